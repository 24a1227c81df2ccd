"""One optimizer's exchange of gradients: PyTorch tensors in, Horovod's public collectives, PyTorch tensors out.

``start`` begins the collective of one gradient and returns Horovod's handle with a ``Pending``, whose ``finish`` turns
the collective's result into the reduced gradient, in the gradient's own memory. Which tensors are compressed, how, and
what bytes mean is the core's business (``codec``); what Horovod's optimizer expects is ``hook``'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from ..agreement import Statement, disagreement
from ..codec import Codec
from ..config import TwoBitConfig
from ..errors import DisagreementError
from ..reduction import Reduction, refuse_dtype
from ..residuals import ResidualRegistry

Handle = Union[int, Callable[[], Any]]

# Horovod 0.28.1 has no bfloat16; what is not listed travels as float32.
_HOROVOD_DTYPES = (torch.float16, torch.float32, torch.float64)

_scratch = threading.local()


class Exchange:
    """Exchanges the gradients of one optimizer with the other ranks of its process set.

    Args:
        config: checked parameters of the compression.
        op: ``hvd.Average`` or ``hvd.Sum``.
        predivide_factor: Horovod's ``gradient_predivide_factor``.
        process_set: the ranks that exchange.

    Raises:
        UnsupportedOperationError: another op.
    """

    def __init__(self, config: TwoBitConfig, op: Any, predivide_factor: float, process_set: hvd.ProcessSet) -> None:
        self._reduction = Reduction.of(hvd, op, predivide_factor)
        self.residuals = ResidualRegistry()
        self._codec = Codec(config, self.residuals)
        self._config = config
        self._process_set = process_set
        self._statement = Statement(config.min_elements, ())
        self._agreement: int | None = None
        self._in_flight: dict[str, Handle] = {}

    def declare(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Tell names and shapes of all tensors that will be exchanged; the same on every rank."""
        for name, tensor in tensors:
            if self._codec.compresses(tensor.numel()):
                self.residuals.declare(name, tuple(tensor.shape))
        self._statement = Statement(self._config.min_elements, tuple(sorted(
            (name, tensor.numel(), self._codec.compresses(tensor.numel())) for name, tensor in tensors)))

    def start(self, name: str, gradient: torch.Tensor) -> tuple[Handle, Pending]:
        """Begin the exchange of one dense gradient.

        Returns:
            Horovod's handle and what turns its result into the reduced gradient.
        """
        (handle, pending), = self.start_group([(name, gradient)])
        return handle, pending

    def start_group(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[Handle, Pending]]:
        """Begin the exchange of several dense gradients that Horovod shall process together.

        Compressed gradients of the group share an allgather, the others an allreduce per dtype, each named after
        the first of its tensors.
        """
        self._begin_agreement()
        pendings = [self._prepare(name, gradient) for name, gradient in gradients]
        started: dict[str, Handle] = {}
        for members in _alike(pendings):
            names = [pending.name for pending in members]
            with _overlap_explained(names):
                started.update(zip(names, self._send(members)))
        self._in_flight.update(started)
        return [(started[pending.name], pending) for pending in pendings]

    def _prepare(self, name: str, gradient: torch.Tensor) -> Pending:
        if not gradient.dtype.is_floating_point:
            refuse_dtype(name, gradient.dtype)
        _drain(self._in_flight.pop(name, None))
        if self._codec.compresses(gradient.numel()):
            flat = _flat_float32(gradient)
            if flat is None:
                flat = _scratch_float32(gradient.numel())
                flat.view(gradient.shape).copy_(gradient.detach())
            payload = self._codec.encode(name, tuple(gradient.shape), flat.numpy())
            return Pending(self, name, gradient, torch.from_numpy(payload), compressed=True)
        wire = gradient.detach()
        if wire.dtype not in _HOROVOD_DTYPES:
            wire = wire.float()
        return Pending(self, name, gradient, wire.contiguous(), compressed=False)

    def _send(self, members: Sequence[Pending]) -> list[Handle]:
        """Begin the collective of members that travel alike; one handle each."""
        name = f"twobit.{members[0].name}"
        tensors = [pending.wire for pending in members]
        alone = len(members) == 1
        if members[0].compressed:
            if alone:
                return [hvd.allgather_async(tensors[0], name=name, process_set=self._process_set)]
            handle = hvd.grouped_allgather_async(tensors, name=name, process_set=self._process_set)
        else:
            scaling = dict(op=self._reduction.op, prescale_factor=self._reduction.prescale,
                           postscale_factor=self._reduction.postscale, process_set=self._process_set)
            if alone:
                return [hvd.allreduce_async_(tensors[0], name=name, **scaling)]
            handle = hvd.grouped_allreduce_async_(tensors, name=name, **scaling)
        group = _Group(handle)
        return [_Member(group, index) for index in range(len(members))]

    def _finish(self, pending: Pending, received: torch.Tensor) -> torch.Tensor:
        self._in_flight.pop(pending.name, None)
        gradient = pending.gradient
        if not pending.compressed:
            return gradient if received.data_ptr() == gradient.data_ptr() else _write(gradient, received)
        # Read anew at every step: an elastic job changes the number of ranks.
        ranks = self._process_set.size()
        flat = _flat_float32(gradient)
        out = _scratch_float32(gradient.numel()) if flat is None else flat
        self._codec.decode(pending.name, received.numpy(), ranks, out.numpy(), self._reduction.scale(ranks))
        return gradient if flat is not None else _write(gradient, out.view(gradient.shape))

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Wait for this step's agreement; within the context the step's results are taken. See ``agreement``.

        Raises:
            DisagreementError: ranks would not send the same collectives; raised on every rank, with what differs.
        """
        self._begin_agreement()
        try:
            self._check_agreement()
            yield
        finally:
            self._agreement = None

    def _begin_agreement(self) -> None:
        """Send this rank's statement unless it was sent in this step."""
        if self._agreement is None:
            self._agreement = self._allgather(np.frombuffer(self._statement.digest, np.uint8).copy(), "")

    def _check_agreement(self) -> None:
        digests = hvd.synchronize(self._agreement).numpy().tobytes()
        if digests == self._statement.digest * self._process_set.size():
            return
        line = np.frombuffer(self._statement.to_json(), np.uint8).copy()
        statements = hvd.synchronize(self._allgather(line, ".details")).numpy().tobytes()
        raise disagreement(statements, hvd.rank())

    def _allgather(self, content: np.ndarray, suffix: str) -> int:
        first = self._statement.tensors[0][0] if self._statement.tensors else ""
        with _overlap_explained([first]):
            return hvd.allgather_async(torch.from_numpy(content), name=f"twobit.agreement{suffix}.{first}",
                                       process_set=self._process_set)

    def abandon(self) -> None:
        """Wait for what is in flight and drop it: the optimizer's step was broken off."""
        for handle in [*self._in_flight.values(), self._agreement]:
            _drain(handle)
        self._in_flight.clear()
        self._agreement = None


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """A gradient whose exchange has begun: what Horovod hands back with the result of the collective.

    Attributes:
        exchange: the exchange that began it.
        name: name of the parameter.
        gradient: the gradient tensor, which the reduced gradient overwrites.
        wire: what was handed to Horovod; kept, because Horovod reads it until the collective has ended.
        compressed: whether ``wire`` is a payload or the gradient itself.
    """

    exchange: Exchange
    name: str
    gradient: torch.Tensor
    wire: torch.Tensor
    compressed: bool

    def finish(self, received: torch.Tensor) -> torch.Tensor:
        """The reduced gradient, from what the collective returned."""
        return self.exchange._finish(self, received)


