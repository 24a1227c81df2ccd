"""PyTorch: tensors that become words on a device give what those on the host give, to the bit. Without Horovod.

The device is the CPU, whose tensors are compressed by a device's kernels: the reference's, and Triton's, interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hvd_twobit import kernels
from hvd_twobit.digit_codec import HOST_WORDS, quantize_once, sum_of
from hvd_twobit.errors import PayloadError
from hvd_twobit.named import NamedTensor
from hvd_twobit.torch import placement, words
from hvd_twobit.torch.placement import KERNELS_VARIABLE
from hvd_twobit.torch.words import DeviceTensors, HostTensors, words_of
from hvd_twobit.words import WordBackend

from . import tensor_reference
from .backends import TRITON
from .test_digits import CONFIGURATIONS, gradients, reduced

CPU = torch.device("cpu")
SHAPE = (21, 11)
RANKS = 3

each_configuration = pytest.mark.parametrize("name", CONFIGURATIONS)
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # Triton's interpreter is NumPy.


@pytest.fixture(params=["reference", "triton"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceTensors:
    """A device whose kernels are the reference's, or Triton's."""
    if request.param == "triton" and TRITON is None:
        pytest.skip("needs Triton")
    load, found = kernels.load, tensor_reference if request.param == "reference" else TRITON
    monkeypatch.setattr("hvd_twobit.kernels.load", lambda name: found if name == "triton" else load(name))
    return DeviceTensors(CPU)


class World:
    """The ranks of one named tensor, each with a backend of its own."""

    def __init__(self, name: str, backends: Sequence[WordBackend]) -> None:
        self.backends = list(backends)
        self.ranks = [NamedTensor("t", CONFIGURATIONS[name]) for _ in backends]

    def exchange(self, tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What every rank gets of the average."""
        sent, exchanges = [], []
        for rank, (tensor, values, backend) in enumerate(zip(self.ranks, tensors, self.backends)):
            made, exchange = tensor.encode(SHAPE, taken(values, backend), rank, RANKS, backend)
            sent.append(backend.read(made).copy())
            exchanges.append(exchange)
        arrived, outs = reduced(sent, after=1 / RANKS), []
        for tensor, exchange, backend in zip(self.ranks, exchanges, self.backends):
            out = taken(np.full(tensors[0].size, 7, np.float32), backend)
            tensor.decode(exchange, taken(arrived, backend), out, backend)
            outs.append(backend.read(out))
        return outs

    def state(self, rank: int) -> dict[str, Any]:
        found = self.ranks[rank].residuals.state_dict()
        return {key: {name: np.asarray(value).tobytes() for name, value in found[key].items()}
                for key in ("residuals", "levels", "uncompressed_steps")}


def taken(values: np.ndarray, backend: WordBackend) -> Any:
    """A copy of an array as a backend takes it."""
    return backend.take(values.copy())


def tensors_of(random: np.random.Generator, step: int) -> list[np.ndarray]:
    """Of each rank, float32; at one step not finite on rank 1, at another so small there that nothing is selected."""
    found = gradients(random, RANKS, int(np.prod(SHAPE)))
    if step == 3:
        found[1][5:8] = np.nan, np.inf, 1e-45
    if step == 4:
        found[1][:] = 1e-3
    return found


@each_configuration
def test_ranks_on_devices_and_on_hosts_exchange_what_hosts_do(name: str, device: DeviceTensors) -> None:
    random = np.random.default_rng(1)
    on_hosts, mixed = (World(name, backends) for backends in ([HOST_WORDS] * RANKS, [HOST_WORDS, device, HOST_WORDS]))
    for step in range(6):
        tensors = tensors_of(random, step)
        for wanted, found in zip(on_hosts.exchange(tensors), mixed.exchange(tensors)):
            assert found.tobytes() == wanted.tobytes(), step
        for rank in range(RANKS):
            assert mixed.state(rank) == on_hosts.state(rank), (step, rank)
        wanted, found = (world.ranks[1].residuals.stats()["t"].scalars() for world in (on_hosts, mixed))
        assert found == pytest.approx(wanted, nan_ok=True)


