"""By how much the gradients that are exchanged are multiplied: the scale of a Keras ``LossScaleOptimizer``.

Horovod exchanges gradients between ``get_scaled_loss`` and ``get_unscaled_gradients``. Where the LossScaleOptimizer
calls both itself, around the optimizer that it wraps, its scale is in force in between. In a custom training loop a
tape is asked for the gradients of a scaled loss, and the loss knows whose scale it was multiplied by: losses of several
optimizers may be scaled before any gradient is computed. Where a loss was changed after it was scaled, so that it does
not know any more, the scale in force is that of the one optimizer whose first method was called and whose second one
was not. All this happens while a graph is built, so it is known per thread, and holds for that graph and those within
it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ..errors import UnsupportedOperationError
from ..horovod_form import replace

_SCALED_BY = "_twobit_scaled_by"
"""The attribute of a scaled loss that tells the optimizer."""


class _Scaling(threading.local):
    """What a thread knows.

    Attributes:
        told: the optimizer whose gradients are surely the ones that are exchanged.
        waiting: weak references to optimizers that have scaled a loss of which no gradients were asked for or unscaled,
            and to the graphs in which they did.
    """

    def __init__(self) -> None:
        self.told: Any = None
        self.waiting: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []


_scaling = _Scaling()


def follow_optimizers() -> None:
    """Take notice when a LossScaleOptimizer scales a loss; a second call does nothing."""
    # Keras 2 has one class for its legacy optimizers and one for the others, Keras 3 neither.
    for kind in tf.keras.mixed_precision.LossScaleOptimizer.__subclasses__():
        if not hasattr(kind, "_knows_twobit"):
            kind._knows_twobit = True
            replace(kind, "get_scaled_loss", _get_scaled_loss)
            replace(kind, "get_unscaled_gradients", _get_unscaled_gradients)
            for method in {"compute_gradients", "_compute_gradients", "get_gradients"} & vars(kind).keys():
                replace(kind, method, _compute_gradients)


def scale_in_force() -> tf.Tensor | None:
    """The loss scale of the gradients that are exchanged now, or None where they are not scaled.

    Raises:
        UnsupportedOperationError: several optimizers have scaled losses, and nothing tells which one's are exchanged.
    """
    if _scaling.told is not None:
        return _scaling.told.loss_scale
    graphs = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    found = [optimizer for optimizer, scaled_in in ((one(), other()) for one, other in _scaling.waiting)
             if optimizer is not None and any(scaled_in is one for one in graphs)]
    if len(found) > 1:
        raise UnsupportedOperationError(
            "the losses of several LossScaleOptimizers are scaled, and TwoBit cannot tell whose gradients the tape is "
            "asked for: ask it for those of what get_scaled_loss returned, or call get_unscaled_gradients of one "
            "optimizer before get_scaled_loss of the next")
    return found[0].loss_scale if found else None


@contextlib.contextmanager
def gradients_of(target: Any) -> Iterator[None]:
    """Within the context, gradients of what a tape was asked for are exchanged.

    Raises:
        UnsupportedOperationError: the parts of the target were scaled by different optimizers.
    """
    found = {id(optimizer): optimizer for optimizer in
             (getattr(part, _SCALED_BY, None) for part in tf.nest.flatten(target)) if optimizer is not None}
    if len(found) > 1:
        raise UnsupportedOperationError("the tape is asked for the gradients of losses that were scaled by several "
                                        "LossScaleOptimizers: ask it for those of one after the other")
    if not found:
        yield
        return
    with _told(next(iter(found.values()))):
        yield


@contextlib.contextmanager
def _told(optimizer: Any) -> Iterator[None]:
    before, _scaling.told = _scaling.told, optimizer
    try:
        yield
    finally:
        _scaling.told = before
        _no_longer_waiting(optimizer)


def _no_longer_waiting(optimizer: Any) -> None:
    _scaling.waiting = [one for one in _scaling.waiting if one[0]() is not None and one[0]() is not optimizer]


# The functions below take the place of a LossScaleOptimizer's methods; ``original`` is Keras's.

def _get_scaled_loss(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    _no_longer_waiting(self)
    _scaling.waiting.append((weakref.ref(self), weakref.ref(tf.compat.v1.get_default_graph())))
    scaled = original(self, *args, **kwargs)
    if tf.is_tensor(scaled):
        setattr(scaled, _SCALED_BY, self)
    return scaled


def _get_unscaled_gradients(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    _no_longer_waiting(self)
    return original(self, *args, **kwargs)


def _compute_gradients(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with _told(self):
        return original(self, *args, **kwargs)
