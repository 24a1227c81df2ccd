"""One bucket of an optimizer on its way: encoded gradient by gradient, sent when it is full, received.

A transfer is used step after step. By ``allgather`` it takes one collective. By ``sra`` it takes two: an alltoall,
after which this rank sums its chunk, and an allgather of the sums. The second is begun by whoever comes along first
when the first has ended: a gradient hook (``advance``), so that sums travel while backward goes on, or the end of the
step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from ..codec import Codec, Contents
from ..errors import DisagreementError, TwoBitError
from ..transports import Planned


class Transfer:
    """The exchange of one bucket, step after step. Subclasses say what is sent, and how.

    Args:
        planned: the bucket, and how it travels.
        process_set: the ranks that exchange.
    """

    def __init__(self, planned: Planned, process_set: hvd.ProcessSet) -> None:
        self._planned = planned
        self._process_set = process_set
        self._error: Exception | None = None
        self._missing = self._names()
        self._undelivered = self._names()

    def _names(self) -> set[str]:
        return {part.name for part in self._planned.bucket.parts}

    def add(self, name: str, gradient: np.ndarray) -> None:
        """Encode what the bucket carries of a gradient, float32[elements] of the whole tensor; send a full bucket."""
        if not self._missing:
            self.abandon()  # What is left of a step that was broken off.
        self._encode(name, gradient)
        self._added(name)

    def skip(self, name: str) -> None:
        """Leave out a gradient in this step: it turned out to travel by other means."""
        if not self._missing:
            self.abandon()
        self._leave_out(name)
        self._undelivered.discard(name)
        self._added(name)

    def _added(self, name: str) -> None:
        self._missing.discard(name)
        if not self._missing:
            with overlap_explained(sorted(self._names())):
                self._send()

    def decode(self, name: str, out: np.ndarray, scale: float) -> None:
        """Wait for the bucket and overwrite what it carries of a tensor with the scaled sum over all ranks.

        Args:
            name: the tensor's name.
            out: float32[elements], the whole tensor's, contiguous.
            scale: factor of the sum.

        Raises:
            PayloadError: a rank sent something else than what this rank expects.
            HorovodInternalError: a collective failed.
        """
        self._wait()
        if self._error is not None:
            raise self._error
        self._decode(name, out, scale)
        self._undelivered.discard(name)
        if not self._undelivered:
            self._reset()

    def abandon(self) -> None:
        """Wait for what is under way, as the other ranks do, and forget it."""
        if not self._missing:
            self._wait()
        self._reset()

    def _wait(self) -> None:
        """Wait for what was sent. An error is kept: Horovod tells it once, and every tensor has to be told."""
        with self._failing():
            self._receive()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (HorovodInternalError, TwoBitError) as error:
            self._error = error

    def _reset(self) -> None:
        """Nothing is under way; be ready for the next step."""
        self._error = None
        self._missing, self._undelivered = self._names(), self._names()
        self._forget()

    # For buckets that take two collectives.

    def advance(self) -> None:
        """Begin what can begin without waiting for another rank. Errors are told when a tensor is decoded."""

    def sum(self) -> None:
        """Wait until the last collective but one has ended, and begin the last."""

    # What subclasses do.

    @property
    def is_under_way(self) -> bool:
        """Whether a collective of this bucket was begun and not waited for."""
        raise NotImplementedError

    def _encode(self, name: str, gradient: np.ndarray) -> None:
        raise NotImplementedError

    def _leave_out(self, name: str) -> None:
        raise NotImplementedError

    def _send(self) -> None:
        raise NotImplementedError

    def _receive(self) -> None:
        """Wait for what the collective returns, once, and check it."""
        raise NotImplementedError

    def _decode(self, name: str, out: np.ndarray, scale: float) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        """Let go of what arrived."""
        raise NotImplementedError


class PayloadTransfer(Transfer):
    """A bucket that travels as payloads: by ``allgather`` or ``sra``.

    Args:
        codec: of the optimizer.
        planned: the bucket, and how it travels.
        process_set: the ranks that exchange.
    """

    def __init__(self, codec: Codec, planned: Planned, process_set: hvd.ProcessSet) -> None:
        super().__init__(planned, process_set)
        self._codec = codec
        self._layout = codec.layout(planned.bucket, planned.chunks)
        self._payloads = self._layout.new()
        # Horovod reads the wire until the collective has ended.
        self._wire = torch.from_numpy(self._payloads)
        self._splits = torch.tensor(self._layout.chunk_nbytes, dtype=torch.int32)
        self._sums: torch.Tensor | None = None
        self._scattering: int | None = None
        self._gathering: int | None = None
        self._contents: Contents | None = None

    @property
    def is_under_way(self) -> bool:
        return self._scattering is not None or self._gathering is not None

    def _encode(self, name: str, gradient: np.ndarray) -> None:
        self._codec.encode(self._layout, self._payloads, name, gradient)

    def _leave_out(self, name: str) -> None:
        self._codec.leave_out(self._layout, self._payloads, name)

    def _send(self) -> None:
        self._codec.seal(self._layout, self._payloads)
        name = f"twobit.{self._planned.bucket.name}"
        if self._planned.transport == "sra":
            self._scattering = hvd.alltoall_async(self._wire, self._splits, name=name, process_set=self._process_set)
        else:
            self._gathering = hvd.allgather_async(self._wire, name=name, process_set=self._process_set)

    def advance(self) -> None:
        if self._scattering is not None and hvd.poll(self._scattering):
            self.sum()

    def sum(self) -> None:
        handle, self._scattering = self._scattering, None
        if handle is None:
            return
        with self._failing():
            received, _ = hvd.synchronize(handle)
            sums = self._codec.sum(self._layout, self._process_set.rank(), received.numpy(), self._planned.ranks)
            self._sums = torch.from_numpy(sums)
            self._gathering = hvd.allgather_async(self._sums, name=f"twobit.sums.{self._planned.bucket.name}",
                                                  process_set=self._process_set)

    def _receive(self) -> None:
        self.sum()
        handle, self._gathering = self._gathering, None
        if handle is None:
            return
        gathered = hvd.synchronize(handle).numpy()
        self._contents = (self._codec.receive_sums(self._layout, gathered) if self._planned.transport == "sra"
                          else self._codec.receive(self._layout, gathered, self._planned.ranks))

    def _decode(self, name: str, out: np.ndarray, scale: float) -> None:
        assert self._contents is not None, f"{self._planned.bucket.label} was not sent"
        self._codec.decode(self._contents, name, out, scale)

    def _forget(self) -> None:
        self._sums = self._contents = None


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
