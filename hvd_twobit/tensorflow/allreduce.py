"""``hvd.allreduce(tensor, compression=TwoBit)``: a tensor in, the words that Horovod adds, a tensor out.

As ``exchange``, this is a piece of graph around Horovod's collective, with NumPy functions that TensorFlow calls in the
step: there the number of ranks is read, and, where the shape was not known before, whether the tensor is compressed at
all. ``encode`` is declared stateful, or TensorFlow would call it for a constant tensor while it optimizes the graph.
What words mean is the core's business (``digit_codec``, ``named``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from .. import joining
from ..calls import is_in_group, mark_words
from ..config import TwoBitConfig
from ..digit_codec import quantize_once, sum_of
from ..errors import ConfigError, UnsupportedOperationError
from ..named import NamedTensor, Sent
from .buffers import aligned_empty
from .exchange import HOROVOD_DTYPES
from .graphs import refuse_xla


@dataclasses.dataclass(frozen=True)
class Converted:
    """A tensor that travels uncompressed, in another dtype."""

    dtype: tf.DType

    def finish(self, received: tf.Tensor) -> tf.Tensor:
        """The reduced tensor, from what the allreduce returned."""
        return tf.cast(received, self.dtype)


@dataclasses.dataclass(frozen=True)
class Summed:
    """A tensor that travels as words: what Horovod hands back with their sum.

    Attributes:
        config: parameters of the compression.
        tensor: what is kept of the tensor; None where it has no name.
        sent: what began, int64: number, whether compressed, rank, ranks.
        shape: the tensor's shape, int32, known in the step.
        static_shape: what is known of it before.
        dtype: the tensor's.
    """

    config: TwoBitConfig
    tensor: NamedTensor | None
    sent: tf.Tensor
    shape: tf.Tensor
    static_shape: tf.TensorShape
    dtype: tf.DType

    def finish(self, received: tf.Tensor) -> tf.Tensor:
        """The reduced tensor, from what the allreduce returned."""
        exact = tf.float64 if self.dtype == tf.float64 else tf.float32

        def decode(words: np.ndarray, numbers: np.ndarray, shape: np.ndarray) -> np.ndarray:
            number, compressed, rank, ranks = numbers.tolist()
            sent = Sent(number, tuple(shape.tolist()), bool(compressed), rank, ranks)
            elements = int(np.prod(shape, dtype=np.int64))
            out = aligned_empty(exact.size * elements).view(exact.as_numpy_dtype)
            is_coded = self.config.compresses(elements) and sent.compressed
            reduced = np.empty(elements, np.float32) if is_coded and exact == tf.float64 else out
            if not self.config.compresses(elements):
                reduced[:] = words
            elif self.tensor is not None:
                self.tensor.decode(sent, words, reduced)
            else:
                sum_of(self.config, words, f"without a name, of shape {sent.shape}", rank, ranks, reduced)
            if reduced is not out:
                out[:] = reduced
            return out

        def build(words: tf.Tensor, numbers: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
            with tf.device("/cpu:0"):
                # Declared stateful, it would keep the next tensor from being encoded while this one travels.
                out = tf.numpy_function(decode, [words, numbers, shape], exact, stateful=False)
            reduced = tf.cast(tf.reshape(out, shape), self.dtype)
            reduced.set_shape(self.static_shape)
            return reduced

        reduced = _without_derivative(build)(received, self.sent, self.shape)
        reduced.set_shape(self.static_shape)
        return reduced


def compress(config: TwoBitConfig, tensor: Any,
             tensor_of: NamedTensor | None = None) -> tuple[tf.Tensor, Converted | Summed | None]:
    """What to hand to Horovod's allreduce for a tensor, and what turns its result into the reduced tensor.

    Args:
        config: parameters of the compression.
        tensor: the user's tensor or variable. Those that are not of floating point numbers go Horovod's own way, as
            those that are known to have fewer than ``min_elements`` elements do, in a dtype that Horovod has.
        tensor_of: what is kept of the tensor.

    Raises:
        ConfigError: it is a tensor of PyTorch's.
        UnsupportedOperationError: XLA is to compile the graph; when a gradient is asked for, it would be lost.
    """
    if type(tensor).__module__.partition(".")[0] == "torch":
        raise ConfigError(f"hvd_twobit.tensorflow.TwoBit was given a torch.{type(tensor).__name__}: with horovod.torch "
                          "take TwoBit from hvd_twobit.torch")
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating:
        return tensor, None
    elements = tensor.shape.num_elements()
    if elements is not None and not config.compresses(elements):
        if is_in_group():
            return tf.cast(tensor, tf.float64), Converted(tensor.dtype)
        if tensor.dtype in HOROVOD_DTYPES:
            return tensor, None
        return tf.cast(tensor, tf.float32), Converted(tensor.dtype)
    refuse_xla()

    def encode(flat: np.ndarray, shape: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rank, ranks = hvd.rank(), hvd.size()  # Read anew in every step: an elastic job changes them.
        number, compressed = 0, True
        if not config.compresses(flat.size):
            words = flat.astype(np.float64)
        elif tensor_of is not None:
            words, sent = tensor_of.encode(tuple(shape.tolist()), flat, rank, ranks)
            number, compressed = sent.number, sent.compressed
        else:
            with np.errstate(over="ignore"):
                words = quantize_once(config, np.ascontiguousarray(flat, np.float32), rank, ranks)
        sent_words = aligned_empty(words.nbytes).view(np.float64)  # Horovod may still be reading those of before.
        sent_words[:] = words
        return sent_words, np.array([number, compressed, rank, ranks], np.int64)

    def build(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        wire = tensor if tensor.dtype in HOROVOD_DTYPES else tf.cast(tensor, tf.float32)
        with tf.device("/cpu:0"):
            words, sent = tf.numpy_function(encode, [tf.reshape(wire, [-1]), tf.shape(tensor)], [tf.float64, tf.int64],
                                            name="twobit")
        words.set_shape([None])
        sent.set_shape([4])
        return words, sent

    words, sent = _without_derivative(build)(tensor)
    mark_words(words)
    return words, Summed(config, tensor_of, sent, tf.shape(tensor), tensor.shape, tensor.dtype)


def follow_after(last: tf.Tensor) -> tf.Tensor:
    """``last``, the rank that joined last, when all ranks have taken over its levels; see ``named``."""
    def shared(last: np.ndarray) -> np.ndarray:
        return np.frombuffer(joining.shared_of_all() if last == hvd.rank() else b"", np.uint8).copy()

    def follow(gathered: np.ndarray) -> np.ndarray:
        joining.follow(gathered.tobytes())
        return np.zeros((), np.int32)

    with tf.device("/cpu:0"):
        mine = tf.numpy_function(shared, [last], tf.uint8)
        mine.set_shape([None])
        # An allgather to which one rank alone contributes: who that is, is not known when a graph is built.
        gathered = hvd.allgather(mine, name="HorovodAllgather/twobit.join/", ignore_name_scope=True)
        with tf.control_dependencies([tf.numpy_function(follow, [gathered], tf.int32)]):
            return tf.identity(last)


def _without_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which a gradient is an error; TensorFlow would return None where a NumPy function is passed."""
    @tf.custom_gradient
    def without(*inputs: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
        def refuse(*upstream: tf.Tensor) -> Any:
            raise UnsupportedOperationError(
                "a gradient is asked for through hvd.allreduce(compression=TwoBit), and two-bit codes have no "
                "derivative: hand tf.stop_gradient(tensor) to hvd.allreduce, or leave compression out")

        return function(*inputs), refuse

    return without
