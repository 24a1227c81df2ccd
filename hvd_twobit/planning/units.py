"""Quantities on the command line: bandwidths, latencies and large counts, with the units that people write.

A library of units would bring hundreds of units and a second of start-up for the six that are needed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal

import click

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"


class Quantity(click.ParamType):
    """A number and a unit, as one float in the base unit.

    Args:
        name: in help and messages.
        units: the base unit's multiple for each unit, decimal; upper and lower case are the same.
        example: a valid value, for messages.
        suffix: what may follow the unit.
        zero: whether zero is a value.
    """

    def __init__(self, name: str, units: Mapping[str, str], example: str, suffix: str = "", zero: bool = False) -> None:
        self.name = name
        self._units = {unit.lower(): Decimal(factor) for unit, factor in units.items()}
        self._suffix = suffix
        self._forms = f"write a number and one of {', '.join(units)}, such as {example}"
        self._zero = zero

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(_NUMBER + r"\s*([a-z]+)", str(value).strip().lower().removesuffix(self._suffix))
        factor = self._units.get(found[2]) if found else None
        if found is None or factor is None:
            self.fail(f"{value!r} is no {self.name}: {self._forms}", param, ctx)
        number = float(Decimal(found[1]) * factor)
        if not math.isfinite(number) or not (number > 0 or self._zero):
            self.fail(f"a {self.name} of {value!r} is out of range: {self._forms}", param, ctx)
        return number


class Count(click.ParamType):
    """A whole number of 1 or more, also as ``25.6e6``."""

    name = "count"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = float(str(value))
            whole = int(number)
        except (ValueError, OverflowError):
            whole = 0
        if whole < 1 or whole != number:
            self.fail(f"{value!r} is no number of parameters: write a whole number of 1 or more, such as 25600000 or "
                      "25.6e6", param, ctx)
        return whole


BANDWIDTH = Quantity("bandwidth", {"kbit": "1e3", "Mbit": "1e6", "Gbit": "1e9"}, "10Gbit", suffix="/s")
"""In bit/s."""

LATENCY = Quantity("latency", {"us": "1e-6", "ms": "1e-3", "s": "1"}, "50us", zero=True)
"""In seconds."""


def bandwidth_text(bits_per_second: float) -> str:
    """Three digits and a unit: ``"2.5 Gbit/s"``."""
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_second >= 0.9995 * factor:
            return f"{bits_per_second / factor:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"


def latency_text(seconds: float) -> str:
    """Three digits and a unit: ``"50 us"``."""
    return f"{1e6 * seconds:.3g} us" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"
