"""``hvd.allreduce`` and ``hvd.grouped_allreduce`` of TensorFlow with ``compression=TwoBit``; see ``allreduce``.

The cases run in functions that are traced once, the first one eagerly as well, and one with shapes that are not known
before the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf

from hvd_twobit.tensorflow import TwoBit
from tests.scenarios import told_by
from tests.scenarios.allreduce import (
    CASES,
    JOINING,
    NAMED,
    SHAPES,
    STEPS,
    STEPS_AFTER_JOIN,
    named_gradient,
    steps_before_join,
)

RUN = ["the bare class", "fixed, average, a third before and seven behind", "asymmetrical, sum, a seventh before",
       "a group", "a group of bfloat16", "a process set", "float16", "bfloat16", "float64", "NaN on one rank"]
"""The cases that run here: what is the core's does so in PyTorch's job already."""

NAMED_RUN = ["adaptive", "asymmetrical, sum"]


def run() -> dict[str, Any]:
    """By case, what came back; None where the rank does not take part."""
    cases = {name: _case(name, tf.function) for name in RUN}
    cases["eagerly"] = _case("the bare class", lambda reduce: reduce)
    unknown = [[tf.TensorSpec(None, tf.float64)] * len(SHAPES)]
    cases["of unknown shape"] = _case("float64", functools.partial(tf.function, input_signature=unknown))
    return {"cases": cases, "named": {name: _named(name) for name in NAMED_RUN}, "mistakes": mistakes(),
            "keras": hvd_keras.allreduce(np.full(2000, 1 + hvd.rank(), np.float32), name="keras", op=hvd.Sum,
                                         compression=TwoBit).numpy()}


def _reduced(tensors: list[tf.Tensor], name: str, process_set: Any) -> list[tf.Tensor]:
    case = CASES[name]
    compression = TwoBit if case.compression is None else TwoBit(**case.compression)
    options = dict(compression=compression, op=getattr(hvd, case.op), process_set=process_set, **case.options)
    if case.grouped:
        return hvd.grouped_allreduce(tensors, name=f"group.{_plain(name)}", **options)
    return [hvd.allreduce(tensor, name=f"{_plain(name)}.{tensor_name}", **options)
            for tensor_name, tensor in zip(SHAPES, tensors)]


def _plain(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def _case(name: str, traced: Callable[..., Any]) -> dict[str, Any] | None:
    case = CASES[name]
    members = case.members(hvd.size())
    process_set = hvd.add_process_set(members) if len(members) < hvd.size() else hvd.global_process_set
    found = None
    if hvd.rank() in members:
        tensors = [tf.cast(case.tensor(hvd.rank(), tensor), case.dtype) for tensor in SHAPES]
        reduced = traced(lambda parts: _reduced(parts, name, process_set))(tensors)
        found = {tensor_name: {"dtype": part.dtype.name, "value": tf.cast(part, tf.float64).numpy()}
                 for tensor_name, part in zip(SHAPES, reduced)}
    if process_set is not hvd.global_process_set:
        hvd.remove_process_set(process_set)
    return found


def _named(name: str) -> dict[str, Any]:
    case = NAMED[name]
    compression = TwoBit(**case.compression or {}).named(name)

    @tf.function
    def reduce(gradient: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(gradient, name=f"named.{_plain(name)}", op=getattr(hvd, case.op), compression=compression)

    steps = [reduce(tf.constant(named_gradient(hvd.rank(), step))).numpy() for step in range(STEPS)]
    assert reduce.experimental_get_tracing_count() == 1
    state = compression.residuals.state_dict()
    return {"steps": steps, "residual": state["residuals"][name],
            "levels": state["levels"].get(name, np.zeros(0, np.float32))}


def join() -> dict[str, Any]:
    """Ranks run out of data one after the other, and go on together when all have."""
    compressions = {name: TwoBit(**case.compression or {}).named(name) for name, case in JOINING.items()}
    found: dict[str, Any] = {name: [] for name in JOINING}
    tape_found, variable = [], tf.Variable(tf.zeros((43, 47)), name="joining")

    def exchange(step: int) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * named_gradient(hvd.rank(), step))
        tape = hvd.DistributedGradientTape(tape, compression=TwoBit(transport="allreduce"))
        tape_found.append(tape.gradient(loss, [variable])[0].numpy())
        for name, compression in compressions.items():
            found[name].append(hvd.allreduce(tf.constant(named_gradient(hvd.rank(), step)), name=f"join.{name}",
                                             op=getattr(hvd, JOINING[name].op), compression=compression,
                                             **JOINING[name].options).numpy())

    for step in range(steps_before_join(hvd.rank())):
        exchange(step)
    last = int(hvd.join())
    for step in range(STEPS_AFTER_JOIN):
        exchange(steps_before_join(0) + step)
    assert int(tf.function(hvd.join)()) in range(hvd.size())
    return {"steps": found, "tape": tape_found, "last": last}


# ---- mistakes ------------------------------------------------------------------------------------------------------

LARGE = 2000


def minimum_of_allreduce() -> None:
    hvd.allreduce(tf.ones(LARGE), op=hvd.Min, compression=TwoBit)


def maximum_of_allreduce_in_a_function() -> None:
    tf.function(lambda: hvd.allreduce(tf.ones(3), op=hvd.Max, compression=TwoBit(0.5)))()


def product_of_grouped_allreduce() -> None:
    hvd.grouped_allreduce([tf.ones(LARGE)], op=hvd.Product, compression=TwoBit)


def adasum_of_a_named_tensor() -> None:
    hvd.allreduce(tf.ones(LARGE), op=hvd.Adasum, compression=TwoBit().named("x"))


def maximum_of_keras() -> None:
    hvd_keras.allreduce(np.ones(LARGE), op=hvd.Max, compression=TwoBit)


def maximum_by_a_function_imported_before() -> None:
    hvd.allreduce.__wrapped__(tf.ones(LARGE), op=hvd.Max, compression=TwoBit)


def minimum_by_a_grouped_function_imported_before() -> None:
    hvd.grouped_allreduce.__wrapped__([tf.ones(LARGE)], op=hvd.Min, compression=TwoBit)


def reducescatter() -> None:
    hvd.reducescatter(tf.ones(LARGE), compression=TwoBit)


def grouped_reducescatter() -> None:
    hvd.grouped_reducescatter([tf.ones(LARGE)], compression=TwoBit().named("x"))


def reducescatter_imported_before() -> None:
    hvd.reducescatter.__wrapped__(tf.ones(LARGE), compression=TwoBit)


def a_gradient_through_it() -> None:
    variable = tf.Variable(tf.ones(LARGE))
    with tf.GradientTape() as tape:
        reduced = hvd.allreduce(2.0 * variable, name="through", compression=TwoBit)
    tape.gradient(reduced, variable)


def a_gradient_through_a_function() -> None:
    variable = tf.Variable(tf.ones(LARGE))

    @tf.function
    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            reduced = hvd.allreduce(2.0 * variable, name="through_function", compression=TwoBit)
        return tape.gradient(reduced, variable)

    gradient()


def jit_compile() -> None:
    tf.function(lambda: hvd.allreduce(tf.ones(LARGE), compression=TwoBit), jit_compile=True)()


def one_name_for_two_tensors() -> None:
    named = TwoBit(0.5).named("two")
    hvd.grouped_allreduce([tf.ones(LARGE), tf.ones(LARGE)], name="two", compression=named)


def one_name_for_two_shapes() -> None:
    named = TwoBit(0.5).named("shapes")
    hvd.allreduce(tf.ones(LARGE), name="shapes", compression=named)
    hvd.allreduce(tf.ones(LARGE + 1), name="other_shapes", compression=named)


def a_name_in_an_optimizer() -> None:
    hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=TwoBit().named("x"))


def other_thresholds_on_one_rank() -> None:
    hvd.allreduce(tf.ones(LARGE), name="other_thresholds", compression=TwoBit(0.5 + hvd.rank()))


MISTAKES = [minimum_of_allreduce, maximum_of_allreduce_in_a_function, product_of_grouped_allreduce,
            adasum_of_a_named_tensor, maximum_of_keras, maximum_by_a_function_imported_before,
            minimum_by_a_grouped_function_imported_before, reducescatter, grouped_reducescatter,
            reducescatter_imported_before, a_gradient_through_it, a_gradient_through_a_function, jit_compile,
            one_name_for_two_tensors, one_name_for_two_shapes, a_name_in_an_optimizer, other_thresholds_on_one_rank]


def mistakes() -> dict[str, str]:
    """What each mistake was told."""
    return told_by(MISTAKES)