class _Group:
    """The result of one grouped collective, waited for once."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._outputs: Sequence[torch.Tensor] | None = None

    def output(self, index: int) -> torch.Tensor:
        if self._outputs is None:
            self._outputs = hvd.synchronize(self._handle)
        return self._outputs[index]


@dataclasses.dataclass(frozen=True, eq=False)
class _Member:
    """A callable handle, as Horovod's optimizer takes them, of one tensor in a group."""

    group: _Group
    index: int

    def __call__(self) -> torch.Tensor:
        return self.group.output(self.index)


def _alike(pendings: Sequence[Pending]) -> list[list[Pending]]:
    """Split into groups that one collective can carry, in order of first appearance."""
    groups: dict[Any, list[Pending]] = {}
    for pending in pendings:
        groups.setdefault((pending.compressed, pending.wire.dtype, pending.wire.device), []).append(pending)
    return list(groups.values())


@contextlib.contextmanager
def _overlap_explained(names: Sequence[str]) -> Iterator[None]:
    """Turn Horovod's ValueError for a name that is in use, which does not tell the name, into one that does."""
    try:
        yield
    except ValueError as error:
        raise DisagreementError(
            f"rank {hvd.rank()} cannot exchange the gradient of {', '.join(map(repr, names))} while another of that "
            "name is under way: optimizers whose backward passes overlap need different parameter names, and a model "
            f"only one optimizer ({error})") from error


def _drain(handle: Handle | None) -> None:
    """Wait until Horovod no longer uses the buffers behind a handle whose result nobody wants."""
    if handle is None:
        return
    try:
        handle() if callable(handle) else hvd.synchronize(handle)
    except HorovodInternalError:
        pass  # The collective failed with its world: its buffers are free as well.


def _flat_float32(gradient: torch.Tensor) -> torch.Tensor | None:
    """The gradient's memory as float32[elements] in the tensor's order, or None where it is not laid out so."""
    if gradient.dtype == torch.float32 and gradient.device.type == "cpu" and gradient.is_contiguous():
        return gradient.detach().view(-1)
    return None


def _scratch_float32(elements: int) -> torch.Tensor:
    """float32[elements] on the CPU with undefined contents, reused by every tensor of this thread."""
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.numel() < elements:
        buffer = _scratch.buffer = torch.empty(elements, dtype=torch.float32)
    return buffer[:elements]


def _write(gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy ``values`` into the gradient, or into a new one where several of its elements share memory."""
    if any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape)):
        gradient = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return gradient.detach().copy_(values)
