"""Less usual ways to train under TensorFlow that go on working: every function runs on 2 ranks.

The threshold is 0.5 and every gradient a multiple of 1/8, so that results can be told by hand.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf

from hvd_twobit import transports
from hvd_twobit.codec import Codec
from hvd_twobit.errors import UnsupportedOperationError
from hvd_twobit.keras import callbacks
from hvd_twobit.tensorflow import TwoBit, residuals_of

EVERYTHING = TwoBit(threshold=0.5, min_elements=0)


def run() -> dict[str, Any]:
    """What every function below returns on this rank."""
    functions = [a_function_called_twice_in_another, a_function_traced_before, a_function_traced_in_another_trace,
                 a_loop_that_adds_up, a_loop_that_trains, a_loop_over_a_dataset,
                 several_steps_per_execution, a_condition, a_condition_of_two_exchanges, several_tapes_added_up,
                 a_variable_of_two_models, models_that_become_one, variables_created_later,
                 a_model_as_an_argument, fitted_again_and_again,
                 a_cloned_model, a_layer_used_twice, one_variable_in_mixed_precision, a_train_step_of_the_users_own,
                 two_loss_scales, two_loss_scales_eagerly, a_loss_changed_after_it_was_scaled,
                 two_losses_changed_after_they_were_scaled, an_unscaled_loss_beside_a_scaled_one,
                 a_transport_that_changes, statistics_for_tensorboard, statistics_of_many_steps_per_execution]
    return {function.__name__: function() for function in functions}


def _variable(name: str = "kernel") -> tf.Variable:
    return tf.Variable(tf.zeros([16]), name=name)


def _reduced(variables: Sequence[tf.Variable], value: Any = 0.25) -> list[tf.Tensor]:
    """Reduced gradients of ``value`` in every element of every variable."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variable * value) for variable in variables])
    return hvd.DistributedGradientTape(tape, compression=EVERYTHING).gradient(loss, list(variables))


def _first(tensors: Sequence[Any]) -> list[float]:
    return [float(np.ravel(tensor)[0]) for tensor in tensors]


def a_function_called_twice_in_another() -> Any:
    """Both calls have the same graph, so the same names of collectives."""
    variables = [_variable() for _ in range(3)]
    inner = tf.function(lambda value: _reduced(variables, value))
    outer = tf.function(lambda: [inner(0.25), inner(0.5)])
    return [[_first(reduced) for reduced in outer()] for _ in range(2)]


def a_function_traced_before() -> Any:
    """By a call of its own, so that while it was traced nothing told of others."""
    variable = _variable()
    inner = tf.function(lambda: _reduced([variable])[0])
    outer = tf.function(lambda: [inner(), inner(), inner()])
    return _first([inner(), *outer(), *outer()])


def a_function_traced_in_another_trace() -> Any:
    """The second trace of the outer function has its own names, the inner function those of the first."""
    variables = [_variable(), _variable()]
    inner = tf.function(lambda: _reduced(variables[:1])[0])

    @tf.function
    def outer(batch: tf.Tensor) -> list[tf.Tensor]:
        return [inner(), _reduced(variables[1:], 0.25 + 0.0 * batch[0])[0], inner()]

    return [_first(outer(tf.zeros(size))) for size in (1, 2, 2)]


def a_loop_that_adds_up() -> Any:
    """Nothing but the exchange itself keeps one pass of the loop from overtaking another."""
    variable = _variable()

    @tf.function
    def added_up(steps: tf.Tensor) -> tf.Tensor:
        total = tf.zeros([16])
        for _ in tf.range(steps):
            total += _reduced([variable])[0]
        return total

    return _first([added_up(tf.constant(5)), added_up(tf.constant(5))])


def a_loop_that_trains() -> Any:
    variable = _variable()

    @tf.function
    def train(steps: tf.Tensor) -> None:
        for _ in tf.range(steps):
            variable.assign_sub(_reduced([variable])[0])

    train(tf.constant(4))
    train(tf.constant(7))
    return _first([variable])


def a_loop_over_a_dataset() -> Any:
    """The step becomes a function that the dataset calls."""
    variable = _variable()

    @tf.function
    def train(values: tf.data.Dataset) -> None:
        for value in values:
            variable.assign_sub(_reduced([variable], value)[0])

    train(tf.data.Dataset.from_tensor_slices(tf.fill([7], 0.25)))
    return _first([variable])


def a_condition() -> Any:
    variable = _variable()
    step = tf.function(lambda wanted: tf.cond(wanted, lambda: _reduced([variable])[0], lambda: tf.fill([16], -1.0)))
    return _first([step(tf.constant(wanted)) for wanted in (True, False, True, True)])


def a_condition_of_two_exchanges() -> Any:
    variable = _variable()
    step = tf.function(lambda low: tf.cond(low, lambda: _reduced([variable])[0], lambda: _reduced([variable], 0.5)[0]))
    return _first([step(tf.constant(low)) for low in (True, False, True, True)])


