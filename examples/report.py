"""Compares runs of the examples: a table on the terminal and the loss curves as a PNG.

    python examples/report.py results/none.json results/fp16.json results/twobit.json --png results/loss.png

A run is what an example's ``--output`` writes. Runs are compared with the first one of their front end.
"""

import argparse
import itertools
import json
import pathlib
import statistics

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # Draws into a file: no display is needed.
import matplotlib.pyplot as plt  # noqa: E402

LINES = ("solid", "dashed", "dotted", "dashdot")


def name_of(run):
    arguments = run["arguments"]
    if arguments["twobit_allreduce"]:
        transport = arguments["twobit_transport"]
        return f"TwoBit {arguments['twobit_threshold']}" + ("" if transport == "auto" else f" {transport}")
    return "fp16" if arguments["fp16_allreduce"] else "uncompressed"


def bytes_per_step(run):
    """Mean over the whole run of the gradient bytes that one rank sent per step."""
    return statistics.fmean(epoch["bytes_sent_per_step"] for epoch in run["epochs"])


def seconds_per_step(run):
    """Median of the epochs' medians; the first epoch, in which kernels are compiled, weighs no more than another."""
    return statistics.median(epoch["seconds_per_step"] for epoch in run["epochs"])


def by_front_end(runs):
    """Runs in lists by their front end, in the order in which front ends first appear."""
    found = {}
    for run in runs:
        found.setdefault(run["front_end"], []).append(run)
    return found


def size_of(run):
    return (f"{run['ranks']} ranks, {run['parameters']:,} parameters, {len(run['epochs'])} epochs of "
            f"{run['steps_per_epoch']} steps")


def table(runs):
    made = Table(title="\n".join(dict.fromkeys(map(size_of, runs))))
    made.add_column("gradients", no_wrap=True)
    for heading in ("test\naccuracy", "test\nloss", "train\nloss", "bytes sent per\nrank and step", "ratio",
                    "ms per\nstep"):
        made.add_column(heading, justify="right", no_wrap=True)
    for front_end, alike in by_front_end(runs).items():
        made.add_row(front_end)  # A column of its own would make the table wider than 80 characters.
        for run in alike:
            last = run["epochs"][-1]
            made.add_row(f" {name_of(run)}", f"{last['test_accuracy']:.4f}", f"{last['test_loss']:.4f}",
                         f"{last['train_loss']:.4f}", f"{bytes_per_step(run):,.0f}",
                         f"{bytes_per_step(alike[0]) / bytes_per_step(run):.2f}",
                         f"{1000 * seconds_per_step(run):.1f}")
        made.add_section()
    return made


def draw(runs, path):
    """Training loss by epoch, and by what a rank had sent until then."""
    figure, (by_epoch, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    # Curves that often overlap: a kind of line for each front end, and a marker for each run, tell them apart without
    # colours.
    front_ends = list(by_front_end(runs))
    for run, marker in zip(runs, itertools.cycle("osD^vx")):
        epochs = [epoch["epoch"] for epoch in run["epochs"]]
        losses = [epoch["train_loss"] for epoch in run["epochs"]]
        sent, megabytes = 0.0, []
        for epoch in run["epochs"]:
            sent += epoch["bytes_sent_per_step"] * run["steps_per_epoch"] / 1e6
            megabytes.append(sent)
        style = dict(marker=marker, markersize=4, linestyle=LINES[front_ends.index(run["front_end"]) % len(LINES)])
        by_epoch.plot(epochs, losses, label=f"{run['front_end']}, {name_of(run)}", **style)
        by_bytes.plot(megabytes, losses, **style)
    by_epoch.set(xlabel="epoch", ylabel="training loss", yscale="log", title="Loss by epoch")
    by_bytes.set(xlabel="gradients sent by one rank (MB)", xscale="log", title="Loss by traffic")
    for axes in (by_epoch, by_bytes):
        axes.grid(alpha=0.3)
    by_epoch.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description="Compare runs of an example")
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN.json")
    parser.add_argument("--png", type=pathlib.Path, help="draw the loss curves into this file")
    args = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in args.runs]
    Console().print(table(runs))
    if args.png:
        draw(runs, args.png)
        print(f"loss curves: {args.png}")


if __name__ == "__main__":
    main()
