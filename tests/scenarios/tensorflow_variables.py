"""Whose residual is whose under TensorFlow, and what Horovod offers around training: every function runs on 2 ranks.

Thresholds are 0.5, and gradients multiples of 1/8, so that results can be told by hand.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import tempfile
import tracemalloc
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from hvd_twobit.errors import ResidualError
from hvd_twobit.keras import TwoBit as KerasTwoBit
from hvd_twobit.tensorflow import CheckpointedResiduals, TwoBit, residuals_of
from tests.scenarios.payloads import ARGUMENTS, SHAPES, STEPS, TRANSPORTS, tensor_of
from tests.simulation import gradient

EVERYTHING = TwoBit(threshold=0.5, min_elements=0)


def run() -> dict[str, Any]:
    """What every function below returns on this rank."""
    functions = [two_models_of_one_name, two_tapes_in_one_step, two_optimizers_in_one_step,
                 two_optimizers_accumulating_in_one_step, a_tape_before_its_first_step,
                 a_source_that_is_no_variable, generic_names, variables_that_end, a_saved_model, functions_run_eagerly,
                 an_instance_in_two_optimizers, the_optimizer_of_mixed_precision, payloads, a_checkpoint,
                 traces_of_one_function, traces_of_functions_that_end, traces_of_eager_steps]
    return {function.__name__: function() for function in functions}


def _variable(value: float = 0.0, name: str = "kernel") -> tf.Variable:
    return tf.Variable(tf.fill([16], value), name=name)


def _tape_step(variable: Any, value: float, compression: Any = EVERYTHING) -> tuple[Any, tf.GradientTape]:
    """The reduced gradient of ``value`` in every element."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * value)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    return tape.gradient(loss, [variable])[0], tape


def two_models_of_one_name() -> Any:
    first, second = _variable(), _variable()
    sent = []
    for _ in range(3):
        for variable, value in ((first, 0.125), (second, 0.25)):
            reduced, tape = _tape_step(variable, value)
            sent.append((float(reduced[0]), {name: float(array[0]) for name, array in
                                              residuals_of(tape).state_dict()["residuals"].items()}))
    return sent


def two_tapes_in_one_step() -> Any:
    """Of two models whose variables bear equal names, in one function, both given the class."""
    first, second = _variable(), _variable()
    step = tf.function(lambda: [_tape_step(first, 0.25)[0], _tape_step(second, 0.5)[0]])
    return [[float(reduced[0]) for reduced in step()] for _ in range(4)]


def two_optimizers_in_one_step(passes: int = 1) -> Any:
    variables = [_variable(), _variable()]
    optimizers = [hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=EVERYTHING,
                                                 backward_passes_per_step=passes) for _ in variables]
    for optimizer, variable in zip(optimizers, variables):
        optimizer.build([variable])

    @tf.function
    def step() -> None:
        for optimizer, variable, value in zip(optimizers, variables, (0.25, 0.5)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * value)
            optimizer.minimize(loss, [variable], tape=tape)

    weights = []
    for _ in range(4):
        step()
        weights.append([float(variable[0]) for variable in variables])
    return weights, [float(residuals_of(optimizer)["kernel:0"][0]) for optimizer in optimizers]


def two_optimizers_accumulating_in_one_step() -> Any:
    return two_optimizers_in_one_step(passes=2)


def an_instance_in_two_optimizers() -> Any:
    optimizers = [hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=EVERYTHING) for _ in "ab"]
    return residuals_of(optimizers[0]) is not residuals_of(optimizers[1]), KerasTwoBit is TwoBit


def a_tape_before_its_first_step() -> Any:
    """Residuals loaded from a checkpoint before the first step, through a tape around a forward pass."""
    variable = _variable()
    with tf.GradientTape() as tape:
        tf.reduce_sum(variable)
    registry = residuals_of(hvd.DistributedGradientTape(tape, compression=TwoBit))
    registry.load_state_dict({**registry.state_dict(), "shapes": {"kernel:0": (16,)},
                              "residuals": {"kernel:0": np.full(16, 0.375, np.float32)}})
    return float(_tape_step(variable, 0.125)[0][0])


def a_source_that_is_no_variable() -> Any:
    """Has no identity from step to step: travels uncompressed, nothing is kept."""
    source = tf.constant(np.zeros(2048, np.float32))
    with tf.GradientTape() as tape:
        tape.watch(source)
        loss = tf.reduce_sum(source * (0.125 + 0.25 * hvd.rank()))
    return float(hvd.DistributedGradientTape(tape, compression=EVERYTHING).gradient(loss, [source])[0][0])


