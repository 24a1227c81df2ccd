"""The object that users pass as ``compression=``: parameters, and Horovod's two methods of a Compressor.

The work is done per optimizer, in ``exchange``; ``hook`` brings the two together. This class holds no state of
training, so one instance may serve several optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from horovod.torch.compression import Compressor

from ..compression import TwoBitParameters
from ..errors import ConfigError
from .exchange import Pending


class TwoBit(TwoBitParameters, Compressor):
    """2-bit gradient compression with error feedback, for ``hvd.DistributedOptimizer(..., compression=TwoBit)``.

    Each gradient element is sent as two bits that mean "plus the level", "minus the level" or "nothing yet"; what they
    could not say is kept on the rank that computed it and added to its next gradient. A rank sends 1/16 of the bytes
    of float32, and levels 3 % more. Pass the class itself, for its defaults, or an instance; each optimizer keeps its
    own residuals (``residuals_of(optimizer)``).

    Tuning: none, to begin with. Levels adapt to the gradient: each tensor travels uncompressed in its first exchange,
    then its levels, one per 1024 elements, follow it. ``warmup_steps`` prolongs the uncompressed beginning. A fixed
    ``threshold`` is in the unit of the gradient and right for as long as gradients keep their size; MXNet's 0.5 is for
    gradients that are sums over the batch. ``residuals_of(optimizer).stats()`` tells how compression goes.

    Mixed precision: with a ``torch.amp.GradScaler``, call ``optimizer.synchronize()`` after ``backward()``, then
    ``scaler.unscale_(optimizer)`` where gradients are clipped, then ``scaler.step(optimizer)`` within
    ``optimizer.skip_synchronize()``. The scaler is recognized there, and residuals and levels follow its scale. An
    overflow on one rank reaches all: every rank skips the step, and residuals are as they were before it, for which a
    copy of each is kept. Tell the scaler as ``scaler=`` where residuals are loaded that were saved at another scale. A
    fixed threshold is in the unit of the gradient before it is scaled.

    Transport: tensors travel in buckets, in the order in which backward computes gradients. By ``"allgather"`` a rank
    receives the codes of all others, which are more the more ranks there are. By ``"sra"`` (scatter-reduce-allgather)
    each rank sums a part of the bucket for all; what a rank receives does not grow with their number, but that sums are
    wider from 8 and from 128 ranks on. Both give the same bits. ``"auto"`` takes for each bucket what costs less by a
    model.

    When not to use it: where the link carries a step's gradients in less time than the CPU takes to compress them, or
    with one process (nothing is sent).

    Args:
        threshold: ``"auto"``, the default, for levels that adapt; or a number, short for
            ``positive_threshold=threshold, negative_threshold=-threshold``.
        positive_threshold: > 0; residuals at or above it are sent as this value. 0.5 where only the other is given.
        negative_threshold: < 0; residuals at or below it are sent as this value. -0.5 where only the other is given.
        min_elements: tensors with fewer elements travel uncompressed (default 1024; 0 compresses all, as MXNet does).
        warmup_steps: exchanges in which tensors travel uncompressed (default 0), with adaptive levels after the first.
        block_elements: elements that share an adaptive level, a multiple of 16 (default 1024).
        transport: ``"auto"``, the default, ``"allgather"`` or ``"sra"``; the environment variable HVD_TWOBIT_TRANSPORT
            overrides it. The same on every rank.
        bucket_cap_mb: MiB of float32 gradient in a bucket (default 25); a larger tensor is cut into several. The same
            on every rank.
        scaler: the ``torch.amp.GradScaler`` of this optimizer; see above.

    Raises:
        ConfigError: an argument is unknown or its value cannot be used.

    Source: 2-bit compression of MXNet 1.9.1's kvstore; F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014, for
    error feedback.
    """

    scaler: torch.amp.GradScaler | None = None

    def __init__(self, threshold: float | str | None = None, *, scaler: torch.amp.GradScaler | None = None,
                 **arguments: Any) -> None:
        super().__init__(threshold, **arguments)
        self.scaler = _checked(scaler)

    @classmethod
    def from_params(cls, params: Mapping[str, Any], *, scaler: torch.amp.GradScaler | None = None,
                    **arguments: Any) -> TwoBit:
        """As ``TwoBitParameters.from_params``, with the ``scaler`` of ``TwoBit``."""
        made = super().from_params(params, **arguments)
        made.scaler = _checked(scaler)
        return made

    @staticmethod
    def decompress(tensor: torch.Tensor | None, ctx: Pending | None) -> torch.Tensor | None:
        """Horovod's second half of an exchange: the gradient for what a collective returned.

        Args:
            tensor: what the collective returned.
            ctx: what the first half returned beside its handle; None for sparse gradients, which pass through.
        """
        return tensor if ctx is None else ctx.finish(tensor)


def _checked(scaler: Any) -> torch.amp.GradScaler | None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(f"scaler must be a torch.amp.GradScaler, not {scaler!r}")
    return scaler
