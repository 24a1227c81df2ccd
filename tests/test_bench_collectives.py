"""``hvd-twobit bench collectives``: what it measures on two real ranks, what it says, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from hvd_twobit.bench.collectives import Measured, _report, verdict_of
from hvd_twobit.bench.methods import METHODS
from hvd_twobit.bench.rounds import Summary
from hvd_twobit.cost_model import HIERARCHICAL

from .jobs import results_of, waits_for_the_job
from .launcher import REPOSITORY, horovodrun

COMMAND = [sys.executable, "-m", "hvd_twobit", "bench", "collectives"]
ELEMENTS = 3000


def handed_over(sent: float, method: str, elements: Sequence[int]) -> None:
    """With two ranks what is handed to Horovod is what travels, but for the agreement and sra's own part."""
    formula = METHODS[method].nbytes(elements, 2)
    assert formula <= sent <= (2 if method == "sra" else 1.02) * formula + 160, method


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    pytest.importorskip("horovod.torch")
    output = horovodrun(2, [*COMMAND, "--elements", str(ELEMENTS), "--repeats", "2", "--json"])
    line, = (line for line in output.splitlines() if line.startswith("[0]<stdout>:"))
    assert "[1]<stdout>" not in output
    return json.loads(line.removeprefix("[0]<stdout>:"))


def test_every_method_is_measured_in_every_round_on_every_rank(measured: dict[str, Any]) -> None:
    assert (measured["ranks"], measured["machines"], measured["elements"]) == (2, 1, [ELEMENTS])
    assert len(measured["rounds"]) == 2
    for of_round in measured["rounds"]:
        assert list(of_round) == [name for name in METHODS if name != HIERARCHICAL], "one machine has one level"
        assert all(len(of_method["seconds"]) == 2 and min(of_method["seconds"]) > 0 for of_method in of_round.values())
    assert measured["verdict"].startswith(("TwoBit helps here: ", "TwoBit does not help here: "))


def test_bytes_are_counted_and_computed(measured: dict[str, Any]) -> None:
    methods = {method["method"]: method for method in measured["methods"]}
    assert (methods["none"]["sent"], methods["fp16"]["sent"]) == (4 * ELEMENTS, 2 * ELEMENTS)
    for name, method in methods.items():
        assert method["received_by_formula"] == METHODS[name].nbytes([ELEMENTS], 2)
        handed_over(method["sent"], name, [ELEMENTS])


@waits_for_the_job
def test_tensorflow_hands_over_the_same_and_all_ranks_receive_the_same() -> None:
    first, second = results_of("tensorflow", 2, "bench")
    assert [digest for _, digest in first.values()] == [digest for _, digest in second.values()]
    assert len({first[method][1] for method in ("allgather", "sra", "allreduce", "auto")}) == 1
    assert (first["none"][0], first["fp16"][0]) == (4 * (ELEMENTS + 10), 2 * (ELEMENTS + 10))
    for method, (sent, _) in first.items():
        handed_over(sent, method, [ELEMENTS, 10])


def summaries(**seconds: float) -> dict[str, Summary]:
    return {name: Summary(value, value, value, value / seconds["none"], value / seconds["fp16"], 100)
            for name, value in seconds.items()}


@pytest.mark.parametrize(("seconds", "verdict"), [
    (dict(none=1.0, fp16=0.6, allgather=0.5, sra=0.2, allreduce=0.4, auto=0.4),
     'TwoBit helps here: compression=TwoBit(transport="sra") exchanges 5.00 times as fast as fp32, 3.00 times as fast '
     "as fp16."),
    (dict(none=1.0, fp16=0.6, allgather=0.5, sra=0.5, allreduce=0.49, auto=0.5),
     "TwoBit helps here: compression=TwoBit exchanges 2.00 times as fast as fp32, 1.20 times as fast as fp16."),
    (dict(none=1.0, fp16=0.4, allgather=2.0, sra=0.5, allreduce=2.0, auto=2.0),
     'TwoBit does not help here: fastest is fp16; compression=TwoBit(transport="sra") exchanges 2.00 times as fast as '
     "fp32, 0.80 times as fast as fp16."),
    (dict(none=1.0, fp16=0.6, sra=0.5, auto=0.5, hierarchical=0.25),
     "TwoBit helps here: compression=TwoBit(hierarchical=True) exchanges 4.00 times as fast as fp32, 2.40 times as "
     "fast as fp16."),
])
def test_the_verdict_is_the_best_choice_and_its_factor(seconds: dict[str, float], verdict: str) -> None:
    assert verdict_of(summaries(**seconds)) == verdict


def test_the_table_fits_80_characters_and_ends_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [{name: {"seconds": [12.3456], "sent": [102_400_000]} for name in METHODS}] * 3
    _report(Measured("resnet50", [25_600_000], "torch", 16, 4, 4, rounds), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "25,600,000 elements, tensors: 1; 16 ranks, machines: 4; torch, rounds: 3" == lines[0]
    assert not [line for line in lines if "…" in line]
    row = next(line.split() for line in lines if line.startswith("fp32"))
    assert row == ["fp32", "12,345.6", "12,346-12,346", "1.00", "1.00", "102.40", "192.00"]
    assert lines[-1].startswith("TwoBit does not help here")


def test_two_levels_are_measured_where_machines_have_several_ranks() -> None:
    assert METHODS[HIERARCHICAL].unavailable(ranks_per_machine=2) is None
    assert METHODS[HIERARCHICAL].unavailable() == "it needs machines with several ranks"


def test_one_process_is_told_what_to_do_with_exit_status_2() -> None:
    pytest.importorskip("horovod.torch")
    alone = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    result = subprocess.run(COMMAND, env=alone, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert "horovodrun -np 4" in result.stderr and len(result.stderr.splitlines()) == 1


def test_elements_and_a_model_at_once_are_refused() -> None:
    result = subprocess.run([*COMMAND, "--elements", "5", "--model", "resnet50"], capture_output=True, text=True)
    assert result.returncode == 2 and "not both" in result.stderr