def generic_names() -> Any:
    """``use_generic_names``, for ranks that call their variables differently."""
    variable = _variable(name=f"kernel_of_rank_{hvd.rank()}")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * 0.5)
    tape = hvd.DistributedGradientTape(tape, compression=EVERYTHING)
    return float(tape.gradient(loss, [variable], use_generic_names=True)[0][0])


def variables_that_end() -> Any:
    """A model that is made anew in a loop starts with residuals of zero, and the old ones' memory is freed."""
    kept = _variable(name="kept")
    sent = []
    for _ in range(3):
        new = _variable(name="new")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((kept + new) * 0.25)
        tape = hvd.DistributedGradientTape(tape, compression=EVERYTHING)
        sent.append([float(reduced[0]) for reduced in tape.gradient(loss, [kept, new])])
        registry = residuals_of(tape)
        del new, tape, loss
        gc.collect()
    return sent, sorted(registry), registry.nbytes


def a_saved_model() -> Any:
    """``hvd.load_model(..., compression=TwoBit)`` and the broadcast of what an optimizer remembers."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(40, input_shape=(30,), name="dense")])
    model.compile(hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), compression=TwoBit(0.01)), "mse")
    random = np.random.default_rng(hvd.rank())
    data = random.standard_normal((8, 30)).astype("f"), random.standard_normal((8, 40)).astype("f")
    hvd.broadcast_variables(model.variables, root_rank=0)
    model.fit(*data, batch_size=4, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder, "model.h5"))
        model.save(path)
        loaded = hvd_keras.load_model(path, compression=TwoBit(0.01))
    hvd.broadcast_variables(loaded.optimizer.variables(), root_rank=0)
    loaded.fit(*data, batch_size=4, verbose=0)
    return {"weights": loaded.get_weights(), "iterations": int(loaded.optimizer.iterations),
            "residuals": list(residuals_of(loaded.optimizer))}


def functions_run_eagerly() -> Any:
    """``tf.config.run_functions_eagerly(True)``, for debugging."""
    variable = _variable()
    tf.config.run_functions_eagerly(True)
    try:
        step = tf.function(lambda: _tape_step(variable, 0.25)[0])
        return [float(step()[0]) for _ in range(3)]
    finally:
        tf.config.run_functions_eagerly(False)


def the_optimizer_of_mixed_precision() -> Any:
    """The optimizer that Keras wraps into a LossScaleOptimizer by itself; an overflow on rank 0 skips the step."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = tf.keras.Sequential([tf.keras.layers.Dense(16, input_shape=(16,), use_bias=False, name="dense")])
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=EVERYTHING)
        model.compile(optimizer, loss=lambda _, output: tf.reduce_sum(output))
        hvd.broadcast_variables(model.variables, root_rank=0)
        before = model.get_weights()[0]
        huge = np.full((1, 16), 60000 if hvd.rank() == 0 else 0.0, np.float32)
        model.fit(huge, np.zeros((1, 16)), verbose=0)
        scale = float(model.optimizer.loss_scale)
        after_overflow = model.get_weights()[0]
        model.fit(np.ones((1, 16), np.float32), np.zeros((1, 16)), verbose=0)
        return {"type": type(model.optimizer).__name__, "scale": scale,
                "same": bool((before == after_overflow).all()),
                "finite": bool(np.isfinite(model.get_weights()[0]).all()),
                "moved": bool((model.get_weights()[0] != before).any()),
                "residuals": [bool(np.isfinite(residuals_of(model.optimizer)[name]).all())
                              for name in residuals_of(model.optimizer)]}
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def payloads() -> Any:
    """What is handed to Horovod's allgather and alltoall for known gradients; see ``tests.scenarios.payloads``."""
    return {transport: _sent(transport) for transport in TRANSPORTS}


def _sent(transport: str) -> dict[str, Any]:
    with _recording() as sent:
        variables = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()}

        @tf.function
        def step(constants: dict[str, tf.Tensor]) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(variable * constants[name]) for name, variable in variables.items()])
            tape = hvd.DistributedGradientTape(tape, compression=TwoBit(transport=transport, **ARGUMENTS))
            return tape.gradient(loss, list(variables.values()))

        reduced = []
        for number in range(STEPS):
            gradients = step({name: tf.constant(gradient(0, hvd.rank(), number, name, shape))
                              for name, shape in SHAPES.items()})
            reduced.append({name: value.numpy() for name, value in zip(SHAPES, gradients)})
    return {"sent": sent, "reduced": reduced}


