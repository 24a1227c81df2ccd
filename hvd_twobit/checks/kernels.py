"""Compares the kernels that training uses with their definition in NumPy, bit for bit, on a small input.

The input has what arithmetic may treat differently from one processor or compiler to the next: numbers that are not
finite, subnormal ones, and sums that overflow.
"""

from __future__ import annotations

import inspect
from typing import Any

ELEMENTS = 4099
"""Several blocks, and a rest that fills no word."""

BLOCK_ELEMENTS = 1024
RANKS = 3


def _numpy() -> str:
    import numpy
    return numpy.__version__


def _numba() -> str:
    import numba
    return numba.__version__


def _kernels() -> dict[str, Any]:
    from ..codec import Codec
    return compare(inspect.signature(Codec).parameters["backend"].default)


STEPS = {"numpy": _numpy, "numba": _numba, "kernels": _kernels}


def compare(backend: str) -> dict[str, Any]:
    """The backend's name, and how many kernels it has.

    Raises:
        RuntimeError: a kernel's results are not those of the definition.
    """
    from .. import kernels

    wanted, found = (results(kernels.load(name)) for name in ("numpy", backend))
    different = [name for name in wanted if wanted[name] != found[name]]
    if different:
        raise RuntimeError(f"results of {', '.join(different)} in {backend} are not those of the definition in NumPy")
    return {"backend": backend, "kernels": len(wanted), "elements": ELEMENTS}


def results(backend: Any) -> dict[str, bytes]:
    """All bits that the kernels of a backend make of the input, by kernel."""
    import numpy as np

    from .. import kernels

    random = np.random.default_rng(0)
    gradients = random.standard_normal((RANKS, ELEMENTS)).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 1.1e-38, 0.5, -0.5],
                       np.float32)
    gradients[:, :special.size] = special
    gradients[:, 2048:3072] *= np.float32(1e-39)  # A block of subnormal numbers, with a subnormal level.
    residuals = np.roll(gradients, 5, axis=1)
    residuals[~np.isfinite(residuals)] = 0.25
    blocks = kernels.block_count(ELEMENTS, BLOCK_ELEMENTS)
    up, down = np.full(blocks, 0.5, np.float32), np.full(blocks, -0.25, np.float32)
    up[2], down[2] = 5e-40, -5e-40
    quantizer = kernels.Quantizer(BLOCK_ELEMENTS, up, down, up, down)
    pairs = np.stack([up, down], axis=1)
    codes = np.zeros((RANKS, kernels.packed_nbytes(ELEMENTS)), np.uint8)
    selected = [backend.quantize_pack(*each, quantizer) for each in zip(gradients, residuals, codes)]
    made = {"quantize_pack": [codes, residuals, *(part for of_rank in selected for part in of_rank)]}

    def out() -> Any:
        return np.empty(ELEMENTS, np.float32)

    sums = out()
    backend.unpack_sum(codes, np.array([pairs * rank for rank in range(1, RANKS + 1)], np.float32), BLOCK_ELEMENTS,
                       sums, 0.75)
    made["unpack_sum"] = [sums]
    words, bits = codes.shape[1] // 4, kernels.count_bits(RANKS)
    counts, of_counts = np.zeros((2, kernels.counts_nbytes(words, bits)), np.uint8), out()
    backend.pack_counts(codes, bits, counts)
    backend.unpack_counts(counts, bits, pairs, BLOCK_ELEMENTS, of_counts, 0.75)
    made |= {"pack_counts": [counts], "unpack_counts": [of_counts]}
    tallies = kernels.Tallies(RANKS, 2)
    integers = np.zeros((RANKS, 2, tallies.integers(words)), np.uint32)
    flags = [backend.pack_tallies(of_rank, tallies, of) for of_rank, of in zip(codes, integers)]
    tallied = np.zeros_like(counts)
    backend.unpack_tallies(integers.sum(axis=0, dtype=np.uint32), tallies, RANKS, bits, tallied)
    made |= {"pack_tallies": [integers, np.array(flags)], "unpack_tallies": [tallied]}
    digits = kernels.Digits(RANKS, symmetric=False)
    floats, of_digits = np.zeros((RANKS, digits.word_count(ELEMENTS))), out()
    for of_rank, of in zip(codes, floats):
        backend.pack_digits(of_rank, digits, of)
    backend.unpack_digits(0.75 * floats.sum(axis=0), digits, 0.75, pairs, BLOCK_ELEMENTS, of_digits, 0.75)
    made |= {"pack_digits": [floats], "unpack_digits": [of_digits]}

    def bits_of(array: Any) -> bytes:
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), array.dtype.type(np.nan), array)  # One NaN is as good as another.
        return np.ascontiguousarray(array).tobytes()

    return {name: b"".join(map(bits_of, arrays)) for name, arrays in made.items()}
