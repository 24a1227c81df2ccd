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
from collections.abc import Sequence

from .errors import DisagreementError
from .payload import VERSION

NBYTES = 32
_MAGIC = b"2BAG"


@dataclasses.dataclass(frozen=True)
class Statement:
    """What one rank exchanges for one optimizer.

    Attributes:
        min_elements: the configured size from which on tensors are compressed; for messages.
        tensors: name, number of elements and whether it is compressed, of every tensor, sorted by name.
    """

    min_elements: int
    tensors: tuple[tuple[str, int, bool], ...]

    @functools.cached_property
    def digest(self) -> bytes:
        """32 bytes, equal where statements mean the same collectives; ``min_elements`` itself does not count."""
        content = json.dumps([VERSION, self.tensors]).encode()
        return _MAGIC + hashlib.blake2b(content, digest_size=NBYTES - len(_MAGIC)).digest()

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
        mine, theirs = _by_name(first), _by_name(other)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs:
                has, lacks = (rank, 0) if name not in mine else (0, rank)
                return (f"tensor {name!r} is exchanged by rank {has} and not by rank {lacks}: give the optimizers of "
                        "all ranks the same named parameters, and freeze the same ones")
            (elements, compressed), (their_elements, their_compressed) = mine[name], theirs[name]
            if elements != their_elements:
                return (f"tensor {name!r} has {elements} elements on rank 0 and {their_elements} on rank {rank}: "
                        "build the same model on every rank")
            if compressed != their_compressed:
                yes, no = (0, rank) if compressed else (rank, 0)
                return (f"tensor {name!r} ({elements} elements) is compressed by rank {yes} and not by rank {no}: "
                        f"min_elements is {first['min_elements']} on rank 0 and {other['min_elements']} on rank {rank};"
                        " give every rank the same")
    return "the statements of all ranks are equal, but their digests were not: bytes were damaged on the way"


def _by_name(statement: dict) -> dict[str, Sequence]:
    return {name: (elements, compressed) for name, elements, compressed in statement["tensors"]}
