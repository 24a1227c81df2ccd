"""Is TwoBit right on this GPU, and how fast? For whoever has one: its authors had none.

    python -m benchmarks.gpu_check                           # meant to take less than five minutes
    python -m benchmarks.gpu_check --device cuda:1 --ranks 2

Correctness first: every kernel of the Triton backend against the reference in NumPy, tensors beyond 32-bit numbers,
the gradients of ResNet-50 in one launch, several streams, and exchanges of all ranks, by every transport, through the
coders of PyTorch's front end against those of the host, and of single tensors, all to the bit; and whether gradient
hooks wait for the device.
Then what ``hvd-twobit bench kernels --device cuda`` measures, with targets. What was found is printed, and written to a
file as JSON: please report it. Exit status 1 where something differs; a target that is missed changes nothing.

``--device cpu`` with TRITON_INTERPRET=1 in the environment carries this out on tensors of a few elements of the CPU,
without what only a GPU has, so that the script itself can be tested: times tell nothing then, and there are no targets.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.checking import Check, Outcome, Setup
    from hvd_twobit.bench.gpu_kernels import Measurement

FORMAT_VERSION = 1
NO_HOROVOD = "Horovod is not installed, without which there is no PyTorch front end"


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__.split("\n\n")[0])
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:NUMBER, or cpu with TRITON_INTERPRET=1.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=pathlib.Path), default="results/gpu_check.json",
              show_default=True, help="File for what is found, as JSON.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True,
              help="Rounds of timings to take medians over.")
@click.option("--ranks", type=click.Choice(["2", "4", "8"]),
              help="Also train under horovodrun with so many ranks on this machine, which may share a GPU.")
def main(device: str, output: pathlib.Path, repeats: int, ranks: str | None) -> None:
    """Check, measure, print and write."""
    if not __package__:  # Run as a file: then the folder of the repository is not where modules are looked for.
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    start, console = time.perf_counter(), Console()
    place = _device(device)
    from benchmarks.gpu.checking import Setup, carry_out
    from hvd_twobit.bench import devices, gpu_kernels

    facts = devices.device_facts(place)
    console.print(f"{place}: {facts['gpu']}", highlight=False, soft_wrap=True)
    outcomes = []
    for name, check in _checks(None if ranks is None else int(ranks)):
        outcomes.append(carry_out(name, check, Setup(place)))
        console.print(_line(outcomes[-1]), highlight=False, soft_wrap=True)
    problem, measurements = "", list[gpu_kernels.Measurement]()
    try:
        measurements = _measured(place, repeats)
    except click.ClickException as error:
        problem = error.message
    if measurements:
        gpu_kernels.report_on(place, measurements, repeats, as_json=False)
    targets = _targets(place, measurements)
    console.print("\n" + targets["text"] + (f"\n[red]no times: {escape(problem)}[/]" if problem else ""),
                  highlight=False, soft_wrap=True)
    failed = sum(outcome.mismatches for outcome in outcomes)
    _write(output, {"format_version": FORMAT_VERSION, "machine": facts, "mismatches": failed,
                    "checks": [dataclasses.asdict(outcome) for outcome in outcomes], "targets": targets,
                    "timings": [dataclasses.asdict(one) for one in measurements], "timings_failed": problem,
                    "repeats": repeats, "seconds": time.perf_counter() - start})
    console.print(f"{sum(outcome.cases for outcome in outcomes):,} cases, {failed} of them wrong; written to {output}; "
                  f"{time.perf_counter() - start:.0f} s", highlight=False, soft_wrap=True)
    sys.exit(1 if failed or problem else 0)


def _device(name: str) -> torch.device:
    """The device called so.

    Raises:
        click.ClickException: it is not there, or kernels cannot run there.
    """
    from hvd_twobit.bench import devices, require

    if name != "cpu":
        return devices.cuda_device(name)
    require("torch", "triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise click.ClickException("--device cpu needs TRITON_INTERPRET=1 in the environment: nothing else runs "
                                   "Triton's kernels without a GPU")
    import torch

    return torch.device("cpu")


def _checks(ranks: int | None) -> Iterator[tuple[str, Check]]:
    """All checks by name, in the order in which they are carried out."""
    from benchmarks.gpu import kernels, large, runs

    yield "quantize_pack", kernels.quantize_pack
    yield "unpack_sum", kernels.unpack_sum
    yield "counts", kernels.counts
    yield "tallies", kernels.tallies
    yield "digits", kernels.digits
    yield "the gradients of a model", runs.model
    yield "several streams", runs.streams
    yield "another GPU", kernels.other_device
    yield "more than 2^31 bytes", large.bytes_beyond_32_bits
    yield "more than 2^31 elements", large.elements_beyond_32_bits
    if importlib.util.find_spec("horovod") is None:
        yield "exchanges", _left_out
        return
    from benchmarks.gpu import exchanges, training, words

    yield from exchanges.CHECKS.items()
    yield "exchanges of single tensors", words.words
    if ranks is not None:
        yield f"training of {ranks} ranks", functools.partial(training.check, ranks=ranks)


def _left_out(setup: Setup) -> Iterator[str]:
    from benchmarks.gpu.checking import LeftOut

    raise LeftOut(NO_HOROVOD)


def _measured(device: torch.device, repeats: int) -> list[Measurement]:
    """The timings; on the CPU of next to nothing."""
    from hvd_twobit.bench import gpu_kernels

    if device.type == "cpu":
        return gpu_kernels.measure_on(device, [40], [17, 3], repeats, quiet=True, launches=1)
    sizes = list(gpu_kernels.fitting(device, gpu_kernels.SIZES))
    return gpu_kernels.measure_on(device, sizes, gpu_kernels.resnet50(), repeats, quiet=False)


def _targets(device: torch.device, measurements: list[Measurement]) -> dict[str, Any]:
    """How many targets were met, and which were missed; with a text for readers."""
    if device.type == "cpu":
        return {"met": 0, "missed": [], "text": "Times of an interpreter tell nothing: targets were left out."}
    all_targets = [(one, name, was_met) for one in measurements for name, was_met in one.met.items()]
    missed = [f"{one.case.kernel} of {one.case.elements:,} elements, {one.case.block}, {one.case.data}, "
              f"{one.case.ranks} ranks: {name} is {getattr(one, name):.3g}, "
              f"required {getattr(one.case.targets, name):g}"
              for one, name, was_met in all_targets if not was_met]
    met = len(all_targets) - len(missed)
    return {"met": met, "missed": missed,
            "text": "\n".join([f"Targets: {met} met, {len(missed)} missed.", *map(escape, missed)])}


def _line(outcome: Outcome) -> str:
    """What is printed of a check."""
    if outcome.left_out:
        return f"[yellow]left out[/]  {outcome.name}: {escape(outcome.left_out)}"
    if not outcome.mismatches:
        return f"[green]right[/]     {outcome.name}: {outcome.cases:,} cases, {outcome.seconds:.1f} s"
    told = "\n".join(f"          {text}" for text in outcome.told)
    return (f"[red]WRONG[/]     {outcome.name}: {outcome.mismatches:,} of {outcome.cases:,} cases, "
            f"{outcome.seconds:.1f} s\n{escape(told)}")


def _write(output: pathlib.Path, result: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_suffix(f"{output.suffix}.part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(output)


if __name__ == "__main__":
    main()
