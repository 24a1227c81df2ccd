"""How training goes with TwoBit, compared with uncompressed and fp16 gradients: tables, JSON and loss curves.

    python benchmarks/convergence.py                     # about an hour on one core
    python benchmarks/convergence.py --quick             # a minute; says nothing about convergence

All workers are simulated in this process, see workers.py: what is measured is how gradients' loss of precision tells on
training, not speed. Runs are written to OUTPUT/convergence.json one by one, and those that are there already are not
repeated, so that an interrupted benchmark goes on where it was. OUTPUT/convergence.png shows the training losses.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import platform
import statistics
import sys
from collections.abc import Sequence
from functools import partial

import click
import numpy as np
import torch
from problems import Digits, Problem, Text
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workers import TRAINING_TAIL, HalfPrecision, Optimizer, TwoBit, Uncompressed, train

from hvd_twobit import __version__
from hvd_twobit.bench import machine_facts
from hvd_twobit.config import TwoBitConfig

FORMAT_VERSION = 1
UNCOMPRESSED, FP16, AUTO, MXNET = "uncompressed", "fp16", "auto", "fixed 0.5"
ACCURACY_LIMIT_POINTS = 0.5
"""How far below uncompressed the test accuracy may be, in percentage points, mean over seeds."""
LOSS_LIMIT_PERCENT = 4.0
"""How far above uncompressed the training loss may be after as many steps, mean over seeds."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A problem with an optimizer.

    Attributes:
        problem: model and data.
        optimizer_name: for tables.
        optimizer: makes the optimizer.
        thresholds: the fixed ones that are tried beside 0.5, in the unit of the gradient.
        judged_by: the measure by which the best of them is chosen, and which has a limit.
    """

    problem: Problem
    optimizer_name: str
    optimizer: Optimizer
    thresholds: Sequence[float]
    judged_by: str

    @property
    def methods(self) -> list[str]:
        """Names of all ways to reduce gradients that are compared."""
        return [UNCOMPRESSED, FP16, MXNET, *map(_fixed, self.thresholds), AUTO]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is run."""

    setups: Sequence[Setup]
    workers: Sequence[int]
    seeds: dict[str, int]

    def runs(self) -> list[tuple[Setup, dict]]:
        """Every run, with what identifies it in the results; an interrupted benchmark leaves whole comparisons."""
        return [(setup, {"problem": setup.problem.name, "optimizer": setup.optimizer_name, "workers": workers,
                         "method": method, "seed": seed})
                for workers in self.workers for seed in range(max(self.seeds.values()))
                for setup in self.setups if seed < self.seeds[setup.problem.name] for method in setup.methods]


def plan(quick: bool) -> Plan:
    """What is run: four setups with 4 and 8 workers; ``quick`` is two of them, small enough for a test."""
    digits = Digits(epochs=1 if quick else 12, batch_size=64)
    text = Text(steps=4 if quick else 250, batch_size=16 if quick else 64, length=8 if quick else 48,
                evaluated=16 if quick else 400)
    sgd = partial(torch.optim.SGD, momentum=0.9)
    setups = [
        Setup(digits, "SGD", partial(sgd, lr=0.05), (0.005, 0.01, 0.02, 0.05), "test_accuracy"),
        Setup(digits, "Adam", partial(torch.optim.Adam, lr=1e-3), (0.005, 0.01, 0.02, 0.05), "test_accuracy"),
        Setup(text, "SGD", partial(sgd, lr=0.5), (0.0005, 0.001, 0.002, 0.005), "train_loss"),
        Setup(text, "Adam", partial(torch.optim.Adam, lr=3e-3), (0.0005, 0.001, 0.002, 0.005), "train_loss"),
    ]
    if quick:
        return Plan([dataclasses.replace(setup, thresholds=setup.thresholds[1:3]) for setup in setups[::3]], (2,),
                    {"digits": 1, "LSTM": 1})
    return Plan(setups, (4, 8), {"digits": 5, "LSTM": 3})


def reducer_of(method: str, workers: int) -> Uncompressed:
    """A new reducer for one training."""
    if method == UNCOMPRESSED:
        return Uncompressed()
    if method == FP16:
        return HalfPrecision()
    threshold = AUTO if method == AUTO else float(method.split()[1])
    return TwoBit(TwoBitConfig.from_arguments(threshold=threshold), workers)


def _fixed(threshold: float) -> str:
    return f"fixed {threshold:g}"


