"""The command ``hvd-twobit``: arguments and exit status; the work is done by the modules that the commands import.

Commands import what they need when they run, so that ``--help`` answers at once and needs neither NumPy nor a
framework.
"""

from __future__ import annotations

import sys

import click

from . import __version__

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def commands() -> None:
    """2-bit gradient compression with error feedback for Horovod."""


@commands.group()
def bench() -> None:
    """Measure speed on this machine."""


@bench.command(epilog="Example:  hvd-twobit bench kernels --elements 1000000 --repeats 21")
@click.option("--elements", type=click.IntRange(min=1), default=25_600_000, show_default=True,
              help="Elements of the gradient. The default is the size of ResNet-50; what fits into the processor's "
                   "caches is measured faster than training is.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True,
              help="Rounds to take medians over; each measures every kernel once, beside its baselines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def kernels(elements: int, repeats: int, as_json: bool) -> None:
    """Compare the kernels with NumPy's add and fill, on one thread.

    Each kernel is measured right after its baselines, in rounds, so that ratios hold on a busy machine where
    milliseconds do not. A kernel that misses its limit is reported; the exit status is 0 all the same.
    """
    from .bench import kernels as kernel_bench
    kernel_bench.run(elements, repeats, as_json)


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


def main() -> None:
    """Run the command line and exit: 0, click's 1 or 2 after a mistake, or 130 after Ctrl-C."""
    try:
        sys.exit(commands.main(prog_name="hvd-twobit", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
