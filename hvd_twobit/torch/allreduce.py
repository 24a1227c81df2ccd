"""``hvd.allreduce(tensor, compression=TwoBit)``: a tensor in, the words that Horovod adds, a tensor out.

What words mean is the core's business (``digit_codec``, ``named``), where they are made that of ``words``; this file
brings PyTorch's tensors to them and back, whatever their dtype, shape and layout, and says which go Horovod's own way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import horovod.torch as hvd
import torch

from ..calls import is_in_group, mark_words
from ..config import TwoBitConfig
from ..digit_codec import quantize_once, sum_of
from ..errors import ConfigError, UnsupportedOperationError
from ..named import NamedTensor, Sent
from .exchange import HOROVOD_DTYPES
from .placement import horovod_takes
from .words import TensorWords, words_of


@dataclasses.dataclass(frozen=True)
class Converted:
    """A tensor that travels uncompressed, in another dtype."""

    dtype: torch.dtype
    device: torch.device

    def finish(self, received: torch.Tensor) -> torch.Tensor:
        """The reduced tensor, from what the allreduce returned."""
        return received.to(device=self.device, dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class Summed:
    """A tensor that travels as words: what Horovod hands back with their sum.

    Attributes:
        config: parameters of the compression.
        tensor: what is kept of the tensor; None where it has no name.
        sent: what began; without a name only its shape and ranks count.
        words: where the tensor is compressed.
        dtype: the tensor's.
        device: the tensor's.
    """

    config: TwoBitConfig
    tensor: NamedTensor | None
    sent: Sent
    words: TensorWords
    dtype: torch.dtype
    device: torch.device

    def finish(self, received: torch.Tensor) -> torch.Tensor:
        """The reduced tensor, from what the allreduce returned."""
        with _plain_tensors():
            return self._reduced(received)

    def _reduced(self, received: torch.Tensor) -> torch.Tensor:
        sent, words = self.sent, self.words
        uncompressed = torch.float64 if self.dtype == torch.float64 and not sent.compressed else torch.float32
        out = torch.empty(sent.shape, dtype=uncompressed, device=words.device)
        flat, arrived = words.array(out.view(-1)), words.array(received.to(words.device))
        if self.tensor is None:
            label = f"without a name, of shape {sent.shape}"
            sum_of(self.config, arrived, label, sent.rank, sent.ranks, flat, words)
        else:
            self.tensor.decode(sent, arrived, flat, words)
        return out.to(device=self.device, dtype=self.dtype)


def compress(config: TwoBitConfig, tensor: torch.Tensor,
             named: NamedTensor | None = None) -> tuple[torch.Tensor, Converted | Summed | None]:
    """What to hand to Horovod's allreduce for a tensor, and what turns its result into the reduced tensor.

    Args:
        config: parameters of the compression.
        tensor: the user's tensor. Sparse ones and those that are not of floating point numbers go Horovod's own way, as
            those with fewer than ``min_elements`` elements do, in a dtype that Horovod has.
        named: what is kept of the tensor.

    Raises:
        ConfigError: it is no tensor of PyTorch's.
        UnsupportedOperationError: a derivative would be lost.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"hvd_twobit.torch.TwoBit was given a {type(tensor).__module__}.{type(tensor).__name__}, no "
                          "torch.Tensor: with horovod.tensorflow take TwoBit from hvd_twobit.tensorflow")
    if not tensor.dtype.is_floating_point or tensor.layout != torch.strided:
        return tensor, None
    if not config.compresses(tensor.numel()):
        if is_in_group():
            return tensor.to("cpu", torch.float64), Converted(tensor.dtype, tensor.device)
        takes = horovod_takes(tensor.device)
        if takes and tensor.dtype in HOROVOD_DTYPES:
            return tensor, None
        dtype = tensor.dtype if tensor.dtype in HOROVOD_DTYPES else torch.float32
        return tensor.to(tensor.device if takes else "cpu", dtype), Converted(tensor.dtype, tensor.device)
    if tensor.requires_grad and torch.is_grad_enabled():
        of = "" if named is None else f" {named.name!r}"
        raise UnsupportedOperationError(
            f"the tensor{of} of shape {tuple(tensor.shape)} requires a gradient, and two-bit codes have no derivative, "
            "so that it would be lost: hand tensor.detach() to hvd.allreduce, or leave compression out")
    shape, rank, ranks = tuple(tensor.shape), hvd.rank(), hvd.size()
    words = words_of(tensor.device)
    with _plain_tensors():
        if named is None:
            made = quantize_once(config, words.values(tensor, exact=False), rank, ranks, words)
            sent = Sent(0, shape, True, rank, ranks)
        else:
            values = words.values(tensor, exact=tensor.dtype == torch.float64)
            made, sent = named.encode(shape, values, rank, ranks, words)
        wire = words.wire(made)
    mark_words(wire)
    return wire, Summed(config, named, sent, words, tensor.dtype, tensor.device)


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Within it, tensors are made that every later call may write, also in a user's ``torch.inference_mode``."""
    with torch.inference_mode(False), torch.no_grad():
        yield
