"""Codes of a bucket's gradients, wherever the gradients lie: on the host, or on a device and from there.

A ``Coder`` is what ``transfer`` puts gradients into and takes sums out of; between the two, ``transfer`` hands what the
coder gives it to Horovod's collectives and what these bring to the coder. There are three:

- ``HostCoder``: gradients on the host are encoded one by one, as they come, by the codec.
- ``StagedCoder``: gradients on a device are encoded there, all of a bucket at once, as soon as it is full; the payload
  is copied to pinned host memory, from which Horovod sends it. What arrives, at 1/16 of a gradient's bytes per rank, is
  uploaded and added up on the device. For Horovod without GPU operations.
- ``DeviceCoder``: the same, but the payload stays on the device, for Horovod with NCCL. Only headers, block tables and
  the levels that follow from them are on the host.

No coder waits for a device before a step's gradients are needed: what is not complete yet is asked for again later
(``is_ready``, ``are_summed``).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import kernels, payload
from ..buckets import Part
from ..codec import BucketLayout, Chunk, Codec, Contents
from ..kernels import Quantizer
from ..tallies import TallyLayout
from ..transports import Planned
from .memory import DeviceMemory, Download, Streams, host_memory, upload, used_here


class Coder:
    """Encodes a bucket and decodes what came of it.

    Args:
        planned: the bucket, and how it travels.
        codec: of the optimizer.
        rank: this rank's number among those that exchange.
        scale: factor of the sum over all ranks.
    """

    def __init__(self, planned: Planned, codec: Codec, rank: int, scale: float) -> None:
        self._planned = planned
        self._codec = codec
        self._rank = rank
        self._scale = scale
        self._layout = codec.layout(planned.bucket, planned.chunks)
        self._contents: Contents | None = None

    @property
    def splits(self) -> list[int]:
        """Bytes of each chunk's payload."""
        return self._layout.chunk_nbytes

    def put(self, name: str, gradient: Any) -> None:
        """Take up what the bucket carries of a gradient, float32[elements] of the whole tensor."""
        raise NotImplementedError

    def leave_out(self, name: str) -> None:
        """Send nothing of a tensor in this step, and leave its residual alone."""
        raise NotImplementedError

    def seal(self) -> None:
        """All gradients are in: complete the payloads."""
        raise NotImplementedError

    def is_ready(self, wait: bool) -> bool:
        """Whether the sealed payloads may be handed to Horovod; with ``wait``, wait until they may."""
        return True

    @property
    def payloads(self) -> torch.Tensor:
        """The sealed payloads of all chunks, one behind the other, uint8."""
        raise NotImplementedError

    def receive(self, gathered: torch.Tensor) -> None:
        """Take what an allgather of the payloads brought.

        Raises:
            PayloadError: see ``Codec.receive``.
        """
        raise NotImplementedError

    def sum(self, received: torch.Tensor) -> None:
        """Sum this rank's chunk, of which an alltoall brought all ranks' payloads.

        Raises:
            PayloadError: see ``Codec.sum``.
        """
        raise NotImplementedError

    def are_summed(self, wait: bool) -> bool:
        """Whether ``sums`` may be handed to Horovod; with ``wait``, wait until they may.

        Raises:
            PayloadError: see ``Codec.sum``.
        """
        return True

    @property
    def sums(self) -> torch.Tensor:
        """The sums of this rank's chunk, uint8."""
        raise NotImplementedError

    def receive_sums(self, gathered: torch.Tensor) -> None:
        """Take what an allgather of the sums brought.

        Raises:
            PayloadError: see ``Codec.receive_sums``.
        """
        raise NotImplementedError

    def tally(self) -> torch.Tensor:
        """The sealed payload as integers, int32, to be added up in place by an allreduce."""
        raise NotImplementedError

    def receive_tallies(self) -> None:
        """The integers that ``tally`` returned have been added up.

        Raises:
            PayloadError: see ``Codec.receive_tallies``.
        """
        raise NotImplementedError

    def take(self, name: str, out: Any) -> None:
        """Overwrite what the bucket carries of a tensor with the scaled sum over all ranks; ``out`` as for ``put``."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until nothing uses the coder's host memory."""

    def forget(self) -> None:
        """Be ready for the next step."""
        self._contents = None

    @property
    def _received(self) -> Contents:
        assert self._contents is not None, f"{self._planned.bucket.label} was not received"
        return self._contents

    def _tally_layout(self) -> TallyLayout:
        return self._codec.tally_layout(self._layout, self._planned.ranks)


