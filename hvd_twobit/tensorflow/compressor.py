"""The object that users pass as ``compression=``: parameters, and Horovod's two methods of a Compressor.

The work is done in ``exchange``, and for single tensors in ``allreduce``; ``hook`` brings the first together with
Horovod's optimizers and tapes. ``TwoBit`` holds no state of training, so one instance may serve several of them.
"""

from __future__ import annotations

from typing import Any, Union

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from ..compression import NamedCompression, OnClassToo, TwoBitParameters
from ..named import NamedTensor
from . import allreduce

Context = Union[allreduce.Converted, allreduce.Summed, None]


class TwoBit(TwoBitParameters, Compressor):
    """2-bit gradient compression with error feedback, for TensorFlow and Keras.

    Pass the class itself, for its defaults, or an instance, to ``hvd.DistributedOptimizer(..., compression=TwoBit)`` or
    ``hvd.DistributedGradientTape(tape, compression=TwoBit)``. Each gradient element is sent as two bits that mean
    "plus the level", "minus the level" or "nothing yet"; what they could not say is kept on the rank that computed it
    and added to its next gradient. A payload has 1/16 of float32's bytes, and levels 3 % more; what crosses a link
    depends on transport and ranks.

    Residuals (``residuals_of(optimizer_or_tape)``): an optimizer has its own. A tape is usually made anew at every
    step, so with tapes residuals belong to the variables: every tape that exchanges a variable with the same op,
    ``gradient_predivide_factor`` and process set continues where the last one stopped, whether it is given the class
    or an instance, eagerly or in a ``tf.function``, and they end with the variables. Sources of a tape that are not
    variables have no identity from step to step and travel uncompressed.

    Tuning: none, to begin with. Levels adapt to the gradient: each variable's gradient travels uncompressed in its
    first exchange, then its levels, one per 1024 elements, follow it. ``warmup_steps`` prolongs the uncompressed
    beginning. A fixed ``threshold`` is in the unit of the gradient and right for as long as gradients keep their size;
    MXNet's 0.5 is for gradients that are sums over the batch. ``residuals_of(optimizer).stats()`` tells how compression
    goes; ``hvd_twobit.keras.callbacks.TwoBitTensorBoard`` plots it.

    Mixed precision: under a Keras ``LossScaleOptimizer`` gradients are exchanged while they are scaled, and residuals
    and levels follow its scale. Keras tells it in ``fit`` and ``minimize``, and in a training loop of your own the loss
    that ``get_scaled_loss`` returned and ``tape.gradient`` is given; where you scale a loss by other means, call
    ``residuals_of(optimizer).scale(new / old)`` when the scale changes. An overflow on one rank reaches all: every rank
    skips the step, and residuals are as they were before it, for which a copy of each is kept. A fixed threshold is in
    the unit of the gradient before it is scaled. Not with ``backward_passes_per_step``: there Keras changes the scale
    of each rank by itself, and ranks whose scales differ are told so.

    With Keras's optimizers Horovod 0.28.1 exchanges gradients in ``fit`` and ``minimize`` only: those that you hand to
    ``apply_gradients`` have to come from a ``DistributedGradientTape``. Gradients of gradients do not pass through an
    exchange.

    Transport: tensors travel in buckets, in the order in which backward computes gradients. By ``"allgather"`` a rank
    receives the codes of all others, which are more the more ranks there are. By ``"sra"`` (scatter-reduce-allgather)
    each rank sums a part of the bucket for all; what a rank receives levels off with their number, at 6 bits an
    element, and more from 8 and from 128 ranks on. By ``"allreduce"`` Horovod's own allreduce adds the codes up. All
    give the same bits. ``"auto"`` takes for each bucket what costs least by a model.

    Several ranks per machine: with ``hierarchical`` the ranks of a machine add their gradients up, or average them, in
    full precision, each for its share of the elements; then it compresses that share for the other machines. What
    leaves a machine is divided by its number of ranks, and so are residuals (named ``kernel:0[2048:4096]``). It takes
    process sets: initialize with ``hvd.init(process_sets=hvd_twobit.node_process_sets())``, or set
    HOROVOD_DYNAMIC_PROCESS_SETS=1. Not for ranks that join at different times (``hvd.join``), and not in an elastic
    job, whose graphs outlive process sets.

    A single tensor: ``hvd.allreduce(tensor, compression=TwoBit)`` and ``hvd.grouped_allreduce`` take it for sums and
    averages. What two bits cannot say is lost there (with the defaults, a relative error of 0.46 for normally
    distributed values), unless the tensor has a name: ``TwoBit(...).named("x")``, which see. With a name or without,
    ``transport``, ``bucket_cap_mb`` and ``hierarchical`` make no difference to it.

    When not to use it: where the link carries a step's gradients in less time than the CPU takes to compress them,
    with one process (nothing is sent), or with ``jit_compile=True``, which Horovod cannot do.

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
            equally many ranks, more than one, and neither an elastic job nor a process set of some ranks only; False,
            the default. The environment variable HVD_TWOBIT_HIERARCHICAL (1, 0, auto) overrides it. The same on every
            rank; see above.

    Raises:
        ConfigError: an argument is unknown or its value cannot be used.
        tf.errors.OpError: in a step. TensorFlow puts an error of ``hvd_twobit.errors`` that a running graph meets into
            one of its own, with the whole text: look for ``DisagreementError: `` (ranks would send different
            collectives), ``PayloadError: `` or ``ResidualError: `` in ``str(error)``, not for the type. Mistakes that
            are known while a graph is built are raised as they are.

    Source: 2-bit compression of MXNet 1.9.1's kvstore; F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014, for
    error feedback.
    """

    @OnClassToo
    def compress(self, tensor: Any) -> tuple[tf.Tensor, Context]:
        """Horovod's first half of an allreduce: what to sum for a tensor. Without a name, what is not sent is lost.

        Args:
            tensor: of any shape and dtype; integers, bool and sparse tensors are handed on as they are.

        Returns:
            A tensor that Horovod may add up over ranks (for a tensor that is compressed, float64 words that hold codes
            as digits), and what ``decompress`` needs to know.

        Raises:
            UnsupportedOperationError: XLA is to compile the graph.
        """
        return allreduce.compress(self.config, tensor)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Context) -> tf.Tensor:
        """Horovod's second half of an allreduce: the reduced tensor, in the shape and dtype of the one before.

        Args:
            tensor: what the collective returned.
            ctx: what the first half returned beside what was sent; None for what travelled as it was.

        Raises:
            tf.errors.OpError: with the text of a ``PayloadError``, in the step: ranks have not sent what belongs
                together.
        """
        return tensor if ctx is None else ctx.finish(tensor)

    def named(self, name: str) -> NamedTwoBit:
        """This compression for one tensor that is exchanged again and again with ``hvd.allreduce``, with a residual.

        Raises:
            ConfigError: the name is no string, or empty.
        """
        return NamedTwoBit(NamedTensor(name, self.config, warns=hvd.rank() == 0), self.config)


class NamedTwoBit(NamedCompression, Compressor):
    """2-bit compression with error feedback of one tensor: ``hvd.allreduce(tensor, compression=named)``.

    Made by ``TwoBit(...).named("x")``, once and outside of any ``tf.function``; keep it as long as the tensor is
    exchanged. What two bits could not say is kept on the rank and added to the next values. The first exchange,
    and ``warmup_steps`` more, travel uncompressed, in which levels are learnt. One name is for one tensor of one shape;
    a step that breaks this, or whose ranks have different levels, ends in a ``tf.errors.OpError`` with the text of the
    ``ResidualError`` or ``PayloadError``.
    """

    def compress(self, tensor: Any) -> tuple[tf.Tensor, Context]:
        """As ``TwoBit.compress``; what is not sent stays in the residual."""
        return allreduce.compress(self.config, tensor, self.tensor)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Context) -> tf.Tensor:
        """As ``TwoBit.decompress``."""
        return TwoBit.decompress(tensor, ctx)
