"""How the sum over ranks becomes the result that Horovod's ``op`` and ``gradient_predivide_factor`` ask for.

Also what cannot be summed so: other ops, and gradients that are not real floating point numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from .errors import UnsupportedOperationError


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A sum or an average over ranks.

    Attributes:
        op: Horovod's constant, ``hvd.Average`` or ``hvd.Sum``.
        averages: whether the sum is divided by the number of ranks.
        prescale: factor before the sum, as Horovod's allreduce takes it.
        postscale: factor after the sum, likewise.
    """

    op: Any
    averages: bool
    prescale: float
    postscale: float

    @classmethod
    def of(cls, hvd: Any, op: Any, predivide_factor: float) -> Reduction:
        """The reduction of an optimizer.

        Args:
            hvd: Horovod's module of the framework, for its constants.
            op: the user's ``op``.
            predivide_factor: the user's ``gradient_predivide_factor``.

        Raises:
            UnsupportedOperationError: two-bit codes cannot take part in this ``op``.
        """
        if op not in (hvd.Average, hvd.Sum):
            refuse_op(hvd, op)
        if op == hvd.Sum:
            return cls(op, False, 1.0, 1.0)
        # As Horovod splits an average: it divides the sum by the number of ranks itself.
        return cls(op, True, 1.0 / predivide_factor, predivide_factor)

    def scale(self, ranks: int) -> float:
        """The factor of the sum over so many ranks."""
        return self.prescale * self.postscale / (ranks if self.averages else 1)


def refuse_op(hvd: Any, op: Any) -> NoReturn:
    """Raise UnsupportedOperationError for a reduction that two-bit codes cannot take part in."""
    names = {hvd.Adasum: "hvd.Adasum", hvd.Min: "hvd.Min", hvd.Max: "hvd.Max", hvd.Product: "hvd.Product"}
    raise UnsupportedOperationError(f"TwoBit cannot be used with op={names.get(op, op)}: two-bit codes can be summed "
                                    "and averaged only; use hvd.Average or hvd.Sum, or leave compression out")


def refuse_reducescatter(function: str) -> NoReturn:
    """Raise UnsupportedOperationError for a collective that would split words by rows."""
    raise UnsupportedOperationError(f"TwoBit cannot be used with hvd.{function}: codes of several elements share a "
                                    "word, which cannot be split by the tensor's rows; leave compression out, or use "
                                    "hvd.allreduce and take this rank's rows")


def refuse_dtype(tensor: str, dtype: Any) -> NoReturn:
    """Raise UnsupportedOperationError for a gradient that is not of real floating point numbers."""
    raise UnsupportedOperationError(f"tensor {tensor!r} has a gradient of dtype {dtype}; TwoBit exchanges gradients "
                                    "of real floating point numbers")
