"""One tensor with a name of its own: what ``TwoBit(...).named("x")`` keeps from one ``hvd.allreduce`` to the next.

A front end wraps a ``NamedTensor`` in Horovod's ``Compressor``; here is what needs no framework. The first exchange,
and ``warmup_steps`` more, travel as they are, as float64; later ones as digits, with error feedback.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np

from . import joining
from .config import TwoBitConfig
from .digit_codec import HOST_WORDS, DigitCodec
from .errors import ConfigError, ResidualError
from .residuals import ResidualRegistry
from .words import WordBackend


@dataclasses.dataclass(frozen=True)
class Sent:
    """An exchange that has begun.

    Attributes:
        number: how many exchanges of this tensor have begun.
        shape: the tensor's shape.
        compressed: whether it travels as digits.
        rank: this rank's number.
        ranks: number of all ranks.
    """

    number: int
    shape: tuple[int, ...]
    compressed: bool
    rank: int
    ranks: int


class NamedTensor:
    """The residual, levels and counters of one tensor that is exchanged again and again.

    Args:
        name: what it is called in messages and in states.
        config: checked parameters.
        warns: whether to log when a fixed threshold does not fit; one rank is enough.

    Attributes:
        residuals: the registry that holds this tensor alone, for checkpoints.

    Raises:
        ConfigError: the name is no string, or empty.
    """

    def __init__(self, name: str, config: TwoBitConfig, warns: bool = True) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a tensor's name is a string with at least one character, not {name!r}")
        self.name = name
        self.residuals = ResidualRegistry()
        self._codec = DigitCodec(config, self.residuals, warns=warns)
        self._number = 0
        self._under_way: weakref.ref[Sent] | None = None
        joining.track(name, self.residuals)

    def encode(self, shape: tuple[int, ...], values: Any, rank: int, ranks: int,
               backend: WordBackend = HOST_WORDS) -> tuple[Any, Sent]:
        """Begin an exchange.

        Args:
            shape: the tensor's shape.
            values: its elements, flat, of a floating point dtype; not changed.
            rank: this rank's number.
            ranks: number of all ranks.
            backend: where the values lie.

        Returns:
            The words for the allreduce, overwritten by the next ``encode``, and what ``decode`` wants to know.

        Raises:
            ResidualError: the tensor had another shape before, or the exchange before has not ended.
        """
        if self._under_way is not None and self._under_way() is not None:
            raise self._twice()
        compressed = self._codec.ready(self.name, shape)
        if compressed:
            words = self._codec.encode(self.name, shape, backend.as_float32(values), rank, ranks, backend)
        else:
            words = self._codec.encode_uncompressed(self.name, shape, values, rank, ranks, backend)
        self._number += 1
        sent = Sent(self._number, shape, compressed, rank, ranks)
        self._under_way = weakref.ref(sent)
        return words, sent

    def decode(self, sent: Sent, words: Any, out: Any, backend: WordBackend = HOST_WORDS) -> None:
        """End an exchange: overwrite ``out`` with the reduced tensor.

        Args:
            sent: what ``encode`` returned.
            words: what the allreduce returned.
            out: the elements, flat, float32 or, of an uncompressed exchange, float64.
            backend: where words and ``out`` lie.

        Raises:
            PayloadError: the words are no sum of this tensor's, or ranks have different levels.
            ResidualError: another exchange has begun since.
        """
        self.abandon()
        if sent.number != self._number:
            raise self._twice()
        if sent.compressed:
            self._codec.decode(self.name, sent.shape, words, sent.rank, sent.ranks, out, backend)
            return
        with np.errstate(over="ignore"):
            out[:] = self._codec.decode_uncompressed(self.name, sent.shape, words, sent.rank, sent.ranks, backend)

    def abandon(self) -> None:
        """The exchange under way, if any, has failed or was not begun: another may begin."""
        self._under_way = None

    def _twice(self) -> ResidualError:
        return ResidualError(f"tensor {self.name!r} is compressed again while an exchange of it is under way: a name "
                             "belongs to one tensor; give each tensor its own TwoBit(...).named(...)")
