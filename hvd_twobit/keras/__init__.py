"""Keras front end: TensorFlow's, under the name that goes with ``horovod.tensorflow.keras`` and ``horovod.keras``."""

from ..tensorflow import TwoBit, residuals_of
from . import callbacks

__all__ = ["TwoBit", "callbacks", "residuals_of"]
