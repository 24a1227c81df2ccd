"""``hvd.DistributedOptimizer`` under a real ``GradScaler``: overflows on one rank, and a loss scale that changes.

Loss scales are powers of two, so what is computed in scaled gradients equals, bit for bit, what is computed without a
scaler: ``expected`` simulates that, and leaves out the steps that the scaler skips.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_twobit.torch import TwoBit, residuals_of
from tests.scenarios import told_by
from tests.simulation import (
    SimulatedMachines,
    assert_same_bits,
    assert_same_state,
    gradient,
    simulated,
    uncompressed,
)

STEPS = 20
LEARNING_RATE = 0.25
SHAPES = {"wide": (37, 61), "row": (1500,), "tiny": (5,)}
OVERFLOWS = {0: "wide", 1: "wide", 7: "tiny", 8: "row", 15: "wide"}
"""The steps in which one rank's gradient of a parameter is not finite."""

INITIAL_SCALE, GROWTH_INTERVAL = 2.0 ** 10, 3


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to train with a scaler.

    Attributes:
        compression: arguments of TwoBit.
        told: whether the scaler is passed as ``TwoBit(scaler=...)``.
        options: keyword arguments of DistributedOptimizer.
        unscales: whether the script calls ``scaler.unscale_``, as one that clips does.
        resumes_at: the step before which everything is saved and loaded into new objects; the scaler, too.
        forgets_scaler: the scaler begins anew when the script resumes, at another scale.
    """

    compression: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    told: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unscales: bool = False
    resumes_at: int | None = None
    forgets_scaler: bool = False


CONFIGURATIONS = {
    "adaptive levels": Configuration(),
    "adaptive levels, the scaler told": Configuration(told=True),
    "adaptive levels, unscaled by the script": Configuration(unscales=True),
    "adaptive levels, groups and warm-up": Configuration(dict(warmup_steps=2), options=dict(groups=2)),
    "adaptive levels of everything": Configuration(dict(min_elements=0)),
    "a fixed threshold, the scaler told": Configuration(dict(threshold=0.375), told=True),
    "two levels": Configuration(dict(hierarchical=True)),
    "two levels, a fixed threshold, resumed": Configuration(dict(hierarchical=True, threshold=0.375), told=True,
                                                            resumes_at=12),
    "resumed with the scaler's state": Configuration(resumes_at=12),
    "resumed with another scale": Configuration(told=True, resumes_at=12, forgets_scaler=True),
}


def _gradient(rank: int, step: int, name: str, exact: bool) -> np.ndarray:
    return gradient(0, rank, step, name, SHAPES[name], exact)


def _exact_until(configuration: Configuration) -> int:
    """The step from which on compressed tensors need not add up exactly: after the overflows in warm-up."""
    return 4 + configuration.compression.get("warmup_steps", 0)


def _is_exact(configuration: Configuration, step: int, name: str) -> bool:
    return step < _exact_until(configuration) or (
        int(np.prod(SHAPES[name])) < configuration.compression.get("min_elements", 1024))


class _Training:
    """Model, optimizer and scaler of one script."""

    def __init__(self, configuration: Configuration, scale: float = INITIAL_SCALE) -> None:
        self.model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=GROWTH_INTERVAL)
        told = {"scaler": self.scaler} if configuration.told else {}
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE), named_parameters=self.model.named_parameters(),
            compression=TwoBit(**configuration.compression, **told), **configuration.options)

    def resumed(self, configuration: Configuration) -> _Training:
        """A new script's training that loaded what this one saved."""
        other = _Training(configuration, 4.0)
        other.model.load_state_dict(self.model.state_dict())
        residuals_of(other.optimizer).load_state_dict(residuals_of(self.optimizer).state_dict())
        if not configuration.forgets_scaler:
            other.scaler.load_state_dict(self.scaler.state_dict())
        return other


def run(names: Sequence[str]) -> dict[str, Any]:
    """Run configurations on this rank: the weights after each step, in the end residuals, levels and scale."""
    return {name: _run(CONFIGURATIONS[name]) for name in names}


def _run(configuration: Configuration) -> dict[str, Any]:
    training = _Training(configuration)
    weights, skipped = [], []
    for step in range(STEPS):
        if step == configuration.resumes_at:
            training = training.resumed(configuration)
        optimizer, scaler = training.optimizer, training.scaler
        loss = sum((parameter * torch.from_numpy(
            _gradient(hvd.rank(), step, name, _is_exact(configuration, step, name)))).sum()
            for name, parameter in training.model.items())
        if hvd.rank() == 1 and step in OVERFLOWS:
            loss = loss + (training.model[OVERFLOWS[step]].reshape(-1)[3] * float("inf"))
        scaler.scale(loss).backward()
        optimizer.synchronize()
        if configuration.unscales:
            scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped.append(scaler.get_scale() < before)
        optimizer.zero_grad()
        weights.append({name: parameter.detach().numpy().copy() for name, parameter in training.model.items()})
    state = residuals_of(training.optimizer).state_dict()
    return {"weights": weights, "skipped": skipped, "residuals": state["residuals"], "levels": state["levels"],
            "scale": state["loss_scale"]}


