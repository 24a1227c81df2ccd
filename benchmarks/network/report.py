"""The report: a page of Markdown with a table for each rate and model, and a chart for each model."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence

from hvd_twobit.bench.methods import BASELINES, METHODS
from hvd_twobit.bench.rounds import Summary

from .cluster import QUEUE_MS, bits_per_second
from .cost import PACKET_SHARE, Prediction, predict
from .results import Entry

NEAR_PERCENT = 25
"""Where time is at most so far above what the link must take, the link is what limits."""
BYTES_PERCENT = 3
"""So far may bytes on the interface be from the formula, before the page says so."""


def write(entries: Sequence[Entry], page: pathlib.Path) -> list[pathlib.Path]:
    """Write page and charts; what was written.

    Args:
        entries: what was measured.
        page: the page of Markdown; charts lie beside it, and are named after it and the model.

    Raises:
        ValueError: nothing was measured.
    """
    if not entries:
        raise ValueError("there are no results to report")
    ordered = sorted(entries, key=lambda entry: (
        entry.model, bits_per_second(entry.rate) or float("inf"), entry.ranks_per_machine, entry.ranks))
    page.parent.mkdir(parents=True, exist_ok=True)
    charts = {model: page.with_name(f"{page.stem}_{model.replace(':', '_')}.png") for model in _distinct(
        entry.model for entry in ordered)}
    for model, path in charts.items():
        draw([entry for entry in ordered if entry.model == model], path)
    page.write_text(markdown(ordered, {model: path.name for model, path in charts.items()}))
    return [page, *charts.values()]


def markdown(entries: Sequence[Entry], charts: dict[str, str]) -> str:
    """The page.

    Args:
        entries: in the order in which they are to appear.
        charts: file names of the charts, by model.
    """
    parts = [_INTRODUCTION.format(near=NEAR_PERCENT, queue=QUEUE_MS, share=100 * (1 - PACKET_SHARE)),
             _conditions(entries), "## What falls short", *(_shortfalls(entries) or ["Nothing."])]
    for model, chart in charts.items():
        of_model = [entry for entry in entries if entry.model == model]
        sizes = of_model[0].elements
        tensors = "one tensor" if len(sizes) == 1 else f"{len(sizes)} tensors"
        parts += [f"## {model}: {tensors}, {sum(sizes):,} elements", f"![Time of an exchange]({chart})"]
        for rate in _distinct(entry.rate for entry in of_model):
            parts += [f"### {model}, {rate}", _table([entry for entry in of_model if entry.rate == rate])]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
# Benchmarks over a network

    make bench-network          # as root; writes this page

Written by `benchmarks/network`; no figure was entered by hand. Ranks are processes under `horovodrun --gloo`. Each
machine is a network namespace, whose link to a switch carries the bandwidth of the table in each direction (`tc tbf`,
queue of {queue} ms); there is one rank on each, unless the table tells of machines with several. An **exchange** is
what `hvd.DistributedOptimizer` does with the gradients of a step, from the first hook of backward() to the end of
synchronize(), compression included; gradients are constant, standard normal, another set on each rank, and computing
them is no part of it. Methods take turns within a round. Before, ranks compared
what they had received with each method: equal in every bit.

- **time** is that of the slowest rank; median over rounds, with the fastest and the slowest round.
- **/ fp32** and **/ fp16**: median of the ratios within a round; below 1 is faster.
- **sent**: bytes that left a machine's interface, median over ranks and rounds, negotiation and headers included.
- **formula**: bytes of the method's formula ([design](design.md)), and how far what was sent is from it.
- **link time**: what the link must take for the formula's bytes, if there were neither latency nor computing, when
  headers take {share:.1f} % of its bandwidth; and how far time is from it. Within {near} %, the link is what limits."""


def _conditions(entries: Sequence[Entry]) -> str:
    """What a reader must know of the machine."""
    facts = {name: _distinct(f"{entry.machine[name]}" for entry in entries) for name in entries[0].machine
             if name != "load_average"}
    loads = [entry.machine["load_average"] for entry in entries]
    cores = min(entry.machine["cores"] for entry in entries)
    rounds = _distinct(f"{len(entry.rounds)}" for entry in entries)
    lines = [f"- {name}: {', '.join(values)}" for name, values in facts.items()]
    lines += [f"- load average when a measurement began: {min(loads):.2f} to {max(loads):.2f} (the job's own ranks "
              "count)", f"- rounds: {', '.join(rounds)}"]
    most = max(entry.ranks for entry in entries)
    if most > cores:
        lines.append(f"- **Up to {most} ranks share {cores} cores.** They compress, add and copy at the expense of "
                     "one another: where the link does not limit, every method takes longer than on machines of their "
                     "own.")
    return "\n".join(["## Machine\n", *lines])


def _table(entries: Sequence[Entry]) -> str:
    rows = [("ranks", "gradients", "time, ms", "fastest-slowest", "/ fp32", "/ fp16", "sent, MB", "formula, MB",
             "off, %", "link time, ms", "off, %"), ("--:", ":--", *["--:"] * 9)]
    for entry in entries:
        for method, summary in entry.summaries().items():
            rows.append((entry.layout.replace(" ranks", ""), METHODS[method].label,
                         *_cells(summary, _prediction(entry, method))))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(summary: Summary, predicted: Prediction) -> list[str]:
    link = ["-", "-"]
    if predicted.seconds is not None:
        link = [_milliseconds(predicted.seconds), f"{_percent_off(summary.seconds, predicted.seconds):+.0f}"]
    return [_milliseconds(summary.seconds), f"{_milliseconds(summary.fastest)}-{_milliseconds(summary.slowest)}",
            f"{summary.to_fp32:.2f}", f"{summary.to_fp16:.2f}", f"{summary.sent / 1e6:.3f}",
            f"{predicted.nbytes / 1e6:.3f}", f"{_percent_off(summary.sent, predicted.nbytes):+.1f}", *link]


