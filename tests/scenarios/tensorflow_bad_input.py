"""Mistakes under TensorFlow that only several ranks can make, or that must be refused before anything is sent.

All run in one job. No mistake leaves a collective behind: ranks that disagree are told before anything else is sent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import horovod.keras as hvd_of_keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import tensorflow as tf

from hvd_twobit import payload
from hvd_twobit.codec import Codec
from hvd_twobit.machines import known_process_sets
from hvd_twobit.tensorflow import TwoBit, hierarchy, residuals_of
from tests.scenarios import told_by

EVERYTHING = TwoBit(threshold=0.5, min_elements=0)


def _variables(**shapes: Any) -> dict[str, tf.Variable]:
    return {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()}


def _gradients(variables: dict[str, tf.Variable], compression: Any = EVERYTHING, used: Any = None,
               **options: Any) -> list[Any]:
    """One exchange of gradients of one, on a tape."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variables[name]) for name in used or variables])
    tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
    return tape.gradient(loss, list(variables.values()))


def another_min_elements() -> None:
    _gradients(_variables(weight=(30, 40), bias=(40,)), TwoBit(min_elements=1024 * hvd.rank()))


def another_min_elements_in_a_function() -> None:
    variables = _variables(weight=(30, 40), bias=(40,))
    tf.function(lambda: _gradients(variables, TwoBit(min_elements=1024 * hvd.rank())))()


def another_min_elements_in_a_group() -> None:
    _gradients(_variables(weight=(30, 40), bias=(40,)), TwoBit(min_elements=1024 * hvd.rank()), groups=1)


def another_min_elements_in_fit() -> None:
    _fit(TwoBit(min_elements=1024 * hvd.rank()))


def auto_on_one_rank() -> None:
    _gradients(_variables(weight=(30, 40)), TwoBit("auto" if hvd.rank() else 0.5, warmup_steps=1))


def another_transport() -> None:
    _gradients(_variables(weight=(30, 40)), TwoBit(0.5, transport="sra" if hvd.rank() else "allgather"))


def another_min_elements_by_allreduce() -> None:
    _gradients(_variables(weight=(30, 40), bias=(40,)), TwoBit(0.5, min_elements=1024 * hvd.rank(),
                                                               transport="allreduce"))


def another_threshold_by_allreduce() -> None:
    _gradients(_variables(weight=(30, 40)), TwoBit(0.5 + hvd.rank(), transport="allreduce"))


def another_bucket_cap() -> None:
    _gradients(_variables(a=(30, 40), b=(30, 40)), TwoBit(0.5, bucket_cap_mb=1 if hvd.rank() else 0.006))


def other_groups_on_one_rank() -> None:
    variables = _variables(a=(10,), b=(10,), c=(10,))
    a, b, c = variables.values()
    _gradients(variables, groups=[[a, b], [c]] if hvd.rank() else [[a], [b, c]])


def levels_of_another_step() -> None:
    variables = _variables(weight=(30, 40))
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables["weight"])
        tape = hvd.DistributedGradientTape(tape, compression=TwoBit)
        tape.gradient(loss, [variables["weight"]])
        residuals_of(tape).scale(1.0 + hvd.rank())


def no_gradient_on_one_rank() -> None:
    variables = _variables(a=(10,), b=(10,))
    _gradients(variables, used=["a", "b"][:2 - hvd.rank()])


def another_shape_on_one_rank() -> None:
    _gradients(_variables(a=(10 + hvd.rank(),)))


def another_size_of_unknown_shape() -> None:
    _gradients({"a": tf.Variable(tf.zeros(10 + hvd.rank()), name="a", shape=tf.TensorShape(None))},
               TwoBit(min_elements=4))


def another_version_of_payload() -> None:
    version = payload.VERSION
    payload.VERSION += hvd.rank()
    try:
        _gradients(_variables(a=(10,)))
    finally:
        payload.VERSION = version


def another_shape_under_a_known_name() -> None:
    variable = tf.Variable(tf.zeros(10), name="a", shape=tf.TensorShape(None))
    step = tf.function(lambda: _gradients({"a": variable}))
    step()
    variable.assign(tf.zeros(11))
    step()


def hierarchical_on_rank_0() -> None:
    hierarchy._found.clear()
    _gradients(_variables(a=(30, 40)), TwoBit(hierarchical=hvd.rank() == 0))


