"""PyTorch front end: ``hvd.DistributedOptimizer(opt, ..., compression=TwoBit)``, ``hvd`` being horovod.torch."""

from ..installed import explained

with explained("torch"):
    from . import hook
    from .checkpoint import as_tensors
    from .compressor import TwoBit

hook.install()

residuals_of = hook.residuals_of

__all__ = ["TwoBit", "as_tensors", "residuals_of"]
