"""Programs that the tests run on real ranks; see ``tests.launcher``."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def told_by(scenarios: Iterable[Callable[[], None]]) -> dict[str, str]:
    """Run functions that should fail: type and message of the error of each, by its name."""
    told = {}
    for scenario in scenarios:
        try:
            scenario()
            told[scenario.__name__] = "no error"
        except Exception as error:
            told[scenario.__name__] = f"{type(error).__name__}: {error}"
    return told