class HostCoder(Coder):
    """Gradients are NumPy arrays, and payloads lie on the host."""

    def __init__(self, planned: Planned, codec: Codec, rank: int, scale: float) -> None:
        super().__init__(planned, codec, rank, scale)
        self._tallies: TallyLayout | None = None
        self._wire = torch.empty(0, dtype=torch.int32)
        self._sums: torch.Tensor | None = None
        self._payloads = torch.from_numpy(self._layout.new())

    def put(self, name: str, gradient: Any) -> None:
        self._codec.encode(self._layout, self._payloads.numpy(), name, gradient)

    def leave_out(self, name: str) -> None:
        self._codec.leave_out(self._layout, self._payloads.numpy(), name)

    def seal(self) -> None:
        self._codec.seal(self._layout, self._payloads.numpy())

    @property
    def payloads(self) -> torch.Tensor:
        return self._payloads

    def receive(self, gathered: torch.Tensor) -> None:
        self._contents = self._codec.receive(self._layout, gathered.numpy(), self._planned.ranks)

    def sum(self, received: torch.Tensor) -> None:
        self._sums = torch.from_numpy(self._codec.sum(self._layout, self._rank, received.numpy(), self._planned.ranks))

    @property
    def sums(self) -> torch.Tensor:
        assert self._sums is not None
        return self._sums

    def receive_sums(self, gathered: torch.Tensor) -> None:
        self._contents = self._codec.receive_sums(self._layout, gathered.numpy())

    def tally(self) -> torch.Tensor:
        if self._tallies is None:
            self._tallies = self._tally_layout()
            self._wire = torch.empty(self._tallies.size, dtype=torch.int32)
        self._codec.tally(self._layout, self._payloads.numpy(), self._rank, self._tallies, self._integers)
        return self._wire

    def receive_tallies(self) -> None:
        assert self._tallies is not None
        self._contents = self._codec.receive_tallies(self._layout, self._tallies, self._integers)

    @property
    def _integers(self) -> np.ndarray:
        return self._wire.numpy().view(np.uint32)

    def take(self, name: str, out: Any) -> None:
        self._codec.decode(self._received, name, out, self._scale)

    def forget(self) -> None:
        super().forget()
        self._sums = None


