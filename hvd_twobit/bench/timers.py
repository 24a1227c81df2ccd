"""How long calls take that launch kernels on a device: there, and on the host.

A device does in its own time what the host asks for, so that a clock of the host sees neither. ``CudaTimer`` has a GPU
tell when it passes events; ``HostTimer`` is for tensors of the CPU, where all is done when a call returns, as with
Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

_LEAD_ELEMENTS = 1 << 26
_MOST_LEADS = 1 << 9
"""A driver keeps about twice as many requests before it has the host wait, which would undo the lead."""


class Timer:
    """Times calls that launch kernels on one device."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, the device is the one on which calls launch."""
        return contextlib.nullcontext()

    def laps(self, calls: Sequence[Call], launches: int, prepare: Call) -> list[float]:
        """Seconds that the device takes for each of some calls, one behind the other: the mean over repetitions.

        Args:
            calls: what is timed.
            launches: how often all of them are repeated.
            prepare: is called before each repetition, and not timed.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until the device has done everything."""
        raise NotImplementedError

    def host(self, call: Call, launches: int) -> list[float]:
        """Seconds that the host is busy with each of so many calls, made while the device may lag behind."""
        self.finish()
        seconds = [_seconds(call) for _ in range(launches)]
        self.finish()
        return seconds

    def whole(self, call: Call) -> float:
        """Seconds from a call, with an idle device, until this has done all that was asked of it."""
        self.finish()
        start = time.perf_counter()
        call()
        self.finish()
        return time.perf_counter() - start


class HostTimer(Timer):
    """For tensors of the CPU."""

    def laps(self, calls: Sequence[Call], launches: int, prepare: Call) -> list[float]:
        seconds: list[list[float]] = [[] for _ in calls]
        for _ in range(launches):
            prepare()
            for call, of_call in zip(calls, seconds):
                of_call.append(_seconds(call))
        return list(map(statistics.fmean, seconds))

    def finish(self) -> None:
        """Nothing: all is done."""


class CudaTimer(Timer):
    """For tensors of a GPU.

    A launch may take the host longer than the kernel takes the device, which would then wait between two events. So
    all is asked of the device while it is busy with something else, a *lead*: copies of a buffer, of which there are as
    many as turn out to be needed. They were enough if the first event has not been passed when the last is asked for.

    Args:
        device: on whose current stream calls launch, within ``current``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lead = torch.zeros((2, _LEAD_ELEMENTS), dtype=torch.float32, device=device)
        self._leads = 1

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def laps(self, calls: Sequence[Call], launches: int, prepare: Call) -> list[float]:
        while True:
            events, was_busy = self._passed(calls, launches, prepare)
            if was_busy or self._leads >= _MOST_LEADS:  # Then times are too long rather than too short.
                break
            self._leads *= 2
        return [statistics.fmean(of_one[number].elapsed_time(of_one[number + 1]) for of_one in events) / 1e3
                for number in range(len(calls))]

    def _passed(self, calls: Sequence[Call], launches: int,
                prepare: Call) -> tuple[list[list[torch.cuda.Event]], bool]:
        """Events before and behind each call, which the device has passed; and whether it was busy until the last."""
        self.finish()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)] for _ in range(launches)]
        for _ in range(self._leads):
            self._lead[0].copy_(self._lead[1])
        for of_one in events:
            prepare()
            of_one[0].record()
            for call, behind in zip(calls, of_one[1:]):
                call()
                behind.record()
        was_busy = not events[0][0].query()
        self.finish()
        return events, was_busy

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


def timer_of(device: torch.device) -> Timer:
    """The timer of a device."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
