"""Counts what a process hands to Horovod's collectives, the same way whatever the compression."""

import functools

import horovod.tensorflow as hvd
import tensorflow as tf

# Every allreduce and allgather of horovod.tensorflow 0.28.1 is built by one of these; the first argument is the tensor,
# or the list of tensors, that this rank contributes.
_COLLECTIVES = ("_allreduce", "_grouped_allreduce", "allgather", "grouped_allgather")


class SentBytes:
    """Adds up, in ``total``, the bytes of the tensors that this rank hands to Horovod from now on.

    This is the content of the messages, measured where they leave TensorFlow, after compression. A ring of n ranks
    sends it 2 (n - 1) / n times from each rank in an allreduce and n - 1 times in an allgather: with two ranks, once in
    both. What Horovod and TCP add (negotiation, message headers) is not counted.
    """

    def __init__(self):
        self._total = tf.Variable(0, dtype=tf.int64, trainable=False)
        for name in _COLLECTIVES:
            setattr(hvd, name, self._counted(getattr(hvd, name)))

    @property
    def total(self):
        return int(self._total)

    def _counted(self, collective):
        @functools.wraps(collective)
        @tf.autograph.experimental.do_not_convert
        def counted(tensors, *args, **kwargs):
            # Part of the graph: Python sees each collective only once, when the training step is traced.
            for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                self._total.assign_add(tf.size(tensor, tf.int64) * tensor.dtype.size)
            return collective(tensors, *args, **kwargs)

        return counted
