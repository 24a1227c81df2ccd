"""Predictions for one model and one cluster: costs of all methods, and where compression stops to pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..cost_model import DEFAULT_PROCESSOR, HIERARCHICAL, METHODS, TRANSPORTS, Cost, Link, Processor, choose, cost

ALWAYS = "always"
NEVER = "never"
LOWEST_BITS = 10**6
HIGHEST_BITS = 10**11
"""Between these bandwidths a break-even is looked for, in bit/s."""

_STEPS = 100
"""Bandwidths that are tried, evenly in their logarithm, before a break-even is looked for between two of them."""

_LARGEST_BUCKET = 2**40
_FREE_TCP = dataclasses.replace(DEFAULT_PROCESSOR, tcp_s=0.0)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is exchanged, between how many ranks, over what.

    Attributes:
        parameters: float32 elements of the gradient.
        workers: number of ranks.
        link: the network between them.
        bucket_cap_mb: most MiB of float32 gradient in a bucket.
        ranks_per_machine: how many ranks share a machine and its link.
    """

    parameters: int
    workers: int
    link: Link
    bucket_cap_mb: float
    ranks_per_machine: int = 1

    @property
    def methods(self) -> tuple[str, ...]:
        """What is compared: two levels only where they make a difference."""
        return METHODS if self.ranks_per_machine == 1 else (*METHODS, HIERARCHICAL)

    def cost(self, method: str, processor: Processor = DEFAULT_PROCESSOR) -> Cost:
        """What an exchange with ``method`` costs; ConfigError where an argument cannot be used."""
        return cost(method, self.parameters, self.workers, ranks_per_machine=self.ranks_per_machine, link=self.link,
                    bucket_cap_mb=self.bucket_cap_mb, processor=processor)

    def at(self, bits_per_second: float) -> Scenario:
        """The same with another bandwidth."""
        return dataclasses.replace(self, link=dataclasses.replace(self.link, bits_per_second=bits_per_second))


def costs(scenario: Scenario) -> dict[str, Cost]:
    """By method, in their order.

    Raises:
        ConfigError: an argument of the scenario cannot be used.
    """
    return {method: scenario.cost(method) for method in scenario.methods}


def break_even(scenario: Scenario, baseline: str) -> float | str:
    """The bandwidth, in bit/s, from which on the best transport of TwoBit is no faster than ``baseline``.

    Above it, compression takes longer than it saves. It is taken for granted that TCP needs no time of the processor,
    which would slow down what sends more: so this errs on the side of ``baseline``.

    ``ALWAYS``: compression pays at 100 Gbit/s still; ``NEVER``: nowhere from 1 Mbit/s on.
    """
    def pays(bits_per_second: float) -> bool:
        there = scenario.at(bits_per_second)
        ways = [method for method in scenario.methods if method in (*TRANSPORTS, HIERARCHICAL)]
        return (min(there.cost(way, _FREE_TCP).seconds for way in ways)
                < there.cost(baseline, _FREE_TCP).seconds)

    if pays(HIGHEST_BITS):
        return ALWAYS
    # From above, as there may be several crossings: overlap makes costs piecewise linear in the time of a bit.
    for step in reversed(range(_STEPS)):
        below, above = (round(LOWEST_BITS * (HIGHEST_BITS / LOWEST_BITS) ** (end / _STEPS)) for end in (step, step + 1))
        if pays(below):
            return float(_first_false(pays, below, above))
    return NEVER


def choices(workers: int, link: Link) -> list[tuple[int, str]]:
    """From how many elements of a bucket on ``choose`` takes which transport, for sizes from 1 element on.

    Sizes are tried in steps of a twentieth; a transport that is chosen for a narrower range only is left out.
    """
    found = [(1, choose(1, workers, link=link))]
    size = 1
    while size < _LARGEST_BUCKET:
        larger = min(size + size // 20 + 1, _LARGEST_BUCKET)
        chosen = choose(larger, workers, link=link)
        if chosen != found[-1][1]:
            start = _first_false(lambda elements: choose(elements, workers, link=link) == found[-1][1], size, larger)
            found.append((start, choose(start, workers, link=link)))
        size = larger
    return found


def _first_false(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Where ``holds`` becomes false, by bisection; it is true at ``low`` and false at ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high
