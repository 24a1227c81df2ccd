"""By how much the gradients that are exchanged are multiplied: the scale of a Keras ``LossScaleOptimizer``.

Horovod exchanges gradients between ``get_scaled_loss`` and ``get_unscaled_gradients``, whether the LossScaleOptimizer
calls them itself, around the optimizer that it wraps, or a custom training loop does, around its tape. So the scale
that is in force is that of the optimizer whose first method was called and whose second one was not; after it,
gradients are in their own unit again. Methods are called while a graph is built, so this is known per thread.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import tensorflow as tf

_scaling = threading.local()


def follow_optimizers() -> None:
    """Take notice when a LossScaleOptimizer scales a loss; a second call does nothing."""
    # Keras 2 has one class for its legacy optimizers and one for the others, Keras 3 neither.
    for kind in tf.keras.mixed_precision.LossScaleOptimizer.__subclasses__():
        if not hasattr(kind, "_knows_twobit"):
            kind._knows_twobit = True
            _before(kind, "get_scaled_loss", lambda optimizer: optimizer)
            _before(kind, "get_unscaled_gradients", lambda optimizer: None)


def scale_in_force() -> tf.Tensor | None:
    """The loss scale of the gradients that are exchanged now, or None where they are not scaled."""
    optimizer = getattr(_scaling, "optimizer", None)
    return None if optimizer is None else optimizer.loss_scale


def _before(kind: type, method: str, in_force: Any) -> None:
    original = getattr(kind, method)

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        _scaling.optimizer = in_force(self)
        return original(self, *args, **kwargs)

    setattr(kind, method, replacement)
