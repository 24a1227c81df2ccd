"""The form of one rank's state as plain numbers and arrays, and what is checked of one that comes from elsewhere.

``residuals`` makes and takes such states, ``checkpoint`` brings them into files and to another number of ranks. A state
trusts nobody: whatever was loaded is checked here as a whole before anything is done with it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import ResidualError
from .levels import HIGHEST, LOWEST

FORMAT_VERSION = 1

PARTS = ("shapes", "residuals", "levels", "uncompressed_steps")
"""The keys of a state that hold a dictionary by tensor name each, beside ``format_version`` and ``OPTIONAL``."""

OPTIONAL = ("loss_scale", "ranks_per_machine")
"""Keys of numbers that a state has only where they say something."""


_SHARE = re.compile(r"(.*)\[(\d{1,18}):(\d{1,18})\]", re.DOTALL)


def share_name(tensor: str, start: int, stop: int) -> str:
    """The name of elements ``start`` to ``stop`` of a tensor that a machine's ranks divide; see ``sharding``."""
    return f"{tensor}[{start}:{stop}]"


def split_share(name: str) -> tuple[str, int, int] | None:
    """The arguments of ``share_name``; None for a name that it never returned."""
    match = _SHARE.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else None


@dataclasses.dataclass(frozen=True)
class RankState:
    """What one rank keeps of all tensors of an optimizer. Arrays are those that were handed in, not copies.

    Attributes:
        shapes: of every tensor that the rank knows, also of those that have nothing below.
        residuals: float32, in the tensors' shapes, finite; a tensor without one has a residual of zero.
        levels: float32[blocks]; a tensor without them has fixed ones, or has to learn them.
        uncompressed_steps: above zero only.
        loss_scale: by what the gradients were multiplied; None where nothing told.
        ranks_per_machine: among how many ranks shares of tensors were divided; 1 where tensors are whole.
    """

    shapes: dict[str, tuple[int, ...]]
    residuals: dict[str, np.ndarray]
    levels: dict[str, np.ndarray]
    uncompressed_steps: dict[str, int]
    loss_scale: float | None = None
    ranks_per_machine: int = 1

    def to_dict(self) -> dict[str, Any]:
        """The state as ``state_dict()`` returns it."""
        known: dict[str, Any] = {} if self.loss_scale is None else {"loss_scale": self.loss_scale}
        if self.ranks_per_machine != 1:
            known["ranks_per_machine"] = self.ranks_per_machine
        return {"format_version": FORMAT_VERSION, **known, **{part: getattr(self, part) for part in PARTS}}

    @classmethod
    def of(cls, state: Any) -> RankState:
        """The state that a dictionary of ``to_dict``'s form holds.

        Raises:
            ResidualError: it is not of this form; the first tensor that is wrong is named.
        """
        if isinstance(state, Mapping) and "format_version" in state:  # Another version may have anything else.
            check_version(state["format_version"])
        if not isinstance(state, Mapping) or set(state) - set(OPTIONAL) != {"format_version", *PARTS}:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ResidualError("a state of residuals is a dictionary with the keys format_version, "
                                f"{', '.join(PARTS)} and perhaps {' and '.join(OPTIONAL)}, not {found}")
        for part in PARTS:
            if not isinstance(state[part], Mapping) or not all(isinstance(name, str) for name in state[part]):
                raise ResidualError(f"the {part} of a state are a dictionary by tensor name, not {state[part]!r:.100}")
        shapes = {name: _shape(name, value) for name, value in state["shapes"].items()}
        for part in PARTS[1:]:
            for name in state[part]:
                if name not in shapes:
                    raise ResidualError(f"the state has {part} of tensor {name!r}, but no shape of it: it is damaged")
        return cls(shapes, {name: _residual(name, value, shapes[name]) for name, value in state["residuals"].items()},
                   {name: _levels(name, value) for name, value in state["levels"].items()},
                   {name: _counter(name, value) for name, value in state["uncompressed_steps"].items()},
                   _loss_scale(state["loss_scale"]) if "loss_scale" in state else None,
                   _ranks(state.get("ranks_per_machine", 1)))


def check_version(version: Any) -> None:
    """Raise ResidualError unless this is the version of a state that this hvd_twobit reads."""
    if not _is_whole(version) or version != FORMAT_VERSION:
        raise ResidualError(f"the state has format version {version!r:.100}, this hvd_twobit reads version "
                            f"{FORMAT_VERSION}: load it with the version that saved it")


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _array(what: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # Lists of unequal lengths, a tensor on a GPU, ...
        raise ResidualError(f"{what} is no array: {error}") from error


def _shape(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(_is_whole(size) and size >= 0 for size in value):
        raise ResidualError(f"the shape of tensor {name!r} is {value!r:.100}, not a tuple of whole numbers")
    return tuple(int(size) for size in value)


def _residual(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = _array(f"the residual of tensor {name!r}", value)
    if array.dtype != np.float32:
        raise ResidualError(f"the residual of tensor {name!r} has dtype {array.dtype}, not float32")
    if array.shape != shape:
        raise ResidualError(f"the residual of tensor {name!r} has shape {array.shape}, but the tensor has shape "
                            f"{shape}")
    if not np.isfinite(array).all():
        raise ResidualError(f"the residual of tensor {name!r} has elements that are not finite")
    return array


def _levels(name: str, value: Any) -> np.ndarray:
    array = _array(f"what stands for the levels of tensor {name!r}", value)
    if array.dtype != np.float32 or array.ndim != 1:
        raise ResidualError(f"the levels of tensor {name!r} are {array.dtype}{list(array.shape)}, not float32[blocks]")
    if not ((array >= LOWEST) & (array <= HIGHEST)).all():
        raise ResidualError(f"the levels of tensor {name!r} are not all between {LOWEST} and {HIGHEST}")
    return array


def _counter(name: str, value: Any) -> int:
    if not _is_whole(value) or value < 0:
        raise ResidualError(f"the counter uncompressed_steps of tensor {name!r} is {value!r:.100}, not a whole number")
    return int(value)


def _loss_scale(value: Any) -> float:
    array = _array("the loss scale", value)
    if array.shape or array.dtype.kind not in "fiu" or not 0 < array < np.inf:
        raise ResidualError(f"the state has a loss scale of {value!r:.100}, not a finite number above zero")
    return float(array)


def _ranks(value: Any) -> int:
    if not _is_whole(value) or not 0 < value < 2**31:
        raise ResidualError(f"the state has ranks_per_machine = {value!r:.100}, not a whole number above zero")
    return int(value)
