"""The command ``hvd-twobit``: arguments and exit status; the work is done by the modules that the commands import.

Commands import what they need when they run, so that ``--help`` answers at once and needs neither NumPy nor a
framework.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

import click

from . import __version__
from .planning.models import MODELS
from .planning.units import BANDWIDTH, LATENCY, Count

DEFAULT_BANDWIDTH = 1e9
"""Of ``plan``, in bit/s."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog="""\b
Examples:
  hvd-twobit check
  hvd-twobit plan --model resnet50 --workers 64 --bandwidth 10Gbit
  horovodrun -np 4 hvd-twobit bench collectives --model resnet50
""")
@click.version_option(__version__)
def commands() -> None:
    """2-bit gradient compression with error feedback for Horovod."""


@commands.group(epilog="Example:  hvd-twobit bench kernels")
def bench() -> None:
    """Measure speed: kernels and front ends on this machine, collectives on your cluster."""


def _device(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise click.BadParameter(f"{value!r} is not a device: give cpu, cuda, or cuda:NUMBER for one of several GPUs")
    return value


@bench.command(epilog="""\b
Examples:
  hvd-twobit bench kernels --elements 1000000 --repeats 21
  hvd-twobit bench kernels --device cuda
""")
@click.option("--device", default="cpu", show_default=True, callback=_device,
              help="Where the kernels run: cpu, cuda, or cuda:NUMBER for one of several GPUs.")
@click.option("--elements", type=click.IntRange(min=1),
              help="Elements of the gradient; what fits into a processor's caches is measured faster than training is. "
                   "[default: 25600000, the size of ResNet-50; on a GPU also 256000000, where memory allows]")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True,
              help="Rounds to take medians over; each measures every kernel beside its baselines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def kernels(device: str, elements: int | None, repeats: int, as_json: bool) -> None:
    """Compare the kernels with what the same memory can do.

    On the CPU, the kernels of one thread with NumPy's add and fill; on a GPU, those written in Triton with a copy on
    the device, for one tensor and for all gradients of ResNet-50.

    Each kernel is measured right after its baselines, in rounds, so that ratios hold on a busy machine where
    milliseconds do not. A kernel that misses its limit is reported; the exit status is 0 all the same, and 1 where
    there is no such device.
    """
    if device == "cpu":
        from .bench import cpu_kernels
        return cpu_kernels.run(elements, repeats, as_json)
    from .bench import gpu_kernels
    gpu_kernels.run(device, elements, repeats, as_json)


@bench.command(epilog="Example:  hvd-twobit bench frontends --ranks 4")
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks of each job.")
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True,
              help="Rounds to take medians over; in each, both front ends exchange once.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def frontends(ranks: int, rounds: int, as_json: bool) -> None:
    """Compare an exchange under TensorFlow with one under PyTorch.

    Needs both front ends. Gradients of a dense model of 25 million parameters are exchanged by ranks on this machine.
    """
    from .bench import frontends as frontend_bench
    frontend_bench.run(ranks, rounds, as_json)


@bench.command(epilog="""\b
Examples:
  horovodrun -np 4 -H host1:2,host2:2 hvd-twobit bench collectives --model resnet50
  horovodrun -np 2 hvd-twobit bench collectives --elements 25.6e6 --repeats 21
""")
@click.option("--elements", type=Count(), help="Exchange one tensor of so many elements.  [default: 25.6e6]")
@click.option("--model", type=click.Choice(["resnet50"]), help="Exchange the gradients of this model instead.")
@click.option("--front-end", type=click.Choice(["pytorch", "tensorflow"]), default="pytorch", show_default=True,
              help="The framework that exchanges.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True,
              help="Rounds to take medians over; in each, every method exchanges once.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in one line, and nothing else. horovodrun puts "
              "[0]<stdout>: before it.")
def collectives(elements: int | None, model: str | None, front_end: str, repeats: int, as_json: bool) -> None:
    """Compare exchanges of gradients on your cluster, under horovodrun.

    Uncompressed, in fp16 and with TwoBit by each of its transports (and on two levels, where machines have several
    ranks), side by side; gradients lie in the CPU's memory.
    The last line tells whether TwoBit helps on this link, and which transport to take. The exchange alone is measured:
    in training, part of it passes while gradients are computed. Exit status 2 where there is one process only.
    """
    if elements is not None and model is not None:
        raise click.UsageError("give either --elements or --model, not both")
    from .bench import collectives as collective_bench
    from .bench.shapes import TENSOR_ELEMENTS
    collective_bench.run(model or f"tensor:{elements or TENSOR_ELEMENTS}",
                         {"pytorch": "torch", "tensorflow": "tensorflow"}[front_end], repeats, as_json)


@commands.command(epilog="""\b
Examples:
  hvd-twobit check
  hvd-twobit check --front-end pytorch --no-self-test --json
