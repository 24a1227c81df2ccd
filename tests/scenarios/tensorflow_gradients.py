"""Twenty steps of Horovod's TensorFlow and Keras front ends in each configuration, with gradients known before.

The loss is the sum of variables times constants that are fed, so that every gradient is its constant whatever the
weights are, and ``expected`` can simulate all ranks. ``run`` is called on the ranks, ``expected`` in the test.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import horovod.keras as hvd_keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_tensorflow_keras
import numpy as np
import tensorflow as tf

from hvd_twobit.config import TRANSPORTS
from hvd_twobit.tensorflow import TwoBit, residuals_of
from tests.scenarios.tensorflow_devices import DEVICE
from tests.simulation import SimulatedMachines, gradient, simulated, uncompressed, uncompressed_steps

STEPS = 20
LEARNING_RATE = 0.25
SHAPES = {"wide": (37, 61), "row": (1500,), "tiny": (5,), "scalar": (), "empty": (0, 3)}
KERAS_SHAPES = {"wide": (37, 61), "row": (1500,), "tiny": (5,)}
EMBEDDING = {"table": (50, 40), "wide": (37, 61), "tiny": (5,)}
DEFAULT_MIN_ELEMENTS = 1024
RANKS_PER_MACHINE = 2
"""As ``tests.jobs`` starts jobs: one machine with two ranks, or two."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to exchange gradients; the defaults are those of a plain training loop.

    Attributes:
        route: name of the function below that trains: a tape, Keras or a session.
        compression: keyword arguments of TwoBit; None passes the class itself. A list has one entry per rank (modulo).
        options: keyword arguments of Horovod's tape or optimizer; ``op`` by name, ``groups`` by names of variables.
        dtype: of variables and gradients.
        shapes: the variables.
        missing: name of a variable that gets no gradient in odd steps, on any rank.
        sparse: name of a variable whose gradient is ``tf.IndexedSlices``.
        one_name: all variables bear the same name.
        unknown_shape: ``"gradient"`` hides the shapes of gradients, ``"variable"`` those of the variables as well.
        local: name of a variable that is not exchanged.
        subset: exchange within a process set of the first half of the ranks; one rank alone exchanges nothing.
        overflow: rank 0 puts NaN and inf into its gradients at step 3, and with a dynamic loss scale at step 0.
        loss_scale: the loss scale of mixed precision training, in which gradients are computed in float16.
        dynamic: the loss scale changes; residuals and levels have to follow it, and steps with an overflow are skipped.
        steps_per_execution: of Keras's fit: so many steps are one loop in the graph.
        on_device: variables lie on a device that compresses, see ``tests.scenarios.tensorflow_devices``.
    """

    route: str = "tape_in_function"
    compression: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    shapes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=lambda: SHAPES)
    missing: str | None = None
    sparse: str | None = None
    one_name: bool = False
    unknown_shape: str | None = None
    local: str | None = None
    subset: bool = False
    overflow: bool = False
    loss_scale: int = 1
    dynamic: bool = False
    steps_per_execution: int = 1
    on_device: bool = False


def _keras(route: str, compression: Any = None, **others: Any) -> Configuration:
    return Configuration(route, dict(threshold=0.4) if compression is None else compression, shapes=KERAS_SHAPES,
                         **others)


TWO_PASSES = dict(backward_passes_per_step=2)
CONFIGURATIONS = {
    "a tape with the bare class": Configuration(),
    "an eager tape with the bare class": Configuration("tape_eagerly"),
    "adaptive levels in a persistent tape": Configuration("tape_persistent", {}),
    "adaptive levels, sum with warm-up in groups": Configuration(compression=dict(warmup_steps=2, block_elements=256),
                                                                 options=dict(groups=2, op="Sum")),
    "adaptive levels of everything": Configuration(compression=dict(min_elements=0, block_elements=64)),
    "adaptive levels, unknown shapes": Configuration(compression={}, unknown_shape="gradient"),
    "adaptive levels, shapes of variables unknown": Configuration(compression={}, unknown_shape="variable"),
    "adaptive levels, a missing gradient": Configuration("tape_eagerly", {}, missing="row"),
    "adaptive levels, sparse gradients": Configuration(compression={}, shapes=EMBEDDING, sparse="table"),
    "adaptive levels in bfloat16 with an overflow": Configuration(compression={}, dtype="bfloat16", overflow=True),
    "adaptive levels in a session": Configuration("session", {}),
    "sra, sum with warm-up in groups, eagerly": Configuration(
        "tape_eagerly", dict(transport="sra", bucket_cap_mb=0.006, warmup_steps=2), dict(groups=2, op="Sum")),
    "sra in a process set": Configuration(compression=dict(transport="sra"), subset=True),
    "sra, unknown shapes": Configuration(compression=dict(transport="sra"), unknown_shape="gradient"),
    "sra in a session": Configuration("session", dict(transport="sra", bucket_cap_mb=0.006)),
    "sra, asymmetric thresholds": Configuration(compression=dict(positive_threshold=0.2, negative_threshold=-0.45,
                                                                 transport="sra", bucket_cap_mb=0.006)),
    "sra, another threshold on every rank": Configuration(
        compression=[dict(threshold=threshold, transport="sra") for threshold in (0.5, 0.1, 2.5)]),
    "sra in bfloat16 with an overflow": Configuration(compression=dict(transport="sra"), dtype="bfloat16",
                                                      overflow=True),
    "allreduce, asymmetric thresholds": Configuration("tape_eagerly", dict(
        positive_threshold=0.2, negative_threshold=-0.45, transport="allreduce"), dict(op="Sum")),
    "allreduce in a process set, unknown shapes": Configuration(compression=dict(transport="allreduce"),
                                                                unknown_shape="gradient", subset=True),
    **{f"{transport} in small buckets": Configuration(compression=dict(
        transport=transport, bucket_cap_mb=0.006, block_elements=64, min_elements=0)) for transport in TRANSPORTS},
    "a fixed threshold with warm-up": Configuration(compression=dict(threshold=0.4, warmup_steps=2)),
    "an eager tape with a new instance per step": Configuration("tape_eagerly", dict(threshold=0.3)),
    "a retraced tape": Configuration("tape_retraced", dict(threshold=0.4)),
    "a persistent tape in several steps": Configuration("tape_persistent", dict(threshold=0.4)),
    "a persistent tape, eagerly": Configuration("tape_persistent_eagerly", dict(threshold=0.4)),
    "asymmetric thresholds": Configuration(compression=dict(positive_threshold=0.2, negative_threshold=-0.45)),
    "another threshold on every rank": Configuration(
        compression=[dict(threshold=0.5), dict(threshold=0.1), dict(threshold=2.5)]),
    "from MXNet's dictionary": Configuration(compression={"compress": "2bit", "positive_threshold": 0.25}),
    "every tensor compressed": Configuration(compression=dict(threshold=0.4, min_elements=0)),
    "predivide factor 3": Configuration(compression=dict(threshold=0.4, min_elements=0),
                                        options=dict(gradient_predivide_factor=3.0)),
    "one group of everything, compressed": Configuration(compression=dict(threshold=0.4, min_elements=0),
                                                         options=dict(groups=1)),
    "listed groups, eagerly": Configuration("tape_eagerly", dict(threshold=0.4),
                                            dict(groups=[["tiny", "row"], ["wide"]])),
    "a missing gradient": Configuration("tape_eagerly", dict(threshold=0.4), missing="row"),
    "a process set": Configuration(compression=dict(threshold=0.4), subset=True),
    "sparse gradients": Configuration(compression=dict(threshold=0.4), shapes=EMBEDDING, sparse="table"),
    "sparse gradients, eagerly": Configuration("tape_eagerly", dict(threshold=0.4), shapes=EMBEDDING, sparse="table"),
    "sparse gradients as dense": Configuration(compression=dict(threshold=0.4), options=dict(sparse_as_dense=True),
                                               shapes=EMBEDDING, sparse="table"),
    "float16": Configuration(compression=dict(threshold=0.4), dtype="float16", overflow=True),
    "bfloat16": Configuration(compression=dict(threshold=0.4), dtype="bfloat16"),
    "float64": Configuration(compression=dict(threshold=0.4), dtype="float64"),
    "groups of float16": Configuration(compression=dict(threshold=0.4), options=dict(groups=2), dtype="float16"),
    "overflow on one rank": Configuration(compression=dict(threshold=0.4), overflow=True),
    "variables of one name": Configuration(compression=dict(threshold=0.4), one_name=True),
    "variables of unknown shape": Configuration(compression=dict(threshold=0.4), unknown_shape="variable"),
    "a tape with a local layer": Configuration("partial_tape", dict(threshold=0.4), shapes=KERAS_SHAPES, local="row"),
    "a session": Configuration("session", dict(threshold=0.4)),
    "a session, two passes per step": Configuration("session", dict(threshold=0.4), TWO_PASSES),
    "Keras's fit": _keras("fit"),
    "Keras's fit with adaptive levels": _keras("fit", {}),
    "Keras's fit with adaptive levels, two passes per step": _keras("fit", {}, options=TWO_PASSES),
    "Keras's fit with adaptive levels, many steps per execution": _keras("fit", {}, steps_per_execution=5),
    "Keras's fit with adaptive levels, dynamic loss scale": _keras("fit", {}, loss_scale=64, dynamic=True,
                                                                   overflow=True),
    "Keras's fit with a fixed threshold, dynamic loss scale": _keras("fit", dict(threshold=0.375), loss_scale=64,
                                                                     dynamic=True, overflow=True),
    "Keras's fit with adaptive levels, dynamic loss scale, legacy": _keras("fit_legacy", {}, loss_scale=64,
                                                                           dynamic=True, overflow=True),
    "Keras's fit by sra, dynamic loss scale": _keras("fit", dict(transport="sra", bucket_cap_mb=0.006), loss_scale=64,
                                                     dynamic=True, overflow=True),
    "Keras's fit, run eagerly": _keras("fit_eagerly"),
    "Keras's fit, legacy optimizer": _keras("fit_legacy"),
    "Keras's fit, legacy optimizer run eagerly": _keras("fit_legacy_eagerly"),
    "Keras's fit by horovod.tensorflow": _keras("fit_by_tensorflow"),
    "Keras's fit by horovod.keras": _keras("fit_by_keras", options=dict(op="Sum")),
    "Keras's fit, two passes per step averaged": _keras("fit", options={**TWO_PASSES,
                                                                        "average_aggregated_gradients": True}),
    "Keras's fit, two passes per step run eagerly": _keras("fit_eagerly", options=TWO_PASSES),
    "Keras's fit, two passes per step, legacy": _keras("fit_legacy", options=TWO_PASSES),
    "Keras's fit, groups": _keras("fit", options=dict(groups=2)),
    "Keras's fit, predivided": _keras("fit", options=dict(gradient_predivide_factor=4.0)),
    "Keras's fit in a process set": _keras("fit", subset=True),
    "Keras's fit with a local layer": _keras("fit_partial", local="row"),
    "Keras's fit in mixed precision": _keras("fit", loss_scale=8, compression=dict(threshold=0.375)),
    "Keras's fit in mixed precision, legacy": _keras("fit_legacy", loss_scale=8, compression=dict(threshold=0.375)),
}
CONFIGURATIONS.update({
    "on a device, adaptive levels in bfloat16 of everything with an overflow, eagerly": Configuration(
        "tape_eagerly", dict(min_elements=0, block_elements=64), dtype="bfloat16", overflow=True, on_device=True),
    "on a device, sra in small buckets, sum with warm-up in groups": Configuration(
        compression=dict(transport="sra", bucket_cap_mb=0.006, warmup_steps=2), options=dict(groups=2, op="Sum"),
        on_device=True),
    "on a device, sra, another threshold on every rank": Configuration(
        compression=[dict(threshold=threshold, transport="sra") for threshold in (0.5, 0.1, 2.5)], on_device=True),
    "on a device, another threshold on every rank": Configuration(
        compression=[dict(threshold=0.5), dict(threshold=0.1), dict(threshold=2.5)], on_device=True),
    "on a device, allreduce, asymmetric thresholds": Configuration(compression=dict(
        positive_threshold=0.2, negative_threshold=-0.45, transport="allreduce"), on_device=True),
    "on a device, unknown shapes": Configuration(compression={}, unknown_shape="variable", on_device=True),
    "on a device, Keras's fit, dynamic loss scale": _keras("fit", {}, loss_scale=64, dynamic=True, overflow=True,
                                                           on_device=True),
    "on a device, two levels": Configuration(compression=dict(hierarchical=True), on_device=True),
    "on a device, a session": Configuration("session", {}, on_device=True),
    "two levels": Configuration(compression=dict(hierarchical=True)),
    "two levels, auto, eagerly": Configuration("tape_eagerly", dict(hierarchical="auto")),
    "two levels, auto with a process set": Configuration(compression=dict(hierarchical="auto"), subset=True),
    "two levels, sum with warm-up in groups": Configuration(
        compression=dict(hierarchical=True, warmup_steps=2, block_elements=256), options=dict(groups=2, op="Sum")),
    "two levels, fixed thresholds for everything, predivide factor 3": Configuration(
        compression=dict(hierarchical=True, positive_threshold=0.2, negative_threshold=-0.45, min_elements=0),
        options=dict(gradient_predivide_factor=3.0)),
    "two levels, sra in small buckets": Configuration(compression=dict(
        hierarchical=True, transport="sra", bucket_cap_mb=0.006, block_elements=64, min_elements=0)),
    "two levels, allreduce, unknown shapes": Configuration(
        compression=dict(hierarchical=True, transport="allreduce"), unknown_shape="gradient"),
    "two levels, everything of unknown shape": Configuration(
        compression=dict(hierarchical=True, min_elements=0), unknown_shape="variable"),
    # Without the small one before it, the large one is the first in its order: it has to be cut at the same places.
    "two levels in small buckets, a missing gradient": Configuration(
        "tape_eagerly", dict(hierarchical=True, bucket_cap_mb=0.006, block_elements=64), missing="row"),
    "two levels, sparse gradients": Configuration(compression=dict(hierarchical=True), shapes=EMBEDDING,
                                                  sparse="table"),
    "two levels, variables of one name in bfloat16 with an overflow": Configuration(
        compression=dict(hierarchical=True), dtype="bfloat16", one_name=True, overflow=True),
    "two levels in a session": Configuration("session", dict(hierarchical=True, bucket_cap_mb=0.006)),
    "Keras's fit on two levels, dynamic loss scale": _keras("fit", dict(hierarchical=True), loss_scale=64, dynamic=True,
                                                            overflow=True),
    "Keras's fit on two levels by sra, many steps per execution": _keras(
        "fit", dict(hierarchical=True, threshold=0.4, transport="sra", bucket_cap_mb=0.006), steps_per_execution=5),
})


def configurations(ranks: int) -> list[str]:
    """Names of the configurations that run on so many ranks: all on 2.

    On more, those in which it counts what other ranks send: transports, thresholds that differ, process sets, an
    overflow on one rank, scaling and groups, two levels, and the bare class. How Keras, a retraced function or a dtype
    gets a gradient to the exchange does not depend on the number of ranks, and takes most of the time.
    """
    return [name for name, configuration in CONFIGURATIONS.items() if ranks == 2 or _depends_on_ranks(configuration)]


def _depends_on_ranks(configuration: Configuration) -> bool:
    arguments = configuration.compression
    if configuration.on_device:
        return False
    if arguments is None or isinstance(arguments, list) or configuration.subset or (
            arguments.keys() & {"transport", "hierarchical"}):
        return True
    return not configuration.route.startswith("fit") and (configuration.overflow or bool(configuration.options))


def _compressed(configuration: Configuration, name: str) -> bool:
    if name == configuration.local or (name == configuration.sparse
                                       and not configuration.options.get("sparse_as_dense")):
        return False
    arguments = configuration.compression if isinstance(configuration.compression, dict) else {}
    return int(np.prod(configuration.shapes[name])) >= arguments.get("min_elements", DEFAULT_MIN_ELEMENTS)


def _passes(configuration: Configuration) -> int:
    return configuration.options.get("backward_passes_per_step", 1)


def _missing(configuration: Configuration, step: int, name: str) -> bool:
    return name == configuration.missing and step % 2 == 1


def _overflows(configuration: Configuration, part: int) -> bool:
    return configuration.overflow and (part == 3 or configuration.dynamic and part == 0)


def _computed_in(configuration: Configuration) -> Any:
    return tf.as_dtype("float16" if configuration.loss_scale > 1 else configuration.dtype).as_numpy_dtype


def _gradient(configuration: Configuration, rank: int, part: int, name: str) -> np.ndarray:
    """One backward pass's gradient, float32 but exact in the configuration's dtype."""
    exact = uncompressed_steps(configuration.compression) + configuration.overflow + configuration.dynamic
    dyadic = part // _passes(configuration) < exact or not _compressed(configuration, name)
    value = gradient(0, rank, part, name, configuration.shapes[name], dyadic)
    if name == configuration.sparse:
        value[np.arange(len(value)) % 3 != part % 3] = 0
    if rank == 0 and _overflows(configuration, part) and value.size > 20:
        value.reshape(-1)[[1, 17]] = np.nan, np.inf
    return value.astype(_computed_in(configuration)).astype(np.float32)


# On the ranks.

def run(names: Sequence[str]) -> dict[str, Any]:
    """Run configurations on this rank: per name, weights (and reduced gradients) of all steps, and the residuals."""
    subset = hvd.add_process_set(list(range(max(1, hvd.size() // 2))))
    results = {}
    for name in names:
        print("configuration", name, flush=True)
        configuration = CONFIGURATIONS[name]
        steps: list[dict[str, np.ndarray]] = []
        with tf.device(DEVICE if configuration.on_device else None):
            registry = globals()[configuration.route](configuration, steps, subset)
        state = registry.state_dict()
        results[name] = {"steps": steps, "residuals": state["residuals"], "levels": state["levels"],
                         "loss_scale": state.get("loss_scale", 1.0)}
        tf.keras.backend.clear_session()
    return results


def _compression(configuration: Configuration) -> Any:
    arguments = configuration.compression
    if isinstance(arguments, list):
        arguments = arguments[hvd.rank() % len(arguments)]
    if arguments is None:
        return TwoBit
    return TwoBit.from_params(arguments) if "compress" in arguments else TwoBit(**arguments)


def _options(configuration: Configuration, variables: Mapping[str, tf.Variable], subset: Any) -> dict[str, Any]:
    options = dict(configuration.options)
    if "op" in options:
        options["op"] = getattr(hvd, options["op"])
    if isinstance(options.get("groups"), list):
        options["groups"] = [[variables[name] for name in group] for group in options["groups"]]
    if configuration.subset:
        options["process_set"] = subset
    return options


def _variables(configuration: Configuration) -> dict[str, tf.Variable]:
    return {name: tf.Variable(tf.zeros(shape, configuration.dtype), name="same" if configuration.one_name else name,
                              shape=tf.TensorShape(None) if configuration.unknown_shape == "variable" else None)
            for name, shape in configuration.shapes.items()}


def _constants(configuration: Configuration, part: int) -> dict[str, np.ndarray]:
    return {name: _gradient(configuration, hvd.rank(), part, name).astype(_computed_in(configuration))
            for name in configuration.shapes if not _missing(configuration, part, name)}


@tf.custom_gradient
def _hiding_the_shape(variable: tf.Tensor) -> Any:
    return tf.identity(variable), lambda upstream: tf.compat.v1.placeholder_with_default(upstream, None)


def _loss(configuration: Configuration, variables: Mapping[str, Any], constants: Mapping[str, Any], rows: Any) -> Any:
    terms = []
    for name, constant in constants.items():
        value = variables[name]
        if name == configuration.sparse:
            value, constant = tf.gather(value, rows), tf.gather(constant, rows)
        elif configuration.unknown_shape:
            value = _hiding_the_shape(value)
        terms.append(tf.reduce_sum(value * constant))
    return tf.add_n(terms)


def _rows(configuration: Configuration, step: int) -> tf.Tensor:
    return tf.range(step % 3, configuration.shapes.get(configuration.sparse, (3,))[0], 3)


def _as_float(value: Any) -> np.ndarray:
    dense = tf.convert_to_tensor(value)
    return np.asarray((dense if dense.dtype == tf.float64 else tf.cast(dense, tf.float32)).numpy())


class _Taping:
    """A training loop with tapes, and what is recorded of it."""

    def __init__(self, configuration: Configuration, steps: list[dict[str, np.ndarray]], subset: Any) -> None:
        self.configuration = configuration
        self.variables = _variables(configuration)
        self.compression = _compression(configuration)
        self.options = _options(configuration, self.variables, subset)
        self._steps = steps
        self._tape: Any = None

    def wrapped(self, tape: tf.GradientTape) -> tf.GradientTape:
        if self.configuration.compression is not None and self.configuration.route == "tape_eagerly":
            self.compression = _compression(self.configuration)
        self._tape = hvd.DistributedGradientTape(tape, compression=self.compression, **self.options)
        return self._tape

    def gradients(self, constants: Mapping[str, tf.Tensor], rows: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = _loss(self.configuration, self.variables, constants, rows)
        return self.apply(self.wrapped(tape).gradient(loss, list(self.variables.values())))

    def apply(self, gradients: list[Any]) -> list[Any]:
        for variable, value in zip(self.variables.values(), gradients):
            if value is not None:
                variable.assign_sub(tf.cast(LEARNING_RATE, variable.dtype) * tf.convert_to_tensor(value))
        return gradients

    def record(self, gradients: Sequence[Any]) -> None:
        self._steps.append({
            **{f"gradient {name}": _as_float(value) for name, value in zip(self.variables, gradients)
               if value is not None},
            **{f"weight {name}": _as_float(variable) for name, variable in self.variables.items()}})

    def train(self, step_function: Callable[..., Any], *more: Callable[[int], Any]) -> Any:
        for step in range(STEPS):
            constants = {name: tf.constant(value) for name, value in _constants(self.configuration, step).items()}
            self.record(step_function(constants, _rows(self.configuration, step), *[one(step) for one in more]))
        return residuals_of(self._tape)


def tape_in_function(*arguments: Any) -> Any:
    taping = _Taping(*arguments)
    return taping.train(tf.function(taping.gradients))


def tape_eagerly(*arguments: Any) -> Any:
    taping = _Taping(*arguments)
    return taping.train(taping.gradients)


def tape_retraced(*arguments: Any) -> Any:
    taping = _Taping(*arguments)
    traces = []

    @tf.function
    def step(constants: Any, rows: Any, batch: tf.Tensor) -> Any:
        traces.append(batch.shape)
        with tf.control_dependencies([tf.reduce_sum(batch)]):
            return taping.gradients(constants, rows)

    registry = taping.train(step, lambda number: tf.zeros([number % 3 + 1]))
    assert len(traces) == 3, traces
    return registry


def tape_persistent(*arguments: Any) -> Any:
    """One tape of a forward pass whose constants are a variable's, asked for gradients of a new loss at every step."""
    return _persistent(tf.function, *arguments)


