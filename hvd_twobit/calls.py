"""What calls of ``hvd.allreduce(compression=TwoBit)`` have to know of each other. No framework.

Horovod compresses tensor by tensor and then hands on what came out: whether a tensor is one of a group, and whether
what is about to be reduced are words, is not among the arguments.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_calls = threading.local()


@contextlib.contextmanager
def in_group() -> Iterator[None]:
    """Within it, every tensor is made one for Horovod's grouped allreduce, whose tensors have one dtype and device."""
    _calls.grouped = True
    try:
        yield
    finally:
        _calls.grouped = False


def is_in_group() -> bool:
    """Whether this thread is within ``in_group``."""
    return getattr(_calls, "grouped", False)


def mark_words(wire: Any) -> None:
    """Remember that a tensor holds words, so that ``hold_words`` knows it where Horovod is about to reduce it."""
    wire._holds_twobit_words = True


def hold_words(tensors: Any) -> bool:
    """Whether Horovod is about to reduce words, which it must do with a sum; ``tensors``: one, or a list of them."""
    return any(getattr(tensor, "_holds_twobit_words", False)
               for tensor in (tensors if isinstance(tensors, (list, tuple)) else [tensors]))
