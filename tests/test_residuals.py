"""The registry of residuals: one per name, in and out of states, nothing half loaded. Files: test_checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_twobit.errors import ResidualError
from hvd_twobit.residuals import ResidualRegistry


def state_of(residuals: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A state of the tensors of ``registry``, or as ``others`` say."""
    return {"format_version": 1, "shapes": {"a": (2, 3), "b": ()}, "residuals": residuals, "levels": {},
            "uncompressed_steps": {}, **others}


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


def test_levels_counters_and_loss_scale_are_part_of_the_state(registry: ResidualRegistry) -> None:
    registry.tensor("a", (2, 3)).levels = np.array([0.5, 2], np.float32)
    registry.tensor("a", (2, 3)).uncompressed_steps = 3
    registry.follow_loss_scale(4.0)
    other = ResidualRegistry()
    other.load_state_dict(registry.state_dict())
    assert other.tensor("a", (2, 3)).levels.tolist() == [2, 8] and other.tensor("a", (2, 3)).uncompressed_steps == 3
    assert other.loss_scale == 4.0 and other.norms() == {"a": 20.0, "b": 8.0}


def test_forgetting_levels_keeps_residuals(registry: ResidualRegistry) -> None:
    registry.tensor("a", (2, 3)).replace(registry["a"].reshape(-1), np.ones(2, np.float32), 5)
    registry.forget_levels()
    assert registry.tensor("a", (2, 3)).levels is None and registry.tensor("a", (2, 3)).uncompressed_steps == 0
    assert registry.norms() == {"a": 5.0, "b": 2.0}


def test_scaling_there_and_back_by_a_power_of_two_changes_no_bit(registry: ResidualRegistry) -> None:
    registry.tensor("a", (2, 3)).levels = np.array([0.3], np.float32)
    before = registry.state_dict()
    registry.scale(2.0 ** 16)
    assert registry.tensor("a", (2, 3)).levels[0] == np.float32(0.3) * 65536
    registry.scale(2.0 ** -16)
    assert registry.tensor("a", (2, 3)).levels == before["levels"]["a"]
    np.testing.assert_array_equal(registry["a"], before["residuals"]["a"])


def test_scaling_keeps_residuals_and_levels_finite_and_levels_above_zero(registry: ResidualRegistry) -> None:
    registry.tensor("a", (2, 3)).levels = np.array([1e30, 1e-30], np.float32)
    registry.scale(1e38)
    assert np.isfinite(registry["a"]).all() and registry["a"].max() == np.finfo(np.float32).max
    assert np.isfinite(registry.tensor("a", (2, 3)).levels).all()
    registry.scale(1e-38)
    registry.scale(1e-38)
    assert (registry.tensor("a", (2, 3)).levels > 0).all()


def test_a_step_that_is_undone_leaves_no_trace() -> None:
    registry = ResidualRegistry()
    registry.can_undo = True
    old, new = registry.tensor("old", (2,)), registry.tensor("new", (2,))
    old.replace(np.array([1, 2], np.float32), np.array([0.5], np.float32), 1)
    registry.begin_step()
    for state in (old, new):
        state.remember(with_residual=registry.can_undo)
        state.residual[:] += 7
        state.levels, state.uncompressed_steps = np.array([9], np.float32), 5
    registry.undo_step()
    assert old.residual.tolist() == [1, 2] and old.levels == [0.5] and old.uncompressed_steps == 1
    assert not new.residual.any() and new.levels is None and new.uncompressed_steps == 0


def test_a_step_that_counts_is_not_undone_with_the_next_one() -> None:
    registry = ResidualRegistry()
    registry.can_undo = True
    state = registry.tensor("w", (2,))
    state.remember(with_residual=True)
    state.residual[:] = 3
    registry.begin_step()
    registry.undo_step()  # The tensor had no gradient in this step.
    assert state.residual.tolist() == [3, 3]


def test_tensors_that_were_not_declared_may_be_missing_from_a_state_and_begin_anew() -> None:
    registry = ResidualRegistry()
    before = registry.state_dict()
    registry.residual("met in a step", (2,))[:] = 7
    registry.load_state_dict(before)
    assert len(registry) == 0 and not registry.residual("met in a step", (2,)).any()


