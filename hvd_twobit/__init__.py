"""2-bit gradient compression with error feedback for Horovod.

The front ends are imported by name (``from hvd_twobit.torch import TwoBit``), so that importing this package loads
neither a deep learning framework nor a compiler.
"""

__version__ = "0.1.0"

from .machines import node_process_sets

__all__ = ["node_process_sets"]