class DeviceBucket:
    """A bucket's gradients on a device: how they become codes there, and how codes and counts become gradients.

    Args:
        codec: of the optimizer.
        layout: how the bucket lies in its payloads.
        memory: of the device.
        backend: the device's kernels.
        scale: factor of the sum over all ranks.
    """

    def __init__(self, codec: Codec, layout: BucketLayout, memory: DeviceMemory, backend: types.ModuleType,
                 scale: float) -> None:
        self.memory = memory
        self.kernels = backend
        self._codec = codec
        self._layout = layout
        self._scale = scale
        self._runs = [backend.Runs(chunk.layout.runs, chunk.layout.block_elements, memory.device)
                      for chunk in layout.chunks]
        self._gradients: dict[str, torch.Tensor] = {}
        self._begun: dict[tuple[int, int], tuple[Quantizer, torch.Tensor]] = {}
        self._before, self._quantized = Streams(), Streams()
        self._nonzero: list[Download] = []

    def put(self, name: str, gradient: torch.Tensor) -> None:
        """Keep a gradient, flat, until the bucket is full; it is overwritten with the sum when that has come."""
        self._gradients[name] = gradient
        self._before.made(gradient)
        for number, run, part in self._layout.places(name):
            self._begun[number, run] = self._codec.begin(part, gradient, self.memory)

    def quantize(self, payloads: torch.Tensor) -> None:
        """Write codes and block tables of all gradients into the payloads, uint8 on the device, a launch per chunk.

        What was not put gets zeros.
        """
        self._before.join()
        self._nonzero = [Download(self._quantize(number, chunk, runs, chunk.of(payloads)))
                         for number, (chunk, runs) in enumerate(zip(self._layout.chunks, self._runs))]
        self._begun.clear()
        self._quantized.made(payloads)

    def _quantize(self, number: int, chunk: Chunk, runs: Any, payload_of_chunk: torch.Tensor) -> torch.Tensor:
        quantizers, gradients, residuals = [], [], []
        for run, part in enumerate(chunk.parts):
            begun = self._begun.get((number, run))
            if begun is None:
                quantizers.append(self._codec.quantizer(part))
                gradients.append(self.memory.zeros(part.elements))
                residuals.append(self.memory.zeros(part.elements))
            else:
                quantizers.append(begun[0])
                gradients.append(self._gradients[part.name][part.start:part.stop])
                residuals.append(begun[1][part.start:part.stop])
        layout = chunk.layout
        nonzero: torch.Tensor = self.kernels.quantize_pack_runs(
            runs, gradients, residuals, layout.codes(payload_of_chunk), self._together(quantizers),
            layout.table_bytes(payload_of_chunk) if layout.block_elements else None)
        return nonzero

    def _together(self, quantizers: Sequence[Quantizer]) -> Quantizer:
        """The quantizers of all runs as one, on the device."""
        fields = [np.concatenate([np.empty(0, np.float32), *(getattr(one, field) for one in quantizers)])
                  for field in ("positive_threshold", "negative_threshold", "positive_level", "negative_level")]
        block_elements = quantizers[0].block_elements if quantizers else kernels.ELEMENTS_PER_WORD
        return Quantizer(block_elements, *upload(np.stack(fields), self.memory.device))

    def join(self) -> None:
        """Let the current stream wait until the gradients are quantized."""
        self._quantized.join()

    def end(self) -> None:
        """Keep count of what was quantized; levels are still those with which it was."""
        for chunk, copy in zip(self._layout.chunks, self._nonzero):
            nonzero, layout = copy.numpy(), chunk.layout
            for part, codes, words, blocks in zip(chunk.parts, nonzero, layout.run_words, layout.run_blocks):
                if part.name in self._gradients:
                    self._codec.end(part, int(codes), 4 * (words.stop - words.start)
                                    + payload.BLOCK_TABLE.itemsize * (blocks.stop - blocks.start))

    def unpack(self, contents: Contents) -> None:
        """Overwrite every gradient that was put with the scaled sum of what arrived."""
        self.join()
        for runs, chunk, arrived, levels in zip(self._runs, self._layout.chunks, contents.chunks, contents.levels):
            outs = [self._out(part) for part in chunk.parts]
            pairs = self._pairs(chunk, levels)
            if isinstance(arrived, payload.Received):
                self.kernels.unpack_sum_runs(runs, self._here(arrived.codes), pairs, outs, self._scale)
            elif arrived.header.form == payload.FLOAT32_SUMS:
                values = self._here(arrived.planes)[0].view(torch.float32)
                for words, out in zip(chunk.layout.run_words, outs):
                    first = kernels.ELEMENTS_PER_WORD * words.start
                    out.copy_(values[first:first + out.numel()].double() * self._scale)
            else:
                self.kernels.unpack_counts_runs(runs, self._here(arrived.planes), arrived.header.form, pairs[0], outs,
                                                self._scale)

    def _out(self, part: Part) -> torch.Tensor:
        whole = self._gradients.get(part.name)
        return self.memory.zeros(part.elements) if whole is None else whole[part.start:part.stop]

    def _pairs(self, chunk: Chunk, levels: np.ndarray) -> torch.Tensor:
        """Levels of all blocks of a chunk's runs, float32[ranks, blocks, 2] on the device."""
        if not chunk.layout.block_elements:  # One level for all; each run is one block.
            levels = np.repeat(levels[:, :1], len(chunk.parts), axis=1)
        if len(levels) > 1 and levels.strides[0] == 0:  # All ranks have the same.
            return upload(levels[:1], self.memory.device).expand(len(levels), -1, -1)
        return upload(levels, self.memory.device)

    def _here(self, array: Any) -> torch.Tensor:
        return array if isinstance(array, torch.Tensor) else upload(array, self.memory.device)

    def forget(self) -> None:
        """Let go of the gradients."""
        self._gradients.clear()
        self._begun.clear()
        self._before = Streams()  # Of a step that was broken off it still has the gradients.


