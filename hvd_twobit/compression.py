"""What every front end's ``TwoBit`` is: parameters, how they are written and printed. No framework.

A front end's class adds Horovod's ``Compressor`` of its framework; see ``torch.compressor`` and
``tensorflow.compressor``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Generic, NoReturn, TypeVar

from .config import TwoBitConfig, describe
from .errors import ConfigError
from .named import NamedTensor
from .residuals import ResidualRegistry

Self = TypeVar("Self", bound="TwoBitParameters")
Result = TypeVar("Result")


class OnClassToo(Generic[Result]):
    """Decorator of a method that may also be called on the class, which then stands for an instance with its defaults.

    Horovod calls ``compression.compress(tensor)``, and users pass the class as well as an instance.
    """

    def __init__(self, function: Callable[..., Result]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Result]:
        return functools.wraps(self._function)(functools.partial(self._function, owner() if instance is None
                                                                 else instance))


class NamedCompression:
    """What every front end's ``TwoBit(...).named("x")`` is: the compression of one tensor, with a residual.

    Attributes:
        tensor: what is kept of it.
    """

    def __init__(self, tensor: NamedTensor, config: TwoBitConfig) -> None:
        self.tensor = tensor
        self.config = config

    @property
    def residuals(self) -> ResidualRegistry:
        """The residual and levels, to be saved and loaded with a checkpoint of this rank."""
        return self.tensor.residuals

    def __repr__(self) -> str:
        return f"TwoBit({describe(self.config)}).named({self.tensor.name!r})"


def is_twobit(compression: Any) -> bool:
    """Whether a user's ``compression=`` is a ``TwoBit``, its class, or one with a name."""
    return isinstance(compression, (TwoBitParameters, NamedCompression)) or (
        isinstance(compression, type) and issubclass(compression, TwoBitParameters))


class TwoBitParameters:
    """The parameters of 2-bit compression; the front ends' ``TwoBit`` classes document them.

    ``unknown`` takes what is refused by name, with the nearest valid one; its type lets type checkers refuse it too.
    """

    def __init__(self, threshold: float | str | None = None, *, positive_threshold: float | None = None,
                 negative_threshold: float | None = None, min_elements: int | None = None,
                 warmup_steps: int | None = None, block_elements: int | None = None, transport: str | None = None,
                 bucket_cap_mb: float | None = None, hierarchical: bool | str | None = None,
                 **unknown: NoReturn) -> None:
        self.config = TwoBitConfig.from_arguments(
            threshold, positive_threshold, negative_threshold, block_elements, min_elements=min_elements,
            warmup_steps=warmup_steps, transport=transport, bucket_cap_mb=bucket_cap_mb, hierarchical=hierarchical,
            **unknown)

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
        """The object of this class that a user's ``compression=`` means, or None if it is another compression.

        Raises:
            ConfigError: it is one for a single tensor, or of another front end.
        """
        cls.refuse_foreign(compression)
        if isinstance(compression, NamedCompression):
            raise ConfigError(f"{compression!r} is for one tensor that is handed to hvd.allreduce: an optimizer or "
                              "tape takes TwoBit itself and knows the names of its tensors")
        if isinstance(compression, type) and issubclass(compression, cls):
            return compression()
        return compression if isinstance(compression, cls) else None

    @classmethod
    def refuse_foreign(cls, compression: Any) -> None:
        """Raise ConfigError if a user's ``compression=`` is a ``TwoBit`` of another framework, or no ``TwoBit`` but a
        module that has one."""
        name = _package_of(cls)
        if isinstance(compression, types.ModuleType) and compression.__name__.partition(".")[0] == "hvd_twobit":
            raise ConfigError(f"compression={compression.__name__} is a module: pass the class in it, {name}.TwoBit")
        if is_twobit(compression):
            given = compression if isinstance(compression, type) else type(compression)
            other = _package_of(given)
            if other != name:
                raise ConfigError(f"{other}.{given.__name__} does not go with horovod.{name.rpartition('.')[2]}: take "
                                  f"TwoBit from {name}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self.config)})"


def _package_of(cls: type) -> str:
    """The front end that a class belongs to."""
    return next(".".join(base.__module__.split(".")[:2]) for base in cls.__mro__
                if base.__module__.startswith("hvd_twobit."))
