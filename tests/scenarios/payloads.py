"""The exchange of which both front ends record what they hand to Horovod: to be compared, byte by byte.

Two tensors share a bucket, one has its own, and one is cut into three. The first step is uncompressed.
"""

from __future__ import annotations

from typing import Any

SHAPES = {"wide": (37, 61), "row": (1500,), "scale": (30,), "bias": (40,)}
STEPS = 3
ARGUMENTS: dict[str, Any] = {"min_elements": 0, "bucket_cap_mb": 0.006}
TRANSPORTS = ("allgather", "sra")


def tensor_of(collective: str) -> str:
    """A collective's name without what TensorFlow's front end puts around it; empty for an agreement."""
    name = collective.strip("/").rpartition("/")[2]
    return "" if "agreement" in name else name