def tape_persistent_eagerly(*arguments: Any) -> Any:
    return _persistent(lambda function: function, *arguments)


def _persistent(decorate: Callable[..., Any], *arguments: Any) -> Any:
    taping = _Taping(*arguments)

    @decorate
    def two_steps(first: Any, second: Any, rows: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            losses = [_loss(taping.configuration, taping.variables, constants, rows) for constants in (first, second)]
        tape = taping.wrapped(tape)
        weights = []
        gradients = []
        for loss in losses:
            gradients.append(taping.apply(tape.gradient(loss, list(taping.variables.values()))))
            weights.append([tf.identity(variable) for variable in taping.variables.values()])
        return gradients, weights

    def parts(step: int) -> dict[str, tf.Tensor]:
        return {name: tf.constant(value) for name, value in _constants(taping.configuration, step).items()}

    for step in range(0, STEPS, 2):
        for gradients, weights in zip(*two_steps(parts(step), parts(step + 1), _rows(taping.configuration, step))):
            taping._steps.append({f"{kind} {name}": _as_float(value) for kind, values in
                                  (("gradient", gradients), ("weight", weights))
                                  for name, value in zip(taping.variables, values)})
    return residuals_of(taping._tape)


def session(configuration: Configuration, steps: list[dict[str, np.ndarray]], subset: Any) -> Any:
    """As scripts for TensorFlow 1 train."""
    with tf.Graph().as_default():
        variables = {name: tf.compat.v1.get_variable(name, shape, tf.as_dtype(configuration.dtype),
                                                     tf.compat.v1.zeros_initializer())
                     for name, shape in configuration.shapes.items()}
        constants = {name: tf.compat.v1.placeholder(variable.dtype, variable.shape)
                     for name, variable in variables.items()}
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(LEARNING_RATE),
                                             compression=_compression(configuration),
                                             **_options(configuration, variables, subset))
        train = optimizer.minimize(_loss(configuration, variables, constants, None), var_list=list(variables.values()))
        initialize = tf.group(tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer())
        with tf.compat.v1.Session() as running:
            running.run(initialize)
            for part in range(STEPS * _passes(configuration)):
                running.run(train, {constants[name]: value for name, value in _constants(configuration, part).items()})
                if (part + 1) % _passes(configuration) == 0:
                    steps.append({f"weight {name}": np.asarray(value)
                                  for name, value in running.run(variables).items()})
    return residuals_of(optimizer)


