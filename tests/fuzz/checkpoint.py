"""A fuzzer of files of residuals, run by test_fuzz: any bytes are loaded, or refused with nothing changed.

The arguments are libFuzzer's. An exception of another kind, more memory than a small file can need, or a hang is a
crash, and libFuzzer writes the input that caused it.
"""

from __future__ import annotations

import sys

import atheris

from tests.fuzz.archives import archive_of
from tests.fuzz.choices import Choices
from tests.fuzz.limits import limit_memory

with atheris.instrument_imports(include=["hvd_twobit", "zipfile"]):
    from hvd_twobit import checkpoint
    from hvd_twobit.errors import ResidualError
    from hvd_twobit.residuals import ResidualRegistry


def one_input(content: bytes) -> None:
    """The first byte tells whether the others are a file or the choices of one."""
    file = content[1:] if content[:1] < b"\x80" else archive_of(Choices(content[1:]))
    registry = ResidualRegistry()
    try:
        state = checkpoint.from_bytes(file)
        registry.load_state_dict(state)
    except ResidualError:
        assert not registry.state_dict()["shapes"]
        return
    again = checkpoint.to_bytes(registry.state_dict())
    assert checkpoint.to_bytes(checkpoint.from_bytes(again)) == again


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    limit_memory()
    atheris.Fuzz()
