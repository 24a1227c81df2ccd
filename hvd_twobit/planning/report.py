"""Prints predictions as a table or as JSON, and draws them against the number of workers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..cost_model import (
    AUTO,
    DEFAULT_BUCKET_CAP_MB,
    DEFAULT_LINK,
    HIERARCHICAL,
    TRANSPORTS,
    UNCOMPRESSED,
    Cost,
    Link,
)
from ..errors import ConfigError
from .forecast import ALWAYS, HIGHEST_BITS, LOWEST_BITS, Scenario, break_even, choices, costs
from .models import MODELS
from .units import bandwidth_text, latency_text

PLOTTED_WORKERS = tuple(2**power for power in range(1, 11))


def run(parameters: int | None, model: str | None, workers: int, bits_per_second: float, latency_s: float,
        bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB, as_json: bool = False, plot: pathlib.Path | None = None,
        ranks_per_machine: int = 1) -> None:
    """Predict and print.

    Args:
        parameters: of the model; None where ``model`` names it.
        model: one of ``MODELS``, or None.
        workers: number of ranks.
        bits_per_second: of a rank's link.
        latency_s: of the network, in seconds.
        bucket_cap_mb: most MiB of float32 gradient in a bucket of TwoBit.
        as_json: print JSON instead of a table.
        plot: where to draw exchange times against numbers of workers.
        ranks_per_machine: how many ranks share a machine and its link.

    Raises:
        click.UsageError: a value cannot be used.
        click.ClickException: the chart cannot be drawn or written.
    """
    facts: dict[str, Any] = {"model": model, "parameters": parameters}
    if model is not None:
        facts = {"model": model, **dataclasses.asdict(MODELS[model])}
    try:
        scenario = Scenario(facts["parameters"], workers, Link(bits_per_second, latency_s), bucket_cap_mb,
                            ranks_per_machine)
        predicted = costs(scenario)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    break_evens = {baseline: break_even(scenario, baseline) for baseline in UNCOMPRESSED}
    if plot is not None:
        draw(scenario, plot)
    if as_json:
        print(json.dumps({**facts, "workers": workers, "ranks_per_machine": ranks_per_machine,
                          "link": dataclasses.asdict(scenario.link), "bucket_cap_mb": bucket_cap_mb,
                          "methods": [_with_ratios(one, predicted) for one in predicted.values()],
                          "break_even_bits_per_second": break_evens,
                          "auto_from_elements": _by_size(workers, DEFAULT_LINK),
                          "fastest_from_elements": _by_size(workers, scenario.link)}))
        return
    _print_table(facts, scenario, predicted, break_evens)
    if plot is not None:
        Console().print(f"written: {plot}", soft_wrap=True)


def _with_ratios(one: Cost, predicted: dict[str, Cost]) -> dict[str, Any]:
    return {**dataclasses.asdict(one),
            **{f"times_faster_than_{baseline}": predicted[baseline].seconds / one.seconds for baseline in UNCOMPRESSED}}


def label(method: str, transports: tuple[str, ...] = ()) -> str:
    """How a method is called in tables and charts."""
    if method in UNCOMPRESSED:
        return method
    named = "two levels" if method == HIERARCHICAL else method
    return f"2-bit {named}" + (f" ({', '.join(transports)})" if method in (AUTO, HIERARCHICAL) and transports else "")


def _print_table(facts: dict[str, Any], scenario: Scenario, predicted: dict[str, Cost],
                 break_evens: dict[str, float | str]) -> None:
    named = f"{facts['model']}, {facts['tensors']} tensors, " if facts["model"] else ""
    link = f"{bandwidth_text(scenario.link.bits_per_second)}, {latency_text(scenario.link.latency_s)}"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in ("pieces", "MB received", "exchange ms", "x fp32", "x fp16"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method, one in predicted.items():
        table.add_row(label(method, one.transports), str(one.buckets), f"{one.nbytes / 1e6:,.1f}",
                      f"{1e3 * one.seconds:,.1f}",
                      *(f"{predicted[baseline].seconds / one.seconds:.2f}" for baseline in UNCOMPRESSED))
    console = Console()
    per_machine = f" on machines of {scenario.ranks_per_machine}" if scenario.ranks_per_machine > 1 else ""
    console.print(f"{named}{scenario.parameters:,} parameters; {scenario.workers} workers{per_machine}, {link}\n",
                  soft_wrap=True, highlight=False)
    console.print(table)
    best = min([method for method in predicted if method in (*TRANSPORTS, HIERARCHICAL)],
               key=lambda method: predicted[method].seconds)
    console.print()
    for text in (f"Fastest here: {label(best)}.",
                 _auto_sentence(scenario.workers),
                 *(_pays_sentence(baseline, until) for baseline, until in break_evens.items()),
                 f"x fp32, x fp16: times as fast. Per step and {'machine' if per_machine else 'rank'}; predicted by "
                 "hvd_twobit.cost_model, not measured; what every step costs beside is left out, so measure small "
                 "models."):
        console.print(text, soft_wrap=True, highlight=False)


def _by_size(workers: int, link: Link) -> list[dict[str, Any]]:
    return [{"elements": elements, "transport": transport} for elements, transport in choices(workers, link)]


def _auto_sentence(workers: int) -> str:
    (_, first), *others = choices(workers, DEFAULT_LINK)
    larger = (f"{transport} from {elements:,} elements on" for elements, transport in others)
    return f"auto: {', '.join([f'{first} for a small bucket', *larger])}."


def _pays_sentence(baseline: str, until: float | str) -> str:
    if isinstance(until, float):
        return f"2-bit pays against {baseline} up to {bandwidth_text(until)} at least, where TCP takes no time."
    if until == ALWAYS:
        return f"2-bit pays against {baseline} at {bandwidth_text(HIGHEST_BITS)} still."
    return (f"2-bit does not pay against {baseline} at any bandwidth from {bandwidth_text(LOWEST_BITS)} to "
            f"{bandwidth_text(HIGHEST_BITS)}.")


def draw(scenario: Scenario, path: pathlib.Path) -> None:
    """Draw exchange times against numbers of workers from 2 to 1024, both axes logarithmic.

    Raises:
        click.ClickException: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="workers", ylabel="predicted exchange time, ms",
                              title=f"{scenario.parameters:,} parameters, "
                                    f"{bandwidth_text(scenario.link.bits_per_second)}, "
                                    f"{latency_text(scenario.link.latency_s)}")
    plotted = [scenario.ranks_per_machine * workers for workers in PLOTTED_WORKERS
               if scenario.ranks_per_machine * workers <= PLOTTED_WORKERS[-1]]
    for method in scenario.methods:
        linestyle, width = ("--", 3.0) if method == AUTO else ("-", 1.5)
        axes.plot(plotted, [1e3 * dataclasses.replace(scenario, workers=workers).cost(method).seconds
                            for workers in plotted], label=label(method), linestyle=linestyle, linewidth=width)
    axes.set_xticks(plotted, [str(workers) for workers in plotted], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: no such file format
        raise click.ClickException(f"cannot write {path}: {error}") from error
