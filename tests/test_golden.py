"""What the compiled MXNet 1.9.1 sent, kept and summed, bit for bit: recorded in ``golden/*.npz``.

``grads`` float32[6, n] are six consecutive gradients of one tensor, ``packed``, ``residual`` and ``dequant`` what
MXNet made of each; ``grads_{n}`` float32[workers, 6, n] and ``sum_{n}`` what a kvstore of several workers returned.
"""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest

from hvd_twobit.kernels import CODE_NOT_FINITE, Quantizer, packed_nbytes

from .backends import few

GOLDEN = Path(__file__).parent / "golden"
NOT_FINITE = ("mx191_2bit_nan_t0.5", "mx191_2bit_inf_t0.5")
FINITE = sorted(path.stem for path in GOLDEN.glob("mx191_2bit_*.npz") if path.stem not in NOT_FINITE)
DISTRIBUTED = sorted(path.stem for path in GOLDEN.glob("mx191_dist_*.npz"))

Recording = dict[str, np.ndarray]


def recording(name: str) -> Recording:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


class Worker:
    """One worker's residual for one tensor, in fixed mode."""

    def __init__(self, backend: types.ModuleType, threshold: np.float32, elements: int) -> None:
        self.backend = backend
        self.quantizer = Quantizer.fixed(threshold, -threshold, elements)
        self.residual = np.zeros(elements, np.float32)

    def push(self, gradient: np.ndarray) -> np.ndarray:
        packed = np.full(packed_nbytes(gradient.size), 0xAA, np.uint8)
        self.backend.quantize_pack(gradient, self.residual, packed, self.quantizer)
        return packed

    def pull(self, payloads: list[np.ndarray]) -> np.ndarray:
        out = np.full(self.residual.size, 7, np.float32)
        levels = np.tile(np.stack([self.quantizer.positive_level, self.quantizer.negative_level], -1),
                         (len(payloads), 1, 1))
        self.backend.unpack_sum(np.stack(payloads), levels, self.quantizer.block_elements, out)
        return out


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def test_the_recordings_are_there() -> None:
    assert len(FINITE) == 20 and len(DISTRIBUTED) == 3 and all((GOLDEN / f"{name}.npz").exists() for name in NOT_FINITE)


@pytest.mark.parametrize("name", FINITE)
def test_packed_bytes_residual_and_decoded_values_are_those_of_mxnet(backend: types.ModuleType, name: str) -> None:
    golden = recording(name)
    worker = Worker(backend, golden["threshold"], golden["grads"].shape[1])
    for step, gradient in enumerate(few(backend, golden["grads"])):
        packed = worker.push(gradient)
        assert packed.tobytes() == golden["packed"][step].tobytes()
        assert np.array_equal(bits(worker.residual), bits(golden["residual"][step]))
        assert np.array_equal(bits(worker.pull([packed])), bits(golden["dequant"][step]))


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_sum_over_workers_is_what_a_kvstore_of_mxnet_returned(backend: types.ModuleType, name: str) -> None:
    golden = recording(name)
    count = int(golden["workers"])
    # From three workers on MXNet adds in the order of arrival; only powers of two make that exact.
    assert count <= 2 or np.frexp(golden["threshold"])[0] == 0.5
    sizes = sorted(int(key.removeprefix("grads_")) for key in golden if key.startswith("grads_"))
    for elements in few(backend, sizes):
        workers = [Worker(backend, golden["threshold"], elements) for _ in range(count)]
        for step, total in enumerate(few(backend, golden[f"sum_{elements}"])):
            payloads = [worker.push(golden[f"grads_{elements}"][rank, step]) for rank, worker in enumerate(workers)]
            assert np.array_equal(bits(workers[0].pull(payloads)), bits(total)), (elements, step)


@pytest.mark.parametrize("name", NOT_FINITE)
def test_elements_that_were_always_finite_are_those_of_mxnet(backend: types.ModuleType, name: str) -> None:
    golden = recording(name)
    worker = Worker(backend, golden["threshold"], golden["grads"].shape[1])
    always_finite = np.ones(golden["grads"].shape[1], bool)
    for step, gradient in enumerate(few(backend, golden["grads"])):
        decoded = worker.pull([worker.push(gradient)])
        always_finite &= np.isfinite(gradient) & np.isfinite(golden["residual"][step])
        assert always_finite.any()
        assert np.array_equal(bits(worker.residual)[always_finite], bits(golden["residual"][step])[always_finite])
        assert np.array_equal(bits(decoded)[always_finite], bits(golden["dequant"][step])[always_finite])


@pytest.mark.parametrize("name", NOT_FINITE)
def test_elements_that_are_not_finite_are_dropped_and_reported_unlike_in_mxnet(backend: types.ModuleType,
                                                                               name: str) -> None:
    golden = recording(name)
    worker = Worker(backend, golden["threshold"], golden["grads"].shape[1])
    reported = 0
    for gradient in golden["grads"]:
        before = worker.residual.copy()
        packed = worker.push(gradient)
        codes = (packed[:, None] >> np.array([6, 4, 2, 0], np.uint8) & 3).ravel()[:gradient.size]
        not_finite = ~np.isfinite(gradient)
        assert np.array_equal(codes == CODE_NOT_FINITE, not_finite)
        assert np.array_equal(bits(worker.residual)[not_finite], bits(before)[not_finite])
        assert np.array_equal(np.isnan(worker.pull([packed])), not_finite)
        reported += np.count_nonzero(not_finite)
    assert reported and np.isfinite(worker.residual).all()
