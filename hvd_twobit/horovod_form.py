"""Is the installed Horovod one whose internals the front ends know? Checked at import, not found out in training.

Each front end's ``hook`` lists the functions of Horovod that it replaces or relies on; here they are compared, and
replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .errors import UnsupportedHorovodError

SUPPORTED_HOROVOD = ("0.28.1",)


@dataclasses.dataclass(frozen=True)
class Expected:
    """One function of Horovod as it is in every supported version.

    Attributes:
        owner: the class or module that has it.
        function: its name there.
        parameters: names of its parameters.
        uses: names or strings that its code, or the code of functions and classes within it, has to mention.
    """

    owner: Any
    function: str
    parameters: Sequence[str]
    uses: Sequence[str] = ()


def check_version(version: str) -> None:
    """Raise UnsupportedHorovodError unless the version is supported."""
    if version not in SUPPORTED_HOROVOD:
        raise UnsupportedHorovodError(f"Horovod {version} is installed, hvd_twobit supports {_supported()}: "
                                      f"install horovod=={SUPPORTED_HOROVOD[-1]}")


def check_form(version: str, functions: Iterable[Expected]) -> None:
    """Raise UnsupportedHorovodError unless the version is supported and the functions have the expected form."""
    check_version(version)
    for expected in functions:
        function = inspect.unwrap(getattr(expected.owner, expected.function, None) or object)
        found = list(inspect.signature(function).parameters)
        mentioned = set(_mentioned(function.__code__)) if inspect.isfunction(function) else set()
        missing = [name for name in expected.uses if name not in mentioned]
        if found != list(expected.parameters) or missing:
            raise UnsupportedHorovodError(
                f"Horovod {version} is installed, but its {expected.owner.__name__}.{expected.function} is not that of "
                f"a released {_supported()}: parameters {found}, expected {list(expected.parameters)}"
                + (f"; attributes {', '.join(missing)} not found" if missing else "")
                + ". Another package may have patched it: import hvd_twobit first, or install a released Horovod")


def replace(owner: Any, name: str, function: Any) -> None:
    """Put ``function(original, ...)`` in the place of a function or method; it gets what the original would get."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)


def arguments(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What a call gives a function, by the names of its parameters, defaults included."""
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _mentioned(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentioned(constant)
        elif isinstance(constant, str):
            yield constant


def _supported() -> str:
    return "Horovod " + " to ".join(dict.fromkeys((SUPPORTED_HOROVOD[0], SUPPORTED_HOROVOD[-1])))
