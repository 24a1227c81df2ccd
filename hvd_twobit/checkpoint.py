"""A rank's state (``ResidualRegistry.state_dict``) in a file, and the states of a job for another number of ranks.

A file is NumPy's npz, not compressed, of plain little-endian arrays: ``format_version``, ``loss_scale`` and
``ranks_per_machine`` where there is one, and ``shapes/<tensor>``, ``residuals/<tensor>``, ``levels/<tensor>`` and
``uncompressed_steps/<tensor>``. It appears under its name when it is complete: whatever ends the writing, what was
there before stays whole.

Reading trusts no byte. Only what ``write`` makes is taken; nothing is unpickled, evaluated or unpacked, and no more
memory is asked for than the file has bytes. ``numpy.load`` reads these files, too, but would believe a header that
claims terabytes.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import os
import pathlib
import re
import stat
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np

from .errors import ResidualError
from .state import PARTS, RankState, check_version, split_share

_NUMBERS: dict[str, np.dtype] = {"format_version": np.dtype("<i8"), "loss_scale": np.dtype("<f8"),
                                 "ranks_per_machine": np.dtype("<i8")}
_DTYPES: dict[str, np.dtype] = {**_NUMBERS, "shapes": np.dtype("<i8"), "residuals": np.dtype("<f4"),
                                "levels": np.dtype("<f4"), "uncompressed_steps": np.dtype("<i8")}
_DIMENSIONS = {**dict.fromkeys(_NUMBERS, 0), "shapes": 1, "levels": 1, "uncompressed_steps": 0}

_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_NPY_HEADER = re.compile(rb"\{'descr': '([^']*)', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \} *\n")

_READ_AT_ONCE = 1 << 20
_FLOAT32_MAX = np.finfo(np.float32).max

# What the standard library raises for an archive that is none, or a damaged one.
_DAMAGED = (zipfile.BadZipFile, zipfile.LargeZipFile, ValueError, EOFError, NotImplementedError, RuntimeError,
            struct.error, OverflowError)


def write(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write what ``state_dict()`` returned to a file of this name.

    Raises:
        OSError: the file cannot be written; one that was there is untouched.
        ResidualError: it is no such state.
    """
    arrays = _arrays(state)
    target = pathlib.Path(path)
    handle, unfinished = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:
        os.unlink(unfinished)
        raise


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``write`` was given, for ``load_state_dict`` or ``redistribute``.

    Raises:
        OSError: there is no such file.
        ResidualError: the file is not one of ``write``.
    """
    with open(path, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ResidualError(f"{os.fspath(path)} is not a file")
        return _read(file, os.fspath(path))


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """The content of a file of what ``state_dict()`` returned.

    Raises:
        ResidualError: it is no such state.
    """
    file = io.BytesIO()
    np.savez(file, **_arrays(state))
    return file.getvalue()


def from_bytes(content: bytes) -> dict[str, Any]:
    """What ``to_bytes`` was given.

    Raises:
        ResidualError: these are not bytes of ``to_bytes``.
    """
    return _read(io.BytesIO(content), f"what was loaded ({len(content)} bytes)")


def redistribute(states: Iterable[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The states with which ``ranks`` ranks go on from the states of another number of ranks.

    A rank that goes on keeps its residual. That of rank ``r`` that does not is added to the one of rank ``r % ranks``,
    in float64, rounded once. A rank that is new begins with none. So the sum over ranks is kept: what all ranks
    together have not sent, in the unit of one rank's gradient. With ``op=Sum`` that is what weights will receive. With
    Average they receive it divided by the new number of ranks, as they do the gradients of the new job.

    With ``hierarchical``, a rank that has no use for a share that it was given (because machines will have another
    number of ranks, or exchange on one level) adds it to a gradient, as many times as it was that of a mean of ranks.
    Ranks have to be numbered machine by machine, as ``horovodrun`` does; then shares of machines that go on stay.

    Args:
        states: those of all ranks that were, in rank order, of the same step.
        ranks: how many there will be.

    Returns:
        A state per rank, in rank order; no memory is shared.

    Raises:
        ResidualError: a state is none, or differs from that of rank 0 in what all ranks have alike (tensors and their
            shapes, levels, counters, the loss scale): the first tensor that differs is named.
    """
    old = [_of_rank(rank, state) for rank, state in enumerate(states)]
    if not old or ranks < 1:
        raise ResidualError(f"the states of {len(old)} ranks cannot be given to {ranks}")
    common = dataclasses.replace(old[0], shapes=dict(old[0].shapes), residuals={}, levels=dict(old[0].levels),
                                 uncompressed_steps=dict(old[0].uncompressed_steps))
    for rank, other in enumerate(old):
        difference = _difference(common, other)
        if difference:
            raise ResidualError(f"rank {rank} has another state than the ranks before: {difference}; use the states "
                                "that all ranks saved at the same step")
        # Of shares, each rank of a machine has its own.
        common.shapes.update(other.shapes)
        common.levels.update(other.levels)
        common.uncompressed_steps.update(other.uncompressed_steps)
    return [RankState(dict(common.shapes), _added([state.residuals for state in old[rank::ranks]]),
                      {name: np.array(levels) for name, levels in common.levels.items()},
                      dict(common.uncompressed_steps), common.loss_scale, common.ranks_per_machine).to_dict()
            for rank in range(ranks)]


