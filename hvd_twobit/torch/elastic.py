"""``hvd.elastic.TorchState(..., residuals=residuals_of(optimizer))``: Horovod is told how to handle residuals there."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

from ..elastic import Committed, follow_rank_0
from ..residuals import ResidualRegistry


class ResidualsHandler(StateHandler):
    """Saves and restores a rank's residuals; synchronizes nothing but what has to be equal on all ranks."""

    def __init__(self, residuals: ResidualRegistry) -> None:
        super().__init__(residuals)
        self._committed = Committed(residuals)

    def save(self) -> None:
        self._committed.save()

    def restore(self) -> None:
        self._committed.restore()

    def sync(self) -> None:
        follow_rank_0(self.value, lambda shared: hvd.broadcast_object(shared, name="twobit.elastic"),
                      lambda shared: hvd.allgather_object(shared, name="twobit.elastic"))

    def set_value(self, value: Any) -> None:
        self._committed = Committed(value)
        super().set_value(value)


def register() -> None:
    """Let Horovod's ``TorchState`` handle residuals; a second call does nothing."""
    handlers = get_handler_registry()
    if (ResidualRegistry, ResidualsHandler) not in handlers:
        set_handler_registry([*handlers, (ResidualRegistry, ResidualsHandler)])
