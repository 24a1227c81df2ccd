"""Compares runs of an example: a table on the terminal and the loss curves as a PNG.

    python examples/report.py results/none.json results/fp16.json results/twobit.json --png results/loss.png

A run is what ``pytorch_digits.py --output`` writes. The first one is what the others are compared with.
"""

import argparse
import json
import pathlib
import statistics

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # Draws into a file: no display is needed.
import matplotlib.pyplot as plt  # noqa: E402


def name_of(run):
    arguments = run["arguments"]
    if arguments["twobit_allreduce"]:
        return f"TwoBit {arguments['twobit_threshold']}"
    return "fp16" if arguments["fp16_allreduce"] else "uncompressed"


def bytes_per_step(run):
    """Mean over the whole run of the gradient bytes that one rank sent per step."""
    return statistics.fmean(epoch["bytes_sent_per_step"] for epoch in run["epochs"])


def seconds_per_step(run):
    """Median of the epochs' medians; the first epoch, in which kernels are compiled, weighs no more than another."""
    return statistics.median(epoch["seconds_per_step"] for epoch in run["epochs"])


def table(runs):
    first = runs[0]
    made = Table(title=f"{first['ranks']} ranks, {first['parameters']:,} parameters, {len(first['epochs'])} epochs "
                       f"of {first['steps_per_epoch']} steps")
    made.add_column("gradients", no_wrap=True)
    for heading in ("test\naccuracy", "test\nloss", "train\nloss", "bytes sent per\nrank and step", "ratio",
                    "ms per\nstep"):
        made.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        last = run["epochs"][-1]
        made.add_row(name_of(run), f"{last['test_accuracy']:.4f}", f"{last['test_loss']:.4f}",
                     f"{last['train_loss']:.4f}", f"{bytes_per_step(run):,.0f}",
                     f"{bytes_per_step(first) / bytes_per_step(run):.2f}", f"{1000 * seconds_per_step(run):.1f}")
    return made


def draw(runs, path):
    """Training loss by epoch, and by what a rank had sent until then."""
    figure, (by_epoch, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    # Three curves that often overlap: a marker each tells them apart without colours.
    for run, marker in zip(runs, "osD^vx"):
        epochs = [epoch["epoch"] for epoch in run["epochs"]]
        losses = [epoch["train_loss"] for epoch in run["epochs"]]
        sent, megabytes = 0.0, []
        for epoch in run["epochs"]:
            sent += epoch["bytes_sent_per_step"] * run["steps_per_epoch"] / 1e6
            megabytes.append(sent)
        by_epoch.plot(epochs, losses, marker=marker, markersize=4, label=name_of(run))
        by_bytes.plot(megabytes, losses, marker=marker, markersize=4, label=name_of(run))
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