def _shortfalls(entries: Sequence[Entry]) -> list[str]:
    """What is not as one would want it: a list for each complaint."""
    def lines(complains: Callable[[Entry, str, Summary], str | None]) -> list[str]:
        found: dict[tuple[str, str, str], list[str]] = {}
        for entry in entries:
            for method, summary in entry.summaries().items():
                if complaint := complains(entry, method, summary):
                    found.setdefault((METHODS[method].label, entry.model, entry.rate), []).append(
                        f"{complaint} with {entry.layout}")
        return [f"- {', '.join(where)}: {'; '.join(what)}" for where, what in found.items()]

    def slower(entry: Entry, method: str, summary: Summary) -> str | None:
        worse = [f"{ratio:.2f} of {METHODS[baseline].label}'s" for baseline, ratio in (
            ("none", summary.to_fp32), ("fp16", summary.to_fp16)) if ratio >= 1]
        return " and ".join(worse) if worse and method not in BASELINES else None

    def other_bytes(entry: Entry, method: str, summary: Summary) -> str | None:
        off = _percent_off(summary.sent, _prediction(entry, method).nbytes)
        return f"{off:+.1f} %" if abs(off) > BYTES_PERCENT else None

    parts = []
    for heading, complaints in (
            ("Two bits take as long as uncompressed gradients or longer, as a part of their time:", lines(slower)),
            (f"Time is more than {NEAR_PERCENT} % above the link's:", _far_from_link(entries)),
            (f"Bytes are more than {BYTES_PERCENT} % off the formula:", lines(other_bytes))):
        if complaints:
            parts += [heading, "\n".join(complaints)]
    return parts


def _far_from_link(entries: Sequence[Entry]) -> list[str]:
    """A line for each model and rate at which times are far above the link's: how many, and the worst."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for entry in entries:
        for method, summary in entry.summaries().items():
            predicted = _prediction(entry, method).seconds
            if predicted is not None:
                found.setdefault((entry.model, entry.rate), []).append(
                    (_percent_off(summary.seconds, predicted), f"{METHODS[method].label} with {entry.layout}"))
    lines = []
    for where, times in found.items():
        far = [off for off, _ in times if off > NEAR_PERCENT]
        if far:
            most, of = max(times)
            lines.append(f"- {', '.join(where)}: {len(far)} of {len(times)} times, at most {most:+.0f} % ({of})")
    return lines


def draw(entries: Sequence[Entry], path: pathlib.Path) -> None:
    """Time of an exchange with one model: a panel for each number of ranks, a bar for each method and rate."""
    import matplotlib
    matplotlib.use("Agg")  # Draws into a file: no display is needed.
    import matplotlib.pyplot as plt
    layouts = _distinct(entry.layout for entry in sorted(entries, key=lambda entry: (entry.ranks_per_machine,
                                                                                    entry.ranks)))
    rates = _distinct(entry.rate for entry in entries)
    methods = [method for method in METHODS if any(method in entry.rounds[0] for entry in entries)]
    width = 0.85 / len(methods)
    figure, panels = plt.subplots(1, len(layouts), figsize=(1 + 4 * len(layouts), 4), layout="constrained", sharey=True,
                                  squeeze=False)
    for layout, axes in zip(layouts, panels[0]):
        for number, method in enumerate(methods):
            bars = [(rates.index(entry.rate) + (number - (len(methods) - 1) / 2) * width, entry.summaries()[method],
                     _prediction(entry, method).seconds)
                    for entry in entries if entry.layout == layout and method in entry.rounds[0]]
            medians = [summary.seconds for _, summary, _ in bars]
            axes.bar([place for place, _, _ in bars], medians, width, color=f"C{number}", label=METHODS[method].label,
                     yerr=[[summary.seconds - summary.fastest for _, summary, _ in bars],
                           [summary.slowest - summary.seconds for _, summary, _ in bars]],
                     error_kw={"elinewidth": 0.8, "ecolor": "0.3"})
            known = [(place, seconds) for place, _, seconds in bars if seconds is not None]
            axes.hlines([seconds for _, seconds in known], [place - width / 2 for place, _ in known],
                        [place + width / 2 for place, _ in known], color="k", linewidth=1.5)
        axes.set(title=layout, yscale="log", xticks=range(len(rates)), xticklabels=rates)
        axes.grid(alpha=0.3, axis="y", which="both")
        axes.set_axisbelow(True)
    panels[0, 0].set_ylabel("seconds per exchange")
    panels[0, -1].legend(fontsize=8)
    figure.suptitle(f"{entries[0].model}: median, fastest and slowest; black: what the link must take", fontsize=10)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _prediction(entry: Entry, method: str) -> Prediction:
    return predict(method, entry.elements, entry.ranks, bits_per_second(entry.rate), entry.ranks_per_machine)


def _percent_off(measured: float, predicted: float) -> float:
    return 100 * (measured / predicted - 1)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
