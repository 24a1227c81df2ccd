"""The object that users pass as ``compression=``: parameters, and Horovod's two methods of a Compressor.

The work is done per optimizer, in ``exchange``, and per tensor in ``allreduce``; ``hook`` brings the first together
with Horovod's optimizers. ``TwoBit`` holds no state of training, so one instance may serve several optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Union

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compressor

from ..compression import NamedCompression, OnClassToo, TwoBitParameters
from ..errors import ConfigError
from ..named import NamedTensor
from . import allreduce
from .exchange import Pending

Context = Union[Pending, allreduce.Converted, allreduce.Summed, None]


class TwoBit(TwoBitParameters, Compressor):
    """2-bit gradient compression with error feedback, for ``hvd.DistributedOptimizer(..., compression=TwoBit)``.

    Each gradient element is sent as two bits that mean "plus the level", "minus the level" or "nothing yet"; what they
    could not say is kept on the rank that computed it and added to its next gradient. A payload has 1/16 of float32's
    bytes, and levels 3 % more; what crosses a link depends on transport and ranks. Pass the class itself, for its
    defaults, or an instance; each optimizer keeps its own residuals (``residuals_of(optimizer)``).

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
    each rank sums a part of the bucket for all; what a rank receives levels off with their number, at 6 bits an
    element, and more from 8 and from 128 ranks on. By ``"allreduce"`` Horovod's own allreduce adds the codes up. All
    give the same bits. ``"auto"`` takes for each bucket what costs least by a model.

    Several ranks per machine: with ``hierarchical`` the ranks of a machine add their gradients up, or average them, in
    full precision, each for its share of the elements; then it compresses that share for the other machines. What
    leaves a machine is divided by its number of ranks, and so are residuals (named ``weight[2048:4096]``). It takes
    process sets: initialize with ``hvd.init(process_sets=hvd_twobit.node_process_sets())``, or set
    HOROVOD_DYNAMIC_PROCESS_SETS=1. Not for ranks that join at different times (``hvd.join``). In an elastic job,
    machines may come and go, but Horovod 0.28.1 ends a job with process sets when a worker is killed.

    A single tensor: ``hvd.allreduce(tensor, compression=TwoBit)`` and ``hvd.grouped_allreduce`` take it for sums and
    averages. What two bits cannot say is lost there (with the defaults, a relative error of 0.46 for normally
    distributed values), unless the tensor has a name: ``TwoBit(...).named("x")``, which see. With a name or without,
    ``transport``, ``bucket_cap_mb`` and ``hierarchical`` make no difference to it.

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
        transport: ``"auto"``, the default, ``"allgather"``, ``"sra"``, or ``"allreduce"``, by which Horovod's own
            allreduce adds the codes up; the environment variable HVD_TWOBIT_TRANSPORT overrides it. The same on every
            rank.
        bucket_cap_mb: MiB of float32 gradient in a bucket (default 25); a larger tensor is cut into several. The same
            on every rank.
        hierarchical: True for exchanges of two levels; ``"auto"`` for such where there are several machines with
            equally many ranks, more than one; False, the default. The environment variable HVD_TWOBIT_HIERARCHICAL
            (1, 0, auto) overrides it. The same on every rank; see above.
        scaler: the ``torch.amp.GradScaler`` of this optimizer; see above.

    Raises:
        ConfigError: an argument is unknown or its value cannot be used.

    Source: 2-bit compression of MXNet 1.9.1's kvstore; F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014, for
    error feedback.
    """

    scaler: torch.amp.GradScaler | None = None

    def __init__(self, threshold: float | str | None = None, *, positive_threshold: float | None = None,
                 negative_threshold: float | None = None, min_elements: int | None = None,
                 warmup_steps: int | None = None, block_elements: int | None = None, transport: str | None = None,
                 bucket_cap_mb: float | None = None, hierarchical: bool | str | None = None,
                 scaler: torch.amp.GradScaler | None = None, **unknown: NoReturn) -> None:
        super().__init__(threshold, positive_threshold=positive_threshold, negative_threshold=negative_threshold,
                         min_elements=min_elements, warmup_steps=warmup_steps, block_elements=block_elements,
                         transport=transport, bucket_cap_mb=bucket_cap_mb, hierarchical=hierarchical, **unknown)
        self.scaler = _checked(scaler)

    @classmethod
    def from_params(cls, params: Mapping[str, Any], *, scaler: torch.amp.GradScaler | None = None,
                    **arguments: Any) -> TwoBit:
        """Make a ``TwoBit`` from the dictionary of MXNet's kvstore, ``{"compress": "2bit", ...}``.

        See ``TwoBitConfig.from_params`` for the keys.

        Args:
            params: MXNet's dictionary, in either of its forms.
            scaler: as of ``TwoBit``.
            arguments: further arguments of ``TwoBit``; with ``min_elements=0`` every tensor is compressed, as in MXNet.

        Raises:
            ConfigError: a key, type or value is not one of MXNet's 2-bit compression; the nearest valid key is named.
        """
        made = super().from_params(params, **arguments)
        made.scaler = _checked(scaler)
        return made

    @OnClassToo
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Context]:
        """Horovod's first half of an allreduce: what to sum for a tensor. Without a name, what is not sent is lost.

        Args:
            tensor: of any shape and dtype; integers, bool and sparse tensors are handed on as they are.

        Returns:
            A tensor that Horovod may add up over ranks (for a tensor that is compressed, float64 words that hold codes
            as digits), and what ``decompress`` needs to know.

        Raises:
            UnsupportedOperationError: the tensor requires a gradient, which would be lost.
        """
        return allreduce.compress(self.config, tensor)

    @staticmethod
    def decompress(tensor: torch.Tensor | None, ctx: Context) -> torch.Tensor | None:
        """Horovod's second half of an exchange: the reduced tensor, in the shape and dtype of the one before.

        Args:
            tensor: what the collective returned; None for a gradient in a bucket.
            ctx: what the first half returned beside what was sent; None for what travelled as it was.

        Raises:
            PayloadError: ranks have not sent what belongs together.
        """
        if ctx is None or isinstance(ctx, Pending):
            return tensor if ctx is None else ctx.finish(tensor)
        assert tensor is not None
        return ctx.finish(tensor)

    def named(self, name: str) -> NamedTwoBit:
        """This compression for one tensor that is exchanged again and again with ``hvd.allreduce``, with a residual.

        Raises:
            ConfigError: the name is no string, or empty.
        """
        return NamedTwoBit(NamedTensor(name, self.config, warns=hvd.rank() == 0), self.config)


class NamedTwoBit(NamedCompression, Compressor):
    """2-bit compression with error feedback of one tensor: ``hvd.allreduce(tensor, compression=named)``.

    Made by ``TwoBit(...).named("x")``, once; keep it as long as the tensor is exchanged. What two bits could not say is
    kept on the rank and added to the tensor's next values. The first exchange, and ``warmup_steps`` more, travel
    uncompressed, in which levels are learnt. One name is for one tensor of one shape.
    """

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Context]:
        """As ``TwoBit.compress``; what is not sent stays in the residual.

        Raises:
            ResidualError: the tensor had another shape before, or its last exchange has not ended.
            UnsupportedOperationError: the tensor requires a gradient, which would be lost.
        """
        return allreduce.compress(self.config, tensor, self.tensor)

    @staticmethod
    def decompress(tensor: torch.Tensor | None, ctx: Context) -> torch.Tensor | None:
        """As ``TwoBit.decompress``."""
        return TwoBit.decompress(tensor, ctx)


def _checked(scaler: Any) -> torch.amp.GradScaler | None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(f"scaler must be a torch.amp.GradScaler, not {scaler!r}")
    return scaler