def hierarchical_on_rank_1_in_a_function() -> None:
    """It is asked while that function is traced; the other rank begins with an exchange on which they agree."""
    hierarchy._found.clear()
    first, second = _variables(a=(30, 40)), _variables(b=(30, 40))
    tf.function(lambda: [_gradients(first), _gradients(second, TwoBit(hierarchical=bool(hvd.rank())))])()


def hierarchical_on_rank_1_by_allreduce() -> None:
    hierarchy._found.clear()
    _gradients(_variables(a=(30, 40)), TwoBit(transport="allreduce", hierarchical=bool(hvd.rank())))


def hierarchical_auto_on_rank_1() -> None:
    """The ranks are on one machine, where only True has levels."""
    hierarchy._found.clear()
    _gradients(_variables(a=(30, 40)), TwoBit(hierarchical="auto" if hvd.rank() else True))


def hierarchical_on_rank_0_after_an_exchange() -> None:
    variables = _variables(a=(30, 40))
    _gradients(variables, TwoBit(hierarchical=True))
    _gradients(variables, TwoBit(hierarchical=hvd.rank() == 0))


def hierarchical_within_a_process_set() -> None:
    _gradients(_variables(a=(10,)), TwoBit(hierarchical=True), process_set=hvd.ProcessSet([0]))


def hierarchical_in_an_elastic_job() -> None:
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=TwoBit(hierarchical="auto"))
        hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=TwoBit(hierarchical=True))
    finally:
        del os.environ["HOROVOD_ELASTIC"]


def hierarchical_without_process_sets() -> None:
    before = os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")
    try:
        for number, ranks in known_process_sets().items():
            if number:
                process_set = hvd.ProcessSet(ranks)
                process_set.process_set_id = number
                hvd.remove_process_set(process_set)
        _gradients(_variables(a=(10,)), TwoBit(0.5, hierarchical=True))
    finally:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = before


def hierarchical_after_process_sets_were_removed() -> None:
    """They are made again."""
    reduced, = _gradients(_variables(a=(10,)), TwoBit(0.5, min_elements=0, hierarchical=True))
    assert (reduced.numpy() == 0.5).all()


def another_shape_under_a_known_name_on_two_levels() -> None:
    variable = tf.Variable(tf.zeros(10), name="a", shape=tf.TensorShape(None))
    compression = TwoBit(0.5, min_elements=0, hierarchical=True)
    _gradients({"a": variable}, compression)
    variable.assign(tf.zeros(11))
    _gradients({"a": variable}, compression)


def _damaged(method: str, position: int, transport: str) -> None:
    """Rank 1 cannot read what came from the other machines; the other ranks of its machine wait for its share."""
    original = getattr(Codec, method)

    def damaged(*arguments: Any) -> Any:
        received = arguments[position].copy()
        received[0] ^= hvd.rank()
        return original(*arguments[:position], received, *arguments[position + 1:])

    setattr(Codec, method, damaged)
    try:
        _gradients(_variables(a=(3000,), b=(3000,)), TwoBit(0.5, hierarchical=True, transport=transport))
    finally:
        setattr(Codec, method, original)


def a_share_that_arrives_damaged() -> None:
    _damaged("receive", 2, "allgather")


def a_share_that_arrives_damaged_and_cannot_be_summed() -> None:
    _damaged("sum", 3, "sra")


def adasum() -> None:
    _gradients(_variables(a=(10,)), TwoBit, op=hvd.Adasum)


def adasum_optimizer() -> None:
    hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), op=hvd.Adasum, compression=TwoBit)


def minimum() -> None:
    _gradients(_variables(a=(10,)), op=hvd.Min)


def complex_gradients() -> None:
    _gradients({"a": tf.Variable(tf.zeros(10, tf.complex64), name="a")})


def residuals_of_another_optimizer() -> None:
    residuals_of(hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)))


def residuals_of_a_new_tape() -> None:
    residuals_of(hvd.DistributedGradientTape(tf.GradientTape(), compression=TwoBit))


def residuals_of_two_models() -> None:
    models = [_variables(a=(10,)), _variables(a=(10,))]
    for model in models:
        _gradients(model)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(model["a"]) for model in models])
    tape = hvd.DistributedGradientTape(tape, compression=EVERYTHING)
    tape.gradient(loss, [model["a"] for model in models])
    residuals_of(tape)


def unknown_argument() -> None:
    TwoBit(treshold=0.1)


def a_variable_as_an_argument() -> None:
    variables = _variables(a=(10,))
    tf.function(lambda variable: _gradients({"a": variable}))(variables["a"])