class Results:
    """The runs that were made, in a file that is written anew after each.

    Args:
        path: the JSON file.
        settings: what results must have been made with to be continued.

    Raises:
        click.ClickException: the file holds results of other settings.
    """

    def __init__(self, path: pathlib.Path, settings: dict) -> None:
        self._path, self._settings = path, settings
        self.runs: list[dict] = []
        if path.exists():
            found = json.loads(path.read_text())
            if found.get("settings") != settings:
                raise click.ClickException(f"{path} holds results of other settings: name another --output")
            self.runs = found["runs"]

    def find(self, **identity: object) -> list[dict]:
        """The runs that agree with what is given."""
        return [run for run in self.runs if all(run[key] == value for key, value in identity.items())]

    def of_setup(self, setup: Setup, workers: int, method: str) -> list[dict]:
        """The runs of a method in a setup, whatever the seed."""
        return self.find(problem=setup.problem.name, optimizer=setup.optimizer_name, workers=workers, method=method)

    def add(self, run: dict) -> None:
        """Keep a run, also if the program ends now."""
        self.runs.append(run)
        whole = {"format_version": FORMAT_VERSION, "machine": {**machine_facts(), "torch": torch.__version__},
                 "settings": self._settings, "runs": self.runs}
        partial_file = self._path.with_suffix(".partial")
        partial_file.write_text(json.dumps(whole) + "\n")
        partial_file.replace(self._path)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error; the error is NaN where one seed or an infinite loss gives none."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return cls(statistics.fmean(values), math.nan)
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))

    def text(self, spec: str) -> str:
        """Mean and error, both formatted; the error without a sign."""
        error = "" if math.isnan(self.error) else f" ± {self.error:{spec.replace('+', '')}}"
        return f"{self.mean:{spec}}{error}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """One method in one setup.

    Attributes:
        train_loss, test_loss: in nats; infinite or NaN where a training broke off.
        test_accuracy: in percent.
        above_percent: by how much the training loss is above that of uncompressed gradients with the same seed.
        points: by how many percentage points the test accuracy is above it.
        bytes_per_step: what one worker sent, all steps together, divided by their number.
        seeds: how many there were.
    """

    method: str
    train_loss: Estimate
    test_loss: Estimate
    test_accuracy: Estimate
    above_percent: Estimate
    points: Estimate
    bytes_per_step: float
    seeds: int

    @classmethod
    def of(cls, method: str, runs: Sequence[dict], uncompressed: Sequence[dict]) -> Summary:
        """Summarize the runs of a method; ``uncompressed`` are those without compression, in the order of seeds too."""
        pairs = list(zip(runs, uncompressed))
        return cls(method, *(Estimate.of([run[key] for run in runs]) for key in ("train_loss", "test_loss")),
                   Estimate.of([100 * run["test_accuracy"] for run in runs]),
                   Estimate.of([100 * (run["train_loss"] / base["train_loss"] - 1) for run, base in pairs]),
                   Estimate.of([100 * (run["test_accuracy"] - base["test_accuracy"]) for run, base in pairs]),
                   statistics.fmean(run["bytes_per_step"] for run in runs), len(runs))


def summaries(results: Results, setup: Setup, workers: int) -> dict[str, Summary]:
    """By method, over the seeds with which every method has been run; empty where there is none."""
    found = {method: {run["seed"]: run for run in results.of_setup(setup, workers, method)} for method in setup.methods}
    seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
    complete = {method: [runs[seed] for seed in seeds] for method, runs in found.items()}
    return {method: Summary.of(method, runs, complete[UNCOMPRESSED]) for method, runs in complete.items() if seeds}


def best_fixed(setup: Setup, by_method: dict[str, Summary]) -> Summary:
    """The best of the setup's thresholds; the measure's ties are broken by the training loss."""
    candidates = [by_method[_fixed(threshold)] for threshold in setup.thresholds]
    if setup.judged_by == "test_accuracy":
        return min(candidates, key=lambda summary: (-summary.test_accuracy.mean, summary.train_loss.mean))
    return min(candidates, key=lambda summary: summary.train_loss.mean)


def table(setup: Setup, workers: int, by_method: dict[str, Summary]) -> Table:
    """One setup's results."""
    made = Table(title=f"{setup.problem.name}, {setup.optimizer_name}, {workers} workers, "
                       f"seeds: {by_method[UNCOMPRESSED].seeds}", box=SIMPLE_HEAD, title_justify="left")
    made.add_column("gradients", no_wrap=True)
    # Losses of the digits end near zero, where a ratio says nothing.
    by_accuracy = setup.judged_by == "test_accuracy"
    for heading in ("train loss", "test loss", "test\naccuracy, %", "above uncompressed,\n"
                    + ("points of accuracy" if by_accuracy else "% of train loss"), "bytes per\nstep"):
        made.add_column(heading, justify="right", no_wrap=True)
    best = best_fixed(setup, by_method)
    for method, summary in by_method.items():
        above = summary.points.text("+.2f") if by_accuracy else summary.above_percent.text("+.1f")
        made.add_row(method + (" (best)" if summary is best else ""), summary.train_loss.text(".4f"),
                     summary.test_loss.text(".4f"), summary.test_accuracy.text(".2f"), above,
                     f"{summary.bytes_per_step:,.0f}")
    return made


