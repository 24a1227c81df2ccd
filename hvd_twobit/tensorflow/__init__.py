"""TensorFlow front end: ``compression=TwoBit`` in the optimizers and gradient tapes of ``horovod.tensorflow``."""

from ..installed import explained

with explained("tensorflow"):
    from . import hook
    from .checkpoint import CheckpointedResiduals
    from .compressor import TwoBit

hook.install()

residuals_of = hook.residuals_of

__all__ = ["CheckpointedResiduals", "TwoBit", "residuals_of"]
