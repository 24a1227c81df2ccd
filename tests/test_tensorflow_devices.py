"""Gradients that are compressed on a device other than the host, which a second CPU device plays.

What comes of them is in ``test_tensorflow_gradients``; here is where it is done, and the same without and with XLA.
"""

from __future__ import annotations

import types

import numpy as np
import pytest
import tensorflow as tf

from hvd_twobit.errors import ConfigError
from hvd_twobit.memory import HOST
from hvd_twobit.tensorflow import devices, kernels
from hvd_twobit.tensorflow.devices import DEVICES_VARIABLE, DeviceMemory, device_of

from .jobs import results_of, waits_for_the_job
from .simulation import assert_same_steps

pytestmark = waits_for_the_job

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.mark.parametrize("where", ["device", "mixed", "xla", "elastic"])
def test_gradients_on_a_device_are_reduced_as_on_the_host(where: str) -> None:
    for rank, result in enumerate(results_of("tensorflow", 2, "devices")):
        assert_same_steps(result["steps"][where], result["steps"]["host"], f"{where}, rank {rank}")


def test_norms_are_those_of_gradients_on_the_host() -> None:
    for result in results_of("tensorflow", 2, "devices"):
        for where in ("device", "mixed"):
            assert np.allclose(result["steps"][f"norms {where}"], result["steps"]["norms host"], rtol=1e-12, atol=0)
        assert np.min(result["steps"]["norms host"]) > 0


def test_residuals_are_on_the_device_and_come_back_to_it_when_a_state_was_loaded() -> None:
    for rank, result in enumerate(results_of("tensorflow", 2, "devices")):
        assert result["placements"]["fixed"]["residuals"] == [DEVICE] * 3
        loaded = result["loaded"]
        assert loaded["loaded"] == ["ndarray"] and loaded["again_on"] == [DEVICE]
        assert_same_steps(loaded["again"], loaded["first"], f"rank {rank}")


def test_no_float32_of_a_gradient_goes_to_the_host() -> None:
    """But in uncompressed exchanges, from which levels are learnt on the host."""
    for result in results_of("tensorflow", 2, "devices"):
        fixed, adaptive = (result["placements"][name]["passed"] for name in ("fixed", "adaptive"))
        assert [one for one in fixed["to the host"] if one.startswith("float32")] == []
        assert [one for one in adaptive["to the host"] if one.startswith("float32")] == ["float32 of HorovodAllreduce"]
        for passed in (fixed, adaptive):
            assert any(one.startswith("uint8") for one in passed["to the host"]), passed
            assert "float32 of PyFuncStateless" in passed["to the device"]  # Thresholds and levels.


@pytest.mark.parametrize("setting, counted", [
    (None, ["GPU:0", "GPU:1"]), ("gpu:1", ["GPU:1"]), ("GPU:0, CPU:1", ["GPU:0", "CPU:1"]), ("none", []),
    ("CPU", ["CPU:0", "CPU:1"])])
def test_devices_that_compress_are_gpus_or_those_that_the_environment_names(
        monkeypatch: pytest.MonkeyPatch, setting: str | None, counted: list[str]) -> None:
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(DEVICES_VARIABLE, setting)
    monkeypatch.setattr(devices, "_why_unusable", lambda device: None)
    names = [f"/job:localhost/replica:0/task:0/device:{name}" for name in ("CPU:0", "CPU:1", "GPU:0", "GPU:1")]
    found = [device_of(types.SimpleNamespace(device=name)) for name in names]
    assert [name.rpartition("device:")[2] for name in found if name] == sorted(counted)


@pytest.mark.parametrize("setting", ["GPU:", "0", "GPU;CPU", "GPU,", "GPU:x"])
def test_a_setting_that_names_no_device_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, setting)
    with pytest.raises(ConfigError, match=f"HVD_TWOBIT_TENSORFLOW_DEVICES must name devices.*{setting!r}"):
        device_of(types.SimpleNamespace(device=""))


def test_all_is_compressed_on_the_host_where_the_environment_asks_for_its_kernels(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "CPU")
    variable = types.SimpleNamespace(device="/job:localhost/replica:0/task:0/device:CPU:0")
    assert device_of(variable) == variable.device
    monkeypatch.setenv("HVD_TWOBIT_KERNELS", "numba")
    assert device_of(variable) is None


def test_gradients_are_compressed_on_the_host_where_a_device_cannot_or_errs(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    missing = types.SimpleNamespace(device="/job:localhost/replica:0/task:0/device:GPU:7")
    assert [device_of(missing), device_of(missing)] == [None, None]
    assert len(caplog.messages) == 1 and "GPU:7 are compressed on the host" in caplog.messages[0]
    monkeypatch.setattr(kernels, "_SMALL", 0)
    monkeypatch.setattr(kernels, "traced", kernels.traced.__wrapped__)  # Built anew, and subnormal sums are flushed.
    assert devices._why_unusable.__wrapped__("/CPU:0") == "their results are not those of the host"


def test_variables_of_graphs_of_tensorflow_1_are_compressed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "CPU")
    with tf.Graph().as_default(), tf.device("/CPU:0"):
        assert device_of(tf.compat.v1.get_variable("w", [3])) is None


def test_the_memory_of_a_device_is_that_of_the_host_elsewhere() -> None:
    values = np.float32([0, 3, -4, 1e38, -3e38, 2.5])
    memory = DeviceMemory("residual", "/CPU:0", None)
    assert memory.read(memory.zeros(3)).tolist() == [0, 0, 0]
    for number in ("norm", "mean_magnitude", "largest"):
        assert getattr(memory, number)(memory.zeros(0)) == 0
    array = memory.take(values)
    assert memory.read(array).tolist() == values.tolist() and memory.shaped(array, (2, 3)).shape == (2, 3)
    for number in ("norm", "mean_magnitude", "largest"):
        assert np.isclose(float(getattr(memory, number)(array)), getattr(HOST, number)(values), rtol=1e-14)
    before = memory.duplicate(array)
    memory.scale(array, 4.7)
    scaled = values.copy()
    HOST.scale(scaled, 4.7)
    assert memory.read(array).tobytes() == scaled.tobytes() and np.abs(scaled).max() == np.finfo(np.float32).max
    memory.restore(array, before)
    assert memory.read(array).tolist() == memory.read(before).tolist() == values.tolist()
