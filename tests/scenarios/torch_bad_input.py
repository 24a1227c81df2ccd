"""Mistakes that only several ranks can make, or that must be refused before anything is sent: what each rank is told.

All run in one job. Where a mistake leaves a collective behind that its partner never enters, the tensors of that
scenario have names of their own.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from hvd_twobit import payload
from hvd_twobit.codec import Codec
from hvd_twobit.torch import TwoBit, residuals_of
from tests.scenarios import told_by

EVERYTHING = TwoBit(0.5, min_elements=0)


def _parameter(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=requires_grad)


def _optimizer(parameters: dict[str, torch.nn.Parameter], compression: Any = EVERYTHING,
               **options: Any) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=0.25),
                                    named_parameters=list(parameters.items()), compression=compression, **options)


def _backward(parameters: dict[str, torch.nn.Parameter], value: float = 1.0) -> None:
    sum((parameter * value).sum().abs() for parameter in parameters.values() if parameter.requires_grad).backward()


def another_min_elements() -> None:
    parameters = {"another_min_elements.weight": _parameter(30, 40), "another_min_elements.bias": _parameter(40)}
    optimizer = _optimizer(parameters, TwoBit(min_elements=1024 * hvd.rank()))
    _backward(parameters)
    optimizer.step()


def another_min_elements_in_a_group() -> None:
    parameters = {"in_a_group.weight": _parameter(30, 40), "in_a_group.bias": _parameter(40)}
    optimizer = _optimizer(parameters, TwoBit(min_elements=1024 * hvd.rank()), groups=1)
    _backward(parameters)
    optimizer.step()


def auto_on_one_rank() -> None:
    parameters = {"auto_on_one_rank.weight": _parameter(30, 40)}
    optimizer = _optimizer(parameters, TwoBit(threshold="auto" if hvd.rank() else 0.5, warmup_steps=1))
    _backward(parameters)
    optimizer.step()


def other_blocks_on_one_rank() -> None:
    parameters = {"other_blocks.weight": _parameter(30, 40)}
    optimizer = _optimizer(parameters, TwoBit(block_elements=16 + 16 * hvd.rank()))
    _backward(parameters)
    optimizer.step()


def another_warm_up() -> None:
    parameters = {"another_warm_up.weight": _parameter(30, 40)}
    optimizer = _optimizer(parameters, TwoBit(warmup_steps=hvd.rank()))
    for _ in range(2):
        _backward(parameters)
        optimizer.step()
        optimizer.zero_grad()


def levels_of_another_step() -> None:
    parameters = {"levels_of_another_step.weight": _parameter(30, 40)}
    optimizer = _optimizer(parameters, TwoBit)
    for _ in range(2):
        _backward(parameters)
        optimizer.step()
        optimizer.zero_grad()
        residuals_of(optimizer).scale(1.0 + hvd.rank())


def another_transport_on_one_rank() -> None:
    parameters = {"another_transport.weight": _parameter(30, 40)}
    optimizer = _optimizer(parameters, TwoBit(0.5, transport="sra" if hvd.rank() else "allgather"))
    _backward(parameters)
    optimizer.step()


def larger_buckets_on_one_rank() -> None:
    parameters = {"larger_buckets.a": _parameter(30, 40), "larger_buckets.b": _parameter(30, 40)}
    optimizer = _optimizer(parameters, TwoBit(0.5, bucket_cap_mb=25 if hvd.rank() else 0.005))
    _backward(parameters)
    optimizer.step()


def another_order_of_parameters() -> None:
    parameters = {"another_order.a": _parameter(30, 40), "another_order.b": _parameter(30, 40)}
    optimizer = _optimizer(dict(sorted(parameters.items(), reverse=bool(hvd.rank()))))
    _backward(parameters)
    optimizer.step()


class _OneMore(hvd.ProcessSet):
    """A process set that has one rank more than the others' in the eyes of rank 1."""

    def size(self) -> int | None:
        return hvd.size() + hvd.rank()


