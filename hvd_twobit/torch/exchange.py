"""One optimizer's exchange of gradients: PyTorch tensors in, Horovod's public collectives, PyTorch tensors out.

``start`` begins the collective of one gradient and returns Horovod's handle with a ``Pending``, whose ``finish`` turns
the collective's result into the reduced gradient, in the gradient's own memory. Which tensors are compressed, how, and
what bytes mean is the core's business (``codec``); what Horovod's optimizer expects is ``hook``'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from ..agreement import Exchanged, Statement, disagreement
from ..codec import Codec
from ..config import TwoBitConfig
from ..errors import DisagreementError
from ..reduction import Reduction, refuse_dtype
from ..residuals import ResidualRegistry
from .loss_scale import LossScale

Handle = Union[int, Callable[[], Any]]

# Horovod 0.28.1 has no bfloat16; what is not listed travels as float32.
HOROVOD_DTYPES = (torch.float16, torch.float32, torch.float64)

_scratch = threading.local()


class Exchange:
    """Exchanges the gradients of one optimizer with the other ranks of its process set.

    Args:
        config: checked parameters of the compression.
        op: ``hvd.Average`` or ``hvd.Sum``.
        predivide_factor: Horovod's ``gradient_predivide_factor``.
        process_set: the ranks that exchange.
        scaler: the gradient scaler that the user told of, if any.

    Raises:
        UnsupportedOperationError: another op.
    """

    def __init__(self, config: TwoBitConfig, op: Any, predivide_factor: float, process_set: hvd.ProcessSet,
                 scaler: torch.amp.GradScaler | None = None) -> None:
        self._reduction = Reduction.of(hvd, op, predivide_factor)
        self.residuals = ResidualRegistry()
        self.loss_scale = LossScale(self.residuals, scaler)
        self._codec = Codec(config, self.residuals, warns=hvd.rank() == 0)
        self._config = config
        self._process_set = process_set
        self._groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        self._sparse: set[str] = set()
        self._statement = Statement.of(config, ())
        self._decided: tuple[list[bool], int] | None = None
        self._compressed: dict[str, bool] = {}
        self._agreement: int | None = None
        self._in_flight: dict[str, Handle] = {}

    def declare(self, tensors: Sequence[tuple[str, torch.Tensor, str]]) -> None:
        """Tell name, shape and group of all tensors that will be exchanged; the same on every rank.

        A group is named after its first tensor.
        """
        for name, tensor, group in tensors:
            if self._codec.compresses(tensor.numel()):
                self.residuals.declare(name, tuple(tensor.shape))
            self._groups.setdefault(group, []).append((name, tuple(tensor.shape)))

    def exclude(self, name: str) -> None:
        """Tell that a tensor has sparse gradients, which are not exchanged here; counts from the next step on."""
        self._begin_step()  # Ranks meet this tensor at different places of a step, and must plan it alike.
        self._sparse.add(name)

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
        self._begin_step()
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
        if self._compressed[name]:
            payload = self._codec.encode(name, tuple(gradient.shape), as_flat_float32(gradient).numpy())
            return Pending(self, name, gradient, torch.from_numpy(payload), compressed=True)
        wire = gradient.detach()
        if wire.dtype not in HOROVOD_DTYPES:
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
        gradient, shape = pending.gradient, tuple(pending.gradient.shape)
        # Read anew at every step: an elastic job changes the number of ranks.
        ranks = self._process_set.size()
        scale = self._reduction.scale(ranks)
        if not pending.compressed:
            if self._codec.compresses(gradient.numel()):
                self._codec.observe(pending.name, shape, as_flat_float32(received).numpy(), ranks, scale)
            return gradient if received.data_ptr() == gradient.data_ptr() else _write(gradient, received)
        flat = _flat_float32(gradient)
        out = _scratch_float32(gradient.numel()) if flat is None else flat
        self._codec.decode(pending.name, shape, received.numpy(), ranks, out.numpy(), scale)
        return gradient if flat is not None else _write(gradient, out.view(gradient.shape))

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Wait for this step's agreement; within the context the step's results are taken. See ``agreement``.

        Raises:
            DisagreementError: ranks would not send the same collectives; raised on every rank, with what differs.
        """
        self._begin_step()
        try:
            self._check_agreement()
            yield
        finally:
            self._agreement = None

    def _begin_step(self) -> None:
        """Unless it was done in this step: settle the last one, decide what is compressed, and tell the other ranks."""
        if self._agreement is not None:
            return
        self.residuals.begin_step()
        self.loss_scale.follow()
        ready = [self._is_ready(members) for members in self._groups.values()]
        decided = (ready, len(self._sparse))
        if decided != self._decided:
            tensors = [tensor for (group, members), yes in zip(self._groups.items(), ready)
                       for tensor in self._planned(group, members, yes)]
            self._decided, self._statement = decided, Statement.of(self._config, tensors)
            self._compressed = {tensor.name: tensor.compressed for tensor in tensors}
        self._agreement = self._allgather(np.frombuffer(self._statement.digest, np.uint8).copy(), "")

    def _is_ready(self, members: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
        """Whether all tensors of a group are ready to be compressed that will be."""
        return all(self._codec.ready(name, shape) for name, shape in members if self._is_compressible(name, shape))

    def _is_compressible(self, name: str, shape: tuple[int, ...]) -> bool:
        return name not in self._sparse and self._codec.compresses(math.prod(shape))

    def _planned(self, group: str, members: Sequence[tuple[str, tuple[int, ...]]], ready: bool) -> list[Exchanged]:
        """How the tensors of a group travel in this step."""
        return [Exchanged(name, math.prod(shape), self._is_compressible(name, shape),
                          ready and self._is_compressible(name, shape), group) for name, shape in members]

    def _check_agreement(self) -> None:
        digests = hvd.synchronize(self._agreement).numpy().tobytes()
        if digests == self._statement.digest * self._process_set.size():
            return
        line = np.frombuffer(self._statement.to_json(), np.uint8).copy()
        statements = hvd.synchronize(self._allgather(line, ".details")).numpy().tobytes()
        raise disagreement(statements, hvd.rank())

    def _allgather(self, content: np.ndarray, suffix: str) -> int:
        first = self._statement.tensors[0].name if self._statement.tensors else ""
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
        self._outputs: Sequence[torch.Tensor] | HorovodInternalError | None = None

    def output(self, index: int) -> torch.Tensor:
        if self._outputs is None:
            try:
                self._outputs = hvd.synchronize(self._handle)
            except HorovodInternalError as error:
                self._outputs = error  # Horovod tells it once.
        if isinstance(self._outputs, HorovodInternalError):
            raise self._outputs
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


def as_flat_float32(values: torch.Tensor) -> torch.Tensor:
    """The values as float32[elements]: the tensor's own memory, or a copy in scratch memory."""
    flat = _flat_float32(values)
    if flat is None:
        flat = _scratch_float32(values.numel())
        flat.view(values.shape).copy_(values.detach())
    return flat


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
