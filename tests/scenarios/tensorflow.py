"""Every scenario of TensorFlow and Keras in one job: to start one costs more than most of what runs in it."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from hvd_twobit.bench.methods import METHODS
from hvd_twobit.bench.tensorflow_exchange import Exchange, Gradients
from tests.scenarios import (
    tensorflow_allreduce,
    tensorflow_bad_input,
    tensorflow_devices,
    tensorflow_documents,
    tensorflow_gradients,
    tensorflow_uses,
    tensorflow_variables,
)


def bench() -> dict[str, Any]:
    """What ``hvd-twobit bench`` does on a rank: by method, bytes handed to Horovod and a digest of what it received."""
    gradients = Gradients([(3000,), (10,)], seed=hvd.rank())
    exchanges = {method: Exchange(method, gradients) for method, known in METHODS.items()
                 if known.unavailable() is None}
    for exchange in exchanges.values():
        exchange.seconds()  # Adaptive levels travel uncompressed.
    return {method: [exchange.sent_nbytes(), exchange.digest()] for method, exchange in exchanges.items()}


def run() -> dict[str, Any]:
    """By scenario file, what it returns on this rank; all but some configurations of gradients run on 2 ranks only."""
    tensorflow_devices.prepare()
    # The process sets that two levels add stay, and Horovod has no two of the same ranks.
    results: dict[str, Any] = {"allreduce": tensorflow_allreduce.run()} if hvd.size() == 2 else {}
    results["gradients"] = tensorflow_gradients.run(tensorflow_gradients.configurations(hvd.size()))
    if hvd.size() == 2:
        results["devices"] = tensorflow_devices.run()
        results["variables"] = tensorflow_variables.run()
        results["uses"] = tensorflow_uses.run()
        results["documents"] = tensorflow_documents.run()
        results["allreduce_join"] = tensorflow_allreduce.join()
        results["bad_input"] = tensorflow_bad_input.run()
        results["bench"] = bench()
    return results