def another_number_of_ranks() -> None:
    parameters = {"another_number.weight": _parameter(30, 40)}
    everyone = copy.copy(hvd.global_process_set)
    everyone.__class__ = _OneMore
    optimizer = _optimizer(parameters, TwoBit(0.5), process_set=everyone)
    _backward(parameters)
    optimizer.step()


def hierarchical_on_rank_0() -> None:
    parameters = {"hierarchical_0.a": _parameter(30, 40)}
    optimizer = _optimizer(parameters, TwoBit(hierarchical=hvd.rank() == 0))
    _backward(parameters)
    optimizer.step()


def hierarchical_on_rank_1() -> None:
    parameters = {"hierarchical_1.a": _parameter(30, 40), "hierarchical_1.b": _parameter(10)}
    optimizer = _optimizer(parameters, TwoBit(0.5, hierarchical=bool(hvd.rank())))
    _backward(parameters)
    optimizer.step()


def hierarchical_within_a_process_set() -> None:
    _optimizer({"within.a": _parameter(10)}, TwoBit(hierarchical=True), process_set=hvd.ProcessSet([0]))


def a_share_that_arrives_damaged() -> None:
    """Rank 1 cannot read what came from the other machines; the other ranks of its machine wait for its share."""
    parameters = {"damaged.a": _parameter(3000), "damaged.b": _parameter(3000)}
    optimizer = _optimizer(parameters, TwoBit(0.5, hierarchical=True, transport="allgather"))
    receive = Codec.receive

    def damaged(codec: Codec, layout: Any, gathered: Any, ranks: int) -> Any:
        gathered[0] ^= hvd.rank()
        return receive(codec, layout, gathered, ranks)

    Codec.receive = damaged
    try:
        _backward(parameters)
        optimizer.step()
    finally:
        Codec.receive = receive


def hierarchical_of_another_kind() -> None:
    TwoBit(hierarchical="yes")


def unknown_transport() -> None:
    TwoBit(transport="ring")


def unknown_transport_in_the_environment() -> None:
    os.environ["HVD_TWOBIT_TRANSPORT"] = "all-gather"
    try:
        TwoBit()
    finally:
        del os.environ["HVD_TWOBIT_TRANSPORT"]


def other_groups_on_one_rank() -> None:
    parameters = {f"other_groups.{name}": _parameter(30, 40) for name in "abc"}
    a, b, c = parameters.values()
    optimizer = _optimizer(parameters, groups=[[a, b], [c]] if hvd.rank() else [[a], [b, c]])
    _backward(parameters)
    optimizer.step()


def frozen_on_one_rank() -> None:
    parameters = {"frozen.a": _parameter(10), "frozen.b": _parameter(10, requires_grad=hvd.rank() == 0)}
    optimizer = _optimizer(parameters)
    _backward(parameters)
    optimizer.step()


def another_shape_on_one_rank() -> None:
    parameters = {"another_shape.a": _parameter(10 + hvd.rank())}
    optimizer = _optimizer(parameters)
    _backward(parameters)
    optimizer.step()


def another_version_of_payload() -> None:
    parameters = {"another_version.a": _parameter(10)}
    optimizer = _optimizer(parameters)
    version = payload.VERSION
    payload.VERSION += hvd.rank()
    try:
        _backward(parameters)
        optimizer.step()
    finally:
        payload.VERSION = version


def another_shape_under_a_known_name() -> None:
    parameters = {"known_name.a": _parameter(10)}
    optimizer = _optimizer(parameters)
    _backward(parameters)
    optimizer.step()
    parameters["known_name.a"].grad = None
    parameters["known_name.a"].data = torch.zeros(11)
    parameters["known_name.a"].grad = torch.ones(11)
    optimizer.step()


def duplicate_names() -> None:
    first, second = _parameter(10), _parameter(10)
    hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=0.25), compression=TwoBit,
                             named_parameters=[("twice", first), ("twice", second)])


