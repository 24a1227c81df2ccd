"""Counts what a rank hands to Horovod's collectives, in the same way whatever the framework and the compression.

For measurements such as those of the examples: it wraps private functions of Horovod 0.28.1 in the process that asks
for it, for good or until the ``with`` ends. Training does not need it.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

# By front end: the module and the functions through which every collective that carries gradients goes, after
# compression. Their first argument is the tensor, or the list of tensors, that this rank contributes.
_COLLECTIVES = {
    "torch": ("horovod.torch.mpi_ops", ("_allreduce_async", "_grouped_allreduce_async", "_allgather_async",
                                        "_grouped_allgather_async", "_alltoall_async", "_reducescatter_async",
                                        "_grouped_reducescatter_async")),
    "tensorflow": ("horovod.tensorflow", ("_allreduce", "_grouped_allreduce", "allgather", "grouped_allgather",
                                          "alltoall")),
}


class SentBytes:
    """Adds up, in ``total``, the bytes of the tensors that this rank hands to Horovod from now on.

    This is the content of the messages, measured where they leave the framework, after compression. A ring of n ranks
    sends it 2 (n - 1) / n times from each rank in an allreduce and n - 1 times in an allgather: with two ranks, once in
    both. What Horovod and TCP add (negotiation, message headers) is not counted.

    Under TensorFlow, functions that were traced before are not counted, and those that were traced meanwhile always
    are: make this first.

    Args:
        front_end: ``"torch"`` or ``"tensorflow"``, the latter for Keras too.
    """

    def __init__(self, front_end: str) -> None:
        self.total = 0
        self._lock = threading.Lock()
        name, collectives = _COLLECTIVES[front_end]
        module = importlib.import_module(name)
        counted = self._counted_in_torch if front_end == "torch" else self._counted_in_tensorflow
        self._module = module
        self._originals = {collective: getattr(module, collective) for collective in collectives}
        for collective, original in self._originals.items():
            setattr(module, collective, counted(original))

    def __enter__(self) -> SentBytes:
        return self

    def __exit__(self, *exception: object) -> None:
        for collective, original in self._originals.items():
            setattr(self._module, collective, original)

    def _add(self, nbytes: Any) -> None:
        with self._lock:
            self.total += int(nbytes)

    def _counted_in_torch(self, collective: Any) -> Any:
        return _counted(collective, lambda tensor: self._add(tensor.numel() * tensor.element_size()))

    def _counted_in_tensorflow(self, collective: Any) -> Any:
        import tensorflow as tf

        def count(tensor: Any) -> None:
            # Part of the graph: Python sees each collective only once, when the training step is traced.
            tf.numpy_function(self._add, [tf.size(tensor, tf.int64) * tensor.dtype.size], [])

        return tf.autograph.experimental.do_not_convert(_counted(collective, count))


def _counted(collective: Any, count: Any) -> Any:
    @functools.wraps(collective)
    def counted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            count(tensor)
        return collective(tensors, *args, **kwargs)

    return counted
