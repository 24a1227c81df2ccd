"""Twenty steps of ``hvd.DistributedOptimizer`` in each of its configurations, with gradients that are known before.

The loss is the sum of parameters times constants, so that every gradient is its constant whatever the weights are, and
``expected`` can simulate all ranks. ``run`` is called on the ranks, ``expected`` in the test's process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_twobit.config import TRANSPORTS
from hvd_twobit.torch import TwoBit, residuals_of
from tests.scenarios.allreduce import STEPS_AFTER_JOIN, joined_steps, named_gradient, steps_before_join
from tests.simulation import (
    SimulatedMachines,
    assert_same_bits,
    assert_same_state,
    gradient,
    simulated,
    uncompressed,
    uncompressed_steps,
)

STEPS = 20
LEARNING_RATE = 0.25
SHAPES = {"wide": (37, 61), "row": (1500,), "tiny": (5,), "scalar": (), "empty": (0, 3)}
DEFAULT_MIN_ELEMENTS = 1024
RANKS_PER_MACHINE = 2
"""As ``tests.jobs`` starts jobs: one machine with two ranks, or two."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to use the optimizer; the defaults are those of a plain script.

    Attributes:
        compression: keyword arguments of TwoBit; None passes the class itself. A list has one entry per rank (modulo).
        options: keyword arguments of DistributedOptimizer; ``op`` by name.
        dtype: of parameters and gradients.
        shapes: the parameters.
        missing: name of a parameter that gets no gradient on rank 0 in odd steps.
        frozen: name of a parameter with requires_grad=False.
        transposed: name of a parameter whose memory, and gradient's memory, is not in row-major order.
        sparse: name of an embedding with sparse gradients.
        clip: synchronize, clip, skip_synchronize.
        keep_zeros: zero_grad(set_to_none=False) of the model instead of the optimizer's zero_grad.
        subset: exchange within a process set of the first half of the ranks.
        reload: load_state_dict before step 9, and after the backward pass of step 14, which is then abandoned.
        overflow: rank 0 puts NaN and inf into its gradients at step 3.
        jumps: gradients become a million times larger at step 5, and a thousand times smaller than at first at step 9.
    """

    compression: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    shapes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=lambda: SHAPES)
    missing: str | None = None
    frozen: str | None = None
    transposed: str | None = None
    sparse: str | None = None
    clip: bool = False
    keep_zeros: bool = False
    subset: bool = False
    reload: bool = False
    overflow: bool = False
    jumps: bool = False


EMBEDDING = {"table": (50, 40), "wide": (37, 61), "tiny": (5,)}
CONFIGURATIONS = {
    "the bare class": Configuration(),
    "adaptive levels with warm-up, sum": Configuration(dict(warmup_steps=3), dict(op="Sum")),
    "adaptive levels of everything": Configuration(dict(min_elements=0, block_elements=64)),
    "adaptive levels, predivide factor 4": Configuration(dict(block_elements=256), dict(gradient_predivide_factor=4.0)),
    "adaptive levels, two groups": Configuration({}, dict(groups=2)),
    "adaptive levels, two groups with a gradient missing on one rank": Configuration({}, dict(groups=2), missing="row"),
    "adaptive levels, two backward passes per step": Configuration({}, dict(backward_passes_per_step=2)),
    "adaptive levels, sparse gradients in a group": Configuration({}, dict(groups=1), shapes=EMBEDDING, sparse="table"),
    "adaptive levels, sparse gradients as dense": Configuration({}, dict(sparse_as_dense=True), shapes=EMBEDDING,
                                                                sparse="table"),
    "adaptive levels, a process set": Configuration({}, subset=True),
    "adaptive levels, a transposed bfloat16 parameter": Configuration({}, dtype="bfloat16", transposed="wide"),
    "adaptive levels, overflow on one rank": Configuration({}, overflow=True),
    "adaptive levels, overflow in warm-up": Configuration(dict(warmup_steps=4), overflow=True),
    "adaptive levels, load_state_dict between and within steps": Configuration({}, reload=True),
    "adaptive levels, a scale that jumps": Configuration({}, jumps=True),
    "sra": Configuration(dict(transport="sra")),
    "sra, overflow on one rank": Configuration(dict(transport="sra"), overflow=True),
    "sra, sum, a gradient missing on one rank": Configuration(
        dict(transport="sra", bucket_cap_mb=0.006, warmup_steps=2), dict(op="Sum"), missing="row"),
    "sra, a process set": Configuration(dict(transport="sra"), subset=True),
    "sra, load_state_dict between and within steps": Configuration(dict(transport="sra"), reload=True),
    "sra, groups of bfloat16": Configuration(dict(transport="sra"), dict(groups=2), dtype="bfloat16"),
    "sra, a fixed threshold": Configuration(dict(threshold=0.5, transport="sra", bucket_cap_mb=0.006)),
    "sra, asymmetric thresholds": Configuration(dict(positive_threshold=0.2, negative_threshold=-0.45,
                                                     transport="sra")),
    "sra, another threshold on every rank": Configuration(
        [dict(threshold=threshold, transport="sra", min_elements=0) for threshold in (0.5, 0.1, 2.5)],
        dict(gradient_predivide_factor=3.0)),
    "allreduce": Configuration(dict(transport="allreduce")),
    "allreduce, asymmetric thresholds": Configuration(dict(positive_threshold=0.2, negative_threshold=-0.45,
                                                           transport="allreduce"), dict(op="Sum")),
    "allreduce, a fixed threshold, a gradient missing on one rank": Configuration(
        dict(threshold=0.5, transport="allreduce"), dict(gradient_predivide_factor=4.0), missing="row"),
    **{f"{transport} in small buckets": Configuration(dict(transport=transport, bucket_cap_mb=0.006, block_elements=64,
                                                           min_elements=0)) for transport in TRANSPORTS},
    **{f"{transport} of few elements": Configuration(
        dict(transport=transport, block_elements=64, min_elements=0), shapes={"wide": (9, 31), "row": (150,)})
        for transport in TRANSPORTS},
    "a fixed threshold with warm-up": Configuration(dict(threshold=0.4, warmup_steps=2)),
    "a fixed threshold": Configuration(dict(threshold=0.5)),
    "sum": Configuration(dict(threshold=0.3), dict(op="Sum")),
    "asymmetric thresholds": Configuration(dict(positive_threshold=0.2, negative_threshold=-0.45)),
    "another threshold on every rank": Configuration([dict(threshold=0.5), dict(threshold=0.1), dict(threshold=2.5)]),
    "from MXNet's dictionary": Configuration({"compress": "2bit", "positive_threshold": 0.25}),
    "every tensor compressed": Configuration(dict(threshold=0.4, min_elements=0)),
    "predivide factor 4": Configuration(dict(threshold=0.4), dict(gradient_predivide_factor=4.0)),
    "predivide factor 3": Configuration(dict(threshold=0.4, min_elements=0), dict(gradient_predivide_factor=3.0)),
    "two backward passes per step": Configuration(dict(threshold=0.4), dict(backward_passes_per_step=2)),
    "two groups": Configuration(dict(threshold=0.4), dict(groups=2)),
    "one group of everything, compressed": Configuration(dict(threshold=0.4, min_elements=0), dict(groups=1)),
    "listed groups": Configuration(dict(threshold=0.4), dict(groups=[["tiny", "row"], ["wide"]])),
    "groups with a gradient missing on one rank": Configuration(dict(threshold=0.4), dict(groups=2), missing="row"),
    "a gradient missing on one rank": Configuration(dict(threshold=0.4), missing="row"),
    "a small gradient missing on one rank": Configuration(dict(threshold=0.4), missing="tiny"),
    "a frozen parameter": Configuration(dict(threshold=0.4), frozen="row"),
    "a process set": Configuration(dict(threshold=0.4), subset=True),
    "sparse gradients": Configuration(dict(threshold=0.4), shapes=EMBEDDING, sparse="table"),
    "sparse gradients as dense": Configuration(dict(threshold=0.4), dict(sparse_as_dense=True), shapes=EMBEDDING,
                                               sparse="table"),
    "synchronize, clip and skip_synchronize": Configuration(dict(threshold=0.4), clip=True),
    "zero_grad that keeps the tensors": Configuration(dict(threshold=0.4), keep_zeros=True),
    "float16": Configuration(dict(threshold=0.4), dtype="float16"),
    "bfloat16": Configuration(dict(threshold=0.4), dtype="bfloat16"),
    "float64": Configuration(dict(threshold=0.4), dtype="float64"),
    "groups of float16": Configuration(dict(threshold=0.4), dict(groups=2), dtype="float16"),
    "a transposed parameter": Configuration(dict(threshold=0.4), transposed="wide"),
    "a transposed bfloat16 parameter": Configuration(dict(threshold=0.4), dtype="bfloat16", transposed="wide"),
    "load_state_dict between and within steps": Configuration(dict(threshold=0.4), reload=True),
    "overflow on one rank": Configuration(dict(threshold=0.4), overflow=True),
    "overflow on one rank in float16": Configuration(dict(threshold=0.4), dtype="float16", overflow=True),
}


HIERARCHICAL = {
    "two levels": Configuration(dict(hierarchical=True)),
    "two levels, auto": Configuration(dict(hierarchical="auto")),
    "two levels, sum, warm-up, a gradient missing on one rank": Configuration(
        dict(hierarchical=True, warmup_steps=2), dict(op="Sum"), missing="row"),
    "two levels, sra in small buckets": Configuration(dict(
        hierarchical=True, transport="sra", bucket_cap_mb=0.006, block_elements=64, min_elements=0)),
    "two levels, allreduce, predivide factor 4": Configuration(
        dict(hierarchical=True, transport="allreduce", block_elements=256), dict(gradient_predivide_factor=4.0)),
    "two levels, a fixed threshold, predivide factor 3": Configuration(
        dict(hierarchical=True, threshold=0.4, min_elements=0), dict(gradient_predivide_factor=3.0)),
    "two levels, allgather in small buckets": Configuration(
        dict(hierarchical=True, transport="allgather", bucket_cap_mb=0.006)),
    "two levels, a fixed threshold": Configuration(dict(hierarchical=True, threshold=0.4)),
    "two levels, asymmetric thresholds, sum, sra": Configuration(
        dict(hierarchical=True, transport="sra", positive_threshold=0.2, negative_threshold=-0.45), dict(op="Sum")),
    "two levels, groups with a gradient missing on one rank": Configuration(
        dict(hierarchical=True), dict(groups=2), missing="row"),
    "two levels, sparse gradients in a group": Configuration(
        dict(hierarchical=True), dict(groups=1), shapes=EMBEDDING, sparse="table"),
    "two levels, overflow on one rank": Configuration(dict(hierarchical=True, transport="allgather"), overflow=True),
    "two levels, overflow in warm-up": Configuration(dict(hierarchical=True, warmup_steps=4), overflow=True),
    "two levels, load_state_dict between and within steps": Configuration(dict(hierarchical=True), reload=True),
    "two levels, a scale that jumps": Configuration(dict(hierarchical=True), jumps=True),
    "two levels, a transposed bfloat16 parameter": Configuration(
        dict(hierarchical=True), dtype="bfloat16", transposed="wide"),
    "two levels, auto with a process set": Configuration(dict(hierarchical="auto"), subset=True),
}
CONFIGURATIONS.update(HIERARCHICAL)


JOINING: dict[str, Mapping[str, Any]] = {"join, adaptive levels": {}, "join, a fixed threshold": dict(threshold=0.4)}
"""Optimizers whose ranks join at different times: arguments of TwoBit."""


def _min_elements(configuration: Configuration) -> int:
    arguments = configuration.compression
    return ((arguments[0] if isinstance(arguments, list) else arguments) or {}).get("min_elements",
                                                                                    DEFAULT_MIN_ELEMENTS)


def _compressed(configuration: Configuration, name: str) -> bool:
    if name == configuration.sparse and not configuration.options.get("sparse_as_dense"):
        return False
    return int(np.prod(configuration.shapes[name])) >= _min_elements(configuration)


def _has_gradient(configuration: Configuration, rank: int, step: int, name: str) -> bool:
    return not (name == configuration.missing and rank == 0 and step % 2) and name != configuration.frozen


def _gradient(configuration: Configuration, seed: int, rank: int, step: int, name: str) -> np.ndarray:
    """One backward pass's gradient, exact in the configuration's dtype."""
    exchange = step // _passes(configuration)
    exact = uncompressed_steps(configuration.compression) + configuration.overflow
    dyadic = exchange < exact or not _compressed(configuration, name)
    value = gradient(seed, rank, step, name, configuration.shapes[name], dyadic)
    if configuration.jumps and exchange >= 5:
        value *= np.float32(2.0 ** 20 if exchange < 9 else 2.0 ** -10)
    if name == configuration.sparse:
        value[np.arange(len(value)) % 3 != step % 3] = 0
    if configuration.overflow and rank == 0 and step == 3 and value.size > 20:
        value.reshape(-1)[[1, 17]] = np.nan, np.inf
    return torch.from_numpy(value).to(getattr(torch, configuration.dtype)).float().numpy()


def _passes(configuration: Configuration) -> int:
    return configuration.options.get("backward_passes_per_step", 1)


def _is_abandoned(configuration: Configuration, step: int) -> bool:
    return configuration.reload and step == 14


class _Model(torch.nn.Module):
    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        for name, shape in configuration.shapes.items():
            values = torch.zeros(shape, dtype=getattr(torch, configuration.dtype))
            if name == configuration.transposed:
                values = torch.zeros(shape[::-1], dtype=values.dtype).t()
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=name != configuration.frozen))

    def loss(self, configuration: Configuration, seed: int, rank: int, step: int) -> torch.Tensor:
        terms = []
        for name, parameter in self.named_parameters():
            if _has_gradient(configuration, rank, step, name):
                weight = torch.from_numpy(_gradient(configuration, seed, rank, step, name)).to(parameter.dtype)
                if name == configuration.sparse:
                    rows = torch.arange(step % 3, len(weight), 3)
                    parameter = torch.nn.functional.embedding(rows, parameter, sparse=True)
                    weight = weight[rows]
                terms.append((parameter * weight).sum())
        if rank % 2:
            terms.reverse()  # Ranks fire their hooks in different orders.
        return sum(terms)


def _optimizer(configuration: Configuration, model: _Model, process_set: Any) -> torch.optim.Optimizer:
    arguments = configuration.compression
    if isinstance(arguments, list):
        arguments = arguments[hvd.rank() % len(arguments)]
    if arguments is None:
        compression = TwoBit
    else:
        compression = TwoBit.from_params(arguments) if "compress" in arguments else TwoBit(**arguments)
    options = dict(configuration.options)
    if "op" in options:
        options["op"] = getattr(hvd, options["op"])
    if isinstance(options.get("groups"), list):
        options["groups"] = [[getattr(model, name) for name in group] for group in options["groups"]]
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
                                    named_parameters=model.named_parameters(), compression=compression,
                                    process_set=process_set, **options)


def run(names: Sequence[str]) -> dict[str, Any]:
    """Run configurations on this rank: per name, reduced gradients and weights of all steps, and the residuals."""
    results = {}
    for name in names:
        print("configuration", name, flush=True)
        results[name] = _run(CONFIGURATIONS[name], _first_half())
    return results


@functools.cache
def _first_half() -> Any:
    """The process set of the first half of the ranks; Horovod has no two of the same ranks."""
    return hvd.add_process_set(list(range(max(1, hvd.size() // 2))))


def _run(configuration: Configuration, subset: Any) -> dict[str, Any]:
    model = _Model(configuration)
    optimizer = _optimizer(configuration, model, subset if configuration.subset else hvd.global_process_set)
    steps: list[dict[str, np.ndarray]] = []
    for step in range(STEPS):
        if configuration.reload and step == 9:
            optimizer.load_state_dict(optimizer.state_dict())
        for part in range(_passes(configuration)):
            model.loss(configuration, 0, hvd.rank(), step * _passes(configuration) + part).backward()
        if _is_abandoned(configuration, step):
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            if configuration.clip:
                optimizer.synchronize()
            else:
                optimizer.step()
            gradients = {f"gradient {name}": _as_float(parameter.grad) for name, parameter in model.named_parameters()
                         if parameter.grad is not None}
            if configuration.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                with optimizer.skip_synchronize():
                    optimizer.step()
            weights = {f"weight {name}": _as_float(parameter) for name, parameter in model.named_parameters()}
            steps.append({**gradients, **weights})
        (model.zero_grad(set_to_none=False) if configuration.keep_zeros else optimizer.zero_grad())
    state = residuals_of(optimizer).state_dict()
    return {"steps": steps, "residuals": state["residuals"], "levels": state["levels"]}


def join() -> dict[str, Any]:
    """Ranks run out of data one after the other, and go on together when all have: with an optimizer each."""
    return {name: _join(name, arguments) for name, arguments in JOINING.items()}


def _join(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    wide, tiny = torch.nn.Parameter(torch.zeros(43, 47)), torch.nn.Parameter(torch.zeros(5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([wide, tiny], lr=LEARNING_RATE), compression=TwoBit(**arguments, transport="allreduce"),
        named_parameters=[(f"{name}.wide", wide), (f"{name}.tiny", tiny)])
    found = []

    def train(step: int) -> None:
        ((wide * torch.from_numpy(named_gradient(hvd.rank(), step))).sum() + tiny.sum()).backward()
        optimizer.step()
        found.append({"wide": _as_float(wide.grad), "tiny": _as_float(tiny.grad)})
        optimizer.zero_grad()

    for step in range(steps_before_join(hvd.rank())):
        train(step)
    hvd.join()
    for step in range(steps_before_join(0), steps_before_join(0) + STEPS_AFTER_JOIN):
        train(step)
    state = residuals_of(optimizer).state_dict()
    return {"steps": found, "residual": state["residuals"][f"{name}.wide"],
            "levels": state["levels"].get(f"{name}.wide", np.zeros(0, np.float32))}


def expected_join(name: str, size: int) -> tuple[list[dict[str, np.ndarray]], Any]:
    """What each step reduces, and the simulated tensor: only ranks with data contribute, but all count."""
    tensor = simulated(JOINING[name], range(size), 43 * 47)
    steps = []
    for step, wide in enumerate(joined_steps(tensor, size, 1 / size)):
        active = sum(step < steps_before_join(rank) or step >= steps_before_join(0) for rank in range(size))
        steps.append({"wide": wide, "tiny": np.full(5, active / size, np.float32)})
    return steps, tensor


def _as_float(tensor: torch.Tensor) -> np.ndarray:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return (dense.double() if dense.dtype == torch.float64 else dense.float()).contiguous().clone().numpy()


def expected(name: str, size: int) -> tuple[list[dict[str, np.ndarray]], dict[str, Any]]:
    """The steps' reduced gradients and weights, the same on every exchanging rank, and the simulated tensors."""
    configuration = CONFIGURATIONS[name]
    ranks = range(max(1, size // 2) if configuration.subset else size)
    average = configuration.options.get("op", "Average") == "Average"
    factor = configuration.options.get("gradient_predivide_factor", 1.0)
    scale = 1 / factor * factor / len(ranks) if average else 1.0
    tensors = {parameter: simulated(configuration.compression, ranks, int(np.prod(configuration.shapes[parameter])))
               for parameter in configuration.shapes
               if _compressed(configuration, parameter) and parameter != configuration.frozen}
    model = _Model(configuration)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    machines = size // RANKS_PER_MACHINE
    if not configuration.subset and _has_levels(configuration, machines):
        tensors = {parameter: SimulatedMachines(
            simulated(configuration.compression, range(machines), int(np.prod(configuration.shapes[parameter]))),
            average, scale) for parameter in tensors}
        scale_of_machines = 1 / factor * factor / machines if average else 1.0
    else:
        scale_of_machines = scale
    steps = []
    for step in range(STEPS):
        gradients = {}
        for parameter in configuration.shapes:
            if parameter == configuration.frozen:
                continue
            per_rank = [_accumulated(configuration, rank, step, parameter) for rank in ranks]
            if parameter in tensors:
                # On two levels a machine's ranks need what came from the others, to end what they have begun.
                received = not _is_abandoned(configuration, step) or isinstance(tensors[parameter],
                                                                                SimulatedMachines)
                reduced = tensors[parameter].step(per_rank, scale_of_machines, received).reshape(
                    configuration.shapes[parameter])
            else:
                reduced = uncompressed(per_rank, scale)
            gradients[parameter] = reduced
        if _is_abandoned(configuration, step):
            continue
        for parameter, value in model.named_parameters():
            if parameter in gradients:
                value.grad = torch.from_numpy(np.asarray(gradients[parameter])).to(value.dtype)
        recorded = {f"gradient {parameter}": _as_float(value.grad) for parameter, value in model.named_parameters()
                    if value.grad is not None}
        if configuration.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        steps.append({**recorded, **{f"weight {parameter}": _as_float(value)
                                     for parameter, value in model.named_parameters()}})
    return steps, tensors


def exchanging(name: str, results: Sequence[Any]) -> Sequence[Any]:
    """The results of the ranks that exchange gradients in a configuration."""
    return results[:max(1, len(results) // 2)] if CONFIGURATIONS[name].subset else results


def assert_expected(name: str, results: Sequence[Any]) -> None:
    """What ``run`` returned of a configuration, on every rank, is what the simulation computes, to the bit."""
    steps, tensors = expected(name, len(results))
    exchanged = exchanging(name, results)
    for rank, result in enumerate(exchanged):
        assert len(result["steps"]) == len(steps)
        for number, (found, wanted) in enumerate(zip(result["steps"], steps)):
            assert found.keys() == wanted.keys()
            for key in wanted:
                assert_same_bits(found[key], wanted[key], f"step {number}, rank {rank}, {key}")
    compression = CONFIGURATIONS[name].compression
    block_elements = compression.get("block_elements", 1024) if isinstance(compression, dict) else 1024
    assert_same_state(exchanged, tensors, block_elements)


def _has_levels(configuration: Configuration, machines: int) -> bool:
    arguments = configuration.compression
    setting = arguments.get("hierarchical") if isinstance(arguments, dict) else None
    return setting is True or (setting == "auto" and machines > 1)


def _accumulated(configuration: Configuration, rank: int, step: int, name: str) -> np.ndarray:
    """The gradient that a rank holds before the exchange of a step: its backward passes, added as torch adds."""
    total = np.zeros(tuple(configuration.shapes[name]), np.float32)
    passes = _passes(configuration)
    for part in range(step * passes, (step + 1) * passes):
        if _has_gradient(configuration, rank, part, name):
            total = total + _gradient(configuration, 0, rank, part, name)
    return total


