"""An exchange of constant random gradients as Horovod's gradient tape makes it under ``tf.function``.

What is timed is the exchange alone: the tape's model computes nothing, and its gradients are constants.
``torch_exchange`` has the same names.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from .methods import METHODS
from .sent_bytes import SentBytes


class Gradients:
    """This rank's gradients, in the CPU's memory.

    Args:
        shapes: of the model's variables.
        seed: of the standard normal values.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        generator = tf.random.Generator.from_seed(seed)
        with tf.device("CPU:0"):
            self.tensors = [generator.normal(shape) for shape in shapes]


class Exchange:
    """Exchanges with one method, by tapes over variables of its own.

    Args:
        method: name of the method.
        gradients: what is exchanged.
    """

    def __init__(self, method: str, gradients: Gradients) -> None:
        self._gradients = gradients.tensors
        self._compression = METHODS[method].compression("tensorflow")
        with tf.device("CPU:0"):
            self._variables = [tf.Variable(tf.zeros(gradient.shape), name=f"{method}_{number}")
                               for number, gradient in enumerate(self._gradients)]
        self._exchange = self._traced()

    def seconds(self) -> float:
        """Exchange once, with all ranks beginning together: seconds on this rank."""
        _barrier()
        start = time.perf_counter()
        self._exchange(self._gradients)
        return time.perf_counter() - start

    def sent_nbytes(self) -> int:
        """Exchange once, in a graph of its own: bytes that this rank handed to Horovod's collectives."""
        with SentBytes("tensorflow") as sent:
            self._traced()(self._gradients)
        return sent.total

    def digest(self) -> str:
        """Exchange once: a digest of the reduced gradients, of all bits."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self._exchange(self._gradients):
            digest.update(tensor.numpy().data)
        return digest.hexdigest()

    def _traced(self) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
        return tf.function(self._reduce).get_concrete_function(self._gradients)

    def _reduce(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        @tf.custom_gradient
        def model(*values: tf.Tensor) -> tuple[tf.Tensor, Callable[..., list[tf.Tensor]]]:
            return tf.zeros([]), lambda upstream, variables=None: gradients

        with tf.device("CPU:0"):
            with tf.GradientTape() as tape:
                loss = model(*[tf.convert_to_tensor(variable) for variable in self._variables])
            tape = hvd.DistributedGradientTape(tape, compression=self._compression)
            return tape.gradient(loss, self._variables)


@tf.function
def _barrier() -> tf.Tensor:
    return hvd.allreduce(tf.random.uniform([1]), name="barrier")  # A constant would be taken out of the graph.
