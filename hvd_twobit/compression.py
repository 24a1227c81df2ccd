"""What every front end's ``TwoBit`` is: parameters, how they are written and printed. No framework.

A front end's class adds Horovod's ``Compressor`` of its framework; see ``torch.compressor`` and
``tensorflow.compressor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from .config import TwoBitConfig, describe
from .errors import UnsupportedOperationError

Self = TypeVar("Self", bound="TwoBitParameters")


class TwoBitParameters:
    """The parameters of 2-bit compression; the front ends' ``TwoBit`` classes document them."""

    def __init__(self, threshold: float | str | None = None, *, positive_threshold: float | None = None,
                 negative_threshold: float | None = None, min_elements: int | None = None,
                 warmup_steps: int | None = None, block_elements: int | None = None, transport: str | None = None,
                 bucket_cap_mb: float | None = None, **unknown: Any) -> None:
        self.config = TwoBitConfig.from_arguments(
            threshold, positive_threshold, negative_threshold, block_elements, min_elements=min_elements,
            warmup_steps=warmup_steps, transport=transport, bucket_cap_mb=bucket_cap_mb, **unknown)

    @classmethod
    def from_params(cls: type[Self], params: Mapping[str, Any], **arguments: Any) -> Self:
        """Make a ``TwoBit`` from the dictionary of MXNet's kvstore, ``{"compress": "2bit", ...}``.

        See ``TwoBitConfig.from_params`` for the keys. ``arguments`` are further arguments of ``TwoBit``; with
        ``min_elements=0`` every tensor is compressed, as in MXNet.

        Raises:
            ConfigError: a key, type or value is not one of MXNet's 2-bit compression; the nearest valid key is named.
        """
        made = cls.__new__(cls)
        made.config = TwoBitConfig.from_params(params, **arguments)
        return made

    @classmethod
    def instance(cls: type[Self], compression: Any) -> Self | None:
        """The object of this class that a user's ``compression=`` means, or None if it is another compression."""
        if isinstance(compression, type) and issubclass(compression, cls):
            return compression()
        return compression if isinstance(compression, cls) else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self.config)})"

    @staticmethod
    def compress(tensor: Any) -> NoReturn:
        """Refuse: without a name there is no residual, and codes cannot be summed by an allreduce.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(
            "TwoBit compresses the gradients of a distributed optimizer or gradient tape made with "
            "compression=TwoBit; a single hvd.allreduce cannot use it, because two-bit codes cannot be summed on the "
            "way: leave compression out here")
