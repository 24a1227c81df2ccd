"""2-bit gradient compression with error feedback for Horovod.

The front ends are imported by name (``from hvd_twobit.torch import TwoBit``), so that importing this package loads
neither a deep learning framework nor a compiler.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # Type checkers take it for true; typing's own would have to be imported.

__all__ = ["node_process_sets"]

if TYPE_CHECKING:
    from .machines import node_process_sets as node_process_sets
else:
    def __getattr__(name: str) -> object:
        """Import what is seldom needed, and say where the front ends are, to whoever looks for them here."""
        if name == "node_process_sets":
            from .machines import node_process_sets
            return node_process_sets
        if name in ("TwoBit", "residuals_of"):
            from .errors import WrongImportError
            raise WrongImportError(
                f"hvd_twobit has no {name} for all frameworks: use `from hvd_twobit.torch import {name}` with "
                "horovod.torch, hvd_twobit.tensorflow with horovod.tensorflow, hvd_twobit.keras with "
                "horovod.tensorflow.keras")
        if name in ("torch", "tensorflow", "keras"):
            raise AttributeError(f"hvd_twobit.{name} is not imported: write `import hvd_twobit.{name}`, or "
                                 f"`from hvd_twobit.{name} import TwoBit`")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