class _Holder(tf.keras.layers.Layer):
    """One variable, multiplied with what it is called with."""

    def __init__(self, configuration: Configuration, name: str) -> None:
        policy = "mixed_float16" if configuration.loss_scale > 1 else configuration.dtype
        super().__init__(name=name, dtype=tf.keras.mixed_precision.Policy(policy))
        self.variable = self.add_weight(name=name, shape=configuration.shapes[name], initializer="zeros")

    def call(self, constants: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.variable * constants[0])


class _Model(tf.keras.Model):
    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.holders = {name: _Holder(configuration, name) for name in configuration.shapes}

    def call(self, constants: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return tf.reshape(tf.add_n([holder(constants[name]) for name, holder in self.holders.items()]), [1])

    @property
    def by_name(self) -> dict[str, tf.Variable]:
        return {name: holder.variable for name, holder in self.holders.items()}


def partial_tape(configuration: Configuration, steps: list[dict[str, np.ndarray]], subset: Any) -> Any:
    taping = _Taping(configuration, steps, subset)
    model = _Model(configuration)
    taping.variables = model.by_name

    @tf.function
    def step(constants: Any, rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(configuration, taping.variables, constants, rows)
        taping._tape = hvd.PartialDistributedGradientTape(tape, compression=taping.compression,
                                                          local_layers=model.holders[configuration.local])
        return taping.apply(taping._tape.gradient(loss, list(taping.variables.values())))

    return taping.train(step)


def _fit(configuration: Configuration, steps: list[dict[str, np.ndarray]], subset: Any, module: Any = None,
         legacy: bool = False, eagerly: bool = False) -> Any:
    module = module or hvd_tensorflow_keras
    model = _Model(configuration)
    options = _options(configuration, model.by_name, subset)
    wrap = module.DistributedOptimizer
    if configuration.local:
        wrap = module.PartialDistributedOptimizer
        options["local_layers"] = model.holders[configuration.local]
    optimizers = tf.keras.optimizers.legacy if legacy else tf.keras.optimizers
    optimizer = distributed = wrap(optimizers.SGD(LEARNING_RATE), compression=_compression(configuration), **options)
    if configuration.loss_scale > 1:
        growth = dict(dynamic_growth_steps=4) if configuration.dynamic else {}
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=configuration.dynamic,
                                                                initial_scale=configuration.loss_scale, **growth)
    model.compile(optimizer=optimizer, loss=lambda _, output: tf.reduce_sum(output), run_eagerly=eagerly,
                  steps_per_execution=configuration.steps_per_execution)

    def batches() -> Iterator[Any]:
        for part in range(STEPS * _passes(configuration)):
            yield {name: value[None] for name, value in _constants(configuration, part).items()}, np.zeros(1)

    kind = _computed_in(configuration)
    data = tf.data.Dataset.from_generator(batches, output_signature=(
        {name: tf.TensorSpec((1, *shape), kind) for name, shape in configuration.shapes.items()},
        tf.TensorSpec((1,))))

    class Record(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (batch + 1) % (_passes(configuration) * configuration.steps_per_execution) == 0:
                steps.append({f"weight {name}": _as_float(variable) for name, variable in model.by_name.items()})

    callbacks = [Record()]
    if not configuration.local:  # It makes local variables equal as well, after the first batch.
        callbacks.insert(0, hvd_tensorflow_keras.callbacks.BroadcastGlobalVariablesCallback(0))
    model.fit(data, verbose=0, callbacks=callbacks, steps_per_epoch=STEPS * _passes(configuration))
    assert residuals_of(model.optimizer) is residuals_of(distributed)
    return residuals_of(model.optimizer)


def fit(*arguments: Any) -> Any:
    return _fit(*arguments)


def fit_eagerly(*arguments: Any) -> Any:
    return _fit(*arguments, eagerly=True)


def fit_legacy(*arguments: Any) -> Any:
    return _fit(*arguments, legacy=True)


def fit_legacy_eagerly(*arguments: Any) -> Any:
    return _fit(*arguments, legacy=True, eagerly=True)


def fit_by_tensorflow(*arguments: Any) -> Any:
    return _fit(*arguments, module=hvd)


def fit_by_keras(*arguments: Any) -> Any:
    return _fit(*arguments, module=hvd_keras)


def fit_partial(*arguments: Any) -> Any:
    return _fit(*arguments, module=hvd_keras)


# In the test's process.

def expected(name: str, size: int, rank: int) -> tuple[list[dict[str, np.ndarray]], dict[str, Any]]:
    """The steps' reduced gradients and weights on a rank that exchanges, and the simulated tensors."""
    configuration = CONFIGURATIONS[name]
    sums, tensors = _reduced(name, size)
    after = _passes(configuration) if configuration.options.get("average_aggregated_gradients") else 1
    kind = tf.as_dtype(configuration.dtype).as_numpy_dtype
    recorded = np.float64 if configuration.dtype == "float64" else np.float32
    weights = {variable: np.zeros(shape, kind) for variable, shape in configuration.shapes.items()}
    steps = []
    for step, reduced in enumerate(sums):
        gradients = {}
        for variable, per_rank in reduced.items():
            value = per_rank[rank] if variable == configuration.local else per_rank[0]
            gradients[variable] = (value / np.float32(after)).astype(kind)
            weights[variable] = np.asarray(weights[variable] - kind(LEARNING_RATE) * gradients[variable], kind)
        if (step + 1) % configuration.steps_per_execution == 0:
            steps.append({**{f"gradient {variable}": value.astype(recorded) for variable, value in gradients.items()},
                          **{f"weight {variable}": value.astype(recorded) for variable, value in weights.items()}})
    return steps, {_residual_name(configuration, variable): tensor for variable, tensor in tensors.items()}


@functools.lru_cache(maxsize=1)
def _reduced(name: str, size: int) -> tuple[list[dict[str, list[np.ndarray]]], dict[str, Any]]:
    """All ranks, simulated once: by step and variable what the exchange returns, and the simulated tensors.

    A loss scale, which is a power of two, must leave no trace, so there is none here.

    What the exchange returns is one array for all ranks, or one for each where it is not exchanged; nothing in steps
    that are skipped.
    """
    configuration = CONFIGURATIONS[name]
    ranks = range(max(1, size // 2) if configuration.subset else size)
    average = configuration.options.get("op", "Average") == "Average"
    factor = configuration.options.get("gradient_predivide_factor", 1.0)
    scale = scale_of_codes = 1 / factor * factor / len(ranks) if average else 1.0
    exchanging = range(size // RANKS_PER_MACHINE) if _has_levels(configuration, size) else ranks
    tensors = {variable: simulated(configuration.compression, exchanging, int(np.prod(configuration.shapes[variable])))
               for variable in configuration.shapes if _compressed(configuration, variable) and len(ranks) > 1}
    if exchanging != ranks:
        tensors = {variable: SimulatedMachines(tensor, average, scale) for variable, tensor in tensors.items()}
        scale_of_codes = 1 / factor * factor / len(exchanging) if average else 1.0
    steps = []
    for step in range(STEPS):
        reduced = {}
        for variable, shape in configuration.shapes.items() if not _skipped(configuration, step) else ():
            if _missing(configuration, step, variable):
                continue
            per_rank = [_accumulated(configuration, rank, step, variable) for rank in ranks]
            if variable in tensors:
                reduced[variable] = [tensors[variable].step(per_rank, scale_of_codes).reshape(shape)]
            elif variable == configuration.local:
                reduced[variable] = [value / np.float32(len(ranks)) for value in per_rank]
            else:
                reduced[variable] = [uncompressed(per_rank, scale)]
        steps.append(reduced)
    return steps, tensors


def _has_levels(configuration: Configuration, size: int) -> bool:
    arguments = configuration.compression
    setting = arguments.get("hierarchical") if isinstance(arguments, dict) else None
    return setting is True or (setting == "auto" and size > RANKS_PER_MACHINE and not configuration.subset)


def _skipped(configuration: Configuration, step: int) -> bool:
    return configuration.dynamic and _overflows(configuration, step)


def _accumulated(configuration: Configuration, rank: int, step: int, name: str) -> np.ndarray:
    """The gradient that a rank hands to the exchange: its backward passes of a step, added in order."""
    passes = _passes(configuration)
    total = np.zeros(tuple(configuration.shapes[name]), np.float32)
    for part in range(step * passes, (step + 1) * passes):
        total = total + _gradient(configuration, rank, part, name)
    return total


def _residual_name(configuration: Configuration, variable: str) -> str:
    if not configuration.one_name:
        return f"{variable}:0"
    position = list(configuration.shapes).index(variable)
    return f"same:0_{position}" if position else "same:0"
