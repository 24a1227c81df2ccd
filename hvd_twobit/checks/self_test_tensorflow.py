"""The self-test's training with Keras."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf

from ..tensorflow import TwoBit

__all__ = ["hvd", "train"]


def train(transport: str, gradients: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Weights after each step, from zero, with this rank's gradients of each step."""
    variables = [tf.Variable(tf.zeros(of_tensor.shape), name=f"{transport}_{number}")
                 for number, of_tensor in enumerate(gradients[0])]
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=TwoBit(transport=transport))

    @tf.function
    def step(constants: list[tf.Tensor]) -> None:
        optimizer.minimize(lambda: tf.add_n([tf.reduce_sum(variable * constant)
                                             for variable, constant in zip(variables, constants)]), variables)

    trained = []
    for of_step in gradients:
        step([tf.constant(constant) for constant in of_step])
        trained.append([variable.numpy().copy() for variable in variables])
    return trained
