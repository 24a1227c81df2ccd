"""The documentation's blocks for TensorFlow and Keras, and what they have done."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from hvd_twobit.tensorflow import residuals_of
from tests.scenarios import documents


def run() -> dict[str, Any]:
    """As ``documents.run``."""
    return documents.run(["keras", "tensorflow"], hvd, {
        "docs/checkpoints.md keras": lambda names: {"files": documents.files()},
        "docs/mixed_precision.md keras": lambda names: {"loss_scale": residuals_of(names["optimizer"]).loss_scale},
        "docs/tuning.md keras": lambda names: {"scalars": documents.scalars_in("logs")}})
