"""A rank's residuals and levels as part of a ``tf.train.Checkpoint``."""

from __future__ import annotations

import tensorflow as tf

from .. import checkpoint
from ..residuals import ResidualRegistry


class CheckpointedResiduals(tf.train.experimental.PythonState):
    """Saves and restores residuals with a ``tf.train.Checkpoint``, as the bytes of a file of residuals::

        tf.train.Checkpoint(model=model, optimizer=optimizer, residuals=CheckpointedResiduals(residuals_of(optimizer)))

    Each rank has residuals of its own, so each needs a checkpoint of its own. Restore before the first step.

    Args:
        residuals: what ``residuals_of`` returned.
    """

    def __init__(self, residuals: ResidualRegistry) -> None:
        self._residuals = residuals

    def serialize(self) -> bytes:
        """The bytes that are saved; TensorFlow calls this."""
        return checkpoint.to_bytes(self._residuals.state_dict())

    def deserialize(self, string_value: bytes) -> None:
        """Take over what was saved; TensorFlow calls this.

        Raises:
            ResidualError: these are no such bytes, or of other variables. Then nothing is changed.
        """
        self._residuals.load_state_dict(checkpoint.from_bytes(string_value))
