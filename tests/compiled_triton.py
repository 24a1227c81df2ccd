"""Compiles what the Triton backend launches, for GPUs that need not be there, and prints facts of the machine code.

Run as a module by test_kernels_triton, without TRITON_INTERPRET:

    python -m tests.compiled_triton

The backend's own functions are called, on small tensors of the CPU. Where they launch, Triton compiles for the
arguments and options of that launch, as it would on a GPU, and nothing runs. Prints one line of JSON: what ``facts``
tells of each kernel, by compute capability, what was launched, and the kernel's name.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from hvd_twobit import kernels
from hvd_twobit.kernels import Digits, Quantizer, Tallies, block_count, counts_nbytes, packed_nbytes

BACKEND = kernels.load("triton")
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Target:
    """What Triton asks its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def facts(compiled: Any) -> dict[str, Any]:
    """What the tests look at in one compiled kernel.

    Returns:
        The different instructions of its PTX; how many of them load or store 128 bits of global memory; registers of a
        thread, and bytes of its stack, which is where ptxas puts what registers have no room for; arguments in float64.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([DISASSEMBLER, "--dump-resource-usage", file.name], capture_output=True, text=True,
                               check=True).stdout
    ptx = compiled.asm["ptx"]
    instructions = re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_]*\.[a-z0-9_.:]+)", ptx, re.MULTILINE)
    return {"instructions": sorted(set(instructions)),
            "wide loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
            "wide stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
            "float64": [name for name, kind in compiled.src.signature.items() if kind == "fp64"],
            **{name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}}


def _quantizer(blocks: int, block_elements: int = 16) -> Quantizer:
    return Quantizer(block_elements, *torch.ones(4, blocks))


def _floats(elements: int, aligned: bool = True) -> torch.Tensor:
    return torch.zeros(elements + 4)[0 if aligned else 1:][:elements]


def _bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _quantize(elements: int, block_elements: int, aligned: bool = True) -> None:
    BACKEND.quantize_pack(_floats(elements, aligned), _floats(elements, aligned), _bytes(packed_nbytes(elements)),
                          _quantizer(block_count(elements, block_elements), block_elements))


def _quantize_runs(block_elements: int, with_table: bool, aligned: bool = True) -> None:
    runs = BACKEND.Runs([3000, 40], block_elements, "cpu")
    tensors = [_floats(elements, aligned) for elements in runs.elements]
    BACKEND.quantize_pack_runs(runs, tensors, tensors, _bytes(4 * runs.words), _quantizer(runs.blocks),
                               _bytes(8 * runs.blocks) if with_table else None)


def _unpack(ranks: int, block_elements: int, aligned: bool = True) -> None:
    BACKEND.unpack_sum(_bytes(ranks, packed_nbytes(3000)), torch.ones(ranks, block_count(3000, block_elements), 2),
                       block_elements, _floats(3000, aligned), 0.5)


def _unpack_runs(ranks: int, block_elements: int) -> None:
    runs = BACKEND.Runs([3000, 40], block_elements, "cpu")
    outs = [_floats(elements) for elements in runs.elements]
    BACKEND.unpack_sum_runs(runs, _bytes(ranks, 4 * runs.words), torch.ones(ranks, runs.blocks, 2), outs, 0.5)


def _count(bits: int, planes: int) -> None:
    counts, out = _bytes(planes, counts_nbytes(200, bits)), _floats(3200)
    BACKEND.pack_counts(_bytes(2, 800), bits, counts)
    BACKEND.unpack_counts(counts, bits, torch.ones(4, 2), 1024, out, 0.5)


def _tally(planes: int) -> None:
    tallies = Tallies(3, planes)
    words = torch.zeros((planes, tallies.integers(200)), dtype=torch.int32)
    BACKEND.pack_tallies(_bytes(800), tallies, words)
    BACKEND.unpack_tallies(words, tallies, 3, 8, _bytes(planes, counts_nbytes(200, 8)))


def _digits(symmetric: bool) -> None:
    digits = Digits(3, symmetric)
    words = torch.zeros(digits.word_count(3200), dtype=torch.float64)
    BACKEND.pack_digits(_bytes(800), digits, words)
    BACKEND.unpack_digits(words, digits, 1.0, torch.tensor([[1.0, -1.0]]), 3200, _floats(3200), 0.5)


LAUNCHES: dict[str, Callable[[], None]] = {
    "quantize": lambda: _quantize(3000, 1024),
    "quantize, one block": lambda: _quantize(3000, 3008),
    "quantize runs": lambda: _quantize_runs(1024, with_table=True),
    "quantize runs, blocks of several chunks": lambda: _quantize_runs(4096, with_table=True),
    "quantize runs, fixed levels": lambda: _quantize_runs(0, with_table=False),
    "quantize runs, unaligned": lambda: _quantize_runs(1024, with_table=True, aligned=False),
    "unpack": lambda: _unpack(1, 1024),
    "unpack, small blocks": lambda: _unpack(1, 16),
    "unpack, unaligned": lambda: _unpack(1, 1024, aligned=False),
    "unpack of ranks": lambda: _unpack(3, 1024),
    "unpack runs": lambda: _unpack_runs(1, 1024),
    "unpack runs of ranks": lambda: _unpack_runs(3, 0),
    "counts of 4 bits": lambda: _count(4, 1),
    "two planes of counts of 16 bits": lambda: _count(16, 2),
    "tallies of one plane": lambda: _tally(1),
    "tallies of two planes": lambda: _tally(2),
    "symmetric digits": lambda: _digits(True),
    "digits": lambda: _digits(False),
}
"""What is launched, by label."""


def main() -> None:
    found: dict[str, Any] = {}
    for capability, labels in ((90, list(LAUNCHES)), (80, [label for label in LAUNCHES if "runs" in label])):
        triton.runtime.driver.set_active(Target(capability))
        for label in labels:
            compiled: list[Any] = []

            def compile_only(kernel: Any, programs: int, device: torch.device, *arguments: Any,
                             compiled: list[Any] = compiled, **constants: Any) -> None:
                compiled.append((kernel.__name__, kernel.warmup(*arguments, grid=(programs,), **constants,
                                                                **BACKEND.OPTIONS)))

            BACKEND._launch = compile_only
            LAUNCHES[label]()
            for name, one in compiled:
                found[f"sm_{capability}, {label}: {name}"] = facts(one)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
