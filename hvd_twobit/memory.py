"""Where residuals lie: on the host, or on the device of a front end's gradients.

The core handles a residual as an opaque array of one ``Memory``, which knows how to read, copy and scale it. ``HOST``
has NumPy arrays. Front ends have memories of their own for devices; a residual moves when its tensor's gradient does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_FLOAT32_MAX = np.finfo(np.float32).max
_ELEMENTS_AT_ONCE = 1 << 16


class Memory:
    """A place for flat float32 arrays of a kind of its own.

    Two memories that are equal have the same arrays. Numbers that methods return may be anything that ``float`` takes,
    so that a device need not be waited for before somebody looks at them.
    """

    def zeros(self, elements: int) -> Any:
        """An array of so many zeros."""
        raise NotImplementedError

    def take(self, values: np.ndarray) -> Any:
        """An array with these values, float32[n]; perhaps ``values`` itself, which nobody else uses from then on."""
        raise NotImplementedError

    def read(self, array: Any) -> np.ndarray:
        """The values of an array on the host, float32[n]; perhaps its own memory, not to be changed."""
        raise NotImplementedError

    def duplicate(self, array: Any, into: Any = None) -> Any:
        """A copy of an array, in the memory of an earlier copy of it where that is given."""
        raise NotImplementedError

    def restore(self, array: Any, duplicate: Any) -> None:
        """Overwrite an array with a copy of it."""
        raise NotImplementedError

    def shaped(self, array: Any, shape: tuple[int, ...]) -> Any:
        """An array in a tensor's shape, as users see it."""
        raise NotImplementedError

    def scale(self, array: Any, factor: float) -> None:
        """Multiply all elements; what overflows becomes the largest float32 of its sign."""
        raise NotImplementedError

    def norm(self, array: Any) -> Any:
        """Euclidean norm, added in float64."""
        raise NotImplementedError

    def mean_magnitude(self, array: Any) -> Any:
        """Mean magnitude of the elements, added in float64; 0 where there are none."""
        raise NotImplementedError

    def largest(self, array: Any) -> Any:
        """The largest magnitude; 0 where there are no elements."""
        raise NotImplementedError


class HostMemory(Memory):
    """NumPy arrays, float32[n]."""

    def zeros(self, elements: int) -> np.ndarray:
        return np.zeros(elements, np.float32)

    def take(self, values: np.ndarray) -> np.ndarray:
        return values

    def read(self, array: np.ndarray) -> np.ndarray:
        return array

    def duplicate(self, array: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        if into is None:
            return array.copy()
        np.copyto(into, array)
        return into

    def restore(self, array: np.ndarray, duplicate: np.ndarray) -> None:
        np.copyto(array, duplicate)

    def shaped(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return array.reshape(shape)

    def scale(self, array: np.ndarray, factor: float) -> None:
        with np.errstate(over="ignore"):
            np.multiply(array, factor, out=array, casting="same_kind")
        np.clip(array, -_FLOAT32_MAX, _FLOAT32_MAX, out=array)

    def norm(self, array: np.ndarray) -> float:
        return float(np.sqrt(sum(float(np.dot(part, part)) for part in _parts(array))))

    def mean_magnitude(self, array: np.ndarray) -> float:
        return sum(float(np.abs(part).sum()) for part in _parts(array)) / max(array.size, 1)

    def largest(self, array: np.ndarray) -> float:
        return max(float(array.max()), -float(array.min())) if array.size else 0.0


HOST = HostMemory()
"""The only memory of NumPy arrays."""


def _parts(values: np.ndarray) -> Iterator[np.ndarray]:
    """The values in float64, a small piece at a time."""
    return (values[start:start + _ELEMENTS_AT_ONCE].astype(np.float64)
            for start in range(0, values.size, _ELEMENTS_AT_ONCE))
