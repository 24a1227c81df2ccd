"""Which tensors travel together, and how what they carry is cut for several ranks. Plain numbers, no arrays.

A collective of its own for every tensor costs more than the bytes of most tensors, and one for all cannot begin before
the last gradient is there. So tensors travel in buckets of a limited size, filled in the order in which backward
computes gradients. A tensor that is larger than a bucket is cut into several, of which one is compressed while another
travels. A bucket again may be cut into a chunk per rank. Both cuts are made between blocks.

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


def plan(tensors: Iterable[tuple[str, tuple[int, ...]]], cap_elements: int, block_elements: int) -> list[Bucket]:
    """Fill buckets with tensors in their order.

    Args:
        tensors: name and shape of each, in the order in which gradients are computed.
        cap_elements: the most elements of a bucket.
        block_elements: a tensor is cut at multiples of this many elements.

    Returns:
        The buckets, in order. A tensor that is cut shares none of its buckets with another one.
    """
    buckets: list[list[Part]] = []
    room = -1
    for name, shape in tensors:
        tensor = Part(name, shape, 0, math.prod(shape))
        if tensor.elements > cap_elements:
            buckets += ([part] for part in _pieces(tensor, cap_elements, block_elements))
            room = -1
            continue
        if tensor.elements > room:
            buckets.append([])
            room = cap_elements
        buckets[-1].append(tensor)
        room -= tensor.elements
    return [Bucket(tuple(parts)) for parts in buckets]


def _pieces(part: Part, cap_elements: int, block_elements: int) -> list[Part]:
    """As few parts of about equal size as keep to the cap, which holds one block at least."""
    blocks = -(-part.elements // block_elements)
    count = -(-blocks // max(1, cap_elements // block_elements))
    edges = [min(blocks * number // count * block_elements, part.elements) for number in range(count + 1)]
    return [dataclasses.replace(part, start=start, stop=stop) for start, stop in zip(edges, edges[1:])]
