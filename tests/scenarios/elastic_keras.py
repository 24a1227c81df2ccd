"""A worker of an elastic Keras job: ``fit`` until it is told to end, telling of every world and every commit."""

from __future__ import annotations

import os
import sys
import uuid
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf

from hvd_twobit.keras import TwoBit, residuals_of
from tests.scenarios.elastic import Reporter, leave


class Loop(tf.keras.callbacks.Callback):
    """Commits after every batch, and reads orders before the next."""

    def __init__(self, state: Any, reporter: Reporter) -> None:
        super().__init__()
        self._state, self._reporter = state, reporter

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        orders = hvd.broadcast_object(self._reporter.orders() if hvd.rank() == 0 else None, name="orders")
        if orders.get("end"):
            raise StopIteration
        self._reporter.serve(orders)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch += 1
        self._state.save()
        self._reporter.tell("commit", self.model.get_weights(), batch=self._state.batch)
        self._state.check_host_updates()


def main(folder: str) -> None:
    hvd.init()
    tf.keras.utils.set_random_seed(os.getpid())
    model = tf.keras.Sequential([tf.keras.layers.Dense(160, "tanh", input_shape=(24,)), tf.keras.layers.Dense(12)])
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9),
                                               compression=TwoBit(transport="sra"))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)  # Its variables have to be there before they are synchronized.
    residuals = residuals_of(optimizer)
    reporter = Reporter(folder, residuals)
    state = hvd_keras.elastic.KerasState(model, optimizer, residuals=residuals, batch=0)
    inputs, wanted = np.random.normal(size=(64, 24)), np.random.normal(size=(64, 12))  # Every worker has its own.

    @hvd_keras.elastic.run
    def train(state: Any) -> None:
        assert state.residuals is residuals
        reporter.world(hvd.broadcast_object(uuid.uuid4().hex, name="world"), model.get_weights(), batch=state.batch,
                       rank=hvd.rank(), size=hvd.size(), in_flight=False)
        try:
            model.fit(inputs, wanted, batch_size=16, epochs=10 ** 6, callbacks=[Loop(state, reporter)], verbose=0)
        except StopIteration:
            return
        except tf.errors.OpError:
            reporter.tell("failed", batch=state.batch)
            raise

    train(state)
    reporter.tell("end", model.get_weights(), batch=state.batch)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
