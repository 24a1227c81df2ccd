"""Which elements this rank keeps residuals and levels of: all, or its share where a machine's ranks divide them.

In an exchange of two levels (see ``machines``) each rank of a machine compresses a share of the machine's gradient. A
share of a tensor is a tensor of its own for residuals, codec and payload, named ``weight[2048:4096]``; it may be empty.
Where one level is enough, the only share is the tensor, under its own name. So nothing behind this file knows which of
both it is.

A residual may lie under a name that is not this rank's: the state was loaded that another number of ranks had saved, or
an elastic job has changed. ``ShardedResiduals.adopt`` moves what this rank has no share of to the tensor's own name, in
the unit of one rank's gradient. In an exchange of one level that is where it belongs; in one of two levels it is added
to the next gradient (``take_over``). So no residual is lost, wherever it came from.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .buckets import Bucket, Part
from .codec import Codec
from .config import TwoBitConfig
from .kernels import block_count
from .levels import LOWEST
from .residuals import ResidualRegistry
from .state import share_name, split_share
from .tensor_state import TensorState


@dataclasses.dataclass(frozen=True)
class Share:
    """Consecutive elements of one tensor of which a rank keeps the residual.

    Attributes:
        name: under which it is kept.
        start: first element in the tensor; the beginning of a block.
        stop: the element behind the last one; the end of a block or of the tensor.
    """

    name: str
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: str, start: int, stop: int) -> Share:
        """A share with the name that it has in an exchange of two levels."""
        return cls(share_name(tensor, start, stop), start, stop)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def part(self) -> Part:
        """The share as a whole tensor."""
        return Part(self.name, (self.elements,), 0, self.elements)


def shares_of(part: Part, count: int, block_elements: int, key: str | None = None) -> list[Share]:
    """Cut a part of a tensor into a share for each of ``count`` ranks, between blocks; some may be empty.

    Which rank gets the larger ones depends on the tensor's name, so that many small tensors are divided evenly.

    Args:
        part: of the tensor.
        count: number of shares.
        block_elements: cuts are made at multiples of this many elements of the tensor.
        key: what stands for the name, where that may not be the same on all ranks.
    """
    blocks = block_count(part.elements, block_elements)
    turn = zlib.crc32((key or part.name).encode()) % count
    edges = [part.start + min(blocks * number // count * block_elements, part.elements) for number in range(count + 1)]
    return [Share.of(part.name, *edges[number:number + 2])
            for number in ((rank + turn) % count for rank in range(count))]


class ShardedResiduals:
    """What this rank keeps of an optimizer's tensors, and what the codec is asked of whole tensors.

    Args:
        config: checked parameters.
        codec: of the optimizer; it sees shares.
        residuals: those that the codec changes.
        averages: whether ranks' gradients are averaged, also within a machine, or added up.
    """

    def __init__(self, config: TwoBitConfig, codec: Codec, residuals: ResidualRegistry, averages: bool) -> None:
        self._config = config
        self._codec = codec
        self._residuals = residuals
        self._averages = averages
        self._shares: dict[str, list[Share]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._beside: set[str] = set()
        self._new: set[str] = set()
        self._division = object()
        self.rank, self.ranks = 0, 1

    def divide(self, rank: int, ranks: int, shapes: dict[str, tuple[int, ...]], buckets: Iterable[Bucket]) -> None:
        """Determine shares.

        Args:
            rank: this rank's number among those of its machine.
            ranks: number of ranks that divide each tensor; 1 where every rank compresses its own gradient.
            shapes: of all tensors that may be compressed, by name.
            buckets: that hold them all.
        """
        self.rank, self.ranks, self._division = rank, ranks, object()
        self._shapes, self._shares, self._new = {}, {}, set()
        self.include(shapes, buckets)

    def include(self, shapes: Mapping[str, tuple[int, ...]], buckets: Iterable[Bucket],
                keys: Mapping[str, str] | None = None) -> None:
        """Determine shares of more tensors, where not all are known at once; of those that are known, nothing changes.

        Args:
            shapes: of the tensors, by name.
            buckets: that hold them all.
            keys: see ``shares_of``, by name.

        Raises:
            ResidualError: a tensor had another shape before.
        """
        new = {name for name, shape in shapes.items() if self._shapes.get(name) != shape}
        for name in new:
            self._residuals.tensor(name, shapes[name])
            self._shapes[name] = shapes[name]
            self._shares[name] = [] if self.ranks > 1 else [Share(name, 0, math.prod(shapes[name]))]
        for part in (part for bucket in buckets if self.ranks > 1 for part in bucket.parts if part.name in new):
            self._shares[part.name].append(shares_of(part, self.ranks, self._config.block_elements,
                                                     (keys or {}).get(part.name))[self.rank])
        self._new |= new

    def forget(self, name: str) -> None:
        """A tensor does not exist any more."""
        for share in self._shares.pop(name, ()):
            self._residuals.discard(share.name)
        self._shapes.pop(name, None)
        self._beside.discard(name)
        self._new.discard(name)

    def ready(self, name: str) -> bool:
        """As ``Codec.ready`` of all shares of a tensor."""
        return all(self._codec.ready(share.name, self._shape(name, share)) for share in self._shares[name])

    def observe(self, name: str, reduced: np.ndarray, ranks: int, scale: float) -> None:
        """As ``Codec.observe`` of all shares of a tensor; ``reduced`` is the whole."""
        usable = self.ranks == 1 or bool(np.isfinite(reduced).all())  # Or shares would not be of one mind.
        for share in self._shares[name]:
            self._codec.observe(share.name, self._shape(name, share), reduced[share.start:share.stop], ranks, scale,
                                usable)

    def _shape(self, name: str, share: Share) -> tuple[int, ...]:
        return self._shapes[name] if share.name == name else (share.elements,)

    def adopt(self) -> None:
        """Bring residuals and levels under the names of this rank's shares.

        To be called after ``divide``, ``include`` and whatever was loaded, before the exchange.
        """
        division = self._division, self._residuals.revision
        if self._residuals.division != division:  # Also where the same tensors are exchanged with other parameters.
            self._new = set(self._shapes)
            self._beside.clear()
        elif not self._new:
            return
        pieces = self._pieces()
        for name in sorted(self._new):
            self._adopt(name, self._shapes[name], pieces.pop(name, []))
        self._convert([piece for found in pieces.values() for piece in found])
        self._new = set()
        self._residuals.ranks_per_machine, self._residuals.division = self.ranks, division

    def _pieces(self) -> dict[str, list[Share]]:
        """Shares of two levels in the registry, by tensor, in their order."""
        pieces: dict[str, list[Share]] = {}
        known = set(self._residuals.names())
        for entry in known:
            tensor, *bounds = split_share(entry) or ("",)
            if bounds and entry not in self._shapes and tensor in known:
                pieces.setdefault(tensor, []).append(Share(entry, *bounds))
        return {name: sorted(found, key=lambda share: share.start) for name, found in pieces.items()}

    def _convert(self, pieces: Sequence[Share]) -> None:
        """Bring residuals of shares that stay as they are into the unit in which shares are from now on."""
        if self._averages and self._residuals.ranks_per_machine != self.ranks:
            factor = np.float32(self._residuals.ranks_per_machine / self.ranks)
            for piece in pieces:
                state = self._residuals.tensor(piece.name, (piece.elements,))
                if state.has_residual:
                    state.residual[:] *= factor

    def _adopt(self, name: str, shape: tuple[int, ...], pieces: Sequence[Share]) -> None:
        mine = [share.name for share in self._shares[name]]
        whole = self._residuals.tensor(name, shape)
        if mine == [name] and not pieces:
            return
        known = {piece.name: self._residuals.tensor(piece.name, (piece.elements,)) for piece in pieces}
        levels, steps = self._known_levels(whole, pieces, known)
        for piece in pieces:
            state = known[piece.name]
            if piece.name in mine:
                self._convert([piece])  # The name of a share may be the same among more ranks.
            else:
                if state.has_residual:
                    whole.residual[piece.start:piece.stop] += np.float32(self._weight) * state.residual
                self._residuals.discard(piece.name)
        for share in self._shares[name]:
            state = self._residuals.tensor(share.name, self._shape(name, share))
            state.relearn(self._cut(levels, share, steps, state), steps)
        if mine != [name]:
            whole.relearn(None, 0)
            if whole.has_residual:
                self._beside.add(name)

    @property
    def _weight(self) -> int:
        """How many ranks' gradients the residual of a share in the registry counts for."""
        return self._residuals.ranks_per_machine if self._averages else 1

    def _cut(self, levels: np.ndarray, share: Share, steps: int, state: TensorState) -> np.ndarray | None:
        """A share's levels, None where they are not all known or not adaptive."""
        if not self._config.adaptive:
            return None
        if not share.elements:  # It is ready where the others are, as far as is known here.
            known = state.levels is not None or (steps and not np.isnan(levels).any())
            return np.full(1, LOWEST, np.float32) if known else None
        cut = levels[self._blocks(share)].copy()
        return None if np.isnan(cut).any() else cut

    def _known_levels(self, whole: TensorState, pieces: Sequence[Share],
                      known: dict[str, TensorState]) -> tuple[np.ndarray, int]:
        """Levels of all blocks of a tensor, NaN where nothing knows them, and the number of uncompressed exchanges."""
        elements = math.prod(whole.shape)
        levels = np.full(block_count(elements, self._config.block_elements), np.nan, np.float32)
        if whole.levels is not None and whole.levels.size == levels.size:
            levels[:] = whole.levels
        for piece in pieces:
            found, blocks = known[piece.name].levels, self._blocks(piece)
            if (piece.elements or not elements) and found is not None and found.size == levels[blocks].size:
                levels[blocks] = found
        return levels, max([whole.uncompressed_steps, *(state.uncompressed_steps for state in known.values())])

    def _blocks(self, share: Share) -> slice:
        first = share.start // self._config.block_elements
        return slice(first, first + block_count(share.elements, self._config.block_elements))

    def take_over(self, name: str, gradient: np.ndarray) -> np.ndarray:
        """The gradient of a tensor, float32[elements], and what this rank has of its residual beside its shares.

        Returns:
            ``gradient`` itself, where there is nothing beside, or a new array.
        """
        if name not in self._beside:
            return gradient
        whole = self._residuals.tensor(name, self._shapes[name])
        whole.remember(with_residual=self._residuals.can_undo)
        total = gradient + whole.residual
        finite = np.isfinite(total)
        whole.residual[finite] = 0  # What is not finite is dropped by the codec; the residual waits for the next step.
        return total

    def settle(self) -> None:
        """A new step begins: give back the memory of what was taken over."""
        for name in list(self._beside):
            whole = self._residuals.tensor(name, self._shapes[name])
            if whole.levels is None and not (whole.has_residual and whole.residual.any()):
                whole.replace(None, None, 0)
                self._beside.discard(name)
