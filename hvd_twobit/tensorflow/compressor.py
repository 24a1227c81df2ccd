"""The object that users pass as ``compression=``: parameters, and Horovod's two methods of a Compressor.

The work is done in ``exchange``; ``hook`` brings the two together. This class holds no state of training, so one
instance may serve several optimizers and tapes.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from ..compression import TwoBitParameters


class TwoBit(TwoBitParameters, Compressor):
    """2-bit gradient compression with error feedback, for TensorFlow and Keras.

    Pass the class itself, for its defaults, or an instance, to ``hvd.DistributedOptimizer(..., compression=TwoBit)`` or
    ``hvd.DistributedGradientTape(tape, compression=TwoBit)``. Each gradient element is sent as two bits that mean
    "positive threshold", "negative threshold" or "nothing yet"; what they could not say is kept on the rank that
    computed it and added to its next gradient. A rank sends 1/16 of the bytes of float32.

    Residuals (``residuals_of(optimizer_or_tape)``): an optimizer has its own. A tape is usually made anew at every
    step, so with tapes residuals belong to the variables: every tape that exchanges a variable with the same op,
    ``gradient_predivide_factor`` and process set continues where the last one stopped, whether it is given the class
    or an instance, eagerly or in a ``tf.function``, and they end with the variables. Sources of a tape that are not
    variables have no identity from step to step and travel uncompressed.

    Tuning: the thresholds are in the unit of the gradient, and 0.5 is MXNet's default, where gradients are sums over
    the batch. Keras's losses are means by default and their gradients much smaller: begin with about twice the mean
    magnitude of your gradients. With a ``LossScaleOptimizer`` (mixed_float16) Horovod exchanges gradients while they
    are scaled: multiply the thresholds by the loss scale and keep it fixed (``dynamic=False``), or let it be and call
    ``residuals_of(optimizer).scale(new / old)`` when it changes.

    With Keras's optimizers Horovod 0.28.1 exchanges gradients in ``fit`` and ``minimize`` only: those that you hand to
    ``apply_gradients`` have to come from a ``DistributedGradientTape``. Gradients of gradients do not pass through an
    exchange.

    When not to use it: where the link carries a step's gradients in less time than the CPU takes to compress them,
    with one process (nothing is sent), with more than 16 ranks, where an allgather of two bits per element receives
    as many bytes as an fp16 allreduce, or with ``jit_compile=True``, which Horovod cannot do.

    Args:
        threshold: short for ``positive_threshold=threshold, negative_threshold=-threshold``.
        positive_threshold: > 0, default 0.5. Residuals at or above it are sent as this value.
        negative_threshold: < 0, default -0.5. Residuals at or below it are sent as this value.
        min_elements: tensors with fewer elements travel uncompressed (default 1024; 0 compresses all, as MXNet does).

    Raises:
        ConfigError: an argument is unknown or its value cannot be used.
        tf.errors.OpError: in a step. TensorFlow puts an error of ``hvd_twobit.errors`` that a running graph meets into
            one of its own, with the whole text: look for ``DisagreementError: `` (ranks would send different
            collectives), ``PayloadError: `` or ``ResidualError: `` in ``str(error)``, not for the type. Mistakes that
            are known while a graph is built are raised as they are.

    Source: 2-bit compression of MXNet 1.9.1's kvstore; F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014, for
    error feedback.
    """

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Horovod's second half of an exchange, never reached with TwoBit: ``compress`` refuses."""
        return tensor
