"""From gradients to the bytes that are sent, and from what all ranks sent to the gradients' sums.

The codec joins configuration, levels, residuals, kernels and payload. It never calls a collective: a front end does.

A tensor's exchange is one of two: while ``ready`` says no, its gradient travels uncompressed and ``observe`` is told
what came back; afterwards it travels in a bucket, by one of two transports. All ranks get the same answers from
``ready``, as it depends on what all received. For a bucket, front ends do this around their collectives:

- ``allgather``, with a ``BucketLayout`` of one chunk: ``encode`` every tensor and ``seal``; an allgather; ``receive``;
  ``decode`` every tensor.
- ``sra`` (scatter-reduce-allgather), with a chunk per rank: ``encode`` and ``seal``; an alltoall of the chunks; ``sum``
  the chunk of this rank; an allgather of the sums; ``receive_sums``; ``decode``. Every rank is for one chunk what
  MXNet's server is for all. Sums are exact, so nothing is lost but in ``encode``.
- ``allreduce``, with one chunk: ``encode`` and ``seal``; ``tally``; Horovod's own allreduce of these integers;
  ``receive_tallies``; ``decode``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import kernels, payload
from .buckets import Bucket, Part
from .config import TwoBitConfig
from .errors import PayloadError, ResidualError
from .levels import levels_of
from .memory import HOST, Memory
from .residuals import ResidualRegistry
from .tallies import TallyLayout


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one payload carries: some parts of a bucket.

    Attributes:
        parts: in the order in which they lie in the payload.
        layout: of the payload.
        offset: bytes of the payloads before this one, among all that a rank sends of the bucket.
    """

    parts: tuple[Part, ...]
    layout: payload.Layout
    offset: int

    def of(self, payloads: Any) -> Any:
        """This chunk's payload among all that a rank sends of the bucket: of an array, or a tensor of a front end."""
        return payloads[self.offset:self.offset + self.layout.nbytes]


class BucketLayout:
    """How a bucket lies in the payloads that a rank sends of it.

    Args:
        bucket: what travels together.
        count: number of chunks: 1 where every rank gets everything, or one per rank.
        block_elements: chunks are cut at multiples of this many elements of a tensor.
        level_block_elements: elements that share an adaptive level; 0 where levels are fixed.
    """

    def __init__(self, bucket: Bucket, count: int, block_elements: int, level_block_elements: int) -> None:
        self.bucket = bucket
        chunks, offset = [], 0
        for parts in bucket.chunks(count, block_elements):
            layout = payload.Layout(tuple(part.elements for part in parts), level_block_elements)
            chunks.append(Chunk(parts, layout, offset))
            offset += layout.nbytes
        self.chunks: tuple[Chunk, ...] = tuple(chunks)
        self.nbytes = offset

    @property
    def chunk_nbytes(self) -> list[int]:
        """Bytes of each chunk's payload: the splits of an alltoall."""
        return [chunk.layout.nbytes for chunk in self.chunks]

    @functools.cached_property
    def _places(self) -> dict[str, list[tuple[int, int]]]:
        places: dict[str, list[tuple[int, int]]] = {}
        for number, chunk in enumerate(self.chunks):
            for run, part in enumerate(chunk.parts):
                places.setdefault(part.name, []).append((number, run))
        return places

    def places(self, name: str) -> Iterator[tuple[int, int, Part]]:
        """Where a tensor lies, in the order of its elements: numbers of chunk and run, and which part that is."""
        for number, run in self._places[name]:
            yield number, run, self.chunks[number].parts[run]

    def new(self) -> np.ndarray:
        """Memory for the payloads: uint8[nbytes], padding cleared."""
        return np.zeros(self.nbytes, np.uint8)