def verdicts(setup: Setup, workers: int, by_method: dict[str, Summary]) -> list[str]:
    """What was wanted of adaptive levels, and whether it is so, by the means over seeds."""
    auto, fixed = by_method[AUTO], best_fixed(setup, by_method)
    where = f"{setup.problem.name}, {setup.optimizer_name}, {workers} workers:"
    if setup.judged_by == "test_accuracy":
        more = auto.test_accuracy.mean - fixed.test_accuracy.mean
        return [f"{where} accuracy of auto {auto.points.text('+.2f')} points from uncompressed "
                f"(limit -{ACCURACY_LIMIT_POINTS}): " + _met(auto.points.mean >= -ACCURACY_LIMIT_POINTS),
                f"{where} accuracy of auto {more:+.2f} points from {fixed.method}, the best (wanted: above 0): "
                + _met(more > 0)]
    more = 100 * (auto.train_loss.mean / fixed.train_loss.mean - 1)
    return [f"{where} loss of auto {auto.above_percent.text('+.1f')} % from uncompressed "
            f"(limit +{LOSS_LIMIT_PERCENT:g}): " + _met(auto.above_percent.mean <= LOSS_LIMIT_PERCENT),
            f"{where} loss of auto {more:+.1f} % from {fixed.method}, the best (wanted: below 0): " + _met(more < 0)]


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def draw(results: Results, whole: Plan, path: pathlib.Path) -> None:
    """Training losses of the fewest workers, mean over seeds and a few steps, one panel for each setup."""
    import matplotlib
    matplotlib.use("Agg")  # Draws into a file: no display is needed.
    import matplotlib.pyplot as plt
    workers = min(whole.workers)
    columns = min(2, len(whole.setups))
    rows = -(-len(whole.setups) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5 * columns, 3.4 * rows), layout="constrained", squeeze=False)
    for setup, axes in zip(whole.setups, panels.flat):
        by_method = summaries(results, setup, workers)
        if not by_method:
            continue
        shown = [UNCOMPRESSED, FP16, MXNET, best_fixed(setup, by_method).method, AUTO]
        for method, style in zip(shown, ("k-", "c--", "C7:", "C1-.", "C3-")):
            runs = results.of_setup(setup, workers, method)
            length = min(len(run["losses"]) for run in runs)
            mean = np.mean([run["losses"][:length] for run in runs], axis=0)
            width = min(8, length)
            smooth = np.convolve(mean, np.ones(width) / width, "valid")
            axes.plot(np.arange(width, length + 1), smooth, style, linewidth=1.3, label=method)
        axes.set(title=f"{setup.problem.name}, {setup.optimizer_name}, {workers} workers", xlabel="step",
                 ylabel="training loss", yscale="log" if setup.judged_by == "test_accuracy" else "linear")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(file_okay=False, path_type=pathlib.Path), default="results/convergence",
              show_default=True, help="Folder for convergence.json and convergence.png; results there are continued.")
@click.option("--problem", "names", type=click.Choice(["digits", "LSTM"]), multiple=True,
              help="Run this problem only; may be repeated.")
@click.option("--report", is_flag=True, help="Run nothing: show what is in OUTPUT, for seeds that are complete.")
@click.option("--quick", is_flag=True, help="A few steps of everything: shows that it works, and nothing else.")
def main(output: pathlib.Path, names: tuple[str, ...], report: bool, quick: bool) -> None:
    """Compare training with TwoBit to training with uncompressed and fp16 gradients."""
    torch.set_num_threads(1)
    output.mkdir(parents=True, exist_ok=True)
    settings = {"quick": quick, "training_tail": TRAINING_TAIL, "hvd_twobit": __version__,
                "python": platform.python_version()}
    results = Results(output / "convergence.json", settings)
    whole = plan(quick)
    if names:
        whole = dataclasses.replace(whole, setups=[setup for setup in whole.setups if setup.problem.name in names])
    missing = [] if report else [(setup, identity) for setup, identity in whole.runs() if not results.find(**identity)]
    bar = Console(stderr=True)
    for setup, identity in track(missing, "training", console=bar, transient=True, disable=not bar.is_terminal):
        reducer = reducer_of(identity["method"], identity["workers"])
        trained = train(setup.problem, setup.optimizer, reducer, identity["workers"], identity["seed"])
        results.add({**identity, **trained})

    console = Console(width=None if sys.stdout.isatty() else 110)
    lines = []
    for setup in whole.setups:
        for workers in whole.workers:
            by_method = summaries(results, setup, workers)
            if not by_method:
                continue
            console.print(table(setup, workers, by_method))
            lines += verdicts(setup, workers, by_method)
    for line in [] if quick else lines:
        console.print(line, highlight=False)
    draw(results, whole, output / "convergence.png")
    console.print(f"loss curves: {output / 'convergence.png'}", highlight=False)


if __name__ == "__main__":
    main()
