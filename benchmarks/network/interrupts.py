"""Ctrl-C, SIGTERM and SIGHUP end the benchmark only while it waits, never while it makes or removes something."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asks to end; not an Exception, like KeyboardInterrupt.

    Attributes:
        status: the exit status that a shell would give.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number


class Interrupts:
    """Within ``with``, signals wait until ``allowed`` is entered, and raise Interrupted there; only the first does."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._allowed = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._received) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Within this, a signal raises Interrupted; also one that came before."""
        try:
            self._allowed = True
            if self._number is not None:
                raise Interrupted(self._number)
            yield
        finally:
            self._allowed = False

    def _received(self, number: int, frame: types.FrameType | None) -> None:
        if self._number is None:
            self._number = number
            if self._allowed:
                raise Interrupted(number)
