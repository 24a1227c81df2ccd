"""Fixtures that several files of tests share."""

from __future__ import annotations

import types

import pytest

from hvd_twobit.residuals import ResidualRegistry

from .backends import BACKENDS


@pytest.fixture
def registry() -> ResidualRegistry:
    """A registry of two tensors with residuals whose norms are 5 and 2."""
    made = ResidualRegistry()
    made.declare("a", (2, 3))
    made.declare("b", ())
    made.residual("a", (2, 3))[:] = [3, 0, 0, 0, 0, 4]
    made.residual("b", ())[:] = -2
    return made


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> types.ModuleType:
    """Each kernel backend in turn."""
    return BACKENDS[request.param]