@contextlib.contextmanager
def _recording() -> Iterator[dict[str, list[np.ndarray]]]:
    """What the graphs that are built meanwhile hand to Horovod, by name of the collective."""
    sent: dict[str, list[np.ndarray]] = {}
    originals = {function: getattr(hvd, function) for function in ("allgather", "alltoall")}

    def recording(original: Any) -> Any:
        def record(tensor: tf.Tensor, *args: Any, name: str = "", **kwargs: Any) -> Any:
            def keep(payload: np.ndarray) -> np.ndarray:
                sent.setdefault(tensor_of(name), []).append(payload.copy())
                return payload.copy()

            if tensor_of(name):
                shape = tensor.shape
                tensor = tf.numpy_function(keep, [tensor], tf.uint8)
                tensor.set_shape(shape)
            return original(tensor, *args, name=name, **kwargs)

        return record

    try:
        for function, original in originals.items():
            setattr(hvd, function, recording(original))
        yield sent
    finally:
        for function, original in originals.items():
            setattr(hvd, function, original)


class _Trained:
    """A Keras model, its optimizer and their checkpoint."""

    def __init__(self, units: int = 64) -> None:
        tf.keras.utils.set_random_seed(1)
        self.model = tf.keras.Sequential([tf.keras.layers.Dense(units, activation="tanh", input_shape=(32,), name="a"),
                                          tf.keras.layers.Dense(48, name="b")])
        self.optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9),
                                                        compression=TwoBit(warmup_steps=2, block_elements=256))
        self.model.compile(self.optimizer, loss="mse")
        self.residuals = residuals_of(self.optimizer)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer,
                                              residuals=CheckpointedResiduals(self.residuals))

    def fit(self, first: int, last: int) -> _Trained:
        """Steps ``first`` to ``last - 1``."""
        random = np.random.default_rng(hvd.rank())
        data = random.standard_normal((60, 4, 80)).astype(np.float32)[first:last].reshape(-1, 80)
        self.model.fit(data[:, :32], data[:, 32:], batch_size=4, shuffle=False, verbose=0)
        return self


def a_checkpoint() -> Any:
    """Restored into a new model and optimizer before their first step, they go on as if nothing had been."""
    trained = _Trained()
    with tempfile.TemporaryDirectory() as folder:
        path = trained.fit(0, 30).checkpoint.write(str(pathlib.Path(folder, f"rank_{hvd.rank()}")))
        resumed = _Trained()
        resumed.checkpoint.read(path).assert_existing_objects_matched()
        trained.fit(30, 60)
        resumed.fit(30, 60)  # TensorFlow restores momenta when they are made.
        other = _Trained(65).fit(0, 4)
        before = other.residuals.norms()
        try:
            tf.train.Checkpoint(residuals=CheckpointedResiduals(other.residuals)).read(path).expect_partial()
            told = "nothing"
        except ResidualError as error:
            told = str(error)
        changed = other.residuals.norms() != before
    states = [made.residuals.state_dict() for made in (trained, resumed)]
    return {"weights": [made.model.get_weights() for made in (trained, resumed)],
            "residuals": [state["residuals"] for state in states], "levels": [state["levels"] for state in states],
            "told": told, "changed": changed}


LARGE = 1 << 18


def _traced_nbytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _graphs() -> int:
    """Graphs of functions that are alive."""
    gc.collect()
    return sum(isinstance(thing, FuncGraph) for thing in gc.get_objects())


def traces_of_one_function() -> Any:
    """Gradients' worth of memory that ten more traces of a function take while it lives."""
    variable = tf.Variable(tf.zeros([LARGE]), name="large")

    @tf.function
    def step(batch: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(_tape_step(variable, 0.25 + 0.0 * tf.reduce_sum(batch))[0])

    tracemalloc.start()
    for size in range(1, 4):
        step(tf.zeros(size))
    before = _traced_nbytes()
    for size in range(4, 14):
        step(tf.zeros(size))
    after = _traced_nbytes()
    tracemalloc.stop()
    return step.experimental_get_tracing_count(), (after - before) / (4 * LARGE)


def traces_of_functions_that_end() -> Any:
    """How many graphs are left of ten functions that were traced, called and let go of, and how many bytes of each."""
    variable = _variable()

    def once() -> None:
        step = tf.function(lambda: _tape_step(variable, 0.25)[0])
        step()

    tracemalloc.start()
    for _ in range(3):
        once()
    graphs, before = _graphs(), _traced_nbytes()
    for _ in range(10):
        once()
    left = (_graphs() - graphs, (_traced_nbytes() - before) / 10)
    tracemalloc.stop()
    return left


def traces_of_eager_steps() -> Any:
    """How many graphs are left of ten models whose variables bear different names, beside a variable that stays."""
    kept = _variable(name="kept")

    def once(name: str) -> None:
        new = _variable(name=name)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((kept + new) * 0.25)
        hvd.DistributedGradientTape(tape, compression=EVERYTHING).gradient(loss, [kept, new])

    for number in range(3):
        once(f"before_{number}")
    graphs = _graphs()
    for number in range(10):
        once(f"new_{number}")
    return _graphs() - graphs
