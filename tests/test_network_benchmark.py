"""``benchmarks/network``: what it sends, predicts and reports; on real links where this machine lets it make some."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("matplotlib")
remote = pytest.importorskip("horovod.runner.util.remote")

from benchmarks.network import cluster as network  # noqa: E402
from benchmarks.network.__main__ import main  # noqa: E402
from benchmarks.network.cost import PACKET_SHARE, predict  # noqa: E402
from benchmarks.network.interrupts import Interrupted, Interrupts  # noqa: E402
from benchmarks.network.job import JobFailed, running  # noqa: E402
from benchmarks.network.results import Entry, load, merge  # noqa: E402
from hvd_twobit.bench.methods import METHODS, Method  # noqa: E402
from hvd_twobit.bench.rounds import DifferentGradients, compare  # noqa: E402
from hvd_twobit.bench.shapes import shapes_of  # noqa: E402

from .launcher import REPOSITORY  # noqa: E402

SHIM = REPOSITORY / "benchmarks" / "network" / "bin"


def benchmark(*options: str) -> Result:
    return CliRunner().invoke(main, options)


# What is exchanged, and what it should take.

def test_resnet50_has_the_parameters_of_the_paper() -> None:
    shapes = shapes_of("resnet50")
    elements = [math.prod(shape) for shape in shapes]
    assert (len(elements), sum(elements)) == (161, 25_557_032)
    assert shapes[:3] == [(64, 3, 7, 7), (64,), (64,)] and shapes[-2:] == [(1000, 2048), (1000,)]
    assert max(elements) == 512 * 512 * 9


def test_tensors_have_the_size_that_is_asked_for() -> None:
    assert shapes_of("tensor") == [(25_600_000,)] and shapes_of("tensor:17") == [(17,)]


@pytest.mark.parametrize("model", ["resnet18", "tensor:", "tensor:0", "tensor:1e6", "resnet50:3", ""])
def test_other_models_are_refused(model: str) -> None:
    with pytest.raises(ValueError, match="no model"):
        shapes_of(model)


@pytest.mark.parametrize(("method", "ranks", "nbytes"), [
    ("none", 2, 4 * 2 ** 20), ("none", 4, 1.5 * 4 * 2 ** 20), ("fp16", 8, 1.75 * 2 * 2 ** 20),
    # Header of 32 bytes, 8 bytes for each of 1024 blocks, two bits per element.
    ("allgather", 2, 32 + 8 * 1024 + 2 ** 18), ("allgather", 8, 7 * (32 + 8 * 1024 + 2 ** 18)),
    ("sra", 4, 0.75 * (32 + 8 * 1024 + 2 ** 18 + 2 ** 19)), ("sra", 8, 0.875 * (32 + 8 * 1024 + 2 ** 18 + 2 ** 20)),
])
def test_bytes_are_those_of_the_formula(method: str, ranks: int, nbytes: float) -> None:
    assert predict(method, [2 ** 20], ranks, None).nbytes == pytest.approx(nbytes, rel=0.01)
    assert predict(method, [2 ** 20, 2 ** 20], ranks, None).nbytes == pytest.approx(2 * nbytes, rel=0.01)


def test_small_tensors_are_not_compressed() -> None:
    assert predict("allgather", [1023], 2, None).nbytes == 4 * 1023
    assert predict("allgather", [1024], 2, None).nbytes < 512
    assert predict("allgather", [1023, 1024], 2, None).nbytes == 4 * 1023 + predict("allgather", [1024], 2, None).nbytes


def test_link_time_is_that_of_bytes_and_headers() -> None:
    assert predict("none", [10 ** 6], 2, 8e9).seconds == pytest.approx(4e6 / 1e9 / PACKET_SHARE)
    assert predict("none", [10 ** 6], 2, None).seconds is None


# The command line.

@pytest.mark.parametrize(("options", "told"), [
    (["--rates", "100mbit,fast"], "no rate 'fast'"), (["--rates", "0gbit"], "no rate '0gbit'"),
    (["--ranks", "1"], "'1' ranks"), (["--ranks", "two"], "'two' ranks"), (["--models", "vgg"], "no model 'vgg'"),
    (["--methods", "topk"], "no method 'topk': take none, fp16, allgather"), (["--rounds", "0"], "--rounds"),
])
def test_values_that_cannot_be_used_are_refused(options: list[str], told: str) -> None:
    result = benchmark(*options)
    assert result.exit_code == 2 and told in " ".join(result.output.split())


def test_a_method_that_hvd_twobit_does_not_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "pigeon", Method("pigeon", "2-bit, pigeon", {"transport": "pigeon"}))
    result = benchmark("--methods", "allgather,pigeon")
    assert result.exit_code == 2 and "does not have the method 'pigeon'" in " ".join(result.output.split())


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = benchmark()
    assert result.exit_code == 1 and "not installed: ip, tc; install iproute2" in result.output


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 10 ** 8), ("2.5gbit", 25 * 10 ** 8), ("64kbit", 64_000)])
def test_rates_are_those_of_tc(rate: str, bits: int) -> None:
    assert network.bits_per_second(rate) == bits
    assert network.bits_per_second("unshaped") is None


# The stand-in for ssh.

def over_ssh(command: str, address: str, fake_ip: str, folder: pathlib.Path) -> subprocess.Popen[str]:
    """Start a command as horovodrun does, with a program of ours as ``ip``."""
    (folder / "ip").write_text(f"#!/bin/sh\n{fake_ip}\n")
    (folder / "ip").chmod(0o755)
    environment = {**os.environ, "PATH": os.pathsep.join([str(SHIM), str(folder), os.environ["PATH"]]),
                   "NETBENCH_PREFIX": "hvdtb7"}
    return subprocess.Popen(["sh", "-c", "exec " + remote.get_remote_command(command, address, timeout_s=10)],
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_ssh_runs_the_command_line_in_the_namespace_of_the_address(tmp_path: pathlib.Path) -> None:
    process = over_ssh("""'cd / ; A="b c" env'""", "10.77.0.3", 'printf "%s\\n" "$@"; exit 7', tmp_path)
    output, _ = process.communicate(timeout=20)
    assert output.splitlines() == ["netns", "exec", "hvdtb7n3", "sh", "-c", 'cd / ; A="b c" env']
    assert process.returncode == 7, "the status of the command"


def test_ssh_skips_options_on_both_sides_of_the_host(tmp_path: pathlib.Path) -> None:
    process = over_ssh("true", "-4 -p 22 -i key 10.77.0.12 -n -o A=b", 'printf "%s\\n" "$@"', tmp_path)
    assert process.communicate(timeout=20)[0].splitlines() == ["netns", "exec", "hvdtb7n12", "sh", "-c", "true"]


def test_ssh_refuses_addresses_of_other_networks(tmp_path: pathlib.Path) -> None:
    process = over_ssh("true", "192.168.0.1", "echo reached", tmp_path)
    assert "192.168.0.1 is no address" in process.communicate(timeout=20)[0] and process.returncode == 255


def test_ssh_ends_all_of_its_session_when_it_is_ended(tmp_path: pathlib.Path) -> None:
    process = over_ssh("'cd / ; sleep 1000 & echo started ; sleep 1000 ; true'", "10.77.0.1", 'shift 3; exec "$@"',
                       tmp_path)
    assert process.stdout and process.stdout.readline() == "started\n"
    process.terminate()
    process.communicate(timeout=20)  # Until nobody holds its output any more.
    assert process.returncode == 143


# Signals.

def test_signals_wait_until_they_are_allowed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        with interrupts.allowed():
            pass
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM") as raised, interrupts.allowed():
            pytest.fail("allowed")
        assert raised.value.status == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_first_signal_interrupts() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted, match="SIGINT"), interrupts.allowed():
            try:
                signal.raise_signal(signal.SIGINT)
                pytest.fail("not interrupted")
            finally:
                signal.raise_signal(signal.SIGTERM)


# What ranks received.

def test_ranks_that_received_different_gradients_fail() -> None:
    compare("sra", ["a", "a", "a"])
    with pytest.raises(DifferentGradients, match="sra: .* of rank 2 the digest is b, of rank 0 a"):
        compare("sra", ["a", "a", "b"])


# Results and report.

def of_ranks(seconds: list[float], nbytes: float) -> dict[str, list[float]]:
    return {"seconds": seconds, "sent": [nbytes] * len(seconds), "received": [nbytes] * len(seconds)}


RECORDED = Entry("1gbit", 2, "tensor:1000000", [1_000_000], {"cpu": "a CPU", "cores": 1, "load_average": 0.5}, [
    {"none": of_ranks([0.040, 0.030], 4_010_000), "fp16": of_ranks([0.030, 0.032], 2_008_000),
     "allgather": of_ranks([0.010, 0.012], 262_000)},
    {"none": of_ranks([0.050, 0.040], 4_010_000), "fp16": of_ranks([0.020, 0.020], 2_008_000),
     "allgather": of_ranks([0.020, 0.010], 262_000)},
    {"none": of_ranks([0.036, 0.036], 4_012_000), "fp16": of_ranks([0.018, 0.018], 2_009_000),
     "allgather": of_ranks([0.010, 0.009], 263_000)},
])


def test_a_round_takes_as_long_as_its_slowest_rank_and_ratios_are_within_rounds() -> None:
    allgather = RECORDED.summaries()["allgather"]
    assert (allgather.seconds, allgather.fastest, allgather.slowest) == (0.012, 0.010, 0.020)
    assert allgather.to_fp32 == pytest.approx(0.012 / 0.040) and allgather.to_fp16 == pytest.approx(10 / 18)
    assert allgather.sent == 262_000


def test_results_of_several_runs_merge_by_key(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "results.json"
    unshaped, again = (dataclasses.replace(RECORDED, **change) for change in (
        {"rate": "unshaped"}, {"rounds": RECORDED.rounds[:1]}))
    for entry in (RECORDED, unshaped, again):
        merge(path, entry)
    assert load(path) == [unshaped, again]
    assert [child.name for child in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", '{"format_version": 99, "entries": []}'])
def test_other_files_are_not_taken_for_results(content: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match="other.json holds no results"):
        load(tmp_path / "other.json")


@pytest.fixture
def report(tmp_path: pathlib.Path) -> Callable[[Entry], str]:
    def write(*entries: Entry) -> str:
        for entry in entries:
            merge(tmp_path / "results.json", entry)
        result = benchmark("--report-only", str(tmp_path / "results.json"), "--report", str(tmp_path / "page.md"))
        assert result.exit_code == 0, result.output
        return (tmp_path / "page.md").read_text()
    return write


def test_report_holds_what_was_measured(report: Callable[..., str], tmp_path: pathlib.Path) -> None:
    page = report(RECORDED, dataclasses.replace(RECORDED, rate="unshaped"))
    lines = [line for line in page.splitlines() if line.startswith("| 2")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    # About 258,000 bytes: header, 977 blocks of 8 bytes, a quarter of a million of codes.
    assert rows[2] == ["2", "2-bit, allgather", "12.0", "10.0-20.0", "0.30", "0.56", "0.262", "0.258", "+1.6", "2.2",
                       "+456"]
    assert rows[5][:6] == rows[2][:6] and rows[5][-2:] == ["-", "-"]
    for text in ("a CPU", "load average when a measurement began: 0.50", "**Up to 2 ranks share 1 cores.**",
                 "rounds: 3", "one tensor, 1,000,000 elements", "### tensor:1000000, 1gbit",
                 "(page_tensor_1000000.png)"):
        assert text in page
    assert (tmp_path / "page_tensor_1000000.png").read_bytes().startswith(b"\x89PNG")


def test_report_tells_what_falls_short(report: Callable[..., str]) -> None:
    page = report(RECORDED)
    assert "- tensor:1000000, 1gbit: 1 of 3 times, at most +456 % (2-bit, allgather with 2 ranks)" in page
    assert "as long as uncompressed" not in page and "off the formula" not in page
    slow = [{**of_round, "allgather": of_ranks([0.045, 0.045], 300_000)} for of_round in RECORDED.rounds]
    page = report(dataclasses.replace(RECORDED, rounds=slow))
    assert "- 2-bit, allgather, tensor:1000000, 1gbit: 1.12 of fp32's and 2.25 of fp16's with 2 ranks" in page
    assert "- 2-bit, allgather, tensor:1000000, 1gbit: +16.3 % with 2 ranks" in page


def test_a_report_of_nothing_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "results.json").write_text('{"format_version": 1, "entries": []}')
    result = benchmark("--report-only", str(tmp_path / "results.json"), "--report", str(tmp_path / "page.md"))
    assert result.exit_code == 1 and "no results" in result.output and not (tmp_path / "page.md").exists()


# Real namespaces.

@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skip where this machine does not let us make network namespaces."""
    try:
        network.check_possible()
    except network.ClusterError as error:
        pytest.skip(str(error))
    name = f"hvdtb{os.getpid()}probe"
    made = ip("netns", "add", name)
    if made.returncode:
        pytest.skip(f"no network namespaces: {made.stderr.strip()}")
    ip("netns", "delete", name)


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("ip", *arguments)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def left_by(pid: int) -> list[str]:
    """Namespaces, which hold all links, and files that a process has made and not removed."""
    files = [path.name for path in network.NETNS_FILES.glob("*")]
    return [name for name in (*ip("netns", "list").stdout.split(), *files) if name.startswith(f"hvdtb{pid}")]


