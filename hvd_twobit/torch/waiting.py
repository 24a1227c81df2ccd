"""Waits for Horovod's collectives without keeping a processor busy."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

_INTERVAL_S = 2e-4


def synchronize(handle: int) -> Any:
    """``hvd.synchronize``, which in Horovod 0.28.1 looks for the end again and again, without a pause.

    Where ranks have few cores, that takes them from Horovod's threads, which are waited for.
    """
    while not hvd.poll(handle):
        time.sleep(_INTERVAL_S)
    return hvd.synchronize(handle)


class Result:
    """What a collective brings, for all who ask: Horovod tells it, or an error, once and then forgets the handle.

    Args:
        handle: Horovod's.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._outcome: Any = None
        self._is_known = False

    def __call__(self) -> Any:
        """The result, waited for.

        Raises:
            HorovodInternalError: the collective failed.
        """
        if not self._is_known:
            try:
                self._outcome = synchronize(self._handle)
            except HorovodInternalError as error:
                self._outcome = error
            self._is_known = True
        if isinstance(self._outcome, HorovodInternalError):
            raise self._outcome
        return self._outcome