class _DeviceGradients(Coder):
    """What coders of gradients on a device share.

    Args:
        planned, codec, rank, scale: see ``Coder``.
        memory: of the device.
        backend: the device's kernels.
    """

    def __init__(self, planned: Planned, codec: Codec, rank: int, scale: float, memory: DeviceMemory,
                 backend: types.ModuleType) -> None:
        super().__init__(planned, codec, rank, scale)
        self._bucket = DeviceBucket(codec, self._layout, memory, backend, scale)
        self._made = torch.zeros(self._layout.nbytes, dtype=torch.uint8, device=memory.device)
        self._is_unpacked = False

    def put(self, name: str, gradient: Any) -> None:
        self._bucket.put(name, gradient)

    def leave_out(self, name: str) -> None:
        """Nothing: what was not put is zeros."""

    def take(self, name: str, out: Any) -> None:
        if not self._is_unpacked:
            self._bucket.end()
            self._bucket.unpack(self._received)
            self._is_unpacked = True
        self._codec.advance(self._received, name)

    def forget(self) -> None:
        super().forget()
        self._bucket.forget()
        self._is_unpacked = False


class StagedCoder(_DeviceGradients, HostCoder):
    """Gradients are tensors of a device, and payloads are sent from pinned host memory."""

    def __init__(self, planned: Planned, codec: Codec, rank: int, scale: float, memory: DeviceMemory,
                 backend: types.ModuleType) -> None:
        super().__init__(planned, codec, rank, scale, memory, backend)
        self._payloads = host_memory((self._layout.nbytes,), torch.uint8, memory.device)
        self._copy: Download | None = None

    def seal(self) -> None:
        self._bucket.quantize(self._made)
        self._copy = Download(self._made, self._payloads)

    def is_ready(self, wait: bool) -> bool:
        if self._copy is not None:
            if not self._copy.is_done(wait):
                return False
            self._copy = None
            HostCoder.seal(self)
        return True

    def drain(self) -> None:
        if self._copy is not None:
            self._copy.is_done(wait=True)

    def forget(self) -> None:
        super().forget()
        self._copy = None


