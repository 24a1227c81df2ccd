"""The jobs of 2 and 4 real ranks in which the scenarios of a front end run, each started once for all tests.

To start a job costs more than most of what runs in it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from .launcher import RanksFailed, run_ranks

TIMEOUT_S = 540
RANKS_PER_MACHINE = 2

# The first test that asks for a job waits for it.
waits_for_the_job = pytest.mark.timeout(TIMEOUT_S + 60)


def results_of(front_end: str, ranks: int, scenarios: str) -> list[Any]:
    """What ``tests.scenarios.<front_end>_<scenarios>`` returned, per rank; see ``tests.scenarios.<front_end>``.

    Raises:
        RanksFailed: the job did not end well; it is not started again for the next test.
    """
    results = _job(front_end, ranks)
    if isinstance(results, RanksFailed):
        raise results
    return [result[scenarios] for result in results]


@functools.cache
def _job(front_end: str, ranks: int) -> list[Any] | RanksFailed:
    try:
        return run_ranks(ranks, f"tests.scenarios.{front_end}:run", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, front_end,
                         TIMEOUT_S, RANKS_PER_MACHINE)
    except RanksFailed as failed:
        return failed
