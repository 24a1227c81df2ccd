"""Gradients on a device that compresses them: a second CPU device plays one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from hvd_twobit.tensorflow import TwoBit, kernels, on_devices, residuals_of
from hvd_twobit.tensorflow.devices import DEVICES_VARIABLE
from tests.simulation import gradient

DEVICE = "/CPU:1"

SHAPES = {"wide": (37, 61), "row": (1500,), "small": (40,)}
STEPS = 4


def prepare() -> None:
    """To be called before TensorFlow starts its runtime. Only what is put on the second device notices it."""
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                               [tf.config.LogicalDeviceConfiguration()] * 2)
    os.environ[DEVICES_VARIABLE] = "CPU:1"


class Training:
    """Steps of a tape in a function.

    Args:
        devices: of each variable.
        compression: arguments of TwoBit.
    """

    def __init__(self, devices: dict[str, str], **compression: Any) -> None:
        self._compression = TwoBit(**compression)
        self.variables = []
        for name, shape in SHAPES.items():
            with tf.device(devices[name]):
                self.variables.append(tf.Variable(tf.zeros(shape), name=name))
        self._step = tf.function(self.gradients)

    def gradients(self, *constants: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            losses = []
            for variable, constant in zip(self.variables, constants):
                with tf.device(variable.device):
                    losses.append(tf.reduce_sum(variable * constant))
        self._tape = hvd.DistributedGradientTape(tape, compression=self._compression)
        return self._tape.gradient(losses, self.variables)

    @property
    def residuals(self) -> Any:
        return residuals_of(self._tape)

    def constants(self, number: int) -> list[tf.Tensor]:
        """The gradients of a step, where their variables are."""
        constants = []
        for (name, shape), variable in zip(SHAPES.items(), self.variables):
            with tf.device(variable.device):
                constants.append(tf.constant(gradient(7, hvd.rank(), number, name, shape)))
        return constants

    def apply(self, gradients: Sequence[tf.Tensor]) -> None:
        """Subtract gradients from the variables."""
        for variable, value in zip(self.variables, gradients):
            variable.assign_sub(value)

    def steps(self, numbers: range) -> list[np.ndarray]:
        """All reduced gradients."""
        return [part.numpy() for number in numbers for part in self._step(*self.constants(number))]


def everywhere(device: str) -> dict[str, str]:
    return dict.fromkeys(SHAPES, device)


@contextlib.contextmanager
def no_soft_placement() -> Iterator[None]:
    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        yield
    finally:
        tf.config.set_soft_device_placement(before)


def by_xla() -> Any:
    """Kernels on the device are compiled by XLA, as for a GPU."""
    return mock.patch.object(on_devices, "on_device",
                             lambda function, device, **options: kernels.traced(function, True, **options))


def elastic() -> Any:
    """Graphs are built as in an elastic job, which have every way to travel."""
    return mock.patch.dict(os.environ, HOROVOD_ELASTIC="1")


def placements(**compression: Any) -> dict[str, Any]:
    """Where residuals are, and what passes between the devices in a step: dtypes and operations. Nothing is placed
    elsewhere than was asked for."""
    with no_soft_placement():
        training = Training(everywhere(DEVICE), **compression)
        constants = training.constants(0)

        @tf.function
        def step(*constants: tf.Tensor) -> None:
            with tf.device(DEVICE):
                training.apply(training.gradients(*constants))

        context.enable_run_metadata()
        try:
            step(*constants)
            graphs = [graph for function in context.export_run_metadata().function_graphs
                      for graph in function.partition_graphs]
        finally:
            context.disable_run_metadata()
    nodes = {node.name: node for graph in graphs for node in graph.node}
    passed: dict[str, set[str]] = {"to the host": set(), "to the device": set()}
    for node in nodes.values():
        sender = nodes[node.input[0].partition(":")[0]] if node.op == "_Send" else None
        if sender is not None and sender.op != "Const":  # Which tells another device that something is done.
            way = "to the host" if node.attr["send_device"].s.endswith(DEVICE[1:].encode()) else "to the device"
            passed[way].add(f"{tf.as_dtype(node.attr['T'].type).name} of {sender.op}")
    return {"residuals": [training.residuals[name].device for name in training.residuals],
            "passed": {way: sorted(kinds) for way, kinds in passed.items()}}


def a_state_that_was_loaded(training: Training) -> dict[str, Any]:
    """The steps behind a state, twice; and where residuals are when it was loaded, and afterwards."""
    state = training.residuals.state_dict()
    first = training.steps(range(STEPS, 2 * STEPS))
    training.residuals.load_state_dict(state)
    loaded = {type(training.residuals[name]).__name__ for name in training.residuals}
    again = training.steps(range(STEPS, 2 * STEPS))
    return {"first": first, "again": again, "loaded": sorted(loaded),
            "again_on": sorted({training.residuals[name].device for name in training.residuals})}


def run() -> dict[str, Any]:
    """By kind of device, what steps with the same gradients return; and what the functions above do."""
    mixed = {**everywhere(DEVICE), "row": "/CPU:0"}
    steps, trainings = {}, {}
    for label, devices in {"host": everywhere("/CPU:0"), "device": everywhere(DEVICE), "mixed": mixed}.items():
        training = trainings[label] = Training(devices, min_elements=0)
        steps[label] = training.steps(range(STEPS))
        stats = training.residuals.stats()
        steps[f"norms {label}"] = [[stats[name].gradient_norm, stats[name].residual_norm,
                                    training.residuals.norms()[name]] for name in sorted(stats)]
    with by_xla():
        steps["xla"] = Training(everywhere(DEVICE), min_elements=0).steps(range(STEPS))
    with elastic():
        steps["elastic"] = Training(everywhere(DEVICE), min_elements=0).steps(range(STEPS))
    sent = dict(fixed=dict(threshold=0.4, transport="sra", bucket_cap_mb=0.006), adaptive={})
    return {"steps": steps, "loaded": a_state_that_was_loaded(trainings["device"]),
            "placements": {name: placements(min_elements=0, **arguments) for name, arguments in sent.items()}}
