"""Compiles what the Triton backend launches, for GPUs that need not be there, and prints facts of the machine code.

Run as a module by test_kernels_triton, without TRITON_INTERPRET:

    python -m tests.compiled_triton 80 90

The backend's own functions are called on small tensors of the CPU. Where they launch, Triton compiles for the signature and
the options of that launch, as it would on a GPU, and nothing runs. Prints one line of JSON: for each compute capability and
launch, under its label, what ``facts`` tells.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from hvd_twobit import kernels
from hvd_twobit.kernels import Quantizer, block_count, packed_nbytes

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
    """Instructions that could change bits or cost time, registers of a thread, and bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([DISASSEMBLER, "--dump-resource-usage", file.name], capture_output=True, text=True,
                               check=True).stdout
    ptx = compiled.asm["ptx"]
    instructions = sorted(set(re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.:]+)", ptx, re.MULTILINE)))
    registers, stack, shared, local = (int(re.search(rf"{name}:(\d+)", usage)[1])  # type: ignore[index]
                                       for name in ("REG", "STACK", "SHARED", "LOCAL"))
    return {"instructions": instructions, "registers": registers, "stack": stack, "shared": shared, "local": local,
            "loads of 128 bits": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
            "stores of 128 bits": len(re.findall(r"st\.global\S*\.v4\.b32", ptx))}


def main() -> None:
    found: dict[str, Any] = {}
    for capability in sys.argv[1:]:
        triton.runtime.driver.set_active(Target(int(capability)))
        for label, launch in LAUNCHES.items():
            compiled: list[Any] = []

            def compile_only(kernel, programs, device, *arguments, compiled=compiled, **constants):
                compiled.append(kernel.warmup(*arguments, grid=(programs,), **constants, **BACKEND.OPTIONS))

            BACKEND._launch = compile_only
            launch()
            for number, one in enumerate(compiled):
                found[f"sm_{capability} {label}" + (f" {number + 1}" if number else "")] = facts(one)
    print(json.dumps(found))
