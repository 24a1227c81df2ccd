"""What Horovod's own collectives cost on this machine, apart from the network: constants of ``hvd_twobit.cost_model``.

    horovodrun --gloo -np 2 python benchmarks/collectives.py

Ranks are processes of one machine, so that bytes travel through its memory. The time of a collective of one element is
that of Horovod's cycle and negotiation. Gloo adds float16 in software: what its allreduce takes longer than float32's
takes for as many bytes is the time of these additions. Rank 0 prints medians as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import horovod.torch as hvd
import torch


def main() -> None:
    """Measure on every rank, print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=4_000_000, help="of the large tensors (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="exchanges to take medians over (default: %(default)s)")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    result = {"ranks": hvd.size(), "elements": arguments.elements,
              "milliseconds_of_one_element": _small(10 * arguments.repeats),
              "nanoseconds_per_element": _large(arguments.elements, arguments.repeats)}
    if hvd.rank() == 0:
        print(json.dumps(result, indent=1))
    hvd.barrier()


def _small(repeats: int) -> dict[str, float]:
    """Milliseconds of collectives of one element per rank."""
    one, each = torch.ones(1), torch.ones(hvd.size())
    return {"allreduce": 1e3 * _seconds(lambda: hvd.allreduce(one, name="small.allreduce"), repeats),
            "allgather": 1e3 * _seconds(lambda: hvd.allgather(one, name="small.allgather"), repeats),
            "alltoall": 1e3 * _seconds(lambda: hvd.alltoall(each, name="small.alltoall"), repeats)}


def _large(elements: int, repeats: int) -> dict[str, float]:
    """Nanoseconds per element of allreduces and casts, per byte by which float64's are longer, and per addition."""
    gradient = 0.01 * torch.randn(elements, generator=torch.Generator().manual_seed(hvd.rank()))
    result = {}
    for op in ("Sum", "Average"):
        for dtype in (torch.float32, torch.float16, torch.float64):
            values, name = gradient.to(dtype), f"{dtype} {op}".removeprefix("torch.")
            result[f"allreduce {name}"] = 1e9 * _seconds(
                functools.partial(hvd.allreduce, values, name=name, op=getattr(hvd, op)), repeats) / elements
    ring = 2 * (hvd.size() - 1) / hvd.size()
    result["byte received and sent"] = (result["allreduce float64 Sum"] - result["allreduce float32 Sum"]) / (4 * ring)
    longer = result["allreduce float16 Sum"] - result["allreduce float32 Sum"] / 2
    result["float16 addition"] = 2 * longer / ring
    result["cast to float16"] = 1e9 * _seconds(gradient.half, repeats) / elements
    result["cast to float32"] = 1e9 * _seconds(gradient.half().float, repeats) / elements
    return result


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of ``call``, with all ranks beginning together; two calls before are not counted."""
    samples = []
    for _ in range(2 + repeats):
        hvd.barrier()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])


if __name__ == "__main__":
    main()