@each_configuration
def test_a_tensor_may_move_between_host_and_device(name: str, device: DeviceTensors) -> None:
    random = np.random.default_rng(2)
    on_hosts, moving = World(name, [HOST_WORDS] * RANKS), World(name, [HOST_WORDS] * RANKS)
    for step in range(6):
        moving.backends[step % RANKS] = device if step < RANKS else HOST_WORDS
        tensors = tensors_of(random, step)
        assert moving.exchange(tensors)[0].tobytes() == on_hosts.exchange(tensors)[0].tobytes()
    assert all(moving.state(rank) == on_hosts.state(rank) for rank in range(RANKS))


@each_configuration
@pytest.mark.parametrize("elements", [0, 1, 100, 128])
def test_a_tensor_without_a_name_is_the_same_on_a_device(name: str, elements: int, device: DeviceTensors) -> None:
    config, random = CONFIGURATIONS[name], np.random.default_rng(elements)
    tensors = gradients(random, RANKS, elements)
    if elements > 8:
        tensors[1][5:8] = np.nan, -np.inf, 1e-45
        tensors[2][:64] = 0
        tensors[2][64:70] = 3e38
    on_hosts, on_devices = ([backend.read(quantize_once(config, taken(tensor, backend), rank, RANKS, backend))
                             for rank, tensor in enumerate(tensors)] for backend in (HOST_WORDS, device))
    assert [one.tobytes() for one in on_devices] == [one.tobytes() for one in on_hosts]
    outs = []
    for backend in (HOST_WORDS, device):
        outs.append(taken(np.full(elements, 7, np.float32), backend))
        sum_of(config, taken(reduced(on_hosts, 3.0, 1 / 7), backend), "t", 0, RANKS, outs[-1], backend)
    assert HOST_WORDS.read(outs[0]).tobytes() == device.read(outs[1]).tobytes()


def test_what_overflows_float32_is_infinite_on_both(device: DeviceTensors) -> None:
    values = np.array([1e300, -1e300, np.nan, 0.1])
    assert device.read(device.as_float32(taken(values, device))).tobytes() == HOST_WORDS.as_float32(values).tobytes()


def test_where_a_tensor_is_compressed_follows_its_device(device: DeviceTensors,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    words._on_device.cache_clear()
    try:
        assert type(words_of(CPU)) is HostTensors
        monkeypatch.setenv(KERNELS_VARIABLE, "triton")
        assert type(words_of(CPU)) is HostTensors, "Triton was asked for, but not for the CPU"
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(placement, "_unusable", {})
        found = words_of(CPU)
        assert type(found) is DeviceTensors and words_of(CPU) is found
    finally:
        words._on_device.cache_clear()


def test_words_of_a_device_are_sent_from_the_host(device: DeviceTensors) -> None:
    made = device.take(np.arange(3.0))
    sent = device.wire(made)
    assert sent is not made and sent.device.type == "cpu" and sent.tolist() == [0, 1, 2]


@each_configuration
def test_what_happens_to_a_state_while_words_travel_is_told_or_does_no_harm(name: str) -> None:
    world = World(name, [HOST_WORDS] * RANKS)
    tensors = tensors_of(np.random.default_rng(3), 0)
    while not world.ranks[0]._codec.ready("t", SHAPE):
        world.exchange(tensors)
    sent, exchange = world.ranks[0].encode(SHAPE, tensors[0], 0, RANKS)
    world.ranks[0].residuals.reset()
    out = np.empty(tensors[0].size, np.float32)
    if CONFIGURATIONS[name].adaptive:
        world.ranks[0].residuals.forget_levels()
        with pytest.raises(PayloadError, match="take_shared"):
            world.ranks[0].decode(exchange, sent, out)
    else:
        world.ranks[0].decode(exchange, sent, out)
        assert out.any()
