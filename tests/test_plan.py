"""``hvd-twobit plan``: what it prints, draws and refuses, and how it compares the model with measurements."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hvd_twobit.cli import commands
from hvd_twobit.cost_model import DEFAULT_LINK, DEFAULT_PROCESSOR, METHODS, TRANSPORTS, Link, choose, cost
from hvd_twobit.planning.forecast import ALWAYS, NEVER, Scenario, break_even, choices
from hvd_twobit.planning.models import MODELS
from hvd_twobit.planning.units import BANDWIDTH, LATENCY, Count, bandwidth_text, latency_text

COMMAND = [sys.executable, "-m", "hvd_twobit", "plan"]
PNG = b"\x89PNG\r\n"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


# What is printed.

def test_the_table_has_every_method_and_tells_where_compression_stops_to_pay() -> None:
    result = invoke("--parameters", "25.6e6", "--workers", "64", "--bandwidth", "10Gbit", "--latency", "50us")
    assert result.exit_code == 0
    for text in ("25,600,000 parameters; 64 workers, 10 Gbit/s, 50 us", "fp32 ", "fp16 ", "2-bit allgather ",
                 "2-bit sra ", "2-bit allreduce ", "2-bit auto (", "MB received", "exchange ms",
                 "Fastest here: 2-bit sra.", "auto: allgather for a small bucket, ", "2-bit pays against fp32 up to ",
                 "2-bit pays against fp16 at 100 Gbit/s still."):
        assert text in result.output
    assert "…" not in result.output, "a column does not fit into 80 characters"


def test_a_row_says_what_the_cost_model_says() -> None:
    result = invoke("--parameters", "1e7", "--workers", "8", "--bandwidth", "1Gbit")
    link = Link(1e9, 50e-6)
    sra, fp32, fp16 = (cost(method, 10**7, 8, link=link) for method in ("sra", "fp32", "fp16"))
    row = next(line.split() for line in result.output.splitlines() if line.startswith("2-bit sra"))
    assert row[2:] == ["2", f"{sra.nbytes / 1e6:.1f}", f"{1e3 * sra.seconds:.1f}", f"{fp32.seconds / sra.seconds:.2f}",
                       f"{fp16.seconds / sra.seconds:.2f}"]


def test_json_is_all_that_is_printed_with_json() -> None:
    printed = planned("--parameters", "25.6e6", "--workers", "4", "--bandwidth", "1Gbit", "--latency", "1ms",
                      "--bucket-cap-mb", "10")
    assert printed["parameters"] == 25_600_000 and printed["workers"] == 4 and printed["bucket_cap_mb"] == 10
    assert printed["link"]["bits_per_second"] == 1e9 and printed["link"]["latency_s"] == 1e-3
    assert [one["method"] for one in printed["methods"]] == list(METHODS)
    expected = cost("sra", 25_600_000, 4, link=Link(1e9, 1e-3), bucket_cap_mb=10)
    sra = next(one for one in printed["methods"] if one["method"] == "sra")
    assert (sra["nbytes"], sra["seconds"], sra["buckets"]) == (expected.nbytes, expected.seconds, 10)
    assert printed["methods"][0]["times_faster_than_fp32"] == 1
    assert set(printed["break_even_bits_per_second"]) == {"fp32", "fp16"}
    assert [(one["elements"], one["transport"]) for one in printed["auto_from_elements"]] == choices(4, DEFAULT_LINK)
    assert printed["fastest_from_elements"] != printed["auto_from_elements"]


def test_defaults_are_those_of_auto() -> None:
    printed = planned("--parameters", "1000", "--workers", "4")
    assert printed["link"] == dataclasses.asdict(DEFAULT_LINK) and printed["bucket_cap_mb"] == 25


def test_what_auto_takes_is_told_by_size() -> None:
    (_, small), (elements, large) = choices(2, DEFAULT_LINK)
    assert f"auto: {small} for a small bucket, {large} from {elements:,} elements on." in invoke(
        "--parameters", "1e9", "--workers", "2").output


def test_a_chart_is_drawn_beside_the_table(tmp_path: pathlib.Path) -> None:
    chart = tmp_path / "chart.png"
    result = invoke("--model", "gpt2", "--workers", "16", "--plot", str(chart))
    assert result.exit_code == 0 and f"written: {chart}" in result.output
    assert chart.read_bytes().startswith(PNG)
    chart.unlink()
    planned("--model", "gpt2", "--workers", "16", "--plot", str(chart))
    assert chart.read_bytes().startswith(PNG)


def test_without_matplotlib_a_chart_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch,
                                                                   tmp_path: pathlib.Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("--model", "gpt2", "--workers", "16", "--plot", str(tmp_path / "chart.png"))
    assert result.exit_code == 1 and "--plot needs matplotlib" in result.output
    assert "pip install matplotlib" in result.output


@pytest.mark.parametrize("name", ["missing/chart.png", "chart.docx"])
def test_a_chart_that_cannot_be_written_is_explained(name: str, tmp_path: pathlib.Path) -> None:
    result = invoke("--model", "gpt2", "--workers", "16", "--plot", str(tmp_path / name))
    assert result.exit_code == 1 and f"Error: cannot write {tmp_path / name}" in result.output


def test_help_has_an_example_and_loads_neither_numpy_nor_a_framework() -> None:
    program = ("import sys; from hvd_twobit.cli import main; sys.argv[1:] = ['plan', '--help']\n"
               "try: main()\n"
               "finally: print({'numpy', 'numba', 'rich', 'matplotlib', 'torch', 'tensorflow'} & set(sys.modules))")
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Example:  hvd-twobit plan --model resnet50 --workers 64" in printed and printed.endswith("set()\n")


# What is refused.

@pytest.mark.parametrize("arguments, message", [
    (["--workers", "4"], "give either --parameters or --model"),
    (["--workers", "4", "--parameters", "10", "--model", "gpt2"], "give either --parameters or --model"),
    (["--parameters", "10"], "give the number of --workers"),
    (["--parameters", "10", "--workers", "0"], "0 is not in the range"),
    (["--parameters", "10", "--workers", "1"], "1 is not in the range"),
    (["--parameters", "10", "--workers", "-3"], "-3 is not in the range"),
    (["--parameters", "10", "--workers", "nan"], "'nan' is not a valid integer"),
    (["--parameters", "10", "--workers", "40000"], "40000 is not in the range"),
    (["--model", "resnet5", "--workers", "4"], "'resnet5' is not one of 'resnet50'"),
    (["--parameters", "0", "--workers", "4"], "'0' is no number of parameters"),
    (["--parameters", "nan", "--workers", "4"], "'nan' is no number of parameters"),
    (["--parameters", "-5", "--workers", "4"], "'-5' is no number of parameters"),
    (["--parameters", "10", "--workers", "4", "--bandwidth", "10"], "write a number and one of kbit, Mbit, Gbit"),
    (["--parameters", "10", "--workers", "4", "--latency", "50"], "write a number and one of us, ms, s"),
    (["--parameters", "10", "--workers", "4", "--bucket-cap-mb", "0"], "0.0 is not in the range"),
    (["--parameters", "10", "--workers", "4", "--bucket-cap-mb", "nan"], "bucket_cap_mb must be a finite number"),
])
def test_a_wrong_argument_is_explained_with_exit_status_2(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_a_mistake_shows_no_trace_of_python() -> None:
    result = subprocess.run([*COMMAND, "--parameters", "10", "--workers", "4", "--bandwidth", "fast"],
                            capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr and "'fast' is no bandwidth" in result.stderr


# Units.

@pytest.mark.parametrize("text, bits_per_second", [
    ("10Gbit", 1e10), ("1.5 Gbit", 1.5e9), ("100mbit", 1e8), ("56kbit", 56e3), ("1e3Mbit", 1e9), (".5Gbit/s", 5e8)])
def test_bandwidths(text: str, bits_per_second: float) -> None:
    assert BANDWIDTH.convert(text, None, None) == pytest.approx(bits_per_second)


@pytest.mark.parametrize("text, seconds", [("50us", 50e-6), ("0us", 0), ("1.5ms", 1.5e-3), ("2s", 2), ("1e2 us", 1e-4)])
def test_latencies(text: str, seconds: float) -> None:
    assert LATENCY.convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "Gbit", "10GB", "10Gbps", "-1Gbit", "0Gbit", "nanGbit", "infGbit",
                                  "1e999Gbit", "1,5Gbit", "10 G bit", "10Gbit10", "10us"])
def test_what_is_no_bandwidth_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(Exception, match="write a number and one of kbit, Mbit, Gbit, such as 10Gbit"):
        BANDWIDTH.convert(text, None, None)


@pytest.mark.parametrize("text", ["", "50", "us", "-1us", "50 s/s", "nan", "1e999s", "1Gbit", "5min"])
def test_what_is_no_latency_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(Exception, match="write a number and one of us, ms, s, such as 50us"):
        LATENCY.convert(text, None, None)


@pytest.mark.parametrize("text, count", [("25600000", 25_600_000), ("25.6e6", 25_600_000), ("1", 1), ("1E3", 1000)])
def test_counts(text: str, count: int) -> None:
    assert Count().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "1.5", "0", "-1", "inf", "-inf", "nan", "1e999", "ten"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="write a whole number of 1 or more, such as 25600000 or 25.6e6"):
        Count().convert(text, None, None)


def test_quantities_are_written_with_three_digits() -> None:
    assert [bandwidth_text(bits) for bits in (1e12, 9.9999e11, 2.5e9, 1e8, 56e3)] == [
        "1 Tbit/s", "1 Tbit/s", "2.5 Gbit/s", "100 Mbit/s", "56 kbit/s"]
    assert [latency_text(seconds) for seconds in (0, 50e-6, 1.5e-3, 2)] == ["0 us", "50 us", "1.5 ms", "2e+03 ms"]


# Where compression stops to pay, and where sra begins.

@pytest.mark.parametrize("baseline, workers", [("fp32", 64), ("fp32", 1024)])
def test_at_the_break_even_the_faster_changes(baseline: str, workers: int) -> None:
    scenario = Scenario(25_600_000, workers, DEFAULT_LINK, 25)
    boundary = break_even(scenario, baseline)
    assert isinstance(boundary, float)
    free = dataclasses.replace(DEFAULT_PROCESSOR, tcp_s=0.0)

    def pays(bits_per_second: float) -> bool:
        there = scenario.at(bits_per_second)
        return min(there.cost(name, free).seconds for name in TRANSPORTS) < there.cost(baseline, free).seconds

    assert pays(boundary / 1.001) and not pays(boundary * 1.001)


def test_one_element_is_not_worth_a_header_and_many_always_where_float16_is_slow() -> None:
    assert break_even(Scenario(1, 64, Link(1e9, 0.0), 25), "fp32") == NEVER
    assert "2-bit does not pay against fp32 at any bandwidth from 1 Mbit/s to 100 Gbit/s." in invoke(
        "--parameters", "1", "--workers", "64", "--latency", "0us").output
    assert break_even(Scenario(25_600_000, 8, DEFAULT_LINK, 25), "fp16") == ALWAYS


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_choices_are_where_the_choice_changes(workers: int) -> None:
    found = choices(workers, DEFAULT_LINK)
    assert found[0][0] == 1 and len(found) > 1
    for (_, before), (elements, after) in zip(found, found[1:]):
        assert choose(elements - 1, workers) == before != choose(elements, workers) == after


# Models.

def convolutional(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    total = 0
    for shape in shapes:
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total, len(shapes)


def resnet(blocks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    def convolution(channels: int, filters: int, side: int) -> list[tuple[int, ...]]:
        return [(filters, channels, side, side), (filters,), (filters,)]

    yield from convolution(3, 64, 7)
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            yield from [*convolution(channels, width, 1), *convolution(width, width, 3),
                        *convolution(width, 4 * width, 1)]
            if block == 0:
                yield from convolution(channels, 4 * width, 1)
            channels = 4 * width
    yield from [(1000, channels), (1000,)]


def vgg16() -> Iterator[tuple[int, ...]]:
    channels = 3
    for filters in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        yield from [(filters, channels, 3, 3), (filters,)]
        channels = filters
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        yield from [(outputs, inputs), (outputs,)]


def encoder(layers: int, width: int, fused_attention: bool) -> Iterator[tuple[int, ...]]:
    """Layers of a transformer: attention, a perceptron four times as wide, two layer norms."""
    for _ in range(layers):
        yield from [(3 * width, width), (3 * width,)] if fused_attention else 3 * [(width, width), (width,)]
        yield from [(width, width), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
        yield from 4 * [(width,)]


def bert(layers: int, width: int) -> list[tuple[int, ...]]:
    embeddings = [(30522, width), (512, width), (2, width), (width,), (width,)]
    return [*embeddings, *encoder(layers, width, False), (width, width), (width,)]


ARCHITECTURES = {
    "resnet50": list(resnet((3, 4, 6, 3))),
    "resnet101": list(resnet((3, 4, 23, 3))),
    "vgg16": list(vgg16()),
    "vit-b16": [(768, 3, 16, 16), (768,), (1, 1, 768), (1, 197, 768), *encoder(12, 768, True), (768,), (768,),
                (1000, 768), (1000,)],
    "bert-base": bert(12, 768),
    "bert-large": bert(24, 1024),
    "gpt2": [(50257, 768), (1024, 768), *encoder(12, 768, True), (768,), (768,)],
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_large_as_their_architecture_says(name: str) -> None:
    assert (MODELS[name].parameters, MODELS[name].tensors) == convolutional(ARCHITECTURES[name])


def test_a_model_stands_for_its_parameters() -> None:
    of_model = planned("--model", "resnet50", "--workers", "8")
    assert of_model["model"] == "resnet50" and of_model["tensors"] == 161 and "torchvision" in of_model["source"]
    assert of_model["methods"] == planned("--parameters", "25557032", "--workers", "8")["methods"]
    assert "resnet50, 161 tensors, 25,557,032 parameters" in invoke("--model", "resnet50", "--workers", "8").output


# Measurements.

def results(tmp_path: pathlib.Path, *entries: dict[str, Any], version: int = 1) -> str:
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"format_version": version, "entries": entries}))
    return str(path)


def entry(rate: str = "1gbit", cores: int = 2, **methods: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """An entry of 2 ranks; by method, seconds and received bytes of all ranks for each round."""
    numbers = range(len(next(iter(methods.values()))))
    return {"rate": rate, "ranks": 2, "model": "tensor", "elements": [10**7, 10**6], "machine": {"cores": cores},
            "rounds": [{name: {"seconds": rounds[number][0], "sent": [0, 0], "received": rounds[number][1]}
                        for name, rounds in methods.items()} for number in numbers]}


def test_a_measurement_is_compared_by_its_slowest_rank_and_its_median_round(tmp_path: pathlib.Path) -> None:
    measured = entry(none=[([0.1, 0.2], [10, 50]), ([0.4, 0.3], [90, 20]), ([9, 1], [70, 70])],
                     allgather=[([1, 1], [1, 1])] * 3)
    printed = json.loads(invoke("--check", results(tmp_path, measured), "--json").output)
    fp32, allgather = printed["comparisons"]
    expected = cost("fp32", 11 * 10**6, 2, link=Link(1e9, 50e-6))
    assert (fp32["rate"], fp32["ranks"], fp32["model"], fp32["method"]) == ("1gbit", 2, "tensor", "fp32")
    assert (fp32["measured_s"], fp32["measured_nbytes"]) == (0.4, 70)
    assert (fp32["predicted_s"], fp32["predicted_nbytes"]) == (expected.seconds, expected.nbytes)
    assert fp32["seconds_error_percent"] == pytest.approx(100 * (expected.seconds / 0.4 - 1))
    assert allgather["method"] == "allgather"
    errors = [abs(one["seconds_error_percent"]) for one in printed["comparisons"]]
    assert printed["median_absolute_error_percent"]["seconds"] == pytest.approx(sum(errors) / 2)
    assert printed["by_method"]["fp32"]["seconds"] == pytest.approx(errors[0])


def test_an_exact_prediction_has_no_error(tmp_path: pathlib.Path) -> None:
    exact = cost("sra", 11 * 10**6, 2, link=Link(1e8, 1e-3), bucket_cap_mb=5)
    measured = entry("100mbit", sra=[([exact.seconds, 0], [exact.nbytes, 0])])
    result = invoke("--check", results(tmp_path, measured), "--latency", "1ms", "--bucket-cap-mb", "5")
    assert result.exit_code == 0
    assert "median absolute error, all: 0.0 % of bytes, 0.0 % of seconds, 1 compared" in result.output
    assert "100mbit, 2 ranks, tensor\n" in result.output
    row = next(line.split() for line in result.output.splitlines() if line.startswith("sra"))
    assert row[3] == row[6] == "+0.0" and row[1] == row[2] and row[4] == row[5]


def test_ranks_that_share_cores_compute_slower(tmp_path: pathlib.Path) -> None:
    predicted = [json.loads(invoke("--check", results(tmp_path, entry(cores=cores, fp16=[([1], [1])])),
                                   "--json").output)["comparisons"][0]["predicted_s"] for cores in (1, 2, 4)]
    assert predicted[0] > predicted[1] == predicted[2]


def test_links_without_a_limit_need_a_bandwidth(tmp_path: pathlib.Path) -> None:
    shaped, unshaped = entry(none=[([1], [1])]), entry("unshaped", none=[([1], [1])])
    path = results(tmp_path, shaped, unshaped)
    without = invoke("--check", path)
    assert without.exit_code == 0 and "left out: 1 entries without a limit of bandwidth" in without.output
    both = json.loads(invoke("--check", path, "--bandwidth", "20Gbit", "--json").output)
    assert [one["rate"] for one in both["comparisons"]] == ["1gbit", "unshaped"] and both["entries_left_out"] == 0
    only = invoke("--check", results(tmp_path, unshaped))
    assert only.exit_code == 1 and "nothing to compare: 1 entries, 1 of them without a limit" in " ".join(
        only.output.split())


@pytest.mark.parametrize("content, message", [
    ("", "is not a file of results of benchmarks/network"),
    ("[]", "is not a file of results of benchmarks/network"),
    ('{"entries": []}', "is not a file of results of benchmarks/network"),
    ('{"format_version": 1, "entries": 3}', "is not a file of results of benchmarks/network"),
    ('{"format_version": 2, "entries": []}', "has format_version 2; this command reads 1"),
    ('{"format_version": 1, "entries": []}', "has nothing to compare"),
    ('{"format_version": 1, "entries": [{"rate": "1gbit"}]}', "an entry that is not of benchmarks/network's form"),
])
def test_another_file_is_refused(content: str, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    result = invoke("--check", str(path))
    assert result.exit_code == 1 and message in " ".join(result.output.split())


@pytest.mark.parametrize("change", [{"rate": "fast"}, {"ranks": 1}, {"machine": {"cores": 0}}, {"elements": "many"},
                                    {"rounds": []}, {"rounds": [{"zip": {"received": [1], "seconds": [1]}}]},
                                    {"rounds": [{"none": {"received": [0], "seconds": [1]}}]}])
def test_an_entry_of_another_form_is_refused(change: dict[str, Any], tmp_path: pathlib.Path) -> None:
    result = invoke("--check", results(tmp_path, {**entry(none=[([1], [1])]), **change}))
    assert result.exit_code == 1 and "an entry that is not of benchmarks/network's form" in " ".join(
        result.output.split())


@pytest.mark.parametrize("option", [["--workers", "4"], ["--parameters", "10"], ["--model", "gpt2"],
                                    ["--plot", "chart.png"]])
def test_what_the_file_tells_is_not_given_again(option: list[str], tmp_path: pathlib.Path) -> None:
    result = invoke("--check", results(tmp_path, entry(none=[([1], [1])])), *option)
    assert result.exit_code == 2 and f"{option[0]} does not go with --check" in result.output