def test_a_state_tells_of_tensors_without_a_residual() -> None:
    registry = ResidualRegistry()
    registry.declare("w", (1000,))
    other = ResidualRegistry()
    other.declare("v", (1000,))
    with pytest.raises(ResidualError, match="nothing of tensor 'v'"):
        other.load_state_dict(registry.state_dict())
    assert registry.nbytes == 0


def test_loading_replaces_everything(registry: ResidualRegistry) -> None:
    registry.load_state_dict(state_of({"b": np.float32(1)}))
    assert registry.norms() == {"b": 1.0}
    assert not registry.residual("a", (2, 3)).any()


@pytest.mark.parametrize("state, message", [
    ({}, "keys format_version, shapes, residuals, levels, uncompressed_steps and perhaps"),
    (None, "not NoneType"),
    (state_of({}, format_version=2), "format version 2, this hvd_twobit reads version 1"),
    ({"format_version": 2, "momenta": {}}, "format version 2, this hvd_twobit reads version 1"),
    (state_of({}, format_version=np.ones(2)), r"format version array\(\[1., 1.\]\)"),
    (state_of({}, shapes={"a": (2, 3), "b": (), "c": (2,), "d": ()}), "residual of tensor 'c', which this"),
    (state_of({}, shapes={"b": ()}), "nothing of tensor 'a', which this optimizer compresses: it was saved"),
    (state_of({}, shapes={"a": (6,), "b": (1,)}), r"'a' has shape \(6,\), but the tensor has shape \(2, 3\)"),
    (state_of({}, shapes={"a": (2, -3), "b": ()}), r"shape of tensor 'a' is \(2, -3\), not a tuple of whole numbers"),
    (state_of({}, shapes={"a": "23", "b": ()}), "shape of tensor 'a' is '23', not a tuple of whole numbers"),
    (state_of({}, shapes=[(2, 3)]), r"the shapes of a state are a dictionary by tensor name, not \[\(2, 3\)\]"),
    (state_of({}, levels={7: np.ones(1, np.float32)}), "the levels of a state are a dictionary by tensor name, not"),
    (state_of({"b": np.float32(1), "a": np.zeros(6, np.float32)}), r"'a' has shape \(6,\)"),
    (state_of({"b": np.float32(1), "a": np.zeros((2, 3))}), "'a' has dtype float64"),
    (state_of({"b": np.float32(1), "a": np.zeros((2, 3), ">f4")}), "'a' has dtype >f4"),
    (state_of({"a": [[1, 2], [3]]}), "residual of tensor 'a' is no array"),
    (state_of({"b": np.float32("nan")}), "'b' has elements that are not finite"),
    (state_of({"z": np.float32(1)}), "residuals of tensor 'z', but no shape of it"),
    (state_of({}, loss_scale=0.0), "loss scale of 0.0"),
    (state_of({}, loss_scale="1"), "loss scale of '1'"),
    (state_of({}, loss_scale=float("nan")), "loss scale of nan"),
    (state_of({}, levels={"a": np.zeros(1, np.float32)}), "levels of tensor 'a' are not all between"),
    (state_of({}, levels={"a": np.array([np.nan], np.float32)}), "levels of tensor 'a' are not all between"),
    (state_of({}, levels={"a": np.ones(1)}), "levels of tensor 'a' are float64"),
    (state_of({}, levels={"z": np.ones(1, np.float32)}), "levels of tensor 'z', but no shape of it"),
    (state_of({}, uncompressed_steps={"a": -1}), "uncompressed_steps of tensor 'a' is -1"),
    (state_of({}, uncompressed_steps={"a": 1.5}), "uncompressed_steps of tensor 'a' is 1.5"),
])
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(registry: ResidualRegistry, state: Any,
                                                                     message: str) -> None:
    with pytest.raises(ResidualError, match=message):
        registry.load_state_dict(state)
    assert registry.norms() == {"a": 5.0, "b": 2.0}
