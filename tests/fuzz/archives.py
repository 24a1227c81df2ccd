"""Archives that look like files of residuals and are not: built from choices that a fuzzer makes, checksums right.

A mutated file nearly always fails at its checksums, so that the parser behind them is never reached. Here choices go
into names, headers and contents, and the archive around them is well-formed, or damaged in a few bytes.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Iterable

from .choices import Choices

KEYS = ("format_version", "loss_scale", "shapes/w", "residuals/w", "levels/w", "uncompressed_steps/w", "residuals/v",
        "shapes/../../w", "residuals/", "momenta/w", "", "file", "/etc/passwd", "residuals/\x00w")
DESCRIPTIONS = ("<f4", "<i8", "<f8", ">f4", "<f2", "|O", "|V4", "|S4", "<U9", "<M8[s]", "|u1")
SHAPES = ("()", "(1,)", "(2,)", "(2, 3)", "(6,)", "(0,)", "(1099511627776,)", "(4294967296, 4294967296)", "(-1,)",
          "(0, 99999999999999999999)", "(" + "1, " * 70 + ")", "(" * 300, "2")
CONTENTS = (b"", b"\x01" + bytes(7), bytes(24), b"\x00\x00\x80\x3f" * 6, b"\x00\x00\xc0\x7f" * 6)


def npy(description: str = "<f4", shape: str = "(2, 3)", content: bytes = bytes(24), order: str = "False") -> bytes:
    """An array in NumPy's format 1.0, whose header says what the arguments say."""
    header = f"{{'descr': '{description}', 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def zipped(entries: Iterable[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of these entries, in order; names may be there twice."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries:
            info = zipfile.ZipInfo("placeholder")
            info.filename = name  # The constructor would shorten it.
            info.compress_type = method
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Of a name that is there already.
                archive.writestr(info, content)
    return file.getvalue()


def archive_of(choices: Choices) -> bytes:
    """The archive that choices stand for; without any, one of a state without tensors."""
    entries = [("format_version.npy", npy("<i8", "()", b"\x01" + bytes(7)))] * choices.one_of((1, 1, 1, 0, 2))
    for _ in range(choices.number(6)):
        content = npy(choices.one_of(DESCRIPTIONS), choices.one_of(SHAPES), choices.one_of(CONTENTS),
                      choices.one_of(("False", "False", "True", "0")))
        if choices.number(3) == 3:
            at = choices.number(len(content))
            content = content[:at] + choices.some_bytes(4) + content[at + choices.number(4):]
        entries.append((choices.one_of(KEYS) + choices.one_of((".npy", ".npy", ".npz", "")), content))
    archive = bytearray(zipped(entries, choices.one_of((zipfile.ZIP_STORED,) * 7 + (zipfile.ZIP_DEFLATED,))))
    for _ in range(choices.one_of((0, 0, 1, 2, 3))):  # Near the end, in the directory, which has no checksum.
        at = max(0, len(archive) - choices.number(400))
        replacement = choices.some_bytes(choices.number(8))
        archive[at:at + len(replacement)] = replacement
    return bytes(archive)