def overlapping_optimizers_with_equal_names() -> None:
    told = []
    for turn in range(hvd.size()):  # The other rank joins in later, so that the first exchange is surely under way.
        models = [{f"overlapping{turn}.a": _parameter(10)} for _ in range(2)]
        optimizers = [_optimizer(model) for model in models]
        if hvd.rank() == turn:
            _backward(models[0])
            try:
                _backward(models[1])
            except Exception as error:
                told.append(error)
        hvd.barrier()
        if hvd.rank() != turn:
            _backward(models[0])
        optimizers[0].step()
    for error in told:
        raise error


def adasum() -> None:
    _optimizer({"adasum.a": _parameter(10)}, TwoBit, op=hvd.Adasum)


def minimum() -> None:
    _optimizer({"minimum.a": _parameter(10)}, op=hvd.Min)


def maximum() -> None:
    _optimizer({"maximum.a": _parameter(10)}, op=hvd.Max)


def product() -> None:
    _optimizer({"product.a": _parameter(10)}, op=hvd.Product)


def complex_gradients() -> None:
    parameters = {"complex.a": _parameter(10, dtype=torch.complex64)}
    _optimizer(parameters)
    _backward(parameters)


def residuals_of_another_optimizer() -> None:
    residuals_of(_optimizer({"another.a": _parameter(10)}, hvd.Compression.fp16))


def unknown_argument() -> None:
    TwoBit(treshold=0.1)


SCENARIOS: list[Callable[[], None]] = [
    adasum, minimum, maximum, product, complex_gradients, residuals_of_another_optimizer,
    unknown_argument, duplicate_names, overlapping_optimizers_with_equal_names, another_shape_under_a_known_name,
    another_version_of_payload, another_min_elements, another_min_elements_in_a_group, auto_on_one_rank,
    other_blocks_on_one_rank, another_warm_up, levels_of_another_step, other_groups_on_one_rank, frozen_on_one_rank,
    another_shape_on_one_rank, another_transport_on_one_rank, larger_buckets_on_one_rank, another_order_of_parameters,
    another_number_of_ranks, hierarchical_on_rank_0, hierarchical_on_rank_1, hierarchical_within_a_process_set,
    a_share_that_arrives_damaged, hierarchical_of_another_kind, unknown_transport, unknown_transport_in_the_environment]


def run() -> dict[str, str]:
    """Type and message of the error of every scenario on this rank."""
    return told_by(SCENARIOS)


def moved() -> dict[str, Any]:
    """A model that becomes another one's dtype when its optimizer was made: what is logged, and what it learns."""
    model = torch.nn.Linear(40, 30, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), compression=EVERYTHING,
                                         named_parameters=[("moved.weight", model.weight)])
    model.double()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvd_twobit").addHandler(handler)
    for _ in range(2):
        model(torch.ones(1, 40, dtype=torch.float64)).sum().backward()
        begun = len(optimizer._handles)
        optimizer.step()
        optimizer.zero_grad()
    logging.getLogger("hvd_twobit").removeHandler(handler)
    return {"told": told, "begun": begun, "weight": model.weight.detach().numpy()}


def two_optimizers() -> dict[str, Any]:
    """Two models with equal parameter names, each with its own optimizer, step in turn, with expanded gradients."""
    models = [{"shared.a": _parameter(100)} for _ in range(2)]
    one_compression = TwoBit(threshold=0.5, min_elements=0)
    optimizers = [_optimizer(model, one_compression) for model in models]
    for _ in range(3):
        for model, optimizer, value in zip(models, optimizers, (0.125, 0.25)):
            model["shared.a"].grad = torch.full((), value).expand(100)
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": [model["shared.a"].detach().numpy() for model in models],
            "residuals": [residuals_of(optimizer)["shared.a"] for optimizer in optimizers],
            "distinct": residuals_of(optimizers[0]) is not residuals_of(optimizers[1])}