""")
@click.option("--front-end", "front_ends", type=click.Choice(["pytorch", "tensorflow"]), multiple=True,
              help="Check this front end only; may be given several times.  [default: those that are installed]")
@click.option("--no-self-test", is_flag=True, help="Start no job of two ranks.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), default=120, show_default=True,
              help="Seconds for the job of each front end, which is ended then.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
@click.option("--launcher", default=None, hidden=True, help="Module to run as horovodrun.")
def check(front_ends: tuple[str, ...], no_self_test: bool, time_limit: float, as_json: bool,
          launcher: str | None) -> None:
    """Check that TwoBit works here, and tell what to do where it does not.

    Looks at versions, Horovod's build and hooks, kernels, GPUs and this machine's name, and trains a few steps with
    each front end in a job of two ranks, whose weights have to be those of a simulation to the bit. Exit status: 0 if
    nothing failed, 1 otherwise. A front end that is not installed is no failure, unless none is.
    """
    from . import jobs
    from .checks import report
    from .checks.checking import SelfTests
    if not report.run(front_ends, SelfTests(not no_self_test, time_limit, launcher or jobs.HOROVODRUN), as_json):
        raise click.exceptions.Exit(1)


@commands.command(epilog="Example:  hvd-twobit plan --model resnet50 --workers 64 --bandwidth 10Gbit --latency 50us")
@click.option("--parameters", type=Count(), help="Parameters of the model, such as 25.6e6.")
@click.option("--model", type=click.Choice(list(MODELS)), help="Take the parameters of this model instead.")
@click.option("--workers", type=click.IntRange(min=2, max=32767), help="Number of ranks.")
@click.option("--ranks-per-machine", type=click.IntRange(min=1), default=1, show_default=True,
              help="Workers that share a machine and its link; adds the exchange of two levels.")
@click.option("--bandwidth", type=BANDWIDTH, help="Of each rank's link: a number with kbit, Mbit or Gbit.  "
              "[default: 1Gbit; with --check, of unshaped links, which are left out without it]")
@click.option("--latency", type=LATENCY, default="50us", show_default=True,
              help="From one rank to another: a number with us, ms or s.")
@click.option("--bucket-cap-mb", type=click.FloatRange(min=0, min_open=True), default=25, show_default=True,
              help="MiB of float32 gradient that are exchanged as one piece.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=pathlib.Path),
              help="Draw exchange time against 2 to 1024 workers into this file (needs matplotlib).")
@click.option("--check", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
              help="Predict what is in this file of results of benchmarks/network, and print the error.")
def plan(parameters: int | None, model: str | None, workers: int | None, ranks_per_machine: int,
         bandwidth: float | None, latency: float, bucket_cap_mb: float, as_json: bool, plot: pathlib.Path | None,
         check: pathlib.Path | None) -> None:
    """Predict bytes and time of a gradient exchange, by transport.

    What each costs is explained in hvd_twobit/cost_model.py and in docs/design.md. Nothing is measured.
    """
    if check is not None:
        for option, given in (("--parameters", parameters), ("--model", model), ("--workers", workers),
                              ("--plot", plot)):
            if given is not None:
                raise click.UsageError(f"{option} does not go with --check: the file tells what was exchanged")
        from .planning import check as planning_check
        return planning_check.run(check, bandwidth, latency, bucket_cap_mb, as_json)
    if (parameters is None) == (model is None):
        raise click.UsageError("give either --parameters or --model, one of them")
    if workers is None:
        raise click.UsageError("give the number of --workers")
    from .planning import report
    report.run(parameters, model, workers, bandwidth or DEFAULT_BANDWIDTH, latency, bucket_cap_mb, as_json, plot,
               ranks_per_machine)


def main() -> None:
    """Run the command line and exit: 0, 1 where something failed, 2 after a mistake, or 130 after Ctrl-C."""
    try:
        sys.exit(commands.main(prog_name="hvd-twobit", standalone_mode=False))
    except click.ClickException as error:
        if os.environ.get("HOROVOD_RANK", "0") == "0":  # Under horovodrun all ranks make the same mistake.
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
