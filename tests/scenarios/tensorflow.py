"""Every scenario of TensorFlow and Keras in one job: to start one costs more than most of what runs in it."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from tests.scenarios import (
    tensorflow_allreduce,
    tensorflow_bad_input,
    tensorflow_documents,
    tensorflow_gradients,
    tensorflow_uses,
    tensorflow_variables,
)


def run() -> dict[str, Any]:
    """By scenario file, what it returns on this rank; all but the configurations of gradients run on 2 ranks only."""
    results: dict[str, Any] = {"gradients": tensorflow_gradients.run(list(tensorflow_gradients.CONFIGURATIONS))}
    if hvd.size() == 2:
        results["variables"] = tensorflow_variables.run()
        results["uses"] = tensorflow_uses.run()
        results["documents"] = tensorflow_documents.run()
        results["allreduce"] = tensorflow_allreduce.run()
        results["allreduce_join"] = tensorflow_allreduce.join()
        results["bad_input"] = tensorflow_bad_input.run()
    return results
