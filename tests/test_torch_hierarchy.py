"""PyTorch on machines with several ranks: what is refused and what is not; see also ``test_torch_optimizer``."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hvd_twobit.errors import ConfigError, UnsupportedOperationError
from hvd_twobit.machines import Machines, Place, node_process_sets

from .jobs import waits_for_the_job
from .launcher import run_ranks

pytestmark = waits_for_the_job


def test_machines_with_unequal_numbers_of_ranks_are_refused_by_name_and_auto_exchanges_on_one_level() -> None:
    results = run_ranks(3, "tests.scenarios.torch_hierarchy:on_unequal_machines",
                        {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, ranks_per_machine=2)
    for result in results:
        assert re.match(r"UnsupportedOperationError: hierarchical=True needs the same number of ranks on every "
                        r"machine: rank 2 is on one with 1 \(.*\), rank 0 on one with 2 \(.*\); start as many",
                        result["told"])
        assert [name.partition("[")[1] for name in result["auto"]["residuals"]] == [""]
        # Residuals 0.25, 1.25, 2.25 send 0, 0.5, 0.5; then 0.5, 2.0, 4.0 send 0.5 each.
        assert np.allclose(result["auto"]["weight"], -(1.0 / 3 + 1.5 / 3))


def test_missing_process_sets_are_told_and_those_of_node_process_sets_serve() -> None:
    results = run_ranks(4, "tests.scenarios.torch_hierarchy:without_process_sets", ranks_per_machine=2)
    for result in results:
        assert re.match(r"ConfigError: hierarchical=True needs a process set of the ranks \[0, 1\], which Horovod "
                        r"does not have: initialize it with "
                        r"`hvd\.init\(process_sets=hvd_twobit\.node_process_sets\(\)\)"
                        "`, or set HOROVOD_DYNAMIC_PROCESS_SETS=1", result["told"])
        # Means of machines 0.75 and 2.75 send 0.5 each; so do 1.0 and 5.0.
        for found in result["with_them"], result["auto"]:
            assert (found["weight"] == -1.0).all()
            name, = found["residuals"]
            assert re.fullmatch(r"weight\d\[(0:2048|2048:4096)\]", name)


def places(*sizes: int, by_node: bool = False) -> list[Place]:
    """Those of machines with so many ranks, numbered machine by machine, or one of each machine in turn."""
    found = [Place(f"node{number}", local, size, sum(other > local for other in sizes[:number]))
             for number, size in enumerate(sizes) for local in range(size)]
    return sorted(found, key=lambda place: place.local_rank) if by_node else found


def test_machines_are_found_however_ranks_are_numbered() -> None:
    machines = Machines.of(places(3, 3))
    assert machines.ranks == ((0, 1, 2), (3, 4, 5))
    assert machines.within(4) == (3, 4, 5) and machines.across(4) == (1, 4)
    assert machines.process_sets() == [(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5)]
    machines = Machines.of(places(3, 3, by_node=True))
    assert machines.ranks == ((0, 2, 4), (1, 3, 5))
    assert machines.within(3) == (1, 3, 5) and machines.across(3) == (2, 3)


def test_a_set_of_all_ranks_is_not_asked_for() -> None:
    assert Machines.of(places(2)).process_sets() == [(0,), (1,)]
    assert Machines.of(places(1, 1)).process_sets() == [(0,), (1,)]


def test_unequal_machines_are_named() -> None:
    with pytest.raises(UnsupportedOperationError, match=r"rank 2 is on one with 1 \(node1\), rank 0 on one with 2 \(n"):
        Machines.of(places(2, 1, 2))


def test_places_that_do_not_fit_together_are_told() -> None:
    with pytest.raises(UnsupportedOperationError, match=r"cannot tell .* \[\('node0', 0, 2, 0\), \('node0', 0"):
        Machines.of([Place("node0", 0, 2, 0)] * 2)


@pytest.mark.parametrize("environment, sets", [
    ({"HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2"}, [[0, 1], [2, 3], [0, 2], [1, 3]]),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, [[0], [1]]),
    ({"SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "3"}, [[0, 1, 2], [3, 4, 5], [0, 3], [1, 4], [2, 5]]),
])
def test_process_sets_follow_the_launcher(environment: dict[str, str], sets: list[list[int]],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert [found.ranks for found in node_process_sets()] == sets
    assert node_process_sets(size=2, local_size=1) == []


def test_unknown_numbers_of_ranks_are_told() -> None:
    with pytest.raises(ConfigError, match=r"call node_process_sets\(size=\.\., local_size=\.\.\)"):
        node_process_sets()
    with pytest.raises(ConfigError, match="5 ranks cannot be 2 on every machine"):
        node_process_sets(5, 2)


@pytest.mark.parametrize("size, local_size, machines", [(4, 2, 3), (4, 1, 3), (4, 2, 1), (6, 2, 2), (6, 4, 2)])
def test_every_rank_of_unequal_machines_is_told_before_it_initializes(size: int, local_size: int, machines: int,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    # Two ranks, one and one: the first machine's see three machines and one; two and four: each sees two.
    for name, value in (("SIZE", size), ("LOCAL_SIZE", local_size), ("CROSS_SIZE", machines)):
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    with pytest.raises(ConfigError, match=f"{size} ranks cannot be {local_size} on every machine"):
        node_process_sets()
