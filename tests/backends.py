"""The kernel backends that there are, for tests that compare each of them with the definition.

Tests of what holds for every backend, the definition included, ask for the fixture ``backend`` (conftest.py).
"""

from __future__ import annotations

import pytest

from hvd_twobit import kernels

DEFINITION = kernels.load("numpy")

OTHERS = [name for name in kernels.BACKENDS if kernels.load(name) is not DEFINITION]

compared_with_the_definition = pytest.mark.parametrize("compared", [kernels.load(name) for name in OTHERS], ids=OTHERS)
"""Calls a test with the module of every backend but the definition."""