def several_tapes_added_up() -> Any:
    variable = _variable()
    step = tf.function(lambda: _reduced([variable])[0] + _reduced([variable])[0] + _reduced([variable])[0])
    return _first([step() for _ in range(3)])


def a_variable_of_two_models() -> Any:
    shared, first, second = _variable("shared"), _variable("first"), _variable("second")
    return [_first(_reduced(model)) for model in ([shared, first], [shared, second], [second, shared], [first])]


def models_that_become_one() -> Any:
    """Their variables have residuals in two places, and are given to one tape in the end."""
    models = [[_variable("one"), _variable("another")], [_variable("other")]]
    sent = [_first(_reduced(model)) for model in models]
    one, another, other = [*models[0], *models[1]]
    return [*sent, _first(_reduced([one, other, another])), _first(_reduced([other]))]


def variables_created_later() -> Any:
    variables: list[tf.Variable] = []
    sent = []
    for _ in range(3):
        variables.append(_variable())
        sent.append(_first(_reduced(variables)))
    return sent


def a_transport_that_changes() -> Any:
    """As when an elastic job grows and shrinks, for which the same graph must do; and how often this rank summed."""
    variables = [_variable("first"), _variable("second")]
    chosen, summed = ["allgather"], []
    originals = transports.choose, Codec.sum
    transports.choose = lambda elements, ranks, adaptive: chosen[0]
    Codec.sum = lambda *args: summed.append(chosen[0]) or originals[1](*args)
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        step = tf.function(lambda: _reduced(variables))
        sent = []
        for chosen[0] in ("allgather", "sra", "sra", "allgather", "allgather", "sra"):
            sent.append(_first(step()))
        return sent, summed, step.experimental_get_tracing_count()
    finally:
        del os.environ["HOROVOD_ELASTIC"]
        transports.choose, Codec.sum = originals


# Keras. The loss is the sum of outputs, so that the gradient of a kernel is the sum of inputs over the batch.

def _dense(**options: Any) -> tf.keras.layers.Dense:
    return tf.keras.layers.Dense(16, use_bias=False, kernel_initializer="zeros", name="dense", **options)


def _model() -> tf.keras.Model:
    return tf.keras.Sequential([tf.keras.Input((16,)), _dense()])


def _compiled(model: tf.keras.Model, optimizer: Any = None, **options: Any) -> tf.keras.Model:
    optimizer = optimizer or hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=EVERYTHING)
    model.compile(optimizer, loss=lambda _, output: tf.reduce_sum(output), **options)
    return model


def _fit(model: tf.keras.Model, rows: int = 1, batch_size: int = 1) -> float:
    """Train on rows of 0.25; an element of the kernel afterwards."""
    model.fit(np.full((rows, 16), 0.25, np.float32), np.zeros((rows, 16)), batch_size=batch_size, verbose=0)
    return _first(model.get_weights())[0]


def several_steps_per_execution() -> Any:
    return _fit(_compiled(_model(), steps_per_execution=3), rows=7)


def fitted_again_and_again() -> Any:
    """``fit`` twice, compiled again with the same optimizer, and with batches of another size."""
    model = _compiled(_model())
    weights = [_fit(model), _fit(model)]
    _compiled(model, model.optimizer)
    weights += [_fit(model), _fit(model, rows=3, batch_size=2)]
    return weights, list(residuals_of(model.optimizer))


def a_cloned_model() -> Any:
    """A clone, and an optimizer made of the other's configuration, begin without residuals."""
    model = _compiled(_model())
    _fit(model)
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    clone = _compiled(tf.keras.models.clone_model(model), optimizer)
    return [_fit(clone), _fit(model), _fit(clone)]


def a_layer_used_twice() -> Any:
    inputs, layer = tf.keras.Input((16,)), _dense()
    return _fit(_compiled(tf.keras.Model(inputs, layer(inputs) + layer(inputs))))


