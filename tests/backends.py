"""The kernel backends that there are, for tests that compare each of them with the definition.

Tests of what holds for every backend, the definition included, ask for the fixture ``backend`` (conftest.py).

The Triton backend is among them where Triton and PyTorch are installed. Its kernels take tensors, so that tests which
have arrays reach it through ``_OnTensors``; and they are run by Triton's interpreter, which needs no GPU, on the memory
of these arrays. Triton asks for TRITON_INTERPRET when a kernel is defined, also for functions of its own library. So
the variable is set here while Triton and the backend are imported, and neither before nor after: other processes that
tests start do not inherit it. Whatever else imports Triton in pytest's process has to do so behind this file, which
conftest.py sees to.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from hvd_twobit import kernels
from hvd_twobit.kernels import Quantizer

DEFINITION = kernels.load("numpy")

ON_ARRAYS = [name for name in kernels.BACKENDS if name != "triton"]
"""Backends whose kernels take arrays."""

_SWAPPED = {"int32": "uint32", "uint32": "int32"}

_INTERPRETED_ELEMENTS = 1200  # The interpreter takes a third of a second for ten times as many.


class _OnTensors:
    """A backend whose kernels take tensors, for callers with arrays: tensors have their memory.

    The interface's uint32 are int32 there; and int32, which no array may be, is made uint32, and refused as that.
    """

    def __init__(self, backend: types.ModuleType) -> None:
        import torch
        self._torch, self._backend = torch, backend

    def _tensor(self, array: np.ndarray) -> Any:
        if array.dtype.byteorder == ">":
            raise ValueError(f"residual is {array.dtype}, which no tensor can be")
        if min(array.strides, default=0) < 0:
            raise ValueError("the rows of packed must be in order of their addresses: no tensor can be otherwise")
        array = array.view(_SWAPPED.get(array.dtype.name, array.dtype))
        if not array.flags.writeable or not array.flags.aligned:  # It is only read.
            array = array.copy()
        return self._torch.from_numpy(array)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        def converted(argument: Any) -> Any:
            if isinstance(argument, np.ndarray):
                return self._tensor(argument)
            if isinstance(argument, Quantizer):
                return Quantizer(argument.block_elements, *(
                    self._tensor(getattr(argument, field.name)) for field in dataclasses.fields(argument)[1:]))
            return argument

        try:
            with np.errstate(over="ignore", invalid="ignore"):
                return getattr(self._backend, name)(*map(converted, arguments),
                                                    **{key: converted(value) for key, value in named.items()})
        except ValueError as error:
            raise ValueError(re.sub(r"\bu?int32\b", lambda found: _SWAPPED[found[0]], str(error))) from error

    def quantize_pack(self, *arguments: Any, **named: Any) -> tuple[np.ndarray, np.ndarray]:
        selected_sum, selected_count = self._call("quantize_pack", *arguments, **named)
        return selected_sum.numpy(), selected_count.numpy().view(np.uint32)

    def pack_tallies(self, *arguments: Any, **named: Any) -> bool:
        return bool(self._call("pack_tallies", *arguments, **named))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **named: self._call(name, *arguments, **named)


def _interpreted() -> types.ModuleType | None:
    """The Triton backend, run by the interpreter; None where it cannot be imported."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
        return None
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        importlib.import_module("triton.experimental.gluon")  # Triton does so at the first launch.
        return kernels.load("triton")
    finally:
        del os.environ["TRITON_INTERPRET"]


TRITON = _interpreted()
"""The Triton backend itself, which takes tensors; or None."""

BACKENDS: dict[str, Any] = {name: kernels.load(name) for name in ON_ARRAYS}
"""All backends that can be imported here, by name, for arrays."""

if TRITON is not None:
    BACKENDS["triton"] = _OnTensors(TRITON)

OTHERS = [name for name in BACKENDS if BACKENDS[name] is not DEFINITION]

compared_with_the_definition = pytest.mark.parametrize("compared", [BACKENDS[name] for name in OTHERS], ids=OTHERS)
"""Calls a test with every backend but the definition."""


def few(backend: Any, items: Sequence[Any]) -> Sequence[Any]:
    """All items, but for Triton's interpreter, which is slow, the first two."""
    return items[:2] if backend is BACKENDS.get("triton") else items


def holds_for(names: list[str], examples: int, interpreted_examples: int, **strategies: Any) -> Callable[..., Any]:
    """Make a test of properties, whose first argument is a backend, one for each of the backends.

    Args:
        names: of backends.
        examples: how many are tried.
        interpreted_examples: how many are tried by Triton's interpreter, with fewer elements.
        strategies: of all other arguments.
    """
    def decorate(test: Callable[..., None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("name", names)
        def parametrized(name: str) -> None:
            drawn = dict(strategies)
            if name == "triton":
                drawn["elements"] = strategies["elements"].map(lambda elements: elements % _INTERPRETED_ELEMENTS)

            @settings(deadline=None, max_examples=interpreted_examples if name == "triton" else examples)
            @given(**drawn)
            def with_backend(**arguments: Any) -> None:
                test(BACKENDS[name], **arguments)

            with_backend()

        parametrized.__name__, parametrized.__doc__ = test.__name__, test.__doc__
        return parametrized

    return decorate
