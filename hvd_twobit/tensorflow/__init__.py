"""TensorFlow front end: ``compression=TwoBit`` in the optimizers and gradient tapes of ``horovod.tensorflow``."""

from . import hook
from .compressor import TwoBit

hook.install()

residuals_of = hook.residuals_of

__all__ = ["TwoBit", "residuals_of"]
