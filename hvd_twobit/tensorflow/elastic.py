"""``hvd.elastic.TensorFlowKerasState(..., residuals=residuals_of(optimizer))``, and ``TensorFlowState`` likewise.

These states have no handlers for kinds of objects, as PyTorch's have: what they are given beside model and optimizer
goes to ``ObjectState``, which keeps references and broadcasts them. ``hook`` puts the functions here in the place of
its methods of the same names; ``original`` is Horovod's. They keep residuals from it and handle these themselves.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from ..elastic import Committed, follow_rank_0
from ..residuals import ResidualRegistry


def __init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    residuals = {name: value for name, value in kwargs.items() if isinstance(value, ResidualRegistry)}
    self._twobit = {name: Committed(value) for name, value in residuals.items()}
    for name, value in residuals.items():
        setattr(self, name, value)
    original(self, *args, **{name: value for name, value in kwargs.items() if name not in residuals})


def save(original: Any, self: Any) -> None:
    original(self)
    for name, committed in _committed(self).items():
        if committed.residuals is getattr(self, name):
            committed.save()
        else:
            self._twobit[name] = Committed(getattr(self, name))


def restore(original: Any, self: Any) -> None:
    original(self)
    for name, committed in _committed(self).items():
        setattr(self, name, committed.residuals)
        committed.restore()


def sync(original: Any, self: Any) -> None:
    original(self)
    for name in _committed(self):
        # As Horovod's states of TensorFlow do with all that they hold: what was synchronized is committed.
        follow_rank_0(getattr(self, name), self._bcast_object, hvd.allgather_object)
        self._twobit[name] = Committed(getattr(self, name))


def _committed(state: Any) -> dict[str, Committed]:
    return getattr(state, "_twobit", {})  # It has none if it was made before the hook was installed.
