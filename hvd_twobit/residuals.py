"""What was not sent yet: one float32 residual per tensor, kept by the tensor's name.

The registry owns the memory of residuals and their way into and out of checkpoints. It knows nothing of codes or
ranks; ``codec`` is what changes a residual during a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .errors import ResidualError

STATE_FORMAT_VERSION = 1


class ResidualRegistry:
    """Residuals of one optimizer on this rank, by tensor name. All are in the unit of the gradient, float32.

    A residual begins at zero and takes its memory (4 bytes per element) when its tensor is first compressed. Names
    and shapes may be declared before, so that a checkpoint of another model is refused at once. Methods may be called
    from any thread, but not while a step is between its first gradient hook and the end of ``synchronize()``.
    """

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        """Announce a tensor that may be compressed later.

        Raises:
            ResidualError: another tensor of this registry bears the name.
        """
        with self._lock:
            if name in self._shapes:
                raise ResidualError(f"tensor {name!r} is declared twice: names of compressed tensors must be unique")
            self._shapes[name] = tuple(shape)

    def residual(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The residual of a tensor, flat: float32[elements]; zeros at first. The registry's own memory.

        Raises:
            ResidualError: the tensor had another shape before.
        """
        with self._lock:
            known = self._shapes.setdefault(name, tuple(shape))
            if known != tuple(shape):
                raise ResidualError(f"tensor {name!r} has shape {tuple(shape)}, but its residual was kept for shape "
                                    f"{known}: give a tensor of another shape another name, or reset() the registry")
            array = self._arrays.get(name)
            if array is None:
                array = self._arrays[name] = np.zeros(int(np.prod(shape, dtype=np.int64)), np.float32)
            return array

    def discard(self, name: str) -> None:
        """Forget one tensor, its residual and its shape; nothing where the name is unknown."""
        with self._lock:
            self._arrays.pop(name, None)
            self._shapes.pop(name, None)

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._arrays))

    def __getitem__(self, name: str) -> np.ndarray:
        """The residual of a tensor in its shape, as a view of the registry's memory."""
        return self._arrays[name].reshape(self._shapes[name])

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the residuals take on this rank."""
        return sum(array.nbytes for array in self._arrays.values())

    def norms(self) -> dict[str, float]:
        """Euclidean norm of each residual, in the unit of the gradient (computed in float64)."""
        return {name: float(np.sqrt(np.square(array, dtype=np.float64).sum())) for name, array in self._arrays.items()}

    def reset(self) -> None:
        """Forget every residual and every shape: what was not sent yet is lost."""
        with self._lock:
            self._arrays.clear()
            self._shapes.clear()

    def scale(self, factor: float) -> None:
        """Multiply every residual, for example when the loss scale of mixed precision training changes.

        Raises:
            ResidualError: the factor is not a finite number above zero.
        """
        if not (np.isfinite(factor) and factor > 0):
            raise ResidualError(f"residuals can be scaled by a finite factor above zero, not by {factor!r}")
        for array in self._arrays.values():
            array *= np.float32(factor)

    def state_dict(self) -> dict[str, Any]:
        """A deep copy of this rank's residuals as plain NumPy arrays in the tensors' shapes.

        Residuals differ from rank to rank: a job that resumes needs the state of every rank, saved by each.
        """
        return {"format_version": STATE_FORMAT_VERSION, "residuals": {name: self[name].copy() for name in self}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all residuals by those of ``state_dict()``; tensors that it does not name begin at zero again.

        Raises:
            ResidualError: ``state`` is not of this format, or names a tensor that this registry knows by another
                shape, or not at all although tensors were declared. Then nothing is changed.
        """
        loaded = self._checked(state)
        with self._lock:
            for name, array in loaded.items():
                self._shapes[name] = array.shape
            self._arrays = {name: array.reshape(-1) for name, array in loaded.items()}

    def _checked(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        if not isinstance(state, Mapping) or set(state) != {"format_version", "residuals"}:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ResidualError("a state of residuals is a dictionary with the keys format_version and residuals, "
                                f"not {found}")
        if state["format_version"] != STATE_FORMAT_VERSION:
            raise ResidualError(f"the state has format version {state['format_version']!r}, this hvd_twobit reads "
                                f"version {STATE_FORMAT_VERSION}: load it with the version that saved it")
        loaded = {}
        for name, value in state["residuals"].items():
            array = np.asarray(value)
            if array.dtype != np.float32:
                raise ResidualError(f"the residual of tensor {name!r} has dtype {array.dtype}, not float32")
            if self._shapes and name not in self._shapes:
                raise ResidualError(f"the state has a residual of tensor {name!r}, which this optimizer does not have; "
                                    f"it has {', '.join(sorted(self._shapes))}")
            if self._shapes.get(name, array.shape) != array.shape:
                raise ResidualError(f"the residual of tensor {name!r} has shape {array.shape}, but the tensor has "
                                    f"shape {self._shapes[name]}")
            if not np.isfinite(array).all():
                raise ResidualError(f"the residual of tensor {name!r} has elements that are not finite")
            loaded[name] = np.array(array, np.float32, order="C")
        return loaded
