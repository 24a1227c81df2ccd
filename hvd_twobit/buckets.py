"""Which tensors travel together, and how what they carry is cut for several ranks. Plain numbers, no arrays.

A collective of its own for every tensor costs more than the bytes of most tensors, and one for all cannot begin before
the last gradient is there. So tensors travel in buckets of a limited size, filled in the order in which backward
computes gradients. A tensor that is larger than a bucket is cut into several, of which one is compressed while another
travels. Nothing travels while the first bucket is compressed and the last decompressed: these are kept smaller. A
bucket again may be cut into a chunk per rank. All cuts are made between blocks.

Every rank computes the same from the same tensors.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020, for buckets.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from .kernels import ELEMENTS_PER_WORD

_SMALLER = 4
"""So many times smaller than others are the first bucket and the ends of a tensor that is cut."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive elements of one tensor.

    Attributes:
        name: the tensor's name.
        shape: the tensor's shape.
        start: its first element here; the beginning of a block.
        stop: the element behind the last one; the end of a block or of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements of this part."""
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether the tensor ends with this part."""
        return self.stop == math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What travels together: whole tensors, or a part of one that is too large.

    Attributes:
        parts: in the order in which they lie in a payload.
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> Bucket:
        """A bucket with one tensor, however large."""
        return cls((Part(name, tuple(shape), 0, math.prod(shape)),))

    @property
    def name(self) -> str:
        """The name of its first tensor, with the first element where that is not the tensor's first."""
        first = self.parts[0]
        return f"{first.name}.{first.start}" if first.start else first.name

    @property
    def label(self) -> str:
        """What messages call it."""
        first, last = self.parts[0].name, self.parts[-1].name
        return f"tensor {first!r}" if first == last else f"tensors {first!r} to {last!r}"

    @property
    def elements(self) -> int:
        """Number of elements of all parts."""
        return sum(part.elements for part in self.parts)

    def chunks(self, count: int, block_elements: int) -> list[tuple[Part, ...]]:
        """Cut into ``count`` chunks, in order, whose codes take about equally many bytes; some may be empty.

        Args:
            count: number of chunks.
            block_elements: cuts are made at multiples of this many elements of a tensor, or between tensors.
        """
        ends = list(itertools.accumulate(-(-part.elements // ELEMENTS_PER_WORD) for part in self.parts))
        cuts = [(0, 0), *(self._cut(ends, ends[-1] * number // count, block_elements) for number in range(1, count)),
                (len(self.parts), 0)]
        return [tuple(self._between(*pair)) for pair in zip(cuts, cuts[1:])]

    def _cut(self, ends: Sequence[int], word: int, block_elements: int) -> tuple[int, int]:
        """The cut between blocks that is nearest to a word: number of a part, and elements of it before the cut."""
        number = bisect.bisect_right(ends, word)
        if number == len(self.parts):
            return number, 0
        part = self.parts[number]
        inside = (word - (ends[number - 1] if number else 0)) * ELEMENTS_PER_WORD
        before = (inside + block_elements // 2) // block_elements * block_elements
        return (number, before) if before < part.elements else (number + 1, 0)

    def _between(self, begin: tuple[int, int], end: tuple[int, int]) -> Iterable[Part]:
        for number in range(begin[0], min(end[0] + 1, len(self.parts))):
            part = self.parts[number]
            start = part.start + (begin[1] if number == begin[0] else 0)
            stop = part.start + end[1] if number == end[0] else part.stop
            if start < stop or (part.elements == 0 and number < end[0]):
                yield dataclasses.replace(part, start=start, stop=stop)


def plan(tensors: Iterable[tuple[str, tuple[int, ...]]], cap_elements: int, block_elements: int,
         alone: bool = False) -> list[Bucket]:
    """Fill buckets with tensors in their order.

    Args:
        tensors: name and shape of each, in the order in which gradients are computed.
        cap_elements: the most elements of a bucket.
        block_elements: a tensor is cut at multiples of this many elements.
        alone: whether a tensor is cut as if it were the only one, wherever it lies among others.

    Returns:
        The buckets, in order. A tensor that is cut shares none of its buckets with another one.
    """
    parts = [Part(name, shape, 0, math.prod(shape)) for name, shape in tensors]
    small = max(cap_elements // _SMALLER, 1)
    buckets: list[list[Part]] = []
    room = -1
    for number, tensor in enumerate(parts):
        if tensor.elements > cap_elements:
            head, tail = (small if alone or outermost else 0
                          for outermost in (not buckets, number == len(parts) - 1))
            buckets += ([part] for part in _pieces(tensor, cap_elements, block_elements, head, tail))
            room = -1
            continue
        if tensor.elements > room:
            room = cap_elements if buckets else small
            buckets.append([])
        buckets[-1].append(tensor)
        room -= tensor.elements
    return [Bucket(tuple(bucket)) for bucket in buckets]


def _pieces(part: Part, cap_elements: int, block_elements: int, head: int, tail: int) -> list[Part]:
    """A first and a last part of so many elements, a block at least or nothing; between, few parts of equal size."""
    blocks = -(-part.elements // block_elements)
    first, last = (-(-elements // block_elements) for elements in (head, tail))
    middle = max(0, blocks - first - last)
    count = -(-middle // max(1, cap_elements // block_elements))
    edges = [0, *(first + middle * number // max(1, count) for number in range(count + 1)), blocks]
    elements = [min(edge * block_elements, part.elements) for edge in edges]
    return [dataclasses.replace(part, start=start, stop=stop) for start, stop in zip(elements, elements[1:])
            if start < stop]
