"""One optimizer's exchange of gradients: PyTorch tensors in, Horovod's public collectives, PyTorch tensors out.

``start`` begins the exchange of one gradient and returns a handle, as Horovod has them, with a ``Pending``, whose
``finish`` puts the reduced gradient into the gradient's own memory. Compressed gradients travel in buckets (see
``pipeline``), others in Horovod's allreduce. Which tensors are compressed, how, and what bytes mean is the core's
business (``codec``, ``transports``); what Horovod's optimizer expects is ``hook``'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from .. import joining
from ..agreement import Exchanged, Statement, disagreement
from ..codec import Codec
from ..config import TwoBitConfig
from ..machines import Levels, asks_for_levels
from ..reduction import Reduction, refuse_dtype
from ..residuals import ResidualRegistry
from ..sharding import ShardedResiduals
from ..transports import Planned, plan_buckets, restricted
from .hierarchy import TwoLevel, find_levels
from .loss_scale import LossScale
from .memory import Download, upload
from .pipeline import Pipeline
from .placement import Placement, horovod_takes
from .transfer import TRANSFERS, Transfer, overlap_explained, wait_for
from .waiting import Result, synchronize

Handle = Callable[[], Any]
Kind = tuple[torch.dtype, torch.device]

logger = logging.getLogger("hvd_twobit")

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
        self._placement = Placement()
        self._declared: list[torch.Tensor] = []
        self._kinds: list[Kind] = []
        self._departures: list[Departure] = []
        self._asks_for_levels = asks_for_levels(config.hierarchical, process_set.ranks, hvd.global_process_set.ranks)
        self.residuals.is_divided = self._asks_for_levels
        self._levels: Levels | None = None
        self._world: tuple[int, int] | None = None
        self._buckets: list[Planned] = []
        self._shares = ShardedResiduals(config, self._codec, self.residuals, self._reduction.averages)
        self._groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        self._sparse: set[str] = set()
        self._order: list[str] = []
        self._statement = Statement.of(config, (), (), 0)
        self._decided: tuple[list[bool], int, Placement] | None = None
        self._compressed: dict[str, bool] = {}
        self._pipeline = Pipeline(())
        self._agreement: int | None = None
        self._in_flight: dict[str, Handle] = {}
        # Backward has a thread for each device that gradients lie on, and so have their hooks.
        self._lock = threading.RLock()

    def declare(self, tensors: Sequence[tuple[str, torch.Tensor, str]]) -> None:
        """Tell name, shape and group of all tensors that will be exchanged, in the order in which gradients come.

        The same on every rank. A group is named after its first tensor.
        """
        if self._config.transport == "allreduce":
            joining.track(f"optimizer of {tensors[0][0] if tensors else ''}", self.residuals)
        self._declared = [tensor for _, tensor, _ in tensors]  # They may move to another device later.
        self._kinds = _kinds(self._declared)
        self._placement = self._placed()  # Asked for now, as a device is tried when it is first seen.
        for name, tensor, group in tensors:
            self._order.append(name)
            if self._codec.compresses(tensor.numel()):
                self.residuals.declare(name, tuple(tensor.shape))
            self._groups.setdefault(group, []).append((name, tuple(tensor.shape)))

    def exclude(self, name: str) -> None:
        """Tell that a tensor has sparse gradients, which are not exchanged here; counts from the next step on."""
        with self._lock:
            self._begin_step()  # Ranks meet this tensor at different places of a step, and must plan it alike.
            if name not in self._sparse:
                self._sparse.add(name)
                self._pipeline.skip(name)

    def start(self, name: str, gradient: torch.Tensor) -> tuple[Handle, Pending]:
        """Begin the exchange of one dense gradient.

        Returns:
            Horovod's handle and what turns its result into the reduced gradient.
        """
        (handle, pending), = self.start_group([(name, gradient)])
        return handle, pending

    def start_group(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[Handle, Pending]]:
        """Begin the exchange of several dense gradients that Horovod shall process together.

        Compressed gradients go into their buckets, which leave when they are full. The others share an allreduce per
        dtype, named after the first of its tensors.
        """
        with self._lock:
            return self._start(gradients)

    def _start(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[Handle, Pending]]:
        self._begin_step()
        pendings = [self._prepare(name, gradient) for name, gradient in gradients]
        self._depart(wait=False)
        started: dict[str, Handle] = {}
        for members in _alike([pending for pending in pendings if not pending.compressed]):
            names = [pending.name for pending in members]
            with overlap_explained(names):
                started.update(zip(names, self._allreduce(members)))
        self._in_flight.update(started)
        return [(started.get(pending.name, _nothing), pending) for pending in pendings]

    def _prepare(self, name: str, gradient: torch.Tensor) -> Pending:
        if not gradient.dtype.is_floating_point:
            refuse_dtype(name, gradient.dtype)
        if self._compressed[name]:
            self.residuals.tensor(name, tuple(gradient.shape))  # Or another shape would be taken for the known one.
            if self._placement.device is not None:
                flat = flat_float32_on(self._placement.device, gradient)
                self._pipeline.add(name, flat)
                return Pending(self, name, gradient, flat=flat)
            self._pipeline.add(name, self._shares.take_over(name, as_flat_float32(gradient).numpy()))
            return Pending(self, name, gradient)
        _drain(self._in_flight.pop(name, None))
        wire = gradient.detach()
        if wire.dtype not in HOROVOD_DTYPES:
            wire = wire.float()
        return Pending(self, name, gradient, wire.contiguous())

    def _depart(self, wait: bool) -> None:
        """Hand to Horovod what has come to the host; with ``wait``, everything."""
        self._departures = [departure for departure in self._departures if not departure.has_begun(wait)]

    def _allreduce(self, members: Sequence[Pending]) -> list[Handle]:
        """Begin the allreduce of members that travel alike, uncompressed; one handle each."""
        wires = [pending.wire for pending in members if pending.wire is not None]
        begin = functools.partial(self._begin_allreduce, members[0].name)
        if horovod_takes(wires[0].device):
            return begin(wires)
        departure = Departure(wires, begin)
        if not departure.has_begun(wait=False):
            self._departures.append(departure)
        return [functools.partial(self._arrived, departure, index) for index in range(len(members))]

    def _arrived(self, departure: Departure, index: int) -> Any:
        """The result of one tensor of a departure, on the host, waited for."""
        self._depart(wait=True)  # Another rank may wait for another one, and neither would begin.
        return departure.synchronize(index)

    def _begin_allreduce(self, name: str, tensors: Sequence[torch.Tensor]) -> list[Handle]:
        options = dict(name=f"twobit.{name}", op=self._reduction.op,
                       prescale_factor=self._reduction.prescale, postscale_factor=self._reduction.postscale,
                       process_set=self._process_set)
        if len(tensors) == 1:
            return [Result(hvd.allreduce_async_(tensors[0], **options))]
        group = Result(hvd.grouped_allreduce_async_(tensors, **options))
        return [_Member(group, index) for index in range(len(tensors))]

    def _finish(self, pending: Pending, received: torch.Tensor | None) -> torch.Tensor:
        gradient = pending.gradient
        if not pending.compressed:
            assert received is not None
            self._in_flight.pop(pending.name, None)
            if self._codec.compresses(gradient.numel()):
                self._shares.observe(pending.name, as_flat_float32(received).numpy(), *self._exchanging())
            if received.data_ptr() == gradient.data_ptr():
                return gradient
            return _write(gradient, received, non_blocking=received.device != gradient.device)  # It is pinned then.
        self._depart(wait=True)  # As for one that travels uncompressed.
        if pending.flat is not None:
            self._pipeline.decode(pending.name, pending.flat)
            in_place = pending.flat.data_ptr() == gradient.data_ptr()
            return gradient if in_place else _write(gradient, pending.flat.view(gradient.shape))
        flat = _flat_float32(gradient)
        out = _scratch_float32(gradient.numel()) if flat is None else flat
        self._pipeline.decode(pending.name, out.numpy())
        return gradient if flat is not None else _write(gradient, out.view(gradient.shape))

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Wait for this step's agreement; within the context the step's results are taken. See ``agreement``.

        Raises:
            DisagreementError: ranks would not send the same collectives; raised on every rank, with what differs.
        """
        self._begin_step()
        try:
            self._depart(wait=True)
            self._check_agreement()
            yield
        finally:
            self._agreement = None

    def _begin_step(self) -> None:
        """Unless it was done in this step: settle the last one, decide what is compressed, and tell the other ranks."""
        if self._agreement is not None:
            return
        self.residuals.begin_step()
        self._shares.settle()
        self.loss_scale.follow()
        self._pipeline.begin_step()
        self._tell_of_moves()
        # An elastic job changes the number of ranks, and takes over what rank 0 has.
        world = (self._process_set.size(), self.residuals.revision)
        if world != self._world or not (self._levels is None or self._levels.are_current):
            self._divide()
            self._world, self._decided = (world[0], self.residuals.revision), None
        ready = [self._is_ready(members) for members in self._groups.values()]
        self._placement = self._placed()
        decided = (ready, len(self._sparse), self._placement)
        if decided != self._decided:
            self._plan(ready)
            self._decided = decided
        self._agreement = self._begin_agreement()

    def _tell_of_moves(self) -> None:
        """Log, on rank 0 and once a move, that PyTorch has forgotten the hooks of parameters."""
        kinds = _kinds(self._declared)
        if kinds == self._kinds:
            return
        moved = [(name, *pair) for name, *pair in zip(self._order, self._kinds, kinds) if pair[0] != pair[1]]
        self._kinds = kinds
        if hvd.rank() == 0:
            name, before, now = moved[0]
            logger.warning(
                "hvd_twobit: parameter %r%s was %s on %s when hvd.DistributedOptimizer was made, and is %s on %s now. "
                "PyTorch forgets the hooks of such parameters, with compression or without: their gradients are "
                "exchanged only when backward has ended, which takes longer. Make the optimizer when the model is what "
                "it will be trained as, and where", name, f" and {len(moved) - 1} others" if moved[1:] else "",
                *before, *now)

    def _divide(self) -> None:
        """Ask, where it is a question, which ranks share a machine; and determine buckets and this rank's shares."""
        if self._asks_for_levels:
            self._levels = None
            self._statement = Statement.of(self._config, self._exchanged(), (), self._process_set.size(), 0)
            self._agreement = self._begin_agreement()
            try:
                self._check_agreement()  # Or a rank that was told another setting would wait for ever.
            finally:
                self._agreement = None
            self._levels = find_levels(self._config.hierarchical, f"twobit.machines.{self._first}")
        ranks = self._process_set.size()
        shapes = {name: shape for members in self._groups.values() for name, shape in members
                  if self._codec.compresses(math.prod(shape))}
        self._buckets = plan_buckets(self._config, [(name, shapes[name]) for name in self._order if name in shapes],
                                     ranks, self._ranks_per_machine)
        self._shares.divide(0 if self._levels is None else self._levels.within.rank(), self._ranks_per_machine, shapes,
                            [planned.bucket for planned in self._buckets])
        self._shares.adopt()

    @property
    def _ranks_per_machine(self) -> int:
        """Ranks that divide a bucket before its exchange; 1 where there is one level."""
        return 1 if self._levels is None else self._levels.machines.local_size

    def _exchanging(self) -> tuple[int, float]:
        """Number of those whose codes are added up, ranks or machines, and the factor of that sum."""
        # Read anew at every step: an elastic job changes the number of ranks.
        number = self._process_set.size() // self._ranks_per_machine
        return number, self._reduction.scale(number)

    def _placed(self) -> Placement:
        """Where this step's gradients are compressed; the ranks of a machine add theirs up on the host."""
        return Placement.of({tensor.device for tensor in self._declared} if self._levels is None else ())

    def _exchanged(self, ready: Sequence[bool] = ()) -> list[Exchanged]:
        """How all tensors travel in a step in which these groups are ready; none, where that is not known yet."""
        return [tensor for (group, members), yes in zip(self._groups.items(), ready or [False] * len(self._groups))
                for tensor in self._planned(group, members, yes)]

    def _plan(self, ready: Sequence[bool]) -> None:
        """Decide how tensors travel from this step on."""
        tensors = self._exchanged(ready)
        self._compressed = {tensor.name: tensor.compressed for tensor in tensors}
        buckets = restricted(self._buckets, self._compressed.__getitem__)
        self._statement = Statement.of(self._config, tensors, buckets, self._process_set.size(),
                                       self._ranks_per_machine, self._placement.from_gpu)
        self._pipeline = Pipeline([self._transfer(planned) for planned in buckets])

    def _transfer(self, planned: Planned) -> Transfer:
        _, scale = self._exchanging()
        if self._levels is None:
            coder = self._placement.coder(planned, self._codec, self._process_set.rank(), scale)
            return TRANSFERS[planned.transport](planned, coder, self._process_set)
        return TwoLevel(planned, self._codec, self._levels, scale, self._reduction.averages,
                        self._config.block_elements)

    def _is_ready(self, members: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
        """Whether all tensors of a group are ready to be compressed that will be."""
        return all(self._shares.ready(name) for name, shape in members if self._is_compressible(name, shape))

    def _is_compressible(self, name: str, shape: tuple[int, ...]) -> bool:
        return name not in self._sparse and self._codec.compresses(math.prod(shape))

    def _planned(self, group: str, members: Sequence[tuple[str, tuple[int, ...]]], ready: bool) -> list[Exchanged]:
        """How the tensors of a group travel in this step."""
        return [Exchanged(name, math.prod(shape), self._is_compressible(name, shape),
                          ready and self._is_compressible(name, shape), group) for name, shape in members]

    def _begin_agreement(self) -> int:
        if self._config.transport != "allreduce":
            return self._allgather(np.frombuffer(self._statement.digest, np.uint8).copy(), "")
        with overlap_explained([self._first]):
            # Of the device that sends: a rank that has joined contributes zeros of one device to all collectives.
            addends = (upload(self._statement.addends, self._placement.device)
                       if self._placement.device is not None and self._placement.sends
                       else torch.from_numpy(self._statement.addends))
            return hvd.allreduce_async(addends, op=hvd.Sum, name=f"twobit.agreement.{self._first}",
                                       process_set=self._process_set)

    def _check_agreement(self) -> None:
        assert self._agreement is not None
        stated = synchronize(self._agreement).cpu().numpy()
        if (self._statement.agrees(stated) if self._config.transport == "allreduce"
                else stated.tobytes() == self._statement.digest * self._process_set.size()):
            return
        line = np.frombuffer(self._statement.to_json(), np.uint8).copy()
        statements = synchronize(self._allgather(line, ".details")).numpy().tobytes()
        raise disagreement(statements, hvd.rank())

    def _allgather(self, content: np.ndarray, suffix: str) -> int:
        with overlap_explained([self._first]):
            return hvd.allgather_async(torch.from_numpy(content), name=f"twobit.agreement{suffix}.{self._first}",
                                       process_set=self._process_set)

    @property
    def _first(self) -> str:
        """The tensor after which what concerns all is named."""
        return self._statement.tensors[0].name if self._statement.tensors else ""

    @property
    def is_under_way(self) -> bool:
        """Whether a gradient is in one of Horovod's collectives."""
        return bool(self._in_flight) or self._pipeline.is_under_way

    def abandon(self) -> None:
        """Wait for what is in flight and drop it: the optimizer's step was broken off."""
        departures, self._departures = self._departures, []
        for departure in departures:  # All of them begin before one is waited for: other ranks wait for them, too.
            with contextlib.suppress(HorovodInternalError):  # Then Horovod has failed, and nobody waits any more.
                departure.has_begun(wait=True)
        self._pipeline.abandon()
        for handle in self._in_flight.values():
            _drain(handle)
        wait_for(self._agreement)
        self._in_flight.clear()
        self._agreement = None


def _kinds(tensors: Sequence[torch.Tensor]) -> list[Kind]:
    return [(tensor.dtype, tensor.device) for tensor in tensors]


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """A gradient whose exchange has begun: what Horovod hands back with the result of the handle.

    Attributes:
        exchange: the exchange that began it.
        name: name of the parameter.
        gradient: the gradient tensor, which the reduced gradient overwrites.
        wire: the gradient as it was handed to Horovod, which reads it until the collective has ended; None where the
            gradient travels in a bucket.
        flat: what was put into the bucket of a gradient on a device, and is overwritten there: its own memory, or a
            copy, float32[elements].
    """

    exchange: Exchange
    name: str
    gradient: torch.Tensor
    wire: torch.Tensor | None = None
    flat: torch.Tensor | None = None

    @property
    def compressed(self) -> bool:
        """Whether the gradient travels in a bucket."""
        return self.wire is None

    def finish(self, received: torch.Tensor | None) -> torch.Tensor:
        """The reduced gradient; ``received`` is what the handle gave: nothing, where it travelled in a bucket."""
        return self.exchange._finish(self, received)


class Departure:
    """Gradients that travel uncompressed from the host, to which a device copies them.

    Args:
        tensors: on the device, contiguous.
        begin: begins a collective of their copies, and returns a handle for each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], begin: Callable[[list[torch.Tensor]], list[Handle]]) -> None:
        self._copies = [Download(tensor) for tensor in tensors]
        self._begin = begin
        self._handles: list[Handle] | None = None

    def has_begun(self, wait: bool) -> bool:
        """Whether the collective has begun, as it does when all copies are complete; with ``wait``, wait for them."""
        if self._handles is None and all([copy.is_done(wait) for copy in self._copies]):
            self._handles = self._begin([copy.host for copy in self._copies])
        return self._handles is not None

    def synchronize(self, index: int) -> Any:
        """The result of one tensor, on the host, waited for."""
        self.has_begun(wait=True)
        assert self._handles is not None
        return self._handles[index]()


def _nothing() -> None:
    """The handle of a gradient in a bucket, which is waited for when it is decoded."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Member:
    """A callable handle, as Horovod's optimizer takes them, of one tensor in a group."""

    group: Result
    index: int

    def __call__(self) -> torch.Tensor:
        return self.group()[self.index]


def _alike(pendings: Sequence[Pending]) -> list[list[Pending]]:
    """Split into groups that one allreduce can carry, in order of first appearance."""
    groups: dict[Any, list[Pending]] = {}
    for pending in pendings:
        assert pending.wire is not None
        groups.setdefault((pending.wire.dtype, pending.wire.device), []).append(pending)
    return list(groups.values())


def _drain(handle: Handle | None) -> None:
    """Wait until Horovod no longer uses the buffers behind a handle whose result nobody wants."""
    if handle is None:
        return
    try:
        handle()
    except HorovodInternalError:
        pass  # The collective failed with its world: its buffers are free as well.


def _flat_float32(gradient: torch.Tensor) -> torch.Tensor | None:
    """The gradient's memory as float32[elements] in the tensor's order, or None where it is not laid out so."""
    if gradient.dtype == torch.float32 and gradient.device.type == "cpu" and gradient.is_contiguous():
        return gradient.detach().view(-1)
    return None


def flat_float32_on(device: torch.device, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as float32[elements] on a device: its own memory, or a copy."""
    if gradient.dtype == torch.float32 and gradient.device == device and gradient.is_contiguous():
        return gradient.detach().view(-1)
    flat = torch.empty(gradient.shape, dtype=torch.float32, device=device)
    return flat.copy_(gradient.detach()).view(-1)


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


def _write(gradient: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy ``values`` into the gradient, or into a new one where several of its elements share memory."""
    if any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape)):
        gradient = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return gradient.detach().copy_(values, non_blocking=non_blocking)
