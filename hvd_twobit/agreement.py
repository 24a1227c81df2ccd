"""Do all ranks mean to send the same? Checked before the result of a step is used, not after a hang.

A rank that compresses a tensor calls an allgather where a rank that does not calls an allreduce, and Horovod would
wait for ever for the two to meet. So each step of each optimizer carries one small collective in which every rank
states, as a digest, which tensors it exchanges and which of them it compresses. Only where digests differ do ranks
exchange their whole statements, of which ``difference`` tells the first that clashes.

The check is repeated at every step because elastic jobs exchange ranks between steps; it travels with the payloads
and costs 32 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable

from .config import TwoBitConfig
from .errors import DisagreementError
from .payload import VERSION

NBYTES = 32
_MAGIC = b"2BAG"


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """One tensor of a statement.

    Attributes:
        name: the tensor's name.
        elements: number of elements.
        compressible: whether it is large enough to be compressed.
        compressed: whether it travels compressed in this step.
        group: name of the first tensor of the group that travels together; its own where it travels alone.
    """

    name: str
    elements: int
    compressible: bool
    compressed: bool
    group: str


@dataclasses.dataclass(frozen=True)
class Statement:
    """What one rank exchanges for one optimizer in one step.

    Attributes:
        min_elements: the configured size from which on tensors are compressed; for messages.
        warmup_steps: the configured number of uncompressed steps; for messages.
        block_elements: elements that share an adaptive level; 0 where thresholds are fixed.
        tensors: all tensors, sorted by name.
    """

    min_elements: int
    warmup_steps: int
    block_elements: int
    tensors: tuple[Exchanged, ...]

    @classmethod
    def of(cls, config: TwoBitConfig, tensors: Iterable[Exchanged]) -> Statement:
        """What a rank with a configuration exchanges."""
        return cls(config.min_elements, config.warmup_steps, config.block_elements if config.adaptive else 0,
                   tuple(sorted(tensors, key=lambda tensor: tensor.name)))

    @functools.cached_property
    def digest(self) -> bytes:
        """32 bytes, equal where statements mean the same collectives, however that was configured."""
        content = json.dumps([VERSION, self.block_elements, [dataclasses.astuple(tensor) for tensor in self.tensors]])
        return _MAGIC + hashlib.blake2b(content.encode(), digest_size=NBYTES - len(_MAGIC)).digest()

    def to_json(self) -> bytes:
        """The whole statement as one line of JSON."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}).encode() + b"\n"


def disagreement(statements: bytes, rank: int) -> DisagreementError:
    """The error of a rank that saw other digests than its own; ``statements`` as for ``difference``."""
    return DisagreementError(f"ranks do not agree on what to exchange, seen by rank {rank}: {difference(statements)}")


def difference(statements: bytes) -> str:
    """Tell in one sentence where ranks first differ, and what to do.

    Args:
        statements: the lines of ``Statement.to_json`` of all ranks, in rank order.
    """
    ranks = [json.loads(line) for line in statements.splitlines()]
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if other["version"] != first["version"]:
            return (f"rank {rank} sends payloads of version {other['version']}, rank 0 of version {first['version']}: "
                    "install the same hvd_twobit on every rank")
        if other["block_elements"] != first["block_elements"]:
            return (f"rank 0 has {_levels(first)} and rank {rank} has {_levels(other)}: give TwoBit the same arguments "
                    "on every rank")
        mine, theirs = _by_name(first), _by_name(other)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs:
                has, lacks = (rank, 0) if name not in mine else (0, rank)
                return (f"tensor {name!r} is exchanged by rank {has} and not by rank {lacks}: give the optimizers of "
                        "all ranks the same named parameters, and freeze the same ones")
            told = _difference_of(mine[name], theirs[name], first, other, rank)
            if told:
                return f"tensor {name!r} {told}"
    return "the statements of all ranks are equal, but their digests were not: bytes were damaged on the way"


def _difference_of(tensor: dict, others: dict, first: dict, other: dict, rank: int) -> str | None:
    """What rank 0 and another rank say differently of a tensor, or None."""
    if tensor["elements"] != others["elements"]:
        return (f"has {tensor['elements']} elements on rank 0 and {others['elements']} on rank {rank}: build the same "
                "model on every rank")
    for decision, setting in (("compressible", "min_elements"), ("compressed", "warmup_steps")):
        if tensor[decision] != others[decision]:
            yes, no = (0, rank) if tensor[decision] else (rank, 0)
            what = f"({tensor['elements']} elements) is compressed by rank {yes} and not by rank {no}: "
            if first[setting] != other[setting]:
                return (f"{what}{setting} is {first[setting]} on rank 0 and {other[setting]} on rank {rank}; give "
                        "every rank the same")
            return (f"{what}rank {no} is still in its uncompressed steps; load states of the same step on every rank, "
                    "or call residuals_of(optimizer).forget_levels() on every rank")
    if tensor["group"] != others["group"]:
        return (f"is exchanged in the group of {tensor['group']!r} on rank 0 and in that of {others['group']!r} on "
                f"rank {rank}: form the same groups on every rank")
    return None


def _levels(statement: dict) -> str:
    blocks = statement["block_elements"]
    return f'threshold="auto" with block_elements={blocks}' if blocks else "a fixed threshold"


def _by_name(statement: dict) -> dict[str, dict]:
    return {tensor["name"]: tensor for tensor in statement["tensors"]}
