"""What a rank of an elastic job has committed of its residuals, and how new ranks come by the levels. No framework.

Front ends call this from Horovod's elastic states; when ranks are exchanged, and by whom, is Horovod's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .residuals import ResidualRegistry
from .state import split_share


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


def follow_rank_0(residuals: ResidualRegistry, broadcast: Callable[[Any], Any],
                  gather: Callable[[Any], list[Any]]) -> None:
    """Take over levels, counters and loss scale of rank 0; every rank of the new world calls this.

    Residuals are not exchanged. A rank that was there before keeps its own, in the unit of rank 0's loss scale, and one
    that is new begins at zero. Where the ranks of a machine divide tensors, rank 0 knows the levels of its shares only;
    those of others come from the first rank that has them.

    Args:
        residuals: of this rank.
        broadcast: returns rank 0's argument on every rank.
        gather: returns the arguments of all ranks, in rank order.

    Raises:
        ResidualError: a tensor has another shape on another rank.
    """
    if not residuals.is_divided:
        return residuals.take_shared(broadcast(residuals.shared()))
    first, *others = gather(residuals.shared())
    for other in others:
        for part in ("shapes", "levels", "uncompressed_steps"):
            first[part] = {**other[part], **first[part]}
    _forget_what_is_not_whole(first)
    residuals.take_shared(first)


def _forget_what_is_not_whole(shared: dict[str, Any]) -> None:
    """Leave out levels and counters of tensors of which no rank knows some: else ranks would not be of one mind."""
    shares: dict[str, list[tuple[int, int, str]]] = {}
    for name in shared["shapes"]:
        tensor, *bounds = split_share(name) or (name,)
        if bounds and tensor in shared["shapes"]:
            shares.setdefault(tensor, []).append((*bounds, name))
    for tensor, parts in shares.items():
        end = 0
        for start, stop, name in sorted(parts):
            if start <= end and name in shared["levels"]:
                end = max(end, stop)
        known = [name for *_, name in parts if name in shared["levels"]]
        if known and tensor not in shared["levels"] and end < math.prod(shared["shapes"][tensor]):
            for *_, name in parts:
                shared["levels"].pop(name, None)
                shared["uncompressed_steps"].pop(name, None)