def a_model_as_an_argument() -> Any:
    model = _model()

    @tf.function
    def step(trained: tf.keras.Model, inputs: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(trained(inputs))
        return hvd.DistributedGradientTape(tape, compression=EVERYTHING).gradient(loss, trained.trainable_variables)

    return _first([step(model, tf.fill([1, 16], 0.25))[0] for _ in range(2)])


def a_train_step_of_the_users_own() -> Any:
    class Model(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = _dense()

        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.dense(data[0]))
            tape = hvd.DistributedGradientTape(tape, compression=EVERYTHING)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    model = Model()
    model.compile(tf.keras.optimizers.SGD(1.0))
    return _fit(model, rows=5)


def one_variable_in_mixed_precision() -> Any:
    """Keras wraps variables then, but tapes watch what is in the wrapping: it has one residual all the same."""
    layer = _dense(dtype="mixed_float16")
    layer.build((1, 16))
    sent = []
    for watched in (True, False, True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(layer(tf.fill([1, 16], 0.25)), tf.float32))
        variables = list(tape.watched_variables()) if watched else layer.trainable_variables
        tape = hvd.DistributedGradientTape(tape, compression=EVERYTHING)
        sent += _first(tape.gradient(loss, variables))
        names = list(residuals_of(tape))
    return sent, len(names)


class _Scaled:
    """A variable, an optimizer whose loss scale doubles at every step, and a loss whose gradient is 1/16."""

    def __init__(self, name: str, scale: float) -> None:
        self.variable = _variable(name)
        self.optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
            tf.keras.optimizers.SGD(1.0), initial_scale=scale, dynamic_growth_steps=1)
        self._tape: Any = None

    def loss(self) -> tf.Tensor:
        return tf.reduce_sum(self.variable * 0.0625)

    def gradient(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[tf.Tensor]:
        self._tape = hvd.DistributedGradientTape(tape, compression=TwoBit(threshold=3 / 32, min_elements=0))
        return self._tape.gradient(loss, [self.variable])

    def apply(self, gradients: list[tf.Tensor]) -> None:
        self.optimizer.apply_gradients(zip(self.optimizer.get_unscaled_gradients(gradients), [self.variable]))

    @property
    def result(self) -> list[float | None]:
        """An element of the variable, the loss scale of the residual and an element of that."""
        residuals = residuals_of(self._tape)
        return [*_first([self.variable]), residuals.loss_scale, *_first([residuals[self.variable.name]])]


def _two_scales(decorate: Any, changed: Any = lambda loss: loss) -> Any:
    """As networks are trained against each other: both losses are scaled before the first gradient is computed."""
    one, other = _Scaled("one", 4.0), _Scaled("other", 64.0)

    @decorate
    def step() -> None:
        with tf.GradientTape() as tape, tf.GradientTape() as other_tape:
            loss = changed(one.optimizer.get_scaled_loss(one.loss()))
            other_loss = changed(other.optimizer.get_scaled_loss(other.loss()))
        gradients = one.gradient(tape, loss)
        other_gradients = other.gradient(other_tape, other_loss)
        one.apply(gradients)
        other.apply(other_gradients)

    for _ in range(2):
        step()
    return [one.result, other.result]


def two_loss_scales() -> Any:
    return _two_scales(tf.function)


def two_loss_scales_eagerly() -> Any:
    return _two_scales(lambda step: step)


def two_losses_changed_after_they_were_scaled() -> Any:
    """Nothing tells which loss is whose: that is refused."""
    try:
        return _two_scales(tf.function, changed=tf.identity)
    except UnsupportedOperationError as error:
        return "cannot tell whose gradients" in str(error)


def a_loss_changed_after_it_was_scaled() -> Any:
    one = _Scaled("one", 4.0)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(one.optimizer.get_scaled_loss(tf.stack([one.loss(), one.loss()])))
        one.apply(one.gradient(tape, loss))

    for _ in range(2):
        step()
    return one.result


def an_unscaled_loss_beside_a_scaled_one() -> Any:
    """The scaled one's gradients are asked for first, and unscaled last."""
    one, other = _Scaled("one", 4.0), _Scaled("other", 64.0)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape, tf.GradientTape() as other_tape:
            loss, other_loss = one.optimizer.get_scaled_loss(one.loss()), other.loss()
        gradients = one.gradient(tape, loss)
        other.variable.assign_sub(other.gradient(other_tape, other_loss)[0])
        one.apply(gradients)

    for _ in range(2):
        step()
    return [one.result, other.result]


def statistics_for_tensorboard() -> Any:
    """What the callback writes for rank 0 while a model with adaptive levels is trained; nothing for others."""
    return _statistics()


def statistics_of_many_steps_per_execution() -> Any:
    """Executions of three steps, and one of two at the end of an epoch."""
    return _statistics(epochs=2, steps_per_execution=3)


def _statistics(epochs: int = 1, **options: Any) -> Any:
    model = tf.keras.Sequential([tf.keras.layers.Dense(64, input_shape=(32,), name="wide", use_bias=False)])
    model.compile(hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01), compression=TwoBit), loss="mse",
                  **options)
    hvd.broadcast_variables(model.variables, root_rank=0)
    with tempfile.TemporaryDirectory() as folder:
        model.fit(np.ones((8, 32), np.float32), np.zeros((8, 64), np.float32), batch_size=1, verbose=0, epochs=epochs,
                  callbacks=[callbacks.TwoBitTensorBoard(folder, update_freq=4)])
        found = {}
        for file in pathlib.Path(folder).iterdir():
            for event in tf.compat.v1.train.summary_iterator(str(file)):
                for value in event.summary.value:
                    found[f"{event.step} {value.tag}"] = float(tf.make_ndarray(value.tensor))
    return {key: found[key] for key in sorted(found) if key.endswith(("exchanges", "nbytes"))} if found else {}
