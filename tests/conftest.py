"""Fixtures that several files of tests share."""

from __future__ import annotations

import types

import pytest

from hvd_twobit import kernels
from hvd_twobit.residuals import ResidualRegistry


@pytest.fixture
def registry() -> ResidualRegistry:
    """A registry of two tensors with residuals whose norms are 5 and 2."""
    made = ResidualRegistry()
    made.declare("a", (2, 3))
    made.declare("b", ())
    made.residual("a", (2, 3))[:] = [3, 0, 0, 0, 0, 4]
    made.residual("b", ())[:] = -2
    return made


@pytest.fixture(params=list(kernels.BACKENDS))
def backend(request: pytest.FixtureRequest) -> types.ModuleType:
    """The module of each kernel backend in turn."""
    return kernels.load(request.param)