class DeviceCoder(_DeviceGradients):
    """Gradients are tensors of a device, and payloads are sent from there."""

    def __init__(self, planned: Planned, codec: Codec, rank: int, scale: float, memory: DeviceMemory,
                 backend: types.ModuleType) -> None:
        super().__init__(planned, codec, rank, scale, memory, backend)
        self._header_bytes = upload(np.concatenate([np.arange(chunk.offset, chunk.offset + payload.HEADER_NBYTES)
                                                    for chunk in self._layout.chunks]), memory.device)
        self._tallies: TallyLayout | None = None
        self._integers = torch.empty(0, dtype=torch.int32, device=memory.device)
        self._span_of_word = torch.empty(0, dtype=torch.int64, device=memory.device)
        self._arrived: torch.Tensor | None = None
        self._fronts: Download | None = None
        self._sums: torch.Tensor | None = None
        self._sums_header: payload.SumsHeader | None = None

    @property
    def _device(self) -> torch.device:
        return self._bucket.memory.device

    def seal(self) -> None:
        self._made.index_copy_(0, self._header_bytes, upload(self._codec.headers(self._layout), self._device))
        self._bucket.quantize(self._made)

    @property
    def payloads(self) -> torch.Tensor:
        self._bucket.join()
        return self._made

    def receive(self, gathered: torch.Tensor) -> None:
        chunk, = self._layout.chunks
        rows = self._rows(gathered, chunk.layout)
        received = payload.checked(rows[:, :chunk.layout.codes_offset].cpu().numpy(), chunk.layout.codes(rows),
                                   chunk.layout, self._layout.bucket.label)
        self._contents = self._codec.accept(self._layout, received)

    def _rows(self, arrived: torch.Tensor, layout: payload.Layout) -> torch.Tensor:
        """The payloads of all ranks, uint8[ranks, bytes]."""
        payload.check_length(arrived.numel(), self._planned.ranks, layout, self._layout.bucket.label,
                             lambda: arrived.cpu().numpy())
        return used_here(arrived).view(self._planned.ranks, layout.nbytes)

    def sum(self, received: torch.Tensor) -> None:
        layout = self._layout.chunks[self._rank].layout
        self._arrived = self._rows(received, layout)
        self._fronts = Download(self._arrived[:, :layout.codes_offset])

    def are_summed(self, wait: bool) -> bool:
        if self._fronts is None:
            return True
        if not self._fronts.is_done(wait):
            return False
        fronts, self._fronts = self._fronts.numpy(), None
        self._sum(fronts)
        return True

    def _sum(self, fronts: np.ndarray) -> None:
        assert self._arrived is not None
        layout, ranks = self._layout.chunks[self._rank].layout, self._planned.ranks
        codes = layout.codes(used_here(self._arrived))  # This may be another stream than that of ``sum``.
        arrived = payload.checked(fronts, codes, layout, self._layout.bucket.label)
        header, levels, following = self._codec.summing(self._layout, self._rank, arrived, ranks)
        front = np.zeros(layout.sums_offset, np.uint8)
        front[:payload.HEADER_NBYTES] = np.frombuffer(header.pack(), np.uint8)
        if following is not None:
            front[payload.HEADER_NBYTES:payload.HEADER_NBYTES + following.nbytes] = following.view(np.uint8)
        made = torch.zeros(layout.sums_nbytes(header), dtype=torch.uint8, device=self._device)
        made[:front.size] = upload(front, self._device)
        planes = layout.sum_planes(made, header)
        if header.form == payload.FLOAT32_SUMS:
            values = planes[0].view(torch.float32)
            self._bucket.kernels.unpack_sum(arrived.codes, upload(levels, self._device),
                                            kernels.whole_tensor(values.numel()), values, 1.0)
        else:
            self._bucket.kernels.pack_counts(arrived.codes, header.form, planes)
        self._sums, self._sums_header = made, header

    @property
    def sums(self) -> torch.Tensor:
        assert self._sums is not None
        return self._sums

    def receive_sums(self, gathered: torch.Tensor) -> None:
        layouts, header = [chunk.layout for chunk in self._layout.chunks], self._sums_header
        assert header is not None
        sizes = [layout.sums_nbytes(header) for layout in layouts]
        if gathered.numel() != sum(sizes):  # Another form than of this rank's sums, or an error: the host knows.
            self._contents = self._codec.receive_sums(self._layout, gathered.cpu().numpy())
            return
        pieces = used_here(gathered).split(sizes)
        fronts = torch.cat([piece[:layout.sums_offset] for piece, layout in zip(pieces, layouts)]).cpu().numpy()
        found = payload.checked_sums(np.split(fronts, np.cumsum([layout.sums_offset for layout in layouts])[:-1]),
                                     layouts, self._layout.bucket.label, header)
        self._contents = self._codec.accept_sums(self._layout, [
            dataclasses.replace(sums, planes=layout.sum_planes(piece, header))
            for sums, piece, layout in zip(found, pieces, layouts)])

    def tally(self) -> torch.Tensor:
        chunk, = self._layout.chunks
        if self._tallies is None:
            self._tallies = self._tally_layout()
            self._integers = torch.empty(self._tallies.size, dtype=torch.int32, device=self._device)
            self._span_of_word = upload(self._tallies.span_of_word, self._device)
        added, integers, made = self._tallies, self._integers, self.payloads
        digits, codes = added.digits(integers), chunk.layout.codes(made)
        integers[:added.front] = 0
        added.headers(integers)[self._rank] = made[:payload.HEADER_NBYTES].view(torch.int32)
        added.table_integers(integers)[self._rank] = chunk.layout.table_bytes(made).view(torch.int32)
        self._bucket.kernels.pack_tallies(codes, added.tallies, digits)
        words = codes.view(torch.int32)
        found = (words & ~(words >> 1) & 0x55555555) != 0
        added.not_finite(integers).scatter_reduce_(0, self._span_of_word, found.to(torch.int32), "amax")
        return integers

    def receive_tallies(self) -> None:
        added = self._tallies
        assert added is not None
        front = self._integers[:added.front].cpu().numpy().view(np.uint32)
        arrived, contributors = added.contributed(front, self._layout.bucket.label)
        sums, self._contents = self._codec.accept_tallies(self._layout, added, arrived, self._new_sums)
        bits, planes = sums.header.form, sums.planes
        self._bucket.kernels.unpack_tallies(added.digits(self._integers), added.tallies, contributors, bits, planes)
        for start, stop, value in added.not_finite_bytes(front, bits):
            planes[:, start:stop] = upload(value, self._device)

    def _new_sums(self, header: payload.SumsHeader) -> payload.Sums:
        """Counts of the only chunk, on the device, with nothing before them."""
        chunk, = self._layout.chunks
        planes = torch.empty((header.planes, kernels.counts_nbytes(chunk.layout.words, header.form)), dtype=torch.uint8,
                             device=self._device)
        return payload.Sums(header, np.empty(0, np.uint8), np.empty(0, np.float32), planes)

    def forget(self) -> None:
        super().forget()
        self._arrived = self._fronts = self._sums = None