def test_links_have_the_rate_and_hosts_their_own_address(namespaces: None) -> None:
    with network.cluster(2) as made:
        made.shape("100mbit")
        for number, address in enumerate(made.addresses, 1):
            name = f"{made.prefix}n{number}"
            for namespace, interface in ((name, "eth0"), (f"{made.prefix}sw", f"port{number}")):
                shaping = run("tc", "-n", namespace, "qdisc", "show", "dev", interface).stdout
                assert "tbf" in shaping and "rate 100Mbit" in shaping
            resolved = ip("netns", "exec", name, sys.executable, "-c",
                          "import socket; print(socket.gethostbyname(socket.gethostname()))")
            assert resolved.stdout == f"{address}\n"
        made.shape("unshaped")
        assert "tbf" not in run("tc", "-n", f"{made.prefix}n1", "qdisc").stdout
        idle = subprocess.Popen(["ip", "netns", "exec", f"{made.prefix}n2", "sleep", "1000"])
    assert idle.wait(10) == -signal.SIGKILL and not left_by(os.getpid())


def test_what_was_made_is_removed_after_an_error(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_address", lambda number: f"10.77.0.{number if number < 2 else 'two'}")
    with pytest.raises(network.ClusterError, match=r"address add 10\.77\.0\.two/24"), network.cluster(2):
        pytest.fail("made")
    assert not left_by(os.getpid())


def test_a_job_that_ends_early_is_told_with_what_it_printed(namespaces: None) -> None:
    with pytest.raises(JobFailed, match="(?s)the job ended early; it printed:.*Beautiful is better than ugly"):
        with Interrupts() as interrupts, network.cluster(2) as made, \
                running(made, "tensor:16", ["none"], interrupts, launcher="this"):
            pytest.fail("started")
    assert not left_by(os.getpid())


@pytest.fixture
def job(namespaces: None, tmp_path: pathlib.Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the benchmark with two ranks and one small tensor; results and report lie in the test's folder."""
    started = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.network", "--ranks", "2", "--models", "tensor:4000000", *options,
                   "--methods", "allgather", "--json", str(tmp_path / "results.json"), "--report",
                   str(tmp_path / "page.md"), "--launcher", "tests.horovodrun"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        started.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def test_bytes_on_the_links_are_those_of_the_formula(job: Callable[..., subprocess.Popen[str]],
                                                     tmp_path: pathlib.Path) -> None:
    process = job("--rates", "200mbit", "--rounds", "2")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0 and errors == "", errors
    assert output.splitlines() == [f"written: {tmp_path / name}" for name in ("page.md", "page_tensor_4000000.png")]
    entry, = load(tmp_path / "results.json")
    assert entry.key == ("200mbit", 2, 1, "tensor:4000000") and len(entry.rounds) == 2
    for method, summary in entry.summaries().items():
        predicted = predict(method, entry.elements, 2, 2e8)
        assert predicted.nbytes < summary.sent < 1.05 * predicted.nbytes, method
        assert predicted.seconds is not None and summary.fastest > 0.9 * predicted.seconds, "a link without a limit"
        for of_round in entry.rounds:
            assert of_round[method]["received"] == pytest.approx(of_round[method]["sent"][::-1], rel=0.02)
    assert not left_by(process.pid)


def test_nothing_is_left_when_a_job_is_interrupted(job: Callable[..., subprocess.Popen[str]],
                                                   tmp_path: pathlib.Path) -> None:
    process = job("--rates", "200mbit")
    ranks: list[int] = []
    while len(ranks) < 2 and process.poll() is None:
        time.sleep(0.05)
        ranks = [pid for pid in pids_of(process.pid) if "benchmarks.network.rank" in command_of(pid)]
    others = pids_of(process.pid)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "ended by SIGTERM" in errors
    assert not left_by(process.pid)
    assert not [command_of(pid) for pid in others if "horovod" in command_of(pid) or "benchmarks" in command_of(pid)]
    assert not (tmp_path / "page.md").exists()


def pids_of(benchmark: int) -> list[int]:
    """Processes in the namespaces of a benchmark of two ranks."""
    names = [f"hvdtb{benchmark}n{number}" for number in (1, 2, 254)]
    return [int(pid) for name in names for pid in ip("netns", "pids", name).stdout.split()]


def command_of(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""

