"""The residuals and levels of one optimizer, by the tensors' names, and their way into and out of checkpoints.

The registry knows nothing of codes or ranks; ``codec`` is what changes a tensor's state during a step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import checkpoint
from .errors import ResidualError
from .levels import HIGHEST, LOWEST, within_limits
from .statistics import TensorSummary, euclidean_norm
from .tensor_state import TensorState

STATE_FORMAT_VERSION = 1

_FLOAT32_MAX = np.finfo(np.float32).max
_STATE_KEYS = {"format_version", "residuals", "levels", "uncompressed_steps"}


class ResidualRegistry:
    """Residuals and levels of one optimizer on this rank, by tensor name. All are in the unit of the gradient, float32.

    A residual begins at zero and takes its memory (4 bytes per element) when its tensor is first compressed. Names
    and shapes may be declared before, so that a checkpoint of another model is refused at once. Methods may be called
    from any thread, but not while a step is between its first gradient hook and the end of ``synchronize()``.

    Attributes:
        can_undo: whether ``undo_step`` can bring residuals back, for which a second copy of each is kept.
        loss_scale: by what the gradients were multiplied that residuals and levels come from; None where nothing told.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, TensorState] = {}
        self._lock = threading.Lock()
        self.can_undo = False
        self.loss_scale: float | None = None

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        """Announce a tensor that may be compressed later.

        Raises:
            ResidualError: another tensor of this registry bears the name.
        """
        with self._lock:
            if name in self._tensors:
                raise ResidualError(f"tensor {name!r} is declared twice: names of compressed tensors must be unique")
            self._tensors[name] = TensorState(tuple(shape))

    def tensor(self, name: str, shape: tuple[int, ...]) -> TensorState:
        """The state of a tensor, made where the name is new.

        Raises:
            ResidualError: the tensor had another shape before.
        """
        with self._lock:
            state = self._tensors.get(name)
            if state is None:
                state = self._tensors[name] = TensorState(tuple(shape))
            if state.shape != tuple(shape):
                raise ResidualError(f"tensor {name!r} has shape {tuple(shape)}, but its residual was kept for shape "
                                    f"{state.shape}: give a tensor of another shape another name, or reset() the "
                                    "registry")
            return state

    def residual(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The residual of a tensor, flat: float32[elements]; zeros at first. The registry's own memory.

        Raises:
            ResidualError: the tensor had another shape before.
        """
        return self.tensor(name, shape).residual

    def discard(self, name: str) -> None:
        """Forget one tensor, its residual and its shape; nothing where the name is unknown."""
        with self._lock:
            self._tensors.pop(name, None)

    def _with_residual(self) -> dict[str, TensorState]:
        return {name: state for name, state in list(self._tensors.items()) if state.has_residual}

    def __len__(self) -> int:
        return len(self._with_residual())

    def __contains__(self, name: object) -> bool:
        return name in self._with_residual()

    def __iter__(self) -> Iterator[str]:
        return iter(self._with_residual())

    def __getitem__(self, name: str) -> np.ndarray:
        """The residual of a tensor in its shape, as a view of the registry's memory."""
        state = self._with_residual()[name]
        return state.residual.reshape(state.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that residuals and levels take on this rank."""
        return sum(state.nbytes for state in list(self._tensors.values()))

    def norms(self) -> dict[str, float]:
        """Euclidean norm of each residual, in the unit of the gradient (computed in float64)."""
        return {name: euclidean_norm(state.residual) for name, state in self._with_residual().items()}

    def stats(self) -> dict[str, TensorSummary]:
        """What is known of each tensor that was exchanged: levels, codes, norms, bytes. See ``TensorSummary``.

        Costs no pass over a gradient or residual, so it may be called at every step.
        """
        summaries = {name: state.statistics.summary() for name, state in list(self._tensors.items())}
        return {name: summary for name, summary in summaries.items() if summary is not None}

    def reset(self) -> None:
        """Forget everything, also shapes: what was not sent yet is lost, and warm-up begins anew."""
        with self._lock:
            self._tensors.clear()

    def forget_levels(self) -> None:
        """Let warm-up begin anew and levels be learnt again; residuals stay.

        To be called on every rank alike, for example when ranks have been exchanged in an elastic job: a new rank
        knows no levels, and all must have the same.
        """
        for state in list(self._tensors.values()):
            state.replace(state.residual if state.has_residual else None, None, 0)

    def scale(self, factor: float) -> None:
        """Multiply every residual and level, for example when the gradients' unit changes.

        Raises:
            ResidualError: the factor is not a finite number above zero.
        """
        if not (np.isfinite(factor) and factor > 0):
            raise ResidualError(f"residuals can be scaled by a finite factor above zero, not by {factor!r}")
        for state in list(self._tensors.values()):
            state.settle()
            if state.has_residual:
                with np.errstate(over="ignore"):
                    np.multiply(state.residual, factor, out=state.residual, casting="same_kind")
                np.clip(state.residual, -_FLOAT32_MAX, _FLOAT32_MAX, out=state.residual)
            if state.levels is not None:
                state.levels = within_limits(state.levels.astype(np.float64) * factor)

    def follow_loss_scale(self, loss_scale: float) -> None:
        """Bring residuals and levels into the unit of gradients that are multiplied by ``loss_scale``.

        Where no loss scale was told before, they are taken for those of gradients that were not multiplied.

        Raises:
            ResidualError: the loss scale is not a finite number above zero.
        """
        if loss_scale != self.loss_scale:
            self.scale(loss_scale / (self.loss_scale or 1.0))
            self.loss_scale = loss_scale

    def begin_step(self) -> None:
        """The step before counts; ``undo_step`` goes back to here."""
        for state in list(self._tensors.values()):
            state.settle()

    def undo_step(self) -> None:
        """Bring back what residuals, levels and counters were at ``begin_step``: the step's gradients are not used.

        Residuals that are not new in this step come back only where ``can_undo`` was set before it.
        """
        for state in list(self._tensors.values()):
            state.undo()

    def state_dict(self) -> dict[str, Any]:
        """A deep copy of this rank's state as plain numbers and NumPy arrays, residuals in the tensors' shapes.

        Residuals differ from rank to rank, levels do not: a job that resumes needs the state of every rank, saved by
        each.
        """
        tensors = list(self._tensors.items())
        known = {} if self.loss_scale is None else {"loss_scale": self.loss_scale}
        return {
            "format_version": STATE_FORMAT_VERSION,
            **known,
            "residuals": {name: self[name].copy() for name in self},
            "levels": {name: state.levels.copy() for name, state in tensors if state.levels is not None},
            "uncompressed_steps": {name: state.uncompressed_steps for name, state in tensors
                                   if state.uncompressed_steps}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by what ``state_dict()`` returned; tensors that it does not name begin anew.

        Raises:
            ResidualError: ``state`` is not of this format, or names a tensor that this registry knows by another
                shape, or not at all although tensors were declared. Then nothing is changed.
        """
        residuals, levels, counters = self._checked(state)
        with self._lock:
            for name, residual in residuals.items():
                self._tensors.setdefault(name, TensorState(residual.shape))
            for name, known in self._tensors.items():
                loaded = residuals[name].reshape(-1) if name in residuals else None
                known.replace(loaded, levels.get(name), counters.get(name, 0))
            self.loss_scale = float(state["loss_scale"]) if "loss_scale" in state else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict()`` to a file of this name (npz); each rank needs a name of its own.

        Raises:
            OSError: the file cannot be written; one that was there is untouched.
        """
        checkpoint.write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace everything by what ``save`` wrote.

        Raises:
            OSError: there is no such file.
            ResidualError: the file is not one of ``save``, or see ``load_state_dict``. Then nothing is changed.
        """
        self.load_state_dict(checkpoint.read(path))

    def _checked(self, state: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, int]]:
        if not isinstance(state, Mapping) or set(state) - {"loss_scale"} != _STATE_KEYS:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ResidualError(f"a state of residuals is a dictionary with the keys {', '.join(sorted(_STATE_KEYS))} "
                                f"and perhaps loss_scale, not {found}")
        if state["format_version"] != STATE_FORMAT_VERSION:
            raise ResidualError(f"the state has format version {state['format_version']!r}, this hvd_twobit reads "
                                f"version {STATE_FORMAT_VERSION}: load it with the version that saved it")
        loss_scale = np.asarray(state.get("loss_scale", 1.0))
        if loss_scale.shape or loss_scale.dtype.kind not in "fiu" or not 0 < loss_scale < np.inf:
            raise ResidualError(f"the state has a loss scale of {state['loss_scale']!r}, not a finite number above "
                                "zero")
        residuals = {name: self._checked_residual(name, value) for name, value in state["residuals"].items()}
        levels = {name: _checked_levels(name, value) for name, value in state["levels"].items()}
        counters = {name: _checked_counter(name, value) for name, value in state["uncompressed_steps"].items()}
        for name in levels.keys() | counters.keys():
            if name not in residuals and name not in self._tensors:
                raise ResidualError(f"the state has levels or a counter of tensor {name!r}, of which it has no "
                                    "residual and this optimizer no tensor")
        return residuals, levels, counters

    def _checked_residual(self, name: str, value: Any) -> np.ndarray:
        array = np.asarray(value)
        if array.dtype != np.float32:
            raise ResidualError(f"the residual of tensor {name!r} has dtype {array.dtype}, not float32")
        if self._tensors and name not in self._tensors:
            raise ResidualError(f"the state has a residual of tensor {name!r}, which this optimizer does not have; "
                                f"it has {', '.join(sorted(self._tensors))}")
        if name in self._tensors and self._tensors[name].shape != array.shape:
            raise ResidualError(f"the residual of tensor {name!r} has shape {array.shape}, but the tensor has "
                                f"shape {self._tensors[name].shape}")
        if not np.isfinite(array).all():
            raise ResidualError(f"the residual of tensor {name!r} has elements that are not finite")
        return np.array(array, np.float32, order="C")


def _checked_levels(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype != np.float32 or array.ndim != 1:
        raise ResidualError(f"the levels of tensor {name!r} are {array.dtype}{list(array.shape)}, not float32[blocks]")
    if not ((array >= LOWEST) & (array <= HIGHEST)).all():
        raise ResidualError(f"the levels of tensor {name!r} are not all between {LOWEST} and {HIGHEST}")
    return np.array(array)


def _checked_counter(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ResidualError(f"the counter uncompressed_steps of tensor {name!r} is {value!r}, not a whole number")
    return int(value)
