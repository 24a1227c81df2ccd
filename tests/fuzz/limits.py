"""What a fuzzed process may take."""

from __future__ import annotations

import resource

_MORE_NBYTES = 1 << 30


def limit_memory() -> None:
    """From now on this process gets a gigabyte of address space more; asking for more is a MemoryError."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + _MORE_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