@dataclasses.dataclass(frozen=True)
class Contents:
    """What arrived of a bucket, checked, to be decoded tensor by tensor.

    Attributes:
        layout: of the bucket.
        chunks: of each chunk, what ranks sent, or what one has summed.
        levels: of each chunk, what codes stand for: float32[ranks, blocks, 2]; of sums float32[1, blocks, 2].
        next_levels: of each chunk, the levels of the next exchange, float32[blocks], or None where they are fixed.
    """

    layout: BucketLayout
    chunks: list[payload.Received | payload.Sums]
    levels: list[np.ndarray]
    next_levels: list[np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What arrived of a part of a tensor: one of codes, counts and sums.

    Attributes:
        part: which part.
        block_elements: elements that share a level.
        levels: what codes stand for, float32[ranks, blocks, 2]; of counts float32[1, blocks, 2].
        codes: of all ranks, uint8[ranks, 4 * words]; rows lie apart.
        counts: uint8[planes, 2 * bits * words]; rows lie apart.
        bits: of a count.
        sums: float32[elements], where ranks' levels differ.
    """

    part: Part
    block_elements: int
    levels: np.ndarray
    codes: np.ndarray | None = None
    counts: np.ndarray | None = None
    bits: int = 0
    sums: np.ndarray | None = None


class Codec:
    """Encodes and decodes the gradients of one optimizer on this rank.

    Args:
        config: checked parameters.
        residuals: what the optimizer has not sent yet; updated by ``encode``. It also keeps levels and counters.
        backend: name of the kernel backend, see ``kernels.load``.
        warns: whether to log when a fixed threshold does not fit; one rank is enough.
    """

    def __init__(self, config: TwoBitConfig, residuals: ResidualRegistry, backend: str = kernels.DEFAULT_BACKEND,
                 warns: bool = True) -> None:
        self._config = config
        self._warns = warns
        self._residuals = residuals
        self._levels = levels_of(config)
        self._kernels = kernels.load(backend)

    def compresses(self, elements: int) -> bool:
        """Whether a tensor of so many elements is compressed once it is ready, or always travels as it is."""
        return self._config.compresses(elements)

    def layout(self, bucket: Bucket, chunks: int) -> BucketLayout:
        """How a bucket lies in ``chunks`` payloads: 1 for an allgather, one per rank for ``sra``."""
        return BucketLayout(bucket, chunks, self._config.block_elements, self._levels.block_elements)

    def ready(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the next exchange of a tensor is compressed: its uncompressed ones are over.

        Raises:
            ResidualError: the tensor had another shape, or its levels other blocks (in a loaded state).
        """
        state = self._residuals.tensor(name, shape)
        if not self._config.adaptive:
            return state.uncompressed_steps >= self._config.uncompressed_steps
        if state.levels is None:
            return False
        elements = math.prod(shape)
        blocks = kernels.block_count(elements, self._config.block_elements)
        if state.levels.size != blocks:
            raise ResidualError(f"tensor {name!r} has {state.levels.size} levels, but {elements} elements in "
                                f"blocks of {self._config.block_elements} take {blocks}: keep block_elements as it "
                                "was, or call forget_levels()")
        return state.uncompressed_steps >= self._config.uncompressed_steps

    def observe(self, name: str, shape: tuple[int, ...], reduced: np.ndarray, ranks: int, scale: float,
                usable: bool = True) -> None:
        """Learn from an uncompressed exchange of a tensor that is not ready.

        Args:
            name: the tensor's name.
            shape: the tensor's shape.
            reduced: float32[elements], what all ranks received: the scaled sum of their gradients.
            ranks: number of ranks that took part.
            scale: factor of the sum, as for ``decode``.
            usable: False where an element of the tensor is not finite that is not part of ``reduced``.
        """
        state = self._residuals.tensor(name, shape)
        state.remember(with_residual=False)
        state.statistics.uncompressed(reduced.size, reduced.nbytes)
        if self._config.adaptive:
            levels = self._levels.first(reduced, 1 / (ranks * scale)) if usable else None
            if levels is None:
                return
            state.levels = levels
        state.uncompressed_steps += 1

    def encode(self, layout: BucketLayout, payloads: np.ndarray, name: str, gradient: np.ndarray) -> None:
        """Add what a bucket carries of a gradient to the tensor's residual and take out what two bits can say.

        The buckets of a tensor that is cut into several have to be encoded in their order.

        Args:
            layout: how the bucket lies in the payloads.
            payloads: uint8[layout.nbytes], where codes and block tables are written.
            name: the tensor's name, under which its residual is kept.
            gradient: float32[elements], the whole tensor's, contiguous; not changed.

        Raises:
            ResidualError: the tensor had another shape or size before.
        """
        for part, codes, table in self._written(layout, payloads, name):
            if gradient.size != math.prod(part.shape):
                raise ResidualError(f"tensor {name!r} has a gradient of {gradient.size} elements, but its shape was "
                                    f"{part.shape}")
            self._encode(part, gradient, codes, table)

    def place(self, layout: BucketLayout, payloads: np.ndarray, name: str,
              quantized: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write what was quantized elsewhere, between ``begin`` and ``end``, into a bucket's payloads.

        Args:
            layout: how the bucket lies in the payloads.
            payloads: uint8[layout.nbytes].
            name: the tensor's name.
            quantized: of each of the tensor's parts in the bucket, in their order: codes, uint8[4 * ceil(n / 16)], and
                payload.BLOCK_TABLE[blocks], empty where levels are fixed.
        """
        for (part, codes, table), (own_codes, own_table) in zip(self._written(layout, payloads, name), quantized):
            codes[:] = own_codes
            table[:] = own_table
            nonzero = int(own_table["selected_count"].sum()) if table.size else kernels.selected(own_codes)
            self.end(part, nonzero, codes.nbytes + table.nbytes)

    def leave_out(self, layout: BucketLayout, payloads: np.ndarray, name: str) -> None:
        """Write zeros in place of what a bucket could carry of a tensor, and leave its residual alone."""
        for _, codes, table in self._written(layout, payloads, name):
            codes[:] = 0
            table[:] = 0

    @staticmethod
    def _written(layout: BucketLayout, payloads: np.ndarray,
                 name: str) -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
        """The parts of a tensor, and where their codes and block tables are written."""
        for number, run, part in layout.places(name):
            chunk = layout.chunks[number]
            words, blocks = chunk.layout.run_words[run], chunk.layout.run_blocks[run]
            memory = chunk.of(payloads)
            yield (part, chunk.layout.codes(memory)[4 * words.start:4 * words.stop],
                   chunk.layout.table(memory)[blocks])

    def _encode(self, part: Part, gradient: np.ndarray, codes: np.ndarray, table: np.ndarray) -> None:
        quantizer, whole = self.begin(part, gradient, HOST)
        residual = whole[part.start:part.stop]
        total, count = self._kernels.quantize_pack(gradient[part.start:part.stop], residual, codes, quantizer)
        self.end(part, int(count.sum()), codes.nbytes + table.nbytes)
        self._levels.write_table(table, total, count, residual)

    def begin(self, part: Part, gradient: Any, memory: Memory) -> tuple[kernels.Quantizer, Any]:
        """What has to be known before a part of a gradient is quantized, wherever that is done.

        Args:
            part: which part; those of a tensor in their order.
            gradient: the whole tensor's, in the memory; None where no sample can be taken of it.
            memory: where the gradient lies, and its residual from now on.

        Returns:
            The quantizer of the part, and the residual of the whole tensor, an array of that memory, to be updated.
        """
        state = self._residuals.tensor(part.name, part.shape)
        if part.start == 0:
            state.remember(with_residual=self._residuals.can_undo)
            state.statistics.begin()
            if state.statistics.is_sampled and gradient is not None:
                state.statistics.sample(memory.norm(gradient), memory.mean_magnitude(gradient))
        return self.quantizer(part), state.residual_in(memory)

    def quantizer(self, part: Part) -> kernels.Quantizer:
        """With what a part is quantized."""
        levels = self._residuals.tensor(part.name, part.shape).levels
        return self._levels.quantizer(None if levels is None else levels[self._blocks(part)], part.elements,
                                      self._loss_scale)

    def end(self, part: Part, nonzero: int, nbytes: int) -> None:
        """A part was quantized: levels are still those with which it was.

        Args:
            part: which part; those of a tensor in their order.
            nonzero: how many of its codes are 11 or 10.
            nbytes: bytes that are sent of it.
        """
        state = self._residuals.tensor(part.name, part.shape)
        state.statistics.add(nonzero, nbytes)
        if not part.is_last:
            return
        if state.statistics.is_sampled:
            state.statistics.left(state.norm)
        if self._config.adaptive:
            assert state.levels is not None
            state.statistics.after(state.elements, float(state.levels.mean()))
            return
        quantizer = self.quantizer(part)
        state.statistics.after(state.elements, float(quantizer.positive_level[0]))
        if self._warns:
            threshold = min(float(quantizer.positive_threshold[0]), -float(quantizer.negative_threshold[0]))
            state.statistics.warn_of_fixed_threshold(part.name, threshold, lambda: state.largest)

    def seal(self, layout: BucketLayout, payloads: np.ndarray) -> None:
        """Write the headers, when all tensors of a bucket are encoded."""
        for chunk, header in zip(layout.chunks, self.headers(layout).reshape(-1, payload.HEADER_NBYTES)):
            chunk.of(payloads)[:payload.HEADER_NBYTES] = header

    def headers(self, layout: BucketLayout) -> np.ndarray:
        """The headers of all chunks, one behind the other, uint8[32 * chunks]."""
        checksum = self._checksum(layout.bucket.parts)
        headers = [self._levels.header(chunk.layout.elements, checksum, self._loss_scale).pack()
                   for chunk in layout.chunks]
        return np.frombuffer(b"".join(headers), np.uint8)

    def receive(self, layout: BucketLayout, gathered: np.ndarray, ranks: int) -> Contents:
        """Check what an allgather of the payloads of all ranks returned.

        Args:
            layout: how the bucket lies in one payload.
            gathered: uint8, the payloads in rank order.
            ranks: number of ranks that sent one.

        Raises:
            PayloadError: a rank sent something else than a payload of this bucket, or has other levels.
        """
        chunk, = layout.chunks
        return self.accept(layout, payload.split(gathered, ranks, chunk.layout, layout.bucket.label))

    def accept(self, layout: BucketLayout, received: payload.Received) -> Contents:
        """Check whether the payloads that an allgather brought are of ranks with this rank's levels.

        Raises:
            PayloadError: a rank has other levels.
        """
        chunk, = layout.chunks
        own = self._check_levels(layout, chunk, received.headers)
        return Contents(layout, [received], [self._levels.pairs(own, received.headers.values())],
                        [self._levels.next(own, received, chunk.layout)])

    def sum(self, layout: BucketLayout, rank: int, received: np.ndarray, ranks: int) -> np.ndarray:
        """Sum this rank's chunk for all ranks.

        Args:
            layout: how the bucket lies in a payload per rank.
            rank: this rank; it sums the chunk of this number.
            received: uint8, the payloads of this chunk in rank order.
            ranks: number of ranks that sent one.

        Returns:
            The sums as they are sent, uint8: see ``payload``.

        Raises:
            PayloadError: a rank sent something else than a payload of this chunk, or has other levels.
        """
        chunk = layout.chunks[rank]
        arrived = payload.split(received, ranks, chunk.layout, layout.bucket.label)
        header, levels, following = self.summing(layout, rank, arrived, ranks)
        sums = chunk.layout.new_sums(header)
        if header.form == payload.FLOAT32_SUMS:
            values = sums.planes[0].view(np.float32)
            self._kernels.unpack_sum(arrived.codes, levels, kernels.whole_tensor(values.size), values, 1.0)
        else:
            self._kernels.pack_counts(arrived.codes, header.form, sums.planes)
        if following is not None:
            sums.next_levels[:] = following
        return sums.memory

    def summing(self, layout: BucketLayout, rank: int, arrived: payload.Received,
                ranks: int) -> tuple[payload.SumsHeader, np.ndarray, np.ndarray | None]:
        """How the payloads of this rank's chunk have to be summed.

        Args:
            layout: how the bucket lies in a payload per rank.
            rank: this rank.
            arrived: the payloads of its chunk.
            ranks: number of ranks that sent one.

        Returns:
            The header of the sums, which tells their form; what codes stand for, float32[ranks, blocks, 2]; and the
            levels of the next exchange, float32[blocks], or None where they are fixed.

        Raises:
            PayloadError: a rank has other levels.
        """
        chunk = layout.chunks[rank]
        own = self._check_levels(layout, chunk, arrived.headers)
        levels = self._levels.pairs(own, arrived.headers.values())
        if (levels == levels[:1]).all():
            planes = 1 if (levels[0, :, 0] == -levels[0, :, 1]).all() else 2
            header = chunk.layout.counts_header(kernels.count_bits(ranks), planes, arrived.headers[0])
        else:  # Adaptive levels are equal, so these are fixed, with one block.
            header = payload.SumsHeader(payload.FLOAT32_SUMS, 1, chunk.layout.elements)
        return header, np.ascontiguousarray(levels), self._levels.next(own, arrived, chunk.layout)

    def receive_sums(self, layout: BucketLayout, gathered: np.ndarray) -> Contents:
        """Check what an allgather of the sums of all chunks returned.

        Args:
            layout: how the bucket lies in a payload per rank.
            gathered: uint8, the sums in rank order.

        Raises:
            PayloadError: a rank sent something else than the sums of its chunk.
        """
        return self.accept_sums(layout, payload.split_sums(gathered, [chunk.layout for chunk in layout.chunks],
                                                           layout.bucket.label))

    def accept_sums(self, layout: BucketLayout, found: Sequence[payload.Sums]) -> Contents:
        """What the sums of all chunks, checked, stand for."""
        levels = []
        for chunk, sums in zip(layout.chunks, found):
            own = self._levels_of(chunk.parts)
            levels.append(self._levels.pairs(own, [payload.Header(0, sums.header.positive_level,
                                                                  sums.header.negative_level)]))
        return Contents(layout, list(found), levels, [sums.next_levels if self._config.adaptive else None
                                                      for sums in found])

    def tally_layout(self, layout: BucketLayout, ranks: int) -> TallyLayout:
        """How a bucket, laid out as one chunk, lies in integers that Horovod's allreduce adds."""
        chunk, = layout.chunks
        return TallyLayout(chunk.layout, kernels.Tallies(ranks, 1 if self._config.symmetric else 2),
                           self._config.block_elements)

    def tally(self, layout: BucketLayout, payloads: np.ndarray, rank: int, into: TallyLayout,
              integers: np.ndarray) -> None:
        """Bring a sealed payload into integers that can be added.

        Args:
            layout: how the bucket lies in its payload.
            payloads: uint8[layout.nbytes], sealed.
            rank: this rank.
            into: what ``tally_layout`` returned.
            integers: uint32[into.size], overwritten.
        """
        chunk, = layout.chunks
        integers[:into.size - into.digits(integers).size] = 0
        into.headers(integers)[rank] = payloads[:payload.HEADER_NBYTES].view(np.uint32)
        into.table(integers)[rank] = chunk.layout.table(payloads)
        codes = chunk.layout.codes(payloads)
        if self._kernels.pack_tallies(codes, into.tallies, into.digits(integers)):
            into.mark(integers, codes)

    def receive_tallies(self, layout: BucketLayout, added: TallyLayout, integers: np.ndarray) -> Contents:
        """Check what an allreduce of integers returned.

        Args:
            layout: how the bucket lies in its payload.
            added: what ``tally_layout`` returned.
            integers: uint32[added.size], the sum over ranks; a rank that has joined contributed zeros.

        Raises:
            PayloadError: a rank sent something else than integers of this bucket, or has other levels.
        """
        chunk, = layout.chunks
        arrived, contributors = added.received(integers, layout.bucket.label)
        sums, contents = self.accept_tallies(layout, added, arrived, chunk.layout.new_sums)
        self._kernels.unpack_tallies(added.digits(integers), added.tallies, contributors, sums.header.form, sums.planes)
        added.spread(integers, sums.header.form, sums.planes)
        return contents

    def accept_tallies(self, layout: BucketLayout, added: TallyLayout, arrived: payload.Received,
                       new_sums: Callable[[payload.SumsHeader], payload.Sums]) -> tuple[payload.Sums, Contents]:
        """What integers stand for, and the counts that have to be taken out of them.

        Args:
            layout: how the bucket lies in its payload.
            added: what ``tally_layout`` returned.
            arrived: headers and tables of the ranks that contributed.
            new_sums: makes memory for counts, where they shall lie.

        Returns:
            The counts, without content yet, and the contents that they belong to.

        Raises:
            PayloadError: a rank has other levels.
        """
        chunk, = layout.chunks
        own = self._check_levels(layout, chunk, arrived.headers)
        levels = self._levels.pairs(own, arrived.headers.values())
        if (levels != levels[:1]).any():
            raise PayloadError(f"{layout.bucket.label}: ranks have thresholds {sorted(set(map(tuple, levels[:, 0])))}, "
                               "and transport=\"allreduce\" cannot add up codes that mean different numbers: give "
                               "TwoBit the same thresholds on every rank, or another transport")
        tallies, bits = added.tallies, kernels.count_bits(added.tallies.ranks)
        sums = new_sums(chunk.layout.counts_header(bits, tallies.planes, next(iter(arrived.headers.values()))))
        return sums, Contents(layout, [sums], [levels[:1]], [self._levels.next(own, arrived, chunk.layout)])

    def decode(self, contents: Contents, name: str, out: np.ndarray, scale: float) -> None:
        """Overwrite what a bucket carries of a tensor with the scaled sum over all ranks; levels move on.

        Args:
            contents: what arrived of the bucket.
            name: the tensor's name.
            out: float32[elements], the whole tensor's, contiguous.
            scale: factor of the sum, for example ``1 / ranks`` for an average.
        """
        for piece in self.pieces(contents, name):
            values = out[piece.part.start:piece.part.stop]
            if piece.codes is not None:
                self._kernels.unpack_sum(piece.codes, piece.levels, piece.block_elements, values, scale)
            elif piece.counts is not None:
                self._kernels.unpack_counts(piece.counts, piece.bits, piece.levels[0], piece.block_elements, values,
                                            scale)
            else:
                assert piece.sums is not None
                with np.errstate(over="ignore", invalid="ignore"):
                    values[:] = piece.sums.astype(np.float64) * scale
        self.advance(contents, name)

    def pieces(self, contents: Contents, name: str) -> Iterator[Piece]:
        """What arrived of a tensor in a bucket, in the order of its elements, to be turned into values."""
        for number, run, part in contents.layout.places(name):
            layout, arrived = contents.layout.chunks[number].layout, contents.chunks[number]
            words, levels = layout.run_words[run], contents.levels[number]
            if layout.block_elements:
                levels = levels[:, layout.run_blocks[run]]
            block_elements = layout.block_elements or kernels.whole_tensor(part.elements)
            piece = Piece(part, block_elements, np.ascontiguousarray(levels))
            if isinstance(arrived, payload.Received):
                yield dataclasses.replace(piece, codes=arrived.codes[:, 4 * words.start:4 * words.stop])
            elif arrived.header.form == payload.FLOAT32_SUMS:
                sums = arrived.planes[0].view(np.float32)[kernels.ELEMENTS_PER_WORD * words.start:][:part.elements]
                yield dataclasses.replace(piece, sums=sums)
            else:
                width = kernels.counts_nbytes(1, arrived.header.form)
                yield dataclasses.replace(piece, bits=arrived.header.form,
                                          counts=arrived.planes[:, width * words.start:width * words.stop])

    def alike(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """The pieces of one tensor in one form, which they do not have where its buckets went by different transports.

        Their values are the same in every form.
        """
        if all((piece.codes is None) == (pieces[0].codes is None) for piece in pieces):
            return pieces
        return [piece if piece.codes is None else self._in_form_of(
            next(other for other in pieces if other.codes is None), piece, piece.codes) for piece in pieces]

    def _in_form_of(self, other: Piece, piece: Piece, codes: np.ndarray) -> Piece:
        if other.counts is None:
            sums = np.empty(piece.part.elements, np.float32)
            self._kernels.unpack_sum(codes, piece.levels, piece.block_elements, sums)
            return dataclasses.replace(piece, codes=None, sums=sums)
        counts = np.empty((len(other.counts), kernels.counts_nbytes(codes.shape[1] // 4, other.bits)), np.uint8)
        self._kernels.pack_counts(codes, other.bits, counts)
        return dataclasses.replace(piece, codes=None, counts=counts, bits=other.bits, levels=piece.levels[:1])

    def advance(self, contents: Contents, name: str) -> None:
        """Levels of a tensor move on, behind its exchange in a bucket."""
        following: np.ndarray | None = None
        for number, run, part in contents.layout.places(name):
            next_levels = contents.next_levels[number]
            if next_levels is not None:
                if following is None:
                    following = self._known_levels(part).copy()
                following[self._blocks(part)] = next_levels[contents.layout.chunks[number].layout.run_blocks[run]]
        if following is not None:
            self._residuals.tensor(part.name, part.shape).levels = following

    def _check_levels(self, layout: BucketLayout, chunk: Chunk,
                      headers: dict[int, payload.Header]) -> np.ndarray | None:
        """This rank's levels in a chunk, which the ranks that sent these headers have to have as well."""
        own = self._levels.header(0, self._checksum(layout.bucket.parts)).levels_checksum
        for rank, header in headers.items():
            if header.levels_checksum != own:
                known = self._residuals.loss_scale
                scaled = "" if known is None else (f"; this rank's loss scale is {known:g}, and has to be the same on "
                                                   "every rank")
                raise PayloadError(f"{layout.bucket.label}: the payload of rank {rank} has a levels_checksum of "
                                   f"{header.levels_checksum:#x}, this rank's levels have {own:#x}: load states of the "
                                   f"same step on every rank, or call forget_levels() on every rank{scaled}")
        return self._levels_of(chunk.parts)

    @property
    def _loss_scale(self) -> float:
        return self._residuals.loss_scale or 1.0

    def _blocks(self, part: Part) -> slice:
        """The blocks of a part among those of its tensor."""
        block_elements = self._config.block_elements
        first = part.start // block_elements
        return slice(first, first + kernels.block_count(part.elements, block_elements))

    def _levels_of(self, parts: tuple[Part, ...]) -> np.ndarray | None:
        """This rank's adaptive levels of some parts, float32[blocks]; None where levels are fixed."""
        if not self._config.adaptive:
            return None
        return np.concatenate([np.empty(0, np.float32), *(self._known_levels(part)[self._blocks(part)]
                                                          for part in parts)])

    def _known_levels(self, part: Part) -> np.ndarray:
        """This rank's adaptive levels of all of a part's tensor, never changed in place."""
        levels = self._residuals.tensor(part.name, part.shape).levels
        assert levels is not None
        return levels

    def _checksum(self, parts: tuple[Part, ...]) -> int:
        levels = self._levels_of(parts)
        return 0 if levels is None else zlib.crc32(levels.tobytes())
