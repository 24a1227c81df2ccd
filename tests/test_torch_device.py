"""PyTorch: gradients that are compressed on a device give what the simulation of all ranks gives, to the bit.

There is no GPU here: gradients of the CPU are compressed by a device's kernels, see ``scenarios.torch_device``.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hvd_twobit.buckets import Bucket, Part
from hvd_twobit.codec import Codec
from hvd_twobit.config import TRANSPORTS, TwoBitConfig
from hvd_twobit.errors import ConfigError, PayloadError
from hvd_twobit.memory import HOST
from hvd_twobit.residuals import ResidualRegistry
from hvd_twobit.torch import placement
from hvd_twobit.torch.coder import Coder, DeviceCoder, HostCoder, StagedCoder
from hvd_twobit.torch.memory import DeviceMemory
from hvd_twobit.torch.placement import KERNELS_VARIABLE, Placement
from hvd_twobit.torch.transfer import TRANSFERS
from hvd_twobit.transports import Planned

from . import tensor_reference
from .coders import carry
from .jobs import TIMEOUT_S
from .launcher import run_ranks
from .scenarios import allreduce, torch_allreduce, torch_amp, torch_device, torch_optimizer

CPU = torch.device("cpu")
MEMORY = DeviceMemory(CPU)
CONFIGURATIONS = [
    "the bare class",
    "adaptive levels of everything",
    "adaptive levels, two groups with a gradient missing on one rank",
    "adaptive levels, two backward passes per step",
    "adaptive levels, sparse gradients in a group",
    "adaptive levels, a process set",
    "adaptive levels, a transposed bfloat16 parameter",
    "adaptive levels, overflow on one rank",
    "adaptive levels, load_state_dict between and within steps",
    "sra, overflow on one rank",
    "sra, sum, a gradient missing on one rank",
    "sra in small buckets",
    "sra, asymmetric thresholds",
    "sra, another threshold on every rank",
    "allreduce, asymmetric thresholds",
    "allreduce in small buckets",
    "allgather in small buckets",
    "another threshold on every rank",
    "float64",
    "groups of float16",
    "zero_grad that keeps the tensors",
    "overflow on one rank",
]
AMP = ["adaptive levels", "a fixed threshold, the scaler told", "resumed with another scale"]
TRITON = {"sent from the device": [f"{transport} of few elements" for transport in TRANSPORTS],
          "sent from the host": ["sra of few elements"]}
"""Few, as Triton's interpreter is slow; sums that are sent from the host are made there."""
HAS_TRITON = importlib.util.find_spec("triton") is not None

