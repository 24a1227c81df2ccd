"""``hvd.allreduce`` and ``hvd.grouped_allreduce`` of PyTorch with ``compression=TwoBit``; see ``allreduce``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_twobit.torch import TwoBit
from tests.scenarios import told_by
from tests.scenarios.allreduce import (
    CASES,
    JOINING,
    NAMED,
    SHAPES,
    STEPS,
    STEPS_AFTER_JOIN,
    expected,
    expected_named,
    named_gradient,
    steps_before_join,
)
from tests.simulation import assert_same_bits, assert_same_steps


def run() -> dict[str, Any]:
    """Of all cases and named tensors, what came back."""
    return {"cases": cases(CASES), "named": named(NAMED)}


def cases(names: Iterable[str]) -> dict[str, Any]:
    """By case, what came back; None where the rank does not take part."""
    return {name: _case(name) for name in names}


def named(names: Iterable[str], steps: int = STEPS) -> dict[str, Any]:
    """Named tensors for so many steps, and what is kept of them then."""
    return {name: _named(name, steps) for name in names}


def _case(name: str) -> dict[str, Any] | None:
    case = CASES[name]
    members = case.members(hvd.size())
    process_set = hvd.add_process_set(members) if len(members) < hvd.size() else hvd.global_process_set
    found = None
    if hvd.rank() in members:
        compression = TwoBit if case.compression is None else TwoBit(**case.compression)
        options = dict(compression=compression, op=getattr(hvd, case.op), process_set=process_set, **case.options)
        tensors = [torch.tensor(case.tensor(hvd.rank(), tensor)).to(getattr(torch, case.dtype)) for tensor in SHAPES]
        before = [tensor.clone() for tensor in tensors]
        if case.grouped:
            reduced = hvd.grouped_allreduce(tensors, name=name, **options)
        else:
            reduced = [hvd.allreduce(tensor, name=f"{name}.{tensor_name}", **options)
                       for tensor_name, tensor in zip(SHAPES, tensors)]
        assert all(torch.equal(torch.nan_to_num(one), torch.nan_to_num(two)) for one, two in zip(tensors, before))
        found = {tensor_name: {"dtype": str(part.dtype), "value": part.double().numpy()}
                 for tensor_name, part in zip(SHAPES, reduced)}
    if process_set is not hvd.global_process_set:
        hvd.remove_process_set(process_set)
    return found


def _named(name: str, steps: int) -> dict[str, Any]:
    case = NAMED[name]
    compression = TwoBit(**case.compression or {}).named(name)
    options = dict(name=f"named.{name}", op=getattr(hvd, case.op), compression=compression)
    found = []
    for step in range(steps):
        with torch.inference_mode(step % 2 == 1):
            found.append(hvd.allreduce(torch.tensor(named_gradient(hvd.rank(), step)), **options).numpy())
    return {"steps": found, **_state(compression, name)}


def _state(compression: Any, name: str) -> dict[str, Any]:
    state = compression.residuals.state_dict()
    return {"residual": state["residuals"][name], "levels": state["levels"].get(name, np.zeros(0, np.float32))}


# In the test's process.

def assert_expected(name: str, results: Sequence[Any]) -> None:
    """What the ranks got in a case is what the simulation of all of them gives."""
    case = CASES[name]
    wanted = expected(name, len(results))
    for rank, found in enumerate(results):
        assert (found is not None) == (rank in case.members(len(results)))
        for tensor, value in wanted.items() if found is not None else ():
            assert found[tensor]["dtype"] == f"torch.{case.dtype}"
            in_dtype = torch.from_numpy(value).to(getattr(torch, case.dtype)).double().numpy()
            if value.size < case.min_elements:  # Added by Horovod, in an order of its own.
                assert np.allclose(found[tensor]["value"], in_dtype, rtol=1e-6)
            else:
                assert_same_bits(found[tensor]["value"], in_dtype, f"{tensor}, rank {rank}")
    if case.overflow:
        assert 1 < np.isnan(wanted["wide"]).sum() < 30


def assert_expected_named(name: str, results: Sequence[Any]) -> None:
    """What the ranks got of a named tensor, and what they keep of it, is what the simulation of all of them gives."""
    steps, tensor = expected_named(name, len(results), len(results[0]["steps"]))
    for rank, found in enumerate(results):
        assert_same_steps(found["steps"], steps, f"rank {rank}")
        assert_same_bits(found["residual"].reshape(-1), tensor.residuals[rank], f"residual, rank {rank}")
        assert_same_bits(found["levels"], np.array(tensor.levels, np.float32), f"levels, rank {rank}")


def join() -> dict[str, Any]:
    """Ranks run out of data one after the other, and go on together when all have; without a name as well."""
    compressions = {name: TwoBit(**case.compression or {}).named(name) for name, case in JOINING.items()}
    found: dict[str, Any] = {name: [] for name in JOINING}

    def exchange(step: int) -> None:
        gradient = torch.tensor(named_gradient(hvd.rank(), step))
        for name, compression in compressions.items():
            found[name].append(hvd.allreduce(gradient, name=f"join.{name}", op=getattr(hvd, JOINING[name].op),
                                             compression=compression, **JOINING[name].options).numpy())
        once.append(hvd.allreduce(torch.ones(2000), name="join.once", compression=TwoBit).numpy())

    once: list[np.ndarray] = []
    for step in range(steps_before_join(hvd.rank())):
        exchange(step)
    last = hvd.join()
    for step in range(STEPS_AFTER_JOIN):
        exchange(steps_before_join(0) + step)
    return {"steps": found, "once": once, "last": last,
            "levels": {name: _state(compression, name)["levels"] for name, compression in compressions.items()}}


# ---- mistakes ------------------------------------------------------------------------------------------------------

LARGE = 2000


def minimum_of_allreduce() -> None:
    hvd.allreduce(torch.ones(LARGE), op=hvd.Min, compression=TwoBit)


def maximum_of_allreduce() -> None:
    hvd.allreduce(torch.ones(3), op=hvd.Max, compression=TwoBit(0.5))


def product_of_grouped_allreduce() -> None:
    hvd.grouped_allreduce([torch.ones(LARGE)], op=hvd.Product, compression=TwoBit)


def adasum_of_allreduce() -> None:
    hvd.allreduce(torch.ones(LARGE), op=hvd.Adasum, compression=TwoBit)


def adasum_of_a_named_tensor() -> None:
    hvd.allreduce(torch.ones(LARGE), op=hvd.Adasum, compression=TwoBit().named("x"))


def maximum_by_a_function_imported_before() -> None:
    hvd.mpi_ops.allreduce.__wrapped__(torch.ones(LARGE), op=hvd.Max, compression=TwoBit)


def minimum_by_a_grouped_function_imported_before() -> None:
    hvd.mpi_ops.grouped_allreduce.__wrapped__([torch.ones(3), torch.ones(LARGE)], op=hvd.Min, compression=TwoBit)


def reducescatter() -> None:
    hvd.reducescatter(torch.ones(LARGE), compression=TwoBit)


def grouped_reducescatter() -> None:
    hvd.mpi_ops.grouped_reducescatter([torch.ones(LARGE)], compression=TwoBit().named("x"))


def reducescatter_imported_before() -> None:
    hvd.reducescatter.__wrapped__(torch.ones(LARGE), compression=TwoBit)


def a_tensor_that_requires_a_gradient() -> None:
    hvd.allreduce(torch.ones(LARGE, requires_grad=True), compression=TwoBit)


def one_name_for_two_tensors() -> None:
    named = TwoBit(0.5).named("two")
    hvd.grouped_allreduce([torch.ones(LARGE), torch.ones(LARGE)], compression=named)


def one_name_for_two_shapes() -> None:
    named = TwoBit(0.5).named("shapes")
    hvd.allreduce(torch.ones(LARGE), name="shapes", compression=named)
    hvd.allreduce(torch.ones(LARGE + 1), name="shapes", compression=named)


def a_name_in_an_optimizer() -> None:
    layer = torch.nn.Linear(3, 3)
    hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1), compression=TwoBit().named("x"))


def no_name() -> None:
    TwoBit().named("")


def other_thresholds_on_one_rank() -> None:
    hvd.allreduce(torch.ones(LARGE), name="other_thresholds", compression=TwoBit(0.5 + hvd.rank()))


def other_levels_on_one_rank() -> None:
    named = TwoBit().named("levels")
    for _ in range(2):
        hvd.allreduce(torch.ones(LARGE), name="other_levels", compression=named)
        named.residuals.scale(1.0 + hvd.rank())


MISTAKES = [minimum_of_allreduce, maximum_of_allreduce, product_of_grouped_allreduce, adasum_of_allreduce,
            adasum_of_a_named_tensor, maximum_by_a_function_imported_before,
            minimum_by_a_grouped_function_imported_before, reducescatter, grouped_reducescatter,
            reducescatter_imported_before, a_tensor_that_requires_a_gradient, one_name_for_two_tensors,
            one_name_for_two_shapes, a_name_in_an_optimizer, no_name, other_thresholds_on_one_rank,
            other_levels_on_one_rank]


def mistakes() -> dict[str, Any]:
    """What each mistake was told, and what still works after them."""
    told = told_by(MISTAKES)
    named = TwoBit(0.5).named("after")
    try:
        hvd.grouped_allreduce([torch.ones(LARGE), torch.ones(LARGE)], compression=named)
    except ValueError:
        pass
    after = hvd.allreduce(torch.full((LARGE,), 0.25), name="after", op=hvd.Sum, compression=named)
    small = hvd.allreduce(torch.ones(3, requires_grad=True), name="small", compression=TwoBit)
    with torch.no_grad():
        frozen = hvd.allreduce(torch.ones(LARGE, requires_grad=True), name="frozen", compression=TwoBit)
    integers = hvd.allreduce(torch.arange(LARGE), name="integers", op=hvd.Sum, compression=TwoBit)
    return {"told": told, "after": after.numpy(), "has_derivative": small.requires_grad, "frozen": frozen.numpy(),
            "integers": integers.numpy()}
