"""What a fuzzer's bytes stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Choices that bytes stand for: what a fuzzer mutates. When they are used up, every choice is the first one."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def number(self, highest: int) -> int:
        """0 to ``highest``, at most 65,535."""
        taken = self.some_bytes(1 if highest < 256 else 2)
        return int.from_bytes(taken, "little") % (highest + 1)

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.number(len(options) - 1)]

    def some_bytes(self, count: int) -> bytes:
        """As many bytes, or what is left of them."""
        self._at += count
        return self._content[self._at - count:self._at]
