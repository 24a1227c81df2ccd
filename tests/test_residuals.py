"""The registry of residuals: one per name, in and out of checkpoints, nothing half loaded."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from hvd_twobit.errors import ResidualError
from hvd_twobit.residuals import ResidualRegistry


@pytest.fixture
def registry() -> ResidualRegistry:
    made = ResidualRegistry()
    made.declare("a", (2, 3))
    made.declare("b", ())
    made.residual("a", (2, 3))[:] = [3, 0, 0, 0, 0, 4]
    made.residual("b", ())[:] = -2
    return made


def test_a_residual_begins_at_zero_and_keeps_its_memory() -> None:
    registry = ResidualRegistry()
    first = registry.residual("w", (4, 5))
    assert first.dtype == np.float32 and first.shape == (20,) and not first.any()
    first[:] = 7
    assert registry.residual("w", (4, 5)) is first


def test_memory_is_taken_when_a_tensor_is_first_compressed() -> None:
    registry = ResidualRegistry()
    registry.declare("w", (1000,))
    assert registry.nbytes == 0 and len(registry) == 0 and "w" not in registry
    registry.residual("w", (1000,))
    assert registry.nbytes == 4000 and list(registry) == ["w"] and "w" in registry


def test_a_changed_shape_under_a_known_name_is_an_error(registry: ResidualRegistry) -> None:
    with pytest.raises(ResidualError, match=r"'a' has shape \(3, 2\), but its residual was kept for shape \(2, 3\)"):
        registry.residual("a", (3, 2))


def test_a_name_declared_twice_is_an_error(registry: ResidualRegistry) -> None:
    with pytest.raises(ResidualError, match="'a' is declared twice"):
        registry.declare("a", (2, 3))


def test_norms_are_euclidean(registry: ResidualRegistry) -> None:
    assert registry.norms() == {"a": 5.0, "b": 2.0}


def test_norms_do_not_overflow_float32() -> None:
    registry = ResidualRegistry()
    registry.residual("w", (4,))[:] = 1e38
    assert registry.norms()["w"] == pytest.approx(2e38)


def test_reset_forgets_residuals_and_shapes(registry: ResidualRegistry) -> None:
    registry.reset()
    assert len(registry) == 0 and registry.nbytes == 0
    assert not registry.residual("a", (3, 2)).any()


def test_scale_multiplies_every_residual(registry: ResidualRegistry) -> None:
    registry.scale(0.5)
    assert registry.norms() == {"a": 2.5, "b": 1.0}


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_refuses_a_factor_that_would_lose_the_residual(registry: ResidualRegistry, factor: float) -> None:
    with pytest.raises(ResidualError, match="not by"):
        registry.scale(factor)
    assert registry.norms() == {"a": 5.0, "b": 2.0}


def test_state_is_a_copy_in_the_tensors_shapes(registry: ResidualRegistry) -> None:
    state = registry.state_dict()
    registry.residual("a", (2, 3))[:] = 0
    assert state["residuals"]["a"].tolist() == [[3, 0, 0], [0, 0, 4]] and state["residuals"]["b"].shape == ()


def test_loading_a_state_brings_back_the_same_bits(registry: ResidualRegistry) -> None:
    state = registry.state_dict()
    other = ResidualRegistry()
    other.load_state_dict(state)
    assert other.residual("a", (2, 3)).tolist() == [3, 0, 0, 0, 0, 4]
    state["residuals"]["a"][:] = 9
    assert other.norms() == {"a": 5.0, "b": 2.0}


def test_a_state_survives_numpys_npz_as_readme_tells(registry: ResidualRegistry, tmp_path: pathlib.Path) -> None:
    np.savez(tmp_path / "residuals_0.npz", **registry.state_dict()["residuals"])
    other = ResidualRegistry()
    with np.load(tmp_path / "residuals_0.npz") as saved:
        other.load_state_dict({"format_version": 1, "residuals": dict(saved)})
    for name in registry:
        np.testing.assert_array_equal(other[name], registry[name])


def test_loading_replaces_everything(registry: ResidualRegistry) -> None:
    registry.load_state_dict({"format_version": 1, "residuals": {"b": np.float32(1)}})
    assert registry.norms() == {"b": 1.0}
    assert not registry.residual("a", (2, 3)).any()


@pytest.mark.parametrize("state, message", [
    ({}, "keys format_version and residuals"),
    (None, "not NoneType"),
    ({"format_version": 2, "residuals": {}}, "format version 2, this hvd_twobit reads version 1"),
    ({"format_version": 1, "residuals": {"b": np.float32(1), "c": np.zeros(2, np.float32)}}, "tensor 'c', which this"),
    ({"format_version": 1, "residuals": {"b": np.float32(1), "a": np.zeros(6, np.float32)}}, r"'a' has shape \(6,\)"),
    ({"format_version": 1, "residuals": {"b": np.float32(1), "a": np.zeros((2, 3))}}, "'a' has dtype float64"),
    ({"format_version": 1, "residuals": {"b": np.float32("nan")}}, "'b' has elements that are not finite"),
])
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(registry: ResidualRegistry, state: Any,
                                                                     message: str) -> None:
    with pytest.raises(ResidualError, match=message):
        registry.load_state_dict(state)
    assert registry.norms() == {"a": 5.0, "b": 2.0}