def a_variable_as_an_argument_under_autograph() -> None:
    @tf.function
    def step(variable: tf.Variable) -> list[Any]:
        return _gradients({"a": variable})

    step(_variables(a=(10,))["a"])


def variables_in_a_list_as_an_argument() -> None:
    variables = _variables(a=(10,), b=(10,))
    tf.function(lambda listed: _gradients(dict(enumerate(listed))))(list(variables.values()))


def _fit(compression: Any = EVERYTHING, **options: Any) -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(40, input_shape=(30,), name="dense")])
    model.compile(hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=compression), "mse",
                  **options)
    model.fit(tf.zeros((4, 30)), tf.zeros((4, 40)), verbose=0)


def jit_compile_in_fit() -> None:
    _fit(jit_compile=True)


def jit_compile_of_a_function() -> None:
    variables = _variables(a=(10,))
    tf.function(lambda: _gradients(variables), jit_compile=True)()


@contextlib.contextmanager
def _keras_3() -> Iterator[Any]:
    """The module keras, said to be version 3 where TensorFlow 2.15 keeps a real Keras 3 from being installed."""
    version = keras.__version__
    if version.startswith("2."):
        keras.__version__ = "3.0.5"
    try:
        yield keras
    finally:
        keras.__version__ = version


def keras_3() -> None:
    with _keras_3() as keras_3:
        hvd_keras.DistributedOptimizer(keras_3.optimizers.SGD(0.1), compression=EVERYTHING)


def keras_3_by_horovod_tensorflow() -> None:
    with _keras_3() as keras_3:
        hvd.DistributedOptimizer(keras_3.optimizers.SGD(0.1), compression=EVERYTHING)


def keras_3_in_mixed_precision() -> None:
    with _keras_3() as keras_3:
        scaling = getattr(keras_3.optimizers, "LossScaleOptimizer", None) or keras_3.mixed_precision.LossScaleOptimizer
        hvd_keras.DistributedOptimizer(scaling(keras_3.optimizers.SGD(0.1)), compression=EVERYTHING)


def keras_3_model_loaded() -> None:
    with _keras_3():
        hvd_of_keras.load_model("no such file", compression=EVERYTHING)


def keras_3_variables_on_a_tape() -> None:
    def named(name: str) -> Any:
        if hasattr(keras, "Variable"):
            return keras.Variable(tf.zeros(10), name=name)
        return type("Variable", (), {"__module__": "keras.src.backend.tensorflow.core", "path": name})()

    with _keras_3():
        hvd.DistributedGradientTape(tf.GradientTape(), compression=EVERYTHING).gradient(tf.zeros([]), [named("a")])


SCENARIOS: list[Callable[[], None]] = [
    adasum, adasum_optimizer, minimum, complex_gradients, residuals_of_another_optimizer,
    residuals_of_a_new_tape, residuals_of_two_models, unknown_argument,
    a_variable_as_an_argument, a_variable_as_an_argument_under_autograph, variables_in_a_list_as_an_argument,
    jit_compile_in_fit, jit_compile_of_a_function,
    keras_3, keras_3_by_horovod_tensorflow, keras_3_in_mixed_precision, keras_3_model_loaded,
    keras_3_variables_on_a_tape, another_min_elements, another_min_elements_in_a_function,
    another_min_elements_in_a_group, another_min_elements_in_fit, auto_on_one_rank, another_transport,
    another_min_elements_by_allreduce, another_threshold_by_allreduce, another_bucket_cap, other_groups_on_one_rank,
    levels_of_another_step, no_gradient_on_one_rank, another_shape_on_one_rank,
    another_size_of_unknown_shape, another_version_of_payload, another_shape_under_a_known_name,
    hierarchical_on_rank_0, hierarchical_on_rank_1_in_a_function, hierarchical_on_rank_1_by_allreduce,
    hierarchical_auto_on_rank_1, hierarchical_on_rank_0_after_an_exchange, hierarchical_within_a_process_set,
    hierarchical_in_an_elastic_job, another_shape_under_a_known_name_on_two_levels, a_share_that_arrives_damaged,
    a_share_that_arrives_damaged_and_cannot_be_summed, hierarchical_without_process_sets,
    hierarchical_after_process_sets_were_removed]


def run() -> dict[str, str]:
    """Type and message of the error of every scenario on this rank."""
    return told_by(SCENARIOS)
