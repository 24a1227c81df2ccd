"""Exchanges of two levels: a bucket's way within the machine and, as one of ``transfer``'s, between machines."""

from __future__ import annotations

import dataclasses

import horovod.torch as hvd
import numpy as np
import torch

from ..codec import Codec
from ..hierarchy import FAILED, TwoLevelLayout
from ..machines import Levels, Place
from ..transports import Planned
from .coder import HostCoder
from .transfer import TRANSFERS, Coded, Transfer, wait_for
from .waiting import synchronize


def find_levels(setting: bool | str, name: str) -> Levels | None:
    """The levels of all ranks, asked of all of them; None where one level is enough. Every rank calls this alike.

    Args:
        setting: ``hierarchical`` as configured, not False.
        name: of the collective, unique.

    Raises:
        UnsupportedOperationError: machines have different numbers of ranks, and the setting is not ``"auto"``.
        ConfigError: a process set is missing and cannot be added.
    """
    line = np.frombuffer(Place.of(hvd).to_json(), np.uint8).copy()
    lines = synchronize(hvd.allgather_async(torch.from_numpy(line), name=name)).numpy().tobytes()
    return Levels.decided(setting, [Place.from_json(one) for one in lines.splitlines()], hvd.rank(),
                          hvd.add_process_set)


class TwoLevel(Transfer):
    """A bucket whose shares the ranks of a machine divide, and exchange with those of the same number elsewhere.

    Args:
        planned: the bucket, and how its shares travel between machines.
        codec: of the optimizer; it sees shares.
        levels: the process sets.
        scale: factor of the sum over machines.
        averages: whether a machine's gradient is the mean of its ranks'.
        block_elements: shares are cut at multiples of this many elements of a tensor.
    """

    def __init__(self, planned: Planned, codec: Codec, levels: Levels, scale: float, averages: bool,
                 block_elements: int) -> None:
        super().__init__(planned)
        self._levels = levels
        self._averages = averages
        self._layout = TwoLevelLayout(planned.bucket, levels.within.rank(), planned.ranks_per_machine, block_elements)
        self._sent = torch.zeros(self._layout.elements)
        self._result = torch.from_numpy(self._layout.result())
        self._splits = torch.from_numpy(self._layout.splits)
        self._across: Coded | None = None
        if self._layout.own is not None:
            own = dataclasses.replace(planned, bucket=self._layout.own, ranks_per_machine=1)
            coder = HostCoder(own, codec, levels.across.rank(), scale)
            self._across = TRANSFERS[planned.transport](own, coder, levels.across)
        self._skipped: set[str] = set()
        self._scattering: int | None = None
        self._is_reduced = False
        self._gathered: np.ndarray | None = None

    @property
    def is_under_way(self) -> bool:
        across = self._across is not None and self._across.is_under_way
        return self._scattering is not None or across or super().is_under_way

    def _put(self, name: str, gradient: np.ndarray) -> None:
        self._layout.put(name, gradient, self._sent.numpy())

    def _leave_out(self, name: str) -> None:
        self._skipped.add(name)

    def _depart(self) -> None:
        self._scattering = hvd.alltoall_async(self._sent, self._splits, process_set=self._levels.within,
                                              name=f"twobit.within.{self._planned.bucket.name}")

    def prepare(self, wait: bool) -> bool:
        if self._missing:
            return False
        if self._scattering is not None:
            if not wait and not hvd.poll(self._scattering):
                return False
            handle, self._scattering = self._scattering, None
            with self._failing():
                self._send_across(synchronize(handle)[0].numpy())
        if not self._is_reduced:
            if not self._has_crossed(wait):
                return False
            self._reduce()
        return True

    def _send_across(self, received: np.ndarray) -> None:
        """This machine's gradient is known in this rank's shares: it leaves for the other machines."""
        gradient = self._layout.machine_gradient(received, self._averages)
        for tensor, share, values in self._layout.of_own(gradient):
            assert self._across is not None
            if tensor in self._skipped:
                self._across.skip(share.name)
            else:
                self._across.add(share.name, values)

    def _has_crossed(self, wait: bool) -> bool:
        """Go on with the exchange between machines, and tell whether its last collective has ended."""
        if self._across is None or self._error is not None:
            return True
        if not self._across.has_begun:
            if not self._across.prepare(wait):
                return False
            self._across.begin()
        return wait or not self._across.is_under_way

    def _reduce(self) -> None:
        """Take what came from the other machines as this rank's part of the last collective."""
        values = self._result.numpy()
        with self._failing():
            if self._across is not None and self._error is None:
                self._across.receive()
                for tensor, share, out in self._layout.of_own(values):
                    if tensor not in self._skipped:
                        self._across.decode(share.name, out)
        values[-1] = 0 if self._error is None else FAILED
        self._is_reduced = True

    def begin(self) -> None:
        # The machine's other ranks wait for this one, also where its share has failed.
        error, self._error = self._error, None
        super().begin()
        self._error = error or self._error

    def _begin(self) -> int:
        return hvd.allgather_async(self._result, name=f"twobit.machine.{self._planned.bucket.name}",
                                   process_set=self._levels.within)

    def receive(self) -> None:
        error, self._error = self._error, None
        super().receive()
        self._error = error or self._error

    def _received(self, arrived: torch.Tensor) -> None:
        self._layout.check(arrived.numpy())
        self._gathered = arrived.numpy()

    def _take(self, name: str, out: np.ndarray) -> None:
        assert self._gathered is not None, f"{self._planned.bucket.label} was not received"
        self._layout.take(name, self._gathered, out)

    def drain(self) -> None:
        super().drain()
        handle, self._scattering = self._scattering, None
        wait_for(handle)
        if self._across is not None:
            self._across.drain()

    def forget(self) -> None:
        super().forget()
        if self._across is not None:
            self._across.forget()
        self._skipped.clear()
        self._is_reduced = False
        self._gathered = None
