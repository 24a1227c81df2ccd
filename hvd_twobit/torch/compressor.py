"""The object that users pass as ``compression=``: parameters, and Horovod's two methods of a Compressor.

The work is done per optimizer, in ``exchange``; ``hook`` brings the two together. This class holds no state of
training, so one instance may serve several optimizers.
"""

from __future__ import annotations

import torch
from horovod.torch.compression import Compressor

from ..compression import TwoBitParameters
from .exchange import Pending


class TwoBit(TwoBitParameters, Compressor):
    """2-bit gradient compression with error feedback, for ``hvd.DistributedOptimizer(..., compression=TwoBit)``.

    Each gradient element is sent as two bits that mean "positive threshold", "negative threshold" or "nothing yet";
    what they could not say is kept on the rank that computed it and added to its next gradient. A rank sends 1/16 of
    the bytes of float32. Pass the class itself, for its defaults, or an instance; each optimizer keeps its own
    residuals (``residuals_of(optimizer)``).

    Tuning: the thresholds are in the unit of the gradient, and 0.5 is MXNet's default, where gradients are sums over
    the batch. PyTorch's losses are means by default and their gradients much smaller: begin with about twice the mean
    magnitude of your gradients, or with ``reduction="sum"``-like losses at 0.5. Too high a threshold sends nothing
    for many steps, too low a one lags behind. Gradients are compressed per rank before they are averaged.

    When not to use it: where the link carries a step's gradients in less time than the CPU takes to compress them,
    with one process (nothing is sent), or with more than 16 ranks, where an allgather of two bits per element receives
    as many bytes as an fp16 allreduce.

    Args:
        threshold: short for ``positive_threshold=threshold, negative_threshold=-threshold``.
        positive_threshold: > 0, default 0.5. Residuals at or above it are sent as this value.
        negative_threshold: < 0, default -0.5. Residuals at or below it are sent as this value.
        min_elements: tensors with fewer elements travel uncompressed (default 1024; 0 compresses all, as MXNet does).

    Raises:
        ConfigError: an argument is unknown or its value cannot be used.

    Source: 2-bit compression of MXNet 1.9.1's kvstore; F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014, for
    error feedback.
    """

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Pending | None) -> torch.Tensor:
        """Horovod's second half of an exchange: the gradient for what a collective returned.

        Args:
            tensor: what the collective returned.
            ctx: what the first half returned beside its handle; None for sparse gradients, which pass through.
        """
        return tensor if ctx is None else ctx.finish(tensor)
