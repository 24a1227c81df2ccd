"""Do all ranks mean to send the same? Checked before the result of a step is used, not after a hang.

A rank that compresses a tensor calls an allgather where a rank that does not calls an allreduce, and Horovod would
wait for ever for the two to meet. So each step of each optimizer carries one small collective in which every rank
states, as a digest, which tensors it exchanges and which of them it compresses. Only where digests differ do ranks
exchange their whole statements, of which ``difference`` tells the first that clashes.

The check is repeated at every step because elastic jobs exchange ranks between steps; it travels with the payloads
and costs 32 bytes. With ``transport="allreduce"``, which is for jobs in which ranks join (``hvd.join``) at different
times, digests are added up instead of gathered: a rank that has joined has zeros, all others must have the same.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable

import numpy as np

from .config import HIERARCHICAL_VARIABLE, TRANSPORT_VARIABLE, TwoBitConfig
from .errors import DisagreementError
from .payload import VERSION
from .transports import Planned

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
        transport: the configured transport; for messages.
        bucket_cap_mb: the configured size of buckets; for messages.
        hierarchical: the configured setting; for messages.
        ranks: number of ranks that this one exchanges with, itself included.
        ranks_per_machine: of an exchange of two levels; 1 where there is one level, 0 before it is known.
        from_gpu: whether buckets are handed to Horovod in a GPU's memory, as all ranks have to or none.
        tensors: all tensors, sorted by name.
        buckets: of those that are compressed: transport, and per part the tensor's name, first element and the element
            behind the last one.
    """

    min_elements: int
    warmup_steps: int
    block_elements: int
    transport: str
    bucket_cap_mb: float
    hierarchical: bool | str
    ranks: int
    ranks_per_machine: int
    from_gpu: bool
    tensors: tuple[Exchanged, ...]
    buckets: tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...]

    @classmethod
    def of(cls, config: TwoBitConfig, tensors: Iterable[Exchanged], buckets: Iterable[Planned],
           ranks: int, ranks_per_machine: int = 1, from_gpu: bool = False) -> Statement:
        """What a rank with a configuration exchanges."""
        return cls(config.min_elements, config.warmup_steps, config.block_elements if config.adaptive else 0,
                   config.transport, config.bucket_cap_mb, config.hierarchical, ranks, ranks_per_machine,
                   from_gpu, tuple(sorted(tensors, key=lambda tensor: tensor.name)),
                   tuple((planned.transport, tuple((part.name, part.start, part.stop) for part in planned.bucket.parts))
                         for planned in buckets))

    @functools.cached_property
    def digest(self) -> bytes:
        """32 bytes, equal where statements mean the same collectives, however that was configured."""
        # Before it is known how ranks share machines, what depends on the setting is whether they ask, and what for.
        levels = self.ranks_per_machine or f"asked for {self.hierarchical}"
        content = json.dumps([VERSION, self.block_elements, self.ranks, levels, self.from_gpu, self.buckets,
                              [dataclasses.astuple(tensor) for tensor in self.tensors]])
        return _MAGIC + hashlib.blake2b(content.encode(), digest_size=NBYTES - len(_MAGIC)).digest()

    @property
    def addends(self) -> np.ndarray:
        """One and the digest, int64[1 + 8], to be added up over ranks."""
        return np.array([1, *np.frombuffer(self.digest, "<u4")], np.int64)

    def agrees(self, total: np.ndarray) -> bool:
        """Whether all ranks that contributed to a sum of addends state the same as this one."""
        return are_equal(total, self.addends)

    def to_json(self) -> bytes:
        """The whole statement as one line of JSON."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}).encode() + b"\n"


def are_equal(total: np.ndarray, addends: np.ndarray) -> bool:
    """Whether all ranks that contributed to a sum of addends have the same, int64[1 + 8]; see ``Statement``."""
    return bool((total == total[0] * addends).all())


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
        if other["ranks_per_machine"] != first["ranks_per_machine"] or (
                first["ranks_per_machine"] == 0 and other["hierarchical"] != first["hierarchical"]):
            return (f"hierarchical is {first['hierarchical']!r} on rank 0, which finds {first['ranks_per_machine']} "
                    f"ranks per machine, and {other['hierarchical']!r} on rank {rank}, which finds "
                    f"{other['ranks_per_machine']} (0: not asked yet): give TwoBit the same on every rank, also in the "
                    f"environment variable {HIERARCHICAL_VARIABLE}, and load states on every rank or on none")
        if other["block_elements"] != first["block_elements"]:
            return (f"rank 0 has {_levels(first)} and rank {rank} has {_levels(other)}: give TwoBit the same arguments "
                    "on every rank")
        if other["ranks"] != first["ranks"]:
            return (f"rank 0 exchanges with {first['ranks']} ranks in all and rank {rank} with {other['ranks']}: give "
                    "the optimizers of all ranks the same process set")
        if other["from_gpu"] != first["from_gpu"]:
            yes, no = (0, rank) if first["from_gpu"] else (rank, 0)
            return (f"rank {yes} compresses and sends gradients on its GPU and rank {no} on its CPU, and NCCL has to "
                    "reach all ranks or none: `hvd-twobit check` on the host of the latter tells what is missing; or "
                    "set HVD_TWOBIT_KERNELS=numba on every rank")
        mine, theirs = _by_name(first), _by_name(other)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs:
                has, lacks = (rank, 0) if name not in mine else (0, rank)
                return (f"tensor {name!r} is exchanged by rank {has} and not by rank {lacks}: give the optimizers of "
                        "all ranks the same named parameters, and freeze the same ones")
            told = _difference_of(mine[name], theirs[name], first, other, rank)
            if told:
                return f"tensor {name!r} {told}"
        told = _difference_of_buckets(first, other, rank)
        if told:
            return told
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
            if decision == "compressible":
                return (f"{what}on rank {no} its gradient is sparse, or not a variable's; compute the same kind of "
                        "gradient on every rank")
            return (f"{what}rank {no} is still in its uncompressed steps; load states of the same step on every rank, "
                    "or call residuals_of(optimizer).forget_levels() on every rank")
    if tensor["group"] != others["group"]:
        return (f"is exchanged in the group of {tensor['group']!r} on rank 0 and in that of {others['group']!r} on "
                f"rank {rank}: form the same groups on every rank")
    return None


def _difference_of_buckets(first: dict, other: dict, rank: int) -> str | None:
    """Where the buckets of rank 0 and another rank differ, and why, or None."""
    if first["buckets"] == other["buckets"]:
        return None
    for setting in ("transport", "bucket_cap_mb"):
        if first[setting] != other[setting]:
            return (f"{setting} is {first[setting]!r} on rank 0 and {other[setting]!r} on rank {rank}: give TwoBit the "
                    "same on every rank" + (f", also in the environment variable {TRANSPORT_VARIABLE}"
                                            if setting == "transport" else ""))
    mine, theirs = ([part for _, parts in statement["buckets"] for part in parts] for statement in (first, other))
    name, others = next((pair for pair in zip(mine, theirs) if pair[0] != pair[1]), (mine[0], theirs[0]))
    return (f"tensor {name[0]!r} of rank 0 is where rank {rank} has tensor {others[0]!r} in the order of parameters: "
            "give the optimizers of all ranks the same parameters in the same order")


def _levels(statement: dict) -> str:
    blocks = statement["block_elements"]
    return f'threshold="auto" with block_elements={blocks}' if blocks else "a fixed threshold"


def _by_name(statement: dict) -> dict[str, dict]:
    return {tensor["name"]: tensor for tensor in statement["tensors"]}
