"""PyTorch front end: ``hvd.DistributedOptimizer(opt, ..., compression=TwoBit)``, ``hvd`` being horovod.torch."""

from . import hook
from .compressor import TwoBit

hook.install()

residuals_of = hook.residuals_of

__all__ = ["TwoBit", "residuals_of"]
