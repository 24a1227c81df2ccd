"""Measurements that ``hvd-twobit bench`` makes, one module for each command; here is what they share."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def machine_facts() -> dict[str, str | int | float]:
    """What a reader must know to compare a measurement with another: processor, load, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
    }


def require(*modules: str) -> None:
    """Raise click.ClickException unless the modules are installed; nothing is imported."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise click.ClickException(f"not installed: {', '.join(missing)}; `hvd-twobit check` tells what to install")


def progress_bar(quiet: bool) -> Progress:
    """A bar on standard error that vanishes when it is done; shown on terminals only, and never if ``quiet``."""
    console = Console(stderr=True)
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                    console=console, transient=True, disable=quiet or not console.is_terminal)


def _cpu_model() -> str:
    """The processor's name as Linux tells it, or as much as Python knows of it elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
