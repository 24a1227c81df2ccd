"""What the Numba backend promises beyond the rule: threads, the caller's floating-point mode, cached machine code.

That its results are the reference's is in ``test_kernels.py``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numba import njit, types

from hvd_twobit import kernels
from hvd_twobit.kernels import Digits, Quantizer, packed_nbytes

NUMPY, NUMBA = kernels.load("numpy"), kernels.load("numba")

COMPILED = ("_quantize_blocks", "_unpack_blocks", "_count_codes", "_weigh_counts", "_tally_codes", "_count_digits",
            "_pack_groups", "_unpack_groups")
"""The loops that are compiled when the kernels are imported, and cached."""

PRINT_DIGEST = "from tests.test_kernels_numba import NUMBA, digest, inputs; print(digest(NUMBA, *inputs(7)))"
"""A program that compiles or loads the kernels and prints what they compute."""

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray, Quantizer]


def inputs(seed: int, elements: int = 200_003, size: float = 1.0) -> Inputs:
    """Gradient, residual, levels of three ranks and quantizer, made by a thread that keeps subnormal numbers."""
    gradient, residual = np.random.default_rng(seed).standard_normal((2, elements)) * size
    levels = np.array([[[0.5, -0.25]]] * 3) * size
    return (gradient.astype(np.float32), residual.astype(np.float32), levels.astype(np.float32),
            Quantizer.fixed(0.5 * size, -0.25 * size, elements))


def digest(backend, gradient: np.ndarray, residual: np.ndarray, levels: np.ndarray, quantizer: Quantizer) -> str:
    """Hash of all that the kernels make of the inputs: codes, residual, statistics, sums of one and of three ranks.

    The latter in both ways: of the ranks' codes, and of digits.
    """
    residual, out, both = residual.copy(), np.empty_like(residual), np.empty_like(residual)
    packed = np.zeros((3, packed_nbytes(gradient.size)), np.uint8)
    selected = backend.quantize_pack(gradient, residual, packed[0], quantizer)
    packed[1:] = packed[0]
    backend.unpack_sum(packed[:1], levels[:1], quantizer.block_elements, out, 0.75)
    backend.unpack_sum(packed, levels, quantizer.block_elements, both, 0.75)
    digits, of_digits = Digits(3, symmetric=False), np.empty_like(residual)
    words = np.empty(digits.word_count(gradient.size))
    backend.pack_digits(packed[0], digits, words)
    backend.unpack_digits(3 * 0.75 * words, digits, 0.75, levels[0], quantizer.block_elements, of_digits, 0.75)
    parts = (residual, packed, *selected, out, both, words, of_digits)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def test_several_threads_may_call_the_kernels_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: digest(NUMBA, *inputs(seed)), range(16)))
    assert found == [digest(NUMBA, *inputs(seed)) for seed in range(16)]


def test_kernels_release_the_global_interpreter_lock() -> None:
    """All loops are compiled to; how long the lock is held cannot be measured reliably on a busy machine."""
    loops = [loop for name, loop in vars(NUMBA).items() if name in COMPILED]
    assert len(loops) == len(COMPILED) and all(loop.targetoptions["nogil"] for loop in loops)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere the caller's mode is used as it is")
def test_subnormal_numbers_are_kept_in_threads_that_flush_them_to_zero() -> None:
    """As in TensorFlow's threads; the mode belongs to a thread, so a thread of its own is used and thrown away."""
    torch = pytest.importorskip("torch")
    subnormal = inputs(3, elements=1003, size=1e-39)
    expected = digest(NUMPY, *subnormal)

    def flushing() -> tuple[str, str, bool]:
        assert torch.set_flush_denormal(True)
        found = digest(NUMBA, *subnormal)
        still_flushing = not (subnormal[0] * np.float32(1)).any()
        return digest(NUMPY, *subnormal), found, still_flushing

    with ThreadPoolExecutor(1) as pool:
        flushed, found, still_flushing = pool.submit(flushing).result()
    assert flushed != expected, "the thread does not flush, so this test shows nothing"
    assert found == expected and still_flushing


def test_processes_that_start_together_share_one_cache(tmp_path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", PRINT_DIGEST], cwd=Path(__file__).parents[1], env=environment,
                                  stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert outputs == [digest(NUMBA, *inputs(7))] * 2
    assert len(list(tmp_path.rglob("*.nbi"))) == len(list(tmp_path.rglob("*.nbc"))) == len(COMPILED)


def test_names_of_cache_files_tell_apart_what_was_compiled_for_another_processor(monkeypatch) -> None:
    def name() -> str:
        def function() -> None: ...
        monkeypatch.setattr(NUMBA, "njit", lambda signature, **options: lambda function: function)
        return NUMBA._compiled(types.void())(function).__qualname__

    here = name()
    assert name() == here
    codegen = NUMBA.cpu_target.target_context.codegen()
    monkeypatch.setattr(type(codegen), "magic_tuple", lambda self: ("another processor",))
    assert name() != here


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError("No space left on device")])
def test_where_nothing_can_be_cached_the_kernels_are_compiled_all_the_same(monkeypatch, caplog, error) -> None:
    def njit_without_cache(signature, cache: bool = False, **options):
        if cache:
            raise error
        return njit(signature, **options)

    monkeypatch.setattr(NUMBA, "njit", njit_without_cache)
    with caplog.at_level(logging.INFO, NUMBA.__name__):
        @NUMBA._compiled(types.int64(types.int64))
        def double(number):
            return 2 * number
    assert double(21) == 42 and f"double is not cached, every process compiles it: {error}" in caplog.text