def expected(name: str, size: int) -> tuple[list[dict[str, np.ndarray]], dict[str, Any]]:
    """The weights after each step and the simulated tensors, all without a scaler."""
    configuration = CONFIGURATIONS[name]
    tensors = {parameter: simulated(configuration.compression, range(size), int(np.prod(shape)))
               for parameter, shape in SHAPES.items()
               if int(np.prod(shape)) >= configuration.compression.get("min_elements", 1024)}
    scale = 1 / size
    if configuration.compression.get("hierarchical"):  # Both ranks are on one machine.
        tensors = {parameter: SimulatedMachines(simulated(configuration.compression, range(1), int(np.prod(shape))),
                                                True, 1 / size) for parameter, shape in SHAPES.items()
                   if parameter in tensors}
        scale = 1.0
    model = torch.nn.ParameterDict({parameter: torch.zeros(shape) for parameter, shape in SHAPES.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    weights = []
    for step in range(STEPS):
        if step not in OVERFLOWS:
            for parameter, shape in SHAPES.items():
                gradients = [_gradient(rank, step, parameter, _is_exact(configuration, step, parameter))
                             for rank in range(size)]
                reduced = (tensors[parameter].step(gradients, scale) if parameter in tensors
                           else uncompressed(gradients, 1 / size))
                model[parameter].grad = torch.from_numpy(reduced.reshape(shape))
            optimizer.step()
        weights.append({parameter: value.detach().numpy().copy() for parameter, value in model.items()})
    return weights, tensors


def mistakes() -> dict[str, str]:
    """What this rank is told where a scaler is used wrongly."""
    return told_by([unscaled_before_synchronize, unscaled_before_the_last_pass,
                    stepped_before_synchronize_by_a_scaling_optimizer, synchronized_again_by_the_step, another_scaler,
                    loaded_at_another_scale, scaled_later, no_scaler])


def _step(training: _Training, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(sum(parameter.sum() for parameter in training.model.values())).backward()
    training.optimizer.synchronize()
    with training.optimizer.skip_synchronize():
        scaler.step(training.optimizer)
    scaler.update()
    training.optimizer.zero_grad()


def unscaled_before_synchronize() -> None:
    training = _Training(Configuration())
    training.scaler.scale(sum(parameter.sum() for parameter in training.model.values())).backward()
    try:
        training.scaler.step(training.optimizer)
    finally:
        training.optimizer.synchronize()


def unscaled_before_the_last_pass() -> None:
    """The last step of an epoch has fewer backward passes: nothing is under way, and everything still to be sent."""
    training = _Training(Configuration(options=dict(backward_passes_per_step=2)))
    training.scaler.scale(sum(parameter.sum() for parameter in training.model.values())).backward()
    try:
        with training.optimizer.skip_synchronize():
            training.scaler.step(training.optimizer)
    finally:
        training.optimizer.synchronize()


def stepped_before_synchronize_by_a_scaling_optimizer() -> None:
    """PyTorch does not call ``unscale_`` for an optimizer that unscales by itself."""
    training = _Training(Configuration())
    training.optimizer._step_supports_amp_scaling = True
    training.scaler.scale(sum(parameter.sum() for parameter in training.model.values())).backward()
    try:
        training.scaler.step(training.optimizer)
    finally:
        training.optimizer.synchronize()


def synchronized_again_by_the_step() -> None:
    """``skip_synchronize`` was forgotten: gradients are exchanged, unscaled, and would be exchanged once more."""
    training = _Training(Configuration())
    training.scaler.scale(sum(parameter.sum() for parameter in training.model.values())).backward()
    training.optimizer.synchronize()
    training.scaler.unscale_(training.optimizer)
    training.scaler.step(training.optimizer)


def another_scaler() -> None:
    training = _Training(Configuration(told=True))
    _step(training, torch.amp.GradScaler("cpu", init_scale=4.0))


def loaded_at_another_scale() -> None:
    training = _Training(Configuration())
    for _ in range(3):
        _step(training, training.scaler)
    other = _Training(Configuration())
    residuals_of(other.optimizer).load_state_dict(residuals_of(training.optimizer).state_dict())
    _step(other, torch.amp.GradScaler("cpu", init_scale=4.0))


def scaled_later() -> None:
    """Steps without a scaler, whose residual is not in the unit of what follows."""
    training = _Training(Configuration(dict(threshold=0.5)))
    for _ in range(2):
        sum(0.125 * parameter.sum() for parameter in training.model.values()).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    _step(training, training.scaler)


def no_scaler() -> None:
    TwoBit(scaler=1024.0)


def assert_expected(name: str, results: Sequence[Any]) -> None:
    """What ``run`` returned of a configuration, on every rank, is what training without a scaler gives, to the bit."""
    weights, tensors = expected(name, len(results))
    for rank, result in enumerate(results):
        for step, (found, wanted) in enumerate(zip(result["weights"], weights)):
            for parameter in wanted:
                assert_same_bits(found[parameter], wanted[parameter], f"step {step}, rank {rank}, {parameter}")
    assert_same_state(results, tensors, unit=results[0]["scale"])
