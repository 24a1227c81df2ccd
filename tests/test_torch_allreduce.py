"""PyTorch: ``hvd.allreduce(compression=TwoBit)`` on real ranks is, bit for bit, the simulation of all ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from .jobs import results_of, waits_for_the_job
from .launcher import run_ranks
from .scenarios import allreduce as scenario
from .scenarios.torch_allreduce import assert_expected, assert_expected_named
from .simulation import assert_same_steps

pytestmark = waits_for_the_job

UNSUPPORTED = r"UnsupportedOperationError: TwoBit cannot be used with op=hvd\.{}: two-bit codes can be summed"
SCATTER = r"UnsupportedOperationError: TwoBit cannot be used with hvd\.{}: .* cannot be split by the tensor's rows"
MESSAGES = {
    "minimum_of_allreduce": UNSUPPORTED.format("Min"),
    "maximum_of_allreduce": UNSUPPORTED.format("Max"),
    "product_of_grouped_allreduce": UNSUPPORTED.format("Product"),
    "adasum_of_allreduce": UNSUPPORTED.format("Adasum"),
    "adasum_of_a_named_tensor": UNSUPPORTED.format("Adasum"),
    "maximum_by_a_function_imported_before": UNSUPPORTED.format("Max"),
    "minimum_by_a_grouped_function_imported_before": UNSUPPORTED.format("Min"),
    "reducescatter": SCATTER.format("reducescatter"),
    "grouped_reducescatter": SCATTER.format("grouped_reducescatter"),
    "reducescatter_imported_before": SCATTER.format("reducescatter"),
    "a_tensor_that_requires_a_gradient": r"UnsupportedOperationError: the tensor of shape \(2000,\) requires a gradient"
                                         r".*hand tensor\.detach\(\)",
    "one_name_for_two_tensors": r"ResidualError: tensor 'two' is compressed again while an exchange of it is under way",
    "one_name_for_two_shapes": r"ResidualError: tensor 'shapes' has shape \(2001,\), but its residual was kept for",
    "a_name_in_an_optimizer": r"ConfigError: TwoBit\(.*\)\.named\('x'\) is for one tensor",
    "no_name": "ConfigError: a tensor's name is a string with at least one character, not ''",
    "other_thresholds_on_one_rank": r"PayloadError: tensor 'without a name, of shape \(2000,\)': the fingerprints of 2 "
                                    r"ranks .* give TwoBit the same arguments on every rank",
    "other_levels_on_one_rank": r"PayloadError: tensor 'levels': the fingerprints of 2 ranks .*take_shared",
}


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"], scope="module")
def results(request: pytest.FixtureRequest) -> list[Any]:
    """Every case in the job of 2 or 4 ranks; per rank."""
    return results_of("torch", request.param, "allreduce")


@pytest.mark.parametrize("name", scenario.CASES)
def test_allreduce_equals_the_simulation_of_all_ranks(name: str, results: list[Any]) -> None:
    assert_expected(name, [result["cases"][name] for result in results])


@pytest.mark.parametrize("name", scenario.NAMED)
def test_a_named_tensor_equals_the_simulation_of_all_ranks_for_20_steps(name: str, results: list[Any]) -> None:
    assert_expected_named(name, [result["named"][name] for result in results])


@pytest.fixture(scope="module")
def mistakes() -> list[Any]:
    return results_of("torch", 2, "allreduce_mistakes")


@pytest.mark.parametrize("mistake", MESSAGES)
def test_every_rank_is_told_what_is_wrong(mistake: str, mistakes: list[Any]) -> None:
    for result in mistakes:
        assert result["told"].keys() == MESSAGES.keys()
        assert re.match(MESSAGES[mistake], result["told"][mistake]), result["told"][mistake]


def test_after_mistakes_everything_goes_on_and_what_is_not_compressed_is_horovods(mistakes: list[Any]) -> None:
    for result in mistakes:
        assert (result["after"] == 2 * 0.5).all(), "the residual of the refused exchange was 1 - 0.5"
        assert result["has_derivative"] and (result["frozen"] == 1).all()
        assert np.array_equal(result["integers"], 2 * np.arange(2000))


def test_a_job_that_tunes_itself_computes_the_same() -> None:
    names = ["adaptive", "asymmetrical, sum"]  # Few, as tuned collectives wait for up to 100 ms.
    results = run_ranks(2, "tests.scenarios.torch_allreduce:named", {
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",  # Horovod on Gloo alone takes no notice of it.
        "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"},
        names=names)
    for name in names:
        steps, _ = scenario.expected_named(name, 2)
        for rank, result in enumerate(results):
            assert_same_steps(result[name]["steps"], steps, f"rank {rank}")


def test_ranks_may_join_one_after_the_other() -> None:
    """Afterwards all go on, with the levels of the one that joined last."""
    results = results_of("torch", 4, "allreduce_join")
    for name in scenario.JOINING:
        wanted = scenario.expected_joining(name, len(results))
        for rank, result in enumerate(results):
            assert result["last"] == 0
            assert_same_steps(result["steps"][name], scenario.seen_by(rank, wanted), f"{name}, rank {rank}")
            assert np.array_equal(result["levels"][name], results[0]["levels"][name])
    joined = [sum(step >= scenario.steps_before_join(rank) for rank in range(4))
              for step in range(scenario.steps_before_join(0))]
    for number, once in enumerate(results[0]["once"]):
        ranks = 4 - joined[number] if number < len(joined) else 4
        assert (once == np.float32(ranks / 4)).all(), "joined ranks count as zeros, and for the average"
