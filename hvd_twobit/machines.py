"""Which ranks share a machine, and the process sets of an exchange of two levels. No framework.

Ranks of a machine exchange in full precision; then the ranks of equal number on all machines exchange two bits, each
for its share of the elements. That takes a process set per machine and one per number. Horovod makes process sets when
it is initialized (``node_process_sets``), or later where HOROVOD_DYNAMIC_PROCESS_SETS=1 allows.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import ConfigError, UnsupportedOperationError

_LAUNCHERS = (("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
              ("PMI_SIZE", "MPI_LOCALNRANKS"), ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"))
"""Environment variables in which launchers tell the number of ranks, and of those on this machine."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs, as its launcher told Horovod.

    Attributes:
        host: name of the machine, for messages.
        local_rank: number of the rank among those of its machine.
        local_size: number of ranks on its machine.
        cross_rank: number of the machine among those that have this local rank.
    """

    host: str
    local_rank: int
    local_size: int
    cross_rank: int

    @classmethod
    def of(cls, hvd: Any) -> Place:
        """That of this process; ``hvd`` is Horovod's module of any framework."""
        return cls(socket.gethostname(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())

    def to_json(self) -> bytes:
        """One line."""
        return json.dumps(dataclasses.astuple(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Place:
        """What ``to_json`` returned."""
        return cls(*json.loads(line))


@dataclasses.dataclass(frozen=True)
class Machines:
    """The ranks of each machine, equally many.

    Attributes:
        ranks: by machine, ascending, as Horovod orders a process set.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, places: Sequence[Place]) -> Machines:
        """The machines of all ranks, whose places are given in rank order.

        Raises:
            UnsupportedOperationError: machines have different numbers of ranks; they are named.
        """
        numbers = collections.Counter(place.local_size for place in places)
        if len(numbers) > 1:
            usual = numbers.most_common(1)[0][0]
            rank = next(rank for rank, place in enumerate(places) if place.local_size != usual)
            other = next(rank for rank, place in enumerate(places) if place.local_size == usual)
            raise UnsupportedOperationError(
                f"hierarchical=True needs the same number of ranks on every machine: rank {rank} is on one with "
                f"{places[rank].local_size} ({places[rank].host}), rank {other} on one with {usual} "
                f"({places[other].host}); start as many on each, or give TwoBit hierarchical=\"auto\", which then "
                "exchanges on one level")
        members: dict[int, dict[int, int]] = {}
        for rank, place in enumerate(places):
            members.setdefault(place.cross_rank, {})[place.local_rank] = rank
        local_size = places[0].local_size
        if any(sorted(machine) != list(range(local_size)) for machine in members.values()):
            raise UnsupportedOperationError(
                "hierarchical=True cannot tell which ranks share a machine: the launcher gave them the places (host, "
                f"local rank, local size, cross rank) {[dataclasses.astuple(place) for place in places]}; start them "
                "with horovodrun, or leave hierarchical out")
        return cls(tuple(tuple(sorted(machine.values())) for _, machine in sorted(members.items())))

    @property
    def local_size(self) -> int:
        """Ranks on each machine."""
        return len(self.ranks[0])

    def position(self, rank: int) -> tuple[int, int]:
        """Number of a rank's machine, and of the rank among those of the machine."""
        return next((number, machine.index(rank)) for number, machine in enumerate(self.ranks) if rank in machine)

    def within(self, rank: int) -> tuple[int, ...]:
        """The ranks on a rank's machine."""
        return self.ranks[self.position(rank)[0]]

    def across(self, rank: int) -> tuple[int, ...]:
        """The ranks of this number on all machines."""
        local = self.position(rank)[1]
        return tuple(sorted(machine[local] for machine in self.ranks))

    def process_sets(self) -> list[tuple[int, ...]]:
        """The ranks of every process set that is needed, without the one of all ranks, in an order for all ranks."""
        everything = {rank for machine in self.ranks for rank in machine}
        across = [self.across(rank) for rank in self.ranks[0]]
        return [members for members in dict.fromkeys([*self.ranks, *across]) if set(members) != everything]


def node_process_sets(size: int | None = None, local_size: int | None = None) -> list[Any]:
    """The process sets that ``TwoBit(hierarchical=True)`` needs, for ``hvd.init(process_sets=node_process_sets())``.

    Ranks have to be numbered machine by machine, with equally many on each, as ``horovodrun`` does; what Horovod then
    tells of every rank is compared with it in the first step. Not for elastic jobs, which initialize Horovod again and
    again: they need HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Args:
        size: number of ranks. Where it is left out, what the launcher's environment variables tell; likewise
        local_size: number of ranks on each machine.

    Returns:
        A new ``horovod`` ``ProcessSet`` per machine and per local rank; none where each machine has one rank.

    Raises:
        ConfigError: the environment does not tell, or machines have different numbers of ranks; on unequal machines it
            may be raised on some ranks only, and the others wait for these in ``hvd.init``.
    """
    from horovod.common.process_sets import ProcessSet

    machines = os.environ.get("HOROVOD_CROSS_SIZE") if size is local_size is None else None
    size, local_size = _told_by_launcher(size, local_size, os.environ)
    if size < 1 or local_size < 1 or size % local_size or machines not in (None, str(size // local_size)):
        raise ConfigError(f"{size} ranks cannot be {local_size} on every machine: start as many on each, or leave "
                          "hierarchical out")
    if local_size == 1:
        return []
    numbered = Machines(tuple(tuple(range(first, first + local_size)) for first in range(0, size, local_size)))
    return [ProcessSet(list(members)) for members in numbered.process_sets()]


def _told_by_launcher(size: int | None, local_size: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    for size_name, local_name in _LAUNCHERS:
        if size_name in environment and local_name in environment:
            try:
                return (int(environment[size_name]) if size is None else size,
                        int(environment[local_name]) if local_size is None else local_size)
            except ValueError:
                continue  # Slurm may tell several numbers: "2(x3)".
    if size is None or local_size is None:
        raise ConfigError("no launcher's environment variables tell how many ranks there are on this machine: call "
                          "node_process_sets(size=.., local_size=..), with the number of all ranks and of those on "
                          "each machine")
    return size, local_size


def known_process_sets() -> dict[int, list[int]]:
    """The ranks of each process set that Horovod has, by id; it has no public function that tells."""
    from horovod.common import process_sets

    return process_sets._basics._get_process_set_ids_and_ranks()


@dataclasses.dataclass(frozen=True)
class Levels:
    """The process sets of this rank in an exchange of two levels.

    Attributes:
        machines: the ranks of each machine.
        within: Horovod's ``ProcessSet`` of the ranks of this machine.
        across: that of the ranks of this rank's number on all machines.
    """

    machines: Machines
    within: Any
    across: Any

    @classmethod
    def of(cls, machines: Machines, rank: int, add: Callable[[list[int]], Any]) -> Levels:
        """Those of a rank; what Horovod lacks of all ranks' process sets is added, on every rank in the same order.

        Args:
            machines: see ``Machines.of``.
            rank: this rank.
            add: Horovod's ``add_process_set``.

        Raises:
            ConfigError: a process set is missing, and Horovod adds none after its initialization.
        """
        ids = {tuple(ranks): number for number, ranks in known_process_sets().items()}
        for members in machines.process_sets():
            if members not in ids:
                if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") in ("", "0"):
                    raise ConfigError(
                        f"hierarchical=True needs a process set of the ranks {list(members)}, which Horovod does not "
                        "have: initialize it with `hvd.init(process_sets=hvd_twobit.node_process_sets())`, or set "
                        "HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment of every rank")
                ids[members] = add(list(members)).process_set_id
        return cls(machines, *(_process_set(members, ids[members])
                               for members in (machines.within(rank), machines.across(rank))))

    @classmethod
    def decided(cls, setting: bool | str, places: Sequence[Place], rank: int,
                add: Callable[[list[int]], Any]) -> Levels | None:
        """Those that the user asks for; None where one level is enough. Every rank calls this alike.

        Args:
            setting: ``hierarchical`` as configured, not False.
            places: of all ranks, in rank order.
            rank: this rank.
            add: see ``of``.

        Raises:
            UnsupportedOperationError: machines have different numbers of ranks, and the setting is not ``"auto"``.
            ConfigError: a process set is missing and cannot be added.
        """
        try:
            machines = Machines.of(places)
        except UnsupportedOperationError:
            if setting is True:
                raise
            return None
        if machines.local_size == 1 or (setting is not True and len(machines.ranks) == 1):
            return None
        return cls.of(machines, rank, add)

    @property
    def are_current(self) -> bool:
        """Whether Horovod still has the process sets of all ranks: an elastic job begins anew without any."""
        known = known_process_sets()
        return (all(known.get(one.process_set_id) == one.ranks for one in (self.within, self.across))
                and self._needed.issubset(map(tuple, known.values())))

    @functools.cached_property
    def _needed(self) -> frozenset[tuple[int, ...]]:
        """The ranks of all process sets; asked for at every step."""
        return frozenset(self.machines.process_sets())


def asks_for_levels(setting: bool | str, ranks: Sequence[int], everyone: Sequence[int]) -> bool:
    """Whether ranks have to find out if they exchange on two levels.

    Args:
        setting: ``hierarchical`` as configured.
        ranks: those of the user's process set.
        everyone: those of Horovod's global process set.

    Raises:
        UnsupportedOperationError: the process set is another one than the global one, and the setting is True.
    """
    if setting is True and ranks != everyone:
        raise UnsupportedOperationError("hierarchical=True exchanges among all ranks, and this optimizer has a process "
                                        f"set of ranks {ranks}: leave one of the two out, or give TwoBit "
                                        "hierarchical=\"auto\"")
    return bool(setting) and ranks == everyone


def _process_set(members: tuple[int, ...], number: int) -> Any:
    from horovod.common.process_sets import ProcessSet

    found = ProcessSet(list(members))
    found.process_set_id = number
    return found