on_ranks = pytest.mark.timeout(TIMEOUT_S + 60)
each_way = pytest.mark.parametrize("sending", torch_device.CODERS)


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """Every configuration in one job of 2 ranks; per rank."""
    environment = {"TRITON_INTERPRET": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    return run_ranks(2, "tests.scenarios.torch_device:run", environment, timeout_s=TIMEOUT_S,
                     configurations=CONFIGURATIONS, amp=AMP, triton=TRITON if HAS_TRITON else {})


@on_ranks
@each_way
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_optimizer_equals_the_simulation(name: str, sending: str, results: list[Any]) -> None:
    torch_optimizer.assert_expected(name, [result[sending]["optimizer"][name] for result in results])


@on_ranks
@each_way
@pytest.mark.parametrize("name", AMP)
def test_training_with_a_gradient_scaler_equals_one_without(name: str, sending: str, results: list[Any]) -> None:
    torch_amp.assert_expected(name, [result[sending]["amp"][name] for result in results])


@on_ranks
@pytest.mark.parametrize(("sending", "name"), [(sending, name) for sending, names in TRITON.items() for name in names])
def test_with_kernels_in_triton_it_does_as_well(name: str, sending: str, results: list[Any]) -> None:
    pytest.importorskip("triton")
    torch_optimizer.assert_expected(name, [result[sending]["triton"]["optimizer"][name] for result in results])


@on_ranks
@each_way
@pytest.mark.parametrize("name", allreduce.CASES)
def test_allreduce_of_one_tensor_equals_the_simulation(name: str, sending: str, results: list[Any]) -> None:
    torch_allreduce.assert_expected(name, [result[sending]["allreduce"]["cases"][name] for result in results])


@on_ranks
@each_way
@pytest.mark.parametrize("name", allreduce.NAMED)
def test_allreduce_of_a_named_tensor_equals_the_simulation(name: str, sending: str, results: list[Any]) -> None:
    torch_allreduce.assert_expected_named(name, [result[sending]["allreduce"]["named"][name] for result in results])


@on_ranks
@each_way
def test_allreduce_with_kernels_in_triton_does_as_well(sending: str, results: list[Any]) -> None:
    pytest.importorskip("triton")
    found = [result[sending]["triton"] for result in results]
    for name in torch_device.CASES_IN_TRITON:
        torch_allreduce.assert_expected(name, [result["cases"][name] for result in found])
    torch_allreduce.assert_expected_named("adaptive", [result["named"]["adaptive"] for result in found])


@on_ranks
@each_way
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_wait_in_different_orders_do_not_wait_for_ever(transport: str, sending: str,
                                                                  results: list[Any]) -> None:
    first, other = (result[sending]["orders"][transport] for result in results)
    for step, (mine, theirs) in enumerate(zip(first, other)):
        sent = [torch_device.gradients(rank, step) for rank in range(2)]
        for name, value in mine.items():
            assert value.tobytes() == theirs[name].tobytes()
            if step == 0 or "small" in name:
                np.testing.assert_allclose(value, (sent[0][name] + sent[1][name]) / 2, atol=1e-6)
            else:
                assert value.any()


@on_ranks
@each_way
def test_no_gradient_was_compressed_elsewhere(sending: str, results: list[Any]) -> None:
    for result in results:
        assert result[sending]["coders"] == [torch_device.CODERS[sending].__name__]


@on_ranks
def test_training_on_a_device_as_the_check_of_gpus_does_it_is_that_on_the_host(results: list[Any]) -> None:
    pytest.importorskip("triton")
    for result in results:
        assert result["gpu_check"] == [""] * 6


# ---- coders, without Horovod ---------------------------------------------------------------------------------------

RANKS = 3
SHAPES = {"a": (70, 50), "b": (33,), "c": (0, 2)}
SCALE = 1 / 3


def coders(kind: type[Coder], transport: str, threshold: float | str,
           registries: Sequence[ResidualRegistry] | None = None) -> list[Coder]:
    """A coder for each of three ranks, with residuals of their own."""
    config = TwoBitConfig.from_arguments(threshold=threshold, min_elements=0, transport=transport)
    bucket = Bucket(tuple(Part(name, shape, 0, int(np.prod(shape))) for name, shape in SHAPES.items()))
    made = []
    for rank in range(RANKS):
        codec = Codec(config, registries[rank] if registries else ResidualRegistry())
        for name, shape in SHAPES.items():
            codec.observe(name, shape, np.full(int(np.prod(shape)), 0.25, np.float32), RANKS, SCALE)
        device = () if kind is HostCoder else (MEMORY, tensor_reference)
        made.append(kind(Planned(bucket, transport, RANKS), codec, rank, SCALE, *device))
    return made


def as_taken_by(one: Coder, values: np.ndarray) -> Any:
    """The same memory as the coder wants it."""
    return values if type(one) is HostCoder else torch.from_numpy(values)


def exchange(made: Sequence[Coder], transport: str, seed: int,
             damage: Callable[[torch.Tensor], torch.Tensor] = lambda arrived: arrived) -> list[dict[str, np.ndarray]]:
    """What every rank gets, where every collective's result is damaged."""
    outs = []
    for rank, one in enumerate(made):
        random = np.random.default_rng(RANKS * seed + rank)
        values = {name: random.standard_normal(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()}
        for name, value in values.items():
            one.put(name, as_taken_by(one, value))
        one.seal()
        outs.append(values)
    carry(made, transport, damage)
    for one, values in zip(made, outs):
        for name in SHAPES:
            one.take(name, as_taken_by(one, values[name]))
        one.forget()
    return outs


@pytest.mark.parametrize("threshold", ["auto", 0.5])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", [DeviceCoder, StagedCoder])
def test_coders_of_devices_do_what_those_of_the_host_do(kind: type[Coder], transport: str,
                                                        threshold: float | str) -> None:
    on_host, on_device = ([ResidualRegistry() for _ in range(RANKS)] for _ in range(2))
    host, device = coders(HostCoder, transport, threshold, on_host), coders(kind, transport, threshold, on_device)
    for step in range(3):
        for wanted, found in zip(exchange(host, transport, step), exchange(device, transport, step)):
            assert [found[name].tobytes() for name in SHAPES] == [wanted[name].tobytes() for name in SHAPES]
    for one, other in zip(on_host, on_device):
        for name in SHAPES:
            assert one[name].tobytes() == other[name].numpy().tobytes()
        assert one.stats().keys() == other.stats().keys()
        for name, summary in one.stats().items():
            assert other.stats()[name].scalars() == pytest.approx(summary.scalars())


def truncated(arrived: torch.Tensor) -> torch.Tensor:
    return arrived[:-16]


def overwritten(offset: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def damage(arrived: torch.Tensor) -> torch.Tensor:
        changed = arrived.clone()
        changed.view(torch.uint8)[offset] ^= 0xC1
        return changed
    return damage


@pytest.mark.parametrize("damage", [overwritten(0), overwritten(4), overwritten(9), overwritten(17), overwritten(28),
                                    overwritten(35)],
                         ids=["magic", "version", "element_count", "block_elements", "checksum", "table"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", [DeviceCoder, StagedCoder])
def test_damaged_bytes_are_told_as_on_the_host(kind: type[Coder], transport: str,
                                               damage: Callable[[torch.Tensor], torch.Tensor]) -> None:
    messages = []
    for made in (coders(HostCoder, transport, "auto"), coders(kind, transport, "auto")):
        with pytest.raises(PayloadError) as told:
            exchange(made, transport, 0, damage)
        messages.append(str(told.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("transport", ["allgather", "sra"])
@pytest.mark.parametrize("kind", [DeviceCoder, StagedCoder])
def test_bytes_that_are_missing_are_told_as_on_the_host(kind: type[Coder], transport: str) -> None:
    with pytest.raises(PayloadError) as on_host:
        exchange(coders(HostCoder, transport, "auto"), transport, 0, truncated)
    with pytest.raises(PayloadError) as on_device:
        exchange(coders(kind, transport, "auto"), transport, 0, truncated)
    assert str(on_host.value) == str(on_device.value)


# ---- residuals that move -------------------------------------------------------------------------------------------

def registry_on_a_device() -> ResidualRegistry:
    registry = ResidualRegistry()
    registry.tensor("w", (2, 3)).residual_in(MEMORY).copy_(torch.arange(6.0))
    return registry


def test_a_residual_is_on_the_device_of_its_gradient_in_the_shape_of_its_tensor() -> None:
    found = registry_on_a_device()["w"]
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_residual_moves_to_the_host_and_back_with_its_values() -> None:
    state = registry_on_a_device().tensor("w", (2, 3))
    assert state.residual.tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(state.array, np.ndarray)
    state.residual[0] = 7
    assert state.residual_in(MEMORY).tolist() == [7, 1, 2, 3, 4, 5]


def test_states_of_a_device_are_saved_scaled_and_loaded_as_those_of_the_host() -> None:
    registry = registry_on_a_device()
    registry.scale(2.0)
    assert registry.norms() == {"w": pytest.approx(220 ** 0.5)}
    assert registry.nbytes == 24
    saved = registry.state_dict()
    assert saved["residuals"]["w"].tolist() == [[0, 2, 4], [6, 8, 10]]
    registry["w"].zero_()
    assert saved["residuals"]["w"].sum() == 30, "what was saved is a copy"
    registry.load_state_dict(saved)
    assert registry.tensor("w", (2, 3)).residual_in(MEMORY).tolist() == [0, 2, 4, 6, 8, 10]


def test_scaling_beyond_float32_ends_at_the_largest_number() -> None:
    state = registry_on_a_device().tensor("w", (2, 3))
    state.residual_in(MEMORY).copy_(torch.tensor([1e38, -1e38, 1.0, 0, 0, 0]))
    state.scale(16.0)
    assert state.residual.tolist() == [pytest.approx(3.4028235e38), pytest.approx(-3.4028235e38), 16, 0, 0, 0]


@pytest.mark.parametrize("moves", [False, True])
def test_a_step_is_undone_also_where_the_residual_has_moved(moves: bool) -> None:
    registry = registry_on_a_device()
    state = registry.tensor("w", (2, 3))
    state.remember(with_residual=True)
    state.residual_in(MEMORY).zero_()
    if moves:
        state.residual_in(HOST)
    state.undo()
    assert state.values.tolist() == [0, 1, 2, 3, 4, 5]
    state.remember(with_residual=True)
    state.residual_in(MEMORY).zero_()
    state.undo()
    assert state.values.tolist() == [0, 1, 2, 3, 4, 5], "and again"


# ---- which kernels --------------------------------------------------------------------------------------------------

def test_gradients_of_the_cpu_are_compressed_on_the_host() -> None:
    assert Placement.of([CPU, CPU]) == Placement.of([]) == Placement()


def test_the_variable_that_chooses_kernels_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "cuda")
    with pytest.raises(ConfigError, match="HVD_TWOBIT_KERNELS must be auto, numba or triton, not 'cuda'"):
        Placement.of([CPU])


def test_triton_is_refused_where_gradients_are_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    with pytest.raises(ConfigError, match="lie on cpu, meta: all have to be on one"):
        Placement.of([CPU, torch.device("meta")])


def test_a_triton_that_cannot_be_imported_leaves_gradients_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> types.ModuleType:
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr("hvd_twobit.kernels.load", load)
    assert placement.trial(CPU) == "Triton's kernels fail there (RuntimeError: 0 active drivers)"


@pytest.mark.parametrize("function", ["quantize_pack_runs", "unpack_sum_runs"])
def test_kernels_that_do_nothing_are_found_out(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_twobit.kernels.load", lambda name: tensor_reference)
    assert placement.trial(CPU) == ""
    monkeypatch.setattr(tensor_reference, function, lambda *arguments: None)
    assert "Triton's kernels are wrong there (sums and residuals of " in placement.trial(CPU)


def test_a_block_table_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize(*arguments: Any) -> None:
        original(*arguments)
        arguments[-1].view(torch.int32)[1] += 1

    original = tensor_reference.quantize_pack_runs
    monkeypatch.setattr("hvd_twobit.kernels.load", lambda name: tensor_reference)
    monkeypatch.setattr(tensor_reference, "quantize_pack_runs", quantize)
    assert "sums and numbers of what is selected are " in placement.trial(CPU)


def test_an_error_of_a_kernel_is_not_taken_for_a_name_in_use() -> None:
    made = coders(DeviceCoder, "allgather", "auto")[0]
    made.seal = raises_value_error  # type: ignore[method-assign]
    bucket = Bucket(tuple(Part(name, shape, 0, int(np.prod(shape))) for name, shape in SHAPES.items()))
    transfer = TRANSFERS["allgather"](Planned(bucket, "allgather", RANKS), made, None)
    with pytest.raises(ValueError, match="^packed is float32$"):
        for name, shape in SHAPES.items():
            transfer.add(name, torch.zeros(int(np.prod(shape))))


def raises_value_error() -> None:
    raise ValueError("packed is float32")


def test_triton_is_refused_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    monkeypatch.setattr("hvd_twobit.torch.placement._unusable", {})
    with pytest.raises(ConfigError, match="Triton's kernels cannot be used on meta: "):
        Placement.of([torch.device("meta")])