def _of_rank(rank: int, state: Mapping[str, Any]) -> RankState:
    try:
        return RankState.of(state)
    except ResidualError as error:
        raise ResidualError(f"rank {rank}: {error}") from error


def _difference(first: RankState, other: RankState) -> str:
    """What differs first between the states of two ranks, of what all ranks have alike; empty where nothing does."""
    if first.loss_scale != other.loss_scale:
        return f"loss scale {other.loss_scale} instead of {first.loss_scale}"
    if first.ranks_per_machine != other.ranks_per_machine:
        return f"{other.ranks_per_machine} ranks per machine instead of {first.ranks_per_machine}"
    for name in sorted(first.shapes.keys() | other.shapes.keys()):
        if split_share(name) and not (name in first.shapes and name in other.shapes):
            continue  # Another rank of the machine has it.
        mine, others = first.shapes.get(name), other.shapes.get(name)
        if mine != others:
            return f"tensor {name!r} has shape {others} instead of {mine} (None: it is not known)"
        if not np.array_equal(first.levels.get(name, ()), other.levels.get(name, ())):
            return f"tensor {name!r} has other levels"
        steps, others_steps = (state.uncompressed_steps.get(name, 0) for state in (first, other))
        if steps != others_steps:
            return f"tensor {name!r} has {others_steps} uncompressed_steps instead of {steps}"
    return ""


def _added(residuals: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """By tensor, the sum of ranks' residuals in new memory; tensors that no rank has a residual of are left out."""
    added = {}
    for name in dict.fromkeys(name for part in residuals for name in part):
        parts = [part[name] for part in residuals if name in part]
        if len(parts) == 1:
            added[name] = np.array(parts[0], order="C")
        else:
            total = np.zeros(parts[0].shape, np.float64)
            for part in parts:
                total += part
            added[name] = np.clip(total, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
    return added


def _arrays(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The entries of a file, by key."""
    plain = RankState.of(state).to_dict()
    numbers = {key: np.array(value, _NUMBERS[key]) for key, value in plain.items() if key in _NUMBERS}
    return {**numbers, **{f"{part}/{name}": np.asarray(value, _DTYPES[part], order="C")
                          for part in PARTS for name, value in plain[part].items()}}


def _read(file: BinaryIO, whose: str) -> dict[str, Any]:
    try:
        return _read_archive(file)
    except ResidualError as error:
        raise ResidualError(f"{whose}: {error}") from error
    except _DAMAGED as error:
        raise ResidualError(f"{whose} is not a file of residuals: {error}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # The archive says that something begins before the file does.
            raise
        raise ResidualError(f"{whose} is not a file of residuals: {error}") from error


def _read_archive(file: BinaryIO) -> dict[str, Any]:
    size = file.seek(0, os.SEEK_END)
    state: dict[str, Any] = {part: {} for part in PARTS}
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            raise ResidualError("two entries have the same name")
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size
               for entry in entries.values()):
            raise ResidualError("an entry is compressed, which no file of residuals has")
        if sum(entry.file_size for entry in entries.values()) > size:
            raise ResidualError(f"its entries claim to have more bytes than the file, which has {size}")
        if "format_version.npy" in entries:  # Another version may have anything else.
            check_version(_read_entry(archive, entries["format_version.npy"], "format_version").item())
        for name, entry in entries.items():
            key = name[:-len(".npy")] if name.endswith(".npy") else ""
            part, slash, tensor = key.partition("/")
            if part not in (PARTS if slash else _NUMBERS):
                raise ResidualError(f"it has an entry {name!r:.200}, which no file of residuals has")
            array = _read_entry(archive, entry, part)
            if not slash:
                state[part] = array.item()
            elif part == "shapes":
                state[part][tensor] = tuple(array.tolist())
            else:
                state[part][tensor] = array.item() if part == "uncompressed_steps" else array
    return state


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, part: str) -> np.ndarray:
    """One array; memory for it is taken only when its header agrees with what the archive has of it."""
    whose, dtype = f"entry {entry.filename!r:.200}", _DTYPES[part]
    with archive.open(entry) as member:
        start = member.read(len(_NPY_MAGIC) + 2)
        if len(start) != len(_NPY_MAGIC) + 2 or not start.startswith(_NPY_MAGIC):
            raise ResidualError(f"{whose} is not a plain array")
        header = member.read(struct.unpack("<H", start[-2:])[0])
        match = _NPY_HEADER.fullmatch(header)
        if match is None or match[1].decode("latin-1") != dtype.str:
            raise ResidualError(f"{whose} is not a plain array of {dtype.str}: its header is {header!r:.200}")
        shape = tuple(int(text) for text in match[2].split(b",") if text.strip())
        nbytes = entry.file_size - len(start) - len(header)
        if nbytes != dtype.itemsize * math.prod(shape) or len(shape) != _DIMENSIONS.get(part, len(shape)):
            raise ResidualError(f"{whose} has {nbytes} bytes, which are no {dtype.str} of shape {shape!r:.100}")
        array = np.empty(shape, dtype)
        rest = array.reshape(-1).view(np.uint8)
        while len(rest):
            content = member.read(min(len(rest), _READ_AT_ONCE))
            if not content:
                raise EOFError(f"{whose} ends too early")
            rest[:len(content)] = np.frombuffer(content, np.uint8)
            rest = rest[len(content):]
        member.read(1)  # At the end of an entry its checksum is compared, also where nothing was left to read.
        return array
