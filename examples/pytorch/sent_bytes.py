"""Counts what a process hands to Horovod's collectives, the same way whatever the compression."""

import functools

import horovod.torch.mpi_ops

# Every allreduce, allgather, alltoall and reducescatter of horovod.torch 0.28.1 goes through one of these; the first
# argument is the tensor, or the list of tensors, that this rank contributes.
_COLLECTIVES = ("_allreduce_async", "_grouped_allreduce_async", "_allgather_async", "_grouped_allgather_async",
                "_alltoall_async", "_reducescatter_async", "_grouped_reducescatter_async")


class SentBytes:
    """Adds up, in ``total``, the bytes of the tensors that this rank hands to Horovod from now on.

    This is the content of the messages, measured where they leave Python, after compression. A ring of n ranks sends
    it 2 (n - 1) / n times from each rank in an allreduce and n - 1 times in an allgather: with two ranks, once in
    both. What Horovod and TCP add (negotiation, message headers) is not counted.
    """

    def __init__(self):
        self.total = 0
        for name in _COLLECTIVES:
            setattr(horovod.torch.mpi_ops, name, self._counted(getattr(horovod.torch.mpi_ops, name)))

    def _counted(self, collective):
        @functools.wraps(collective)
        def counted(tensors, *args, **kwargs):
            for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                self.total += tensor.numel() * tensor.element_size()
            return collective(tensors, *args, **kwargs)

        return counted
