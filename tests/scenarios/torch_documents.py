"""The documentation's blocks for PyTorch, and what they have done."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd

from hvd_twobit.torch import residuals_of
from tests.scenarios import documents


def run() -> dict[str, Any]:
    """As ``documents.run``."""
    return documents.run(["torch"], hvd, {
        "docs/checkpoints.md torch": lambda names: {"files": documents.files(),
                                                    "residuals": len(residuals_of(names["optimizer"]))},
        "docs/elastic.md torch": lambda names: {"batch": names["state"].batch},
        "docs/mixed_precision.md torch": lambda names: {
            "loss_scale": residuals_of(names["optimizer"]).loss_scale, "scale": names["scaler"].get_scale()},
        "docs/mxnet.md torch": lambda names: {"compression": repr(names["compression"])},
        "docs/tuning.md torch": _statistics})


def _statistics(names: dict[str, Any]) -> dict[str, Any]:
    names["writer"].close()
    return {"scalars": documents.scalars_in("logs")}
