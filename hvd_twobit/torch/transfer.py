"""One bucket of an optimizer on its way: encoded, sent when it is full, received, decoded.

A transfer is used step after step. Its last collective brings what is decoded; ``pipeline`` says when it may begin. By
``sra`` there is one before: an alltoall, which begins as soon as the payloads are complete and after which this rank
sums its chunk for all. Payloads and sums are made by a ``coder``. ``hierarchy`` composes these transfers to one of two
levels.

Gradients are arrays or tensors, as the coder wants them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ..errors import DisagreementError, TwoBitError
from ..transports import Planned
from .coder import Coder
from .waiting import synchronize


class Transfer:
    """The exchange of one bucket. Subclasses say what is sent, and how.

    Errors of collectives, and of what they bring, are kept until a tensor is decoded: Horovod tells them once,
    perhaps in a gradient hook, and every tensor of the bucket has to be told.

    Args:
        planned: the bucket, and how it travels.
    """

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self.names = frozenset(part.name for part in planned.bucket.parts)
        self._missing, self._undelivered = set(self.names), set(self.names)
        self._has_begun = False
        self._handle: int | None = None
        self._error: Exception | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no gradient of this step is in."""
        return len(self._missing) == len(self.names)

    @property
    def has_begun(self) -> bool:
        """Whether the last collective was begun."""
        return self._has_begun

    @property
    def has_arrived(self) -> bool:
        """Whether the last collective was begun and waited for, or has nothing to wait for."""
        return self._has_begun and self._handle is None

    @property
    def is_awaited(self) -> bool:
        """Whether the last collective was begun and not waited for."""
        return self._handle is not None

    @property
    def is_under_way(self) -> bool:
        """Whether a collective was begun and has not ended."""
        return self._handle is not None and not hvd.poll(self._handle)

    def add(self, name: str, gradient: Any) -> None:
        """Take up what the bucket carries of a gradient, float32[elements] of the whole tensor."""
        self._put(name, gradient)
        self._is_in(name)

    def skip(self, name: str) -> None:
        """Leave out a gradient in this step: it turned out to travel by other means."""
        self._leave_out(name)
        self._undelivered.discard(name)
        self._is_in(name)

    def _is_in(self, name: str) -> None:
        self._missing.discard(name)
        if not self._missing:
            with overlap_explained(sorted(self.names)):
                self._depart()

    def prepare(self, wait: bool) -> bool:
        """Do what comes before the last collective, and tell whether that may begin; with ``wait``, wait for it."""
        return not self._missing

    def begin(self) -> None:
        """Begin the last collective."""
        self._has_begun = True
        if self._error is None:
            with self._failing(), overlap_explained(sorted(self.names)):
                self._handle = self._begin()

    def receive(self) -> None:
        """Wait for the last collective and check what it brought."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with self._failing():
                self._received(synchronize(handle))

    def decode(self, name: str, out: Any) -> None:
        """Overwrite what the bucket carries of a tensor with the scaled sum over all ranks.

        Args:
            name: the tensor's name.
            out: float32[elements], the whole tensor's, contiguous, of the kind of what was added.

        Raises:
            PayloadError: a rank sent something else than what this rank expects.
            HorovodInternalError: a collective failed.
        """
        if self._error is not None:
            raise self._error
        self._take(name, out)
        self._undelivered.discard(name)
        if not self._undelivered:
            self.forget()

    def drain(self) -> None:
        """Wait for what is under way, and drop what it brings."""
        handle, self._handle = self._handle, None
        wait_for(handle)

    def forget(self) -> None:
        """Be ready for the next step; nothing may be under way."""
        self._missing, self._undelivered = set(self.names), set(self.names)
        self._has_begun = False
        self._error = None

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (HorovodInternalError, TwoBitError) as error:
            self._error = error

    # What subclasses do.

    def _put(self, name: str, gradient: Any) -> None:
        raise NotImplementedError

    def _leave_out(self, name: str) -> None:
        raise NotImplementedError

    def _depart(self) -> None:
        """The bucket is full: begin what precedes the last collective."""

    def _begin(self) -> int:
        raise NotImplementedError

    def _received(self, arrived: torch.Tensor) -> None:
        raise NotImplementedError

    def _take(self, name: str, out: Any) -> None:
        raise NotImplementedError


class Coded(Transfer):
    """A bucket that travels as codes.

    Args:
        planned: the bucket, and how it travels.
        coder: makes payloads of its gradients, and gradients of what arrives.
        process_set: the ranks that exchange.
    """

    def __init__(self, planned: Planned, coder: Coder, process_set: hvd.ProcessSet) -> None:
        super().__init__(planned)
        self._coder = coder
        self._process_set = process_set

    def _put(self, name: str, gradient: Any) -> None:
        self._coder.put(name, gradient)

    def _leave_out(self, name: str) -> None:
        self._coder.leave_out(name)

    def _depart(self) -> None:
        self._coder.seal()

    def prepare(self, wait: bool) -> bool:
        return not self._missing and self._coder.is_ready(wait)

    def _take(self, name: str, out: Any) -> None:
        self._coder.take(name, out)

    def drain(self) -> None:
        super().drain()
        self._coder.drain()

    def forget(self) -> None:
        super().forget()
        self._coder.forget()


class Allgather(Coded):
    """A bucket whose payloads all ranks get."""

    def _begin(self) -> int:
        return hvd.allgather_async(self._coder.payloads, name=f"twobit.{self._planned.bucket.name}",
                                   process_set=self._process_set)

    def _received(self, arrived: torch.Tensor) -> None:
        self._coder.receive(arrived)


class ScatterReduceAllgather(Coded):
    """A bucket of which every rank sums a chunk for all."""

    def __init__(self, planned: Planned, coder: Coder, process_set: hvd.ProcessSet) -> None:
        super().__init__(planned, coder, process_set)
        self._splits = torch.tensor(coder.splits, dtype=torch.int32)
        self._scattering: int | None = None
        self._is_scattered = False

    @property
    def is_under_way(self) -> bool:
        return self._scattering is not None or super().is_under_way

    def _depart(self) -> None:
        super()._depart()
        self._scatter(wait=False)

    def _scatter(self, wait: bool) -> None:
        """Begin the alltoall, once the payloads are complete."""
        if not self._is_scattered and super().prepare(wait):
            self._is_scattered = True
            with overlap_explained(sorted(self.names)):
                self._scattering = hvd.alltoall_async(self._coder.payloads, self._splits,
                                                      name=f"twobit.{self._planned.bucket.name}",
                                                      process_set=self._process_set)

    def prepare(self, wait: bool) -> bool:
        self._scatter(wait)
        if self._scattering is not None and (wait or hvd.poll(self._scattering)):
            handle, self._scattering = self._scattering, None
            with self._failing():
                self._coder.sum(synchronize(handle)[0])
        if not self._is_scattered or self._scattering is not None:
            return False
        with self._failing():
            return self._coder.are_summed(wait)
        return True  # With an error, which is told when a tensor is decoded.

    def drain(self) -> None:
        super().drain()
        handle, self._scattering = self._scattering, None
        wait_for(handle)

    def _begin(self) -> int:
        return hvd.allgather_async(self._coder.sums, name=f"twobit.sums.{self._planned.bucket.name}",
                                   process_set=self._process_set)

    def _received(self, arrived: torch.Tensor) -> None:
        self._coder.receive_sums(arrived)

    def forget(self) -> None:
        super().forget()
        self._is_scattered = False


class Allreduce(Coded):
    """A bucket whose codes Horovod's own allreduce adds up, as digits of integers."""

    def __init__(self, planned: Planned, coder: Coder, process_set: hvd.ProcessSet) -> None:
        super().__init__(planned, coder, process_set)
        self._integers: torch.Tensor | None = None

    def _depart(self) -> None:
        super()._depart()
        self.prepare(wait=False)

    def prepare(self, wait: bool) -> bool:
        if self._integers is None and super().prepare(wait):
            self._integers = self._coder.tally()
        return self._integers is not None

    def _begin(self) -> int:
        return hvd.allreduce_async_(self._integers, name=f"twobit.{self._planned.bucket.name}", op=hvd.Sum,
                                    process_set=self._process_set)

    def _received(self, arrived: torch.Tensor) -> None:
        self._coder.receive_tallies()

    def forget(self) -> None:
        super().forget()
        self._integers = None


TRANSFERS = {"allgather": Allgather, "sra": ScatterReduceAllgather, "allreduce": Allreduce}
"""The transfer of each transport."""


def wait_for(handle: int | None) -> None:
    """Wait until Horovod no longer uses the memory of a collective whose result nobody wants."""
    if handle is not None:
        with contextlib.suppress(HorovodInternalError):  # Then it failed with its world.
            synchronize(handle)


@contextlib.contextmanager
def overlap_explained(names: Sequence[str]) -> Iterator[None]:
    """Turn Horovod's ValueError for a name that is in use, which does not tell the name, into one that does."""
    try:
        yield
    except ValueError as error:
        raise DisagreementError(
            f"rank {hvd.rank()} cannot exchange the gradient of {', '.join(map(repr, names))} while another of that "
            "name is under way: optimizers whose backward passes overlap need different parameter names, and a model "
            f"only one optimizer ({error})") from error
