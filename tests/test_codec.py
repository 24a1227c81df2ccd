"""The codec: what is encoded and decoded again is what the simulation of all ranks says, with memory that is kept."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from hvd_twobit.codec import Codec
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.errors import PayloadError, ResidualError
from hvd_twobit.residuals import ResidualRegistry

from .simulation import SimulatedTensor, gradient

SHAPE = (37, 61)
ELEMENTS = 37 * 61


@pytest.fixture(params=["numpy", "numba"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def codec(backend: str, positive: float = 0.5, negative: float = -0.5) -> tuple[Codec, ResidualRegistry]:
    registry = ResidualRegistry()
    return Codec(TwoBitConfig(positive, negative, 1024), registry, backend), registry


@pytest.mark.parametrize("thresholds", [[(0.5, -0.5)] * 3, [(0.5, -0.25)] * 3, [(0.5, -0.5), (0.1, -0.1), (0.3, -2.0)]])
def test_three_ranks_exchange_what_the_simulation_says(backend: str, thresholds: list[tuple[float, float]]) -> None:
    simulated = SimulatedTensor(thresholds, ELEMENTS)
    ranks = [codec(backend, *pair) for pair in thresholds]
    out = np.empty(ELEMENTS, np.float32)
    for step in range(5):
        gradients = [gradient(1, rank, step, "w", SHAPE) for rank in range(3)]
        gathered = np.concatenate([ranks[rank][0].encode("w", SHAPE, gradients[rank].reshape(-1)) for rank in range(3)])
        wanted = simulated.step(gradients, 1 / 3)
        for rank, (one, registry) in enumerate(ranks):
            one.decode("w", SHAPE, gathered, 3, out, 1 / 3)
            np.testing.assert_array_equal(out.view(np.uint32), wanted.view(np.uint32))
            np.testing.assert_array_equal(registry["w"].reshape(-1).view(np.uint32),
                                          simulated.residuals[rank].view(np.uint32))


def test_a_step_allocates_nothing_of_the_gradients_size() -> None:
    one, _ = codec("numba")
    values = gradient(1, 0, 0, "w", (1 << 20,))
    out = np.empty_like(values)

    def step() -> None:
        one.decode("w", values.shape, one.encode("w", values.shape, values), 1, out, 1.0)

    step()
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.nbytes // 64


def test_the_payload_of_a_tensor_is_the_same_memory_at_every_step(backend: str) -> None:
    one, _ = codec(backend)
    values = gradient(1, 0, 0, "w", SHAPE).reshape(-1)
    assert one.encode("w", SHAPE, values) is one.encode("w", SHAPE, values)
    assert one.encode("w", SHAPE, values) is not one.encode("v", SHAPE, values)


def test_small_tensors_are_not_compressed(backend: str) -> None:
    one, _ = codec(backend)
    assert one.compresses(1024) and not one.compresses(1023)


def test_a_changed_shape_is_an_error_before_anything_changes(backend: str) -> None:
    one, registry = codec(backend)
    one.encode("w", SHAPE, gradient(1, 0, 0, "w", SHAPE).reshape(-1))
    before = registry["w"].copy()
    with pytest.raises(ResidualError, match="'w' has shape"):
        one.encode("w", (61, 37), np.ones(ELEMENTS, np.float32))
    np.testing.assert_array_equal(registry["w"], before)


def test_after_a_reset_a_name_may_have_another_shape(backend: str) -> None:
    one, registry = codec(backend)
    one.encode("w", SHAPE, np.ones(ELEMENTS, np.float32))
    registry.reset()
    out = np.empty(7, np.float32)
    one.decode("w", (7,), one.encode("w", (7,), np.ones(7, np.float32)), 1, out, 1.0)
    assert (out == 0.5).all() and (registry["w"] == 0.5).all()


def test_foreign_bytes_leave_the_gradient_alone(backend: str) -> None:
    one, _ = codec(backend)
    out = np.full(ELEMENTS, 3, np.float32)
    with pytest.raises(PayloadError, match="tensor 'w': the payload of rank 0 begins with"):
        one.decode("w", SHAPE, np.zeros(one.encode("w", SHAPE, out).size, np.uint8), 1, out, 1.0)
    assert (out == 3).all()
