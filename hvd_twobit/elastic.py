"""What a rank of an elastic job has committed of its residuals, and how new ranks come by the levels. No framework.

Front ends call this from Horovod's elastic states; when ranks are exchanged, and by whom, is Horovod's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .residuals import ResidualRegistry

_SHARED = ("levels", "uncompressed_steps")


class Committed:
    """A copy of this rank's residuals, levels and counters as they were when it was made, or at the last ``save``.

    It takes as much memory as the residuals themselves.

    Attributes:
        residuals: what it is a copy of.
    """

    def __init__(self, residuals: ResidualRegistry) -> None:
        self.residuals = residuals
        self.save()

    def save(self) -> None:
        """Commit what there is now."""
        self._state = self.residuals.state_dict()

    def restore(self) -> None:
        """Go back to what was committed: what failed steps took out of the residuals is in them again."""
        self.residuals.load_state_dict(self._state)


def follow_rank_0(residuals: ResidualRegistry, broadcast: Callable[[Any], Any]) -> None:
    """Take over levels, counters and loss scale of rank 0; every rank of the new world calls this.

    Residuals are not exchanged. A rank that was there before keeps its own, in the unit of rank 0's loss scale, and one
    that is new begins at zero.

    Args:
        residuals: of this rank.
        broadcast: returns rank 0's argument on every rank.

    Raises:
        ResidualError: a tensor has another shape on rank 0.
    """
    own = residuals.state_dict()
    told = broadcast({"shapes": residuals.shapes(), "loss_scale": own.get("loss_scale"),
                      **{key: own[key] for key in _SHARED}})
    for name, shape in told["shapes"].items():
        residuals.tensor(name, shape)
    loss_scale = told["loss_scale"]
    if loss_scale != own.get("loss_scale"):
        residuals.follow_loss_scale(loss_scale or 1.0)
        own = residuals.state_dict()
    own.pop("loss_scale", None)
    residuals.load_state_dict({**own, **({} if loss_scale is None else {"loss_scale": loss_scale}),
                               **{key: told[key] for key in _SHARED}})
