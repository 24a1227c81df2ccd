"""The jobs of 2 and 4 real ranks in which all scenarios of TensorFlow run, each started once for all tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from .launcher import RanksFailed, run_ranks

TIMEOUT_S = 540

# The first test that asks for a job waits for it.
waits_for_the_job = pytest.mark.timeout(TIMEOUT_S + 60)


def results_of(ranks: int, scenarios: str) -> list[Any]:
    """What ``tests.scenarios.tensorflow_<scenarios>`` returned, per rank.

    Raises:
        RanksFailed: the job did not end well; it is not started again for the next test.
    """
    results = _job(ranks)
    if isinstance(results, RanksFailed):
        raise results
    return [result[scenarios] for result in results]


@functools.cache
def _job(ranks: int) -> list[Any] | RanksFailed:
    try:
        return run_ranks(ranks, "tests.scenarios.tensorflow:run", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, "tensorflow",
                         TIMEOUT_S)
    except RanksFailed as failed:
        return failed
