"""What the Triton backend does beyond the rule: many runs in one launch, and what its machine code has to be like.

That its results are the reference's, tensor by tensor, is in the tests of all backends, by the interpreter
(backends.py). No test here needs a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_twobit.kernels import Quantizer, block_count, count_bits, counts_nbytes, packed_nbytes, whole_tensor
from hvd_twobit.kernels.reference import sum_in_lanes
from hvd_twobit.payload import BLOCK_TABLE

from .backends import DEFINITION, TRITON
from .launcher import REPOSITORY
from .simulation import assert_same_bits

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
assert TRITON is not None

LENGTHS = (0, 1, 17, 1000, 1025, 0, 2049)
"""Elements of runs: none, parts of words, and what lies around a chunk of 1024."""

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # The interpreter is NumPy.


def blocks_of(elements: int, block_elements: int) -> int:
    return block_count(elements, block_elements) if block_elements else 1


class Placed:
    """What a launch gets of arrays of several runs: tensors in one buffer, which are aligned to 16 bytes or are not."""

    def __init__(self, arrays: Sequence[np.ndarray], aligned: bool) -> None:
        self.buffer = torch.full((sum(array.size + 16 for array in arrays) + 16,), 77.0)
        self.tensors, self._untouched, start = [], torch.ones(len(self.buffer), dtype=torch.bool), 4
        for array in arrays:
            start += -(self.buffer.data_ptr() // 4 + start) % 4 + (0 if aligned else 1)
            self.tensors.append(self.buffer[start:start + array.size])
            self.tensors[-1].copy_(torch.from_numpy(array))
            self._untouched[start:start + array.size] = False
            start += array.size + 4

    def arrays(self) -> list[np.ndarray]:
        assert (self.buffer[self._untouched] == 77).all(), "written out of bounds"
        return [tensor.numpy() for tensor in self.tensors]


def of_runs(quantizer: Quantizer, block_elements: int, lengths: Sequence[int]) -> list[Quantizer]:
    """The quantizers of the runs that have this one together."""
    made, first = [], 0
    for elements in lengths:
        part = slice(first, first + blocks_of(elements, block_elements))
        made.append(Quantizer(block_elements or whole_tensor(elements), quantizer.positive_threshold[part],
                              quantizer.negative_threshold[part], quantizer.positive_level[part],
                              quantizer.negative_level[part]))
        first = part.stop
    return made


def on_tensors(quantizer: Quantizer) -> Quantizer:
    return Quantizer(quantizer.block_elements, *(
        torch.from_numpy(array) for array in (quantizer.positive_threshold, quantizer.negative_threshold,
                                              quantizer.positive_level, quantizer.negative_level)))


def table_entry(selected_sum: np.float32, count: int, residual: np.ndarray) -> tuple[np.float32, int]:
    """What a block table has to tell of a block."""
    told = selected_sum if count else sum_in_lanes(np.abs(residual))
    return min(told, np.finfo(np.float32).max), count


# ---- runs -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("block_elements, lengths, aligned, with_table", [
    (16, LENGTHS, False, True), (1024, (*LENGTHS, 17 * 1024 + 5), True, True), (1040, LENGTHS, False, True),
    (4096, (*LENGTHS, 9000), True, True), (0, LENGTHS, False, True), (0, (*LENGTHS, 17 * 1024 + 5), True, False),
])
def test_runs_are_quantized_as_each_of_them_alone(block_elements: int, lengths: tuple[int, ...], aligned: bool,
                                                  with_table: bool) -> None:
    random = np.random.default_rng(block_elements)
    runs = TRITON.Runs(lengths, block_elements, "cpu")
    # Blocks that select much, little and nothing; sums of some are infinite.
    size = random.choice(np.float32([0.5, 2.5, 50]), runs.blocks)
    levels = (random.random((2, runs.blocks)) + 0.5).astype(np.float32)
    quantizer = Quantizer(16, size, -size, levels[0], -levels[1])
    gradients = [random.standard_normal(elements).astype(np.float32) for elements in lengths]
    residuals = [random.standard_normal(elements).astype(np.float32) for elements in lengths]
    gradients[3][3], gradients[4][1024], residuals[6][:20] = np.nan, np.inf, 3e38

    of_gradients, of_residuals = Placed(gradients, aligned), Placed(residuals, aligned)
    packed = np.full(4 * runs.words + 32, 0x55, np.uint8)
    table = np.full(8 * runs.blocks + 32, 0x55, np.uint8)
    counts = TRITON.quantize_pack_runs(
        runs, of_gradients.tensors, of_residuals.tensors, torch.from_numpy(packed)[16:-16], on_tensors(quantizer),
        torch.from_numpy(table)[16:-16] if with_table else None)

    codes, entries, selected = [], [], []
    for gradient, residual, of_run in zip(gradients, residuals, of_runs(quantizer, block_elements, lengths)):
        codes.append(np.empty(packed_nbytes(gradient.size), np.uint8))
        sums, numbers = DEFINITION.quantize_pack(gradient, residual, codes[-1], of_run)
        starts = [block * of_run.block_elements for block in range(sums.size)]
        entries += [table_entry(one, number, residual[start:start + of_run.block_elements])
                    for one, number, start in zip(sums, numbers, starts)]
        selected.append(int(numbers.sum()))
    untouched = np.full(16, 0x55, np.uint8)
    assert_same_bits(packed, np.concatenate([untouched, *codes, untouched]), "codes")
    for found, wanted in zip(of_residuals.arrays(), residuals):
        assert_same_bits(found, wanted, "residual")
    for found, wanted in zip(of_gradients.arrays(), gradients):
        assert_same_bits(found, wanted, "gradient")
    assert counts.tolist() == selected
    if with_table:
        assert {number == 0 for _, number in entries} == {True, False}
        assert_same_bits(table, np.concatenate([untouched, np.array(entries, BLOCK_TABLE).view(np.uint8), untouched]),
                         "table")


@pytest.mark.parametrize("block_elements, ranks, aligned", [
    (16, 1, True), (512, 3, False), (1024, 1, False), (1024, 3, True), (4096, 2, True), (0, 1, True), (0, 3, False)])
def test_runs_are_unpacked_as_each_of_them_alone(block_elements: int, ranks: int, aligned: bool) -> None:
    random = np.random.default_rng(block_elements + ranks)
    lengths = (*LENGTHS, 5000)
    runs = TRITON.Runs(lengths, block_elements, "cpu")
    packed = random.integers(0, 256, (ranks, 4 * runs.words + 12), np.uint8)  # rows lie apart
    levels = (random.random((ranks, runs.blocks, 2)) * [1, -1]).astype(np.float32)
    levels[1:, ::2] = levels[:1, ::2]
    outs = Placed([np.full(elements, 7, np.float32) for elements in lengths], aligned)
    TRITON.unpack_sum_runs(runs, torch.from_numpy(packed)[:, 8:-4], torch.from_numpy(levels), outs.tensors, 1 / 3)

    word = block = 0
    for elements, found in zip(lengths, outs.arrays()):
        words, blocks = packed_nbytes(elements) // 4, blocks_of(elements, block_elements)
        wanted = np.empty(elements, np.float32)
        DEFINITION.unpack_sum(packed[:, 8 + 4 * word:8 + 4 * (word + words)],
                              np.ascontiguousarray(levels[:, block:block + blocks]),
                              block_elements or whole_tensor(elements), wanted, 1 / 3)
        assert np.array_equal(found, wanted, equal_nan=True)
        word, block = word + words, block + blocks


@pytest.mark.parametrize("block_elements, ranks, planes", [(16, 3, 1), (1024, 9, 2), (0, 3, 2)])
def test_counts_of_runs_are_weighed_as_those_of_each_alone(block_elements: int, ranks: int, planes: int) -> None:
    random = np.random.default_rng(block_elements)
    lengths = (*LENGTHS, 5000)
    runs, bits = TRITON.Runs(lengths, block_elements, "cpu"), count_bits(ranks)
    counts = np.zeros((planes, counts_nbytes(runs.words, bits) + 4), np.uint8)
    DEFINITION.pack_counts(random.integers(0, 256, (ranks, 4 * runs.words), np.uint8), bits, counts[:, 4:])
    levels = (random.random((runs.blocks, 2)) * [1, -1]).astype(np.float32)
    outs = Placed([np.full(elements, 7, np.float32) for elements in lengths], aligned=True)
    TRITON.unpack_counts_runs(runs, torch.from_numpy(counts)[:, 4:], bits, torch.from_numpy(levels), outs.tensors,
                              1 / 3)

    byte, block = 4, 0
    for elements, found in zip(lengths, outs.arrays()):
        nbytes, blocks = counts_nbytes(packed_nbytes(elements) // 4, bits), blocks_of(elements, block_elements)
        wanted = np.empty(elements, np.float32)
        DEFINITION.unpack_counts(counts[:, byte:byte + nbytes], bits, levels[block:block + blocks],
                                 block_elements or whole_tensor(elements), wanted, 1 / 3)
        assert np.array_equal(found, wanted, equal_nan=True)
        byte, block = byte + nbytes, block + blocks


def test_no_runs_and_no_ranks_are_nothing_to_do() -> None:
    runs = TRITON.Runs([], 1024, "cpu")
    nothing, none = torch.empty(0, dtype=torch.uint8), torch.empty(0)
    counts = TRITON.quantize_pack_runs(runs, [], [], nothing, Quantizer(16, none, none, none, none), nothing)
    assert counts.tolist() == []
    TRITON.unpack_sum_runs(runs, nothing[None], torch.empty(1, 0, 2), [])
    out = torch.ones(20)
    TRITON.unpack_sum_runs(TRITON.Runs([20], 0, "cpu"), torch.empty((0, 8), dtype=torch.uint8), torch.empty(0, 1, 2),
                           [out], -1.0)
    assert out.tolist() == [0.0] * 20 and torch.signbit(out).all()


def test_sums_that_float64_would_round_are_added_in_order() -> None:
    """2**53 + 2**29 is half way between two float32; 1 and 1, added one by one, do not change it, but 2 does."""
    gradient = np.zeros(4 * 1024, np.float32)
    gradient[::1024] = 2.0**53, 2.0**29, 1, 1
    quantizer = Quantizer(4096, *np.float32([[0.5], [-0.5], [1], [-1]]))
    selected_sum, _ = TRITON.quantize_pack(torch.from_numpy(gradient), torch.zeros(4096),
                                           torch.empty(1024, dtype=torch.uint8), on_tensors(quantizer))
    wanted, _ = DEFINITION.quantize_pack(gradient, np.zeros(4096, np.float32), np.empty(1024, np.uint8), quantizer)
    assert selected_sum.tolist() == wanted.tolist() == [2.0**53]


@pytest.mark.parametrize("changed, message", [
    (dict(gradients=[torch.zeros(40)]), "gradients are of 1 runs, but there are 2"),
    (dict(residuals=[torch.zeros(40), torch.zeros(6)]), r"residuals\[1\] is float32\[6\], but must be .*float32\[5\]"),
    (dict(gradients=[torch.zeros(80)[::2], torch.zeros(5)]), r"gradients\[0\] is float32\[40\].*contiguous"),
    (dict(gradients=[torch.zeros(40).double(), torch.zeros(5)]), r"gradients\[0\] is float64"),
    (dict(residuals=[torch.zeros(40, device="meta"), torch.zeros(5)]),
     r"residuals\[0\] is float32\[40\] on meta, but must be .* on cpu"),
    (dict(packed=torch.zeros(12, dtype=torch.uint8)), r"packed is uint8\[12\].*uint8\[16\]"),
    (dict(table=torch.zeros(40, dtype=torch.uint8)), r"table is uint8\[40\].*uint8\[32\]"),
    (dict(quantizer=Quantizer(16, *torch.ones(4, 5))), r"positive_threshold is float32\[5\].*float32\[4\]"),
])
def test_quantize_pack_runs_refuses_tensors_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    arguments = dict(gradients=[torch.zeros(40), torch.zeros(5)], residuals=[torch.zeros(40), torch.zeros(5)],
                     packed=torch.zeros(16, dtype=torch.uint8), quantizer=Quantizer(16, *torch.ones(4, 4)),
                     table=torch.zeros(32, dtype=torch.uint8))
    with pytest.raises(ValueError, match=message):
        TRITON.quantize_pack_runs(TRITON.Runs([40, 5], 16, "cpu"), **{**arguments, **changed})


@pytest.mark.parametrize("changed, message", [
    (dict(packed=torch.zeros((2, 12), dtype=torch.uint8)), r"packed is uint8\[2, 12\].*uint8\[rows, 16\]"),
    (dict(levels=torch.ones(1, 4, 2)), r"levels is float32\[1, 4, 2\].*float32\[2, 4, 2\]"),
    (dict(levels=torch.ones(2, 2, 4).transpose(1, 2)), "levels is .*contiguous"),
    (dict(outs=[torch.zeros(40)]), "outs are of 1 runs"),
])
def test_unpack_sum_runs_refuses_tensors_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    arguments = dict(packed=torch.zeros((2, 16), dtype=torch.uint8), levels=torch.ones(2, 4, 2),
                     outs=[torch.zeros(40), torch.zeros(5)])
    with pytest.raises(ValueError, match=message):
        TRITON.unpack_sum_runs(TRITON.Runs([40, 5], 16, "cpu"), **{**arguments, **changed})


@pytest.mark.parametrize("elements, block_elements, message", [
    ([5, -1], 16, "cannot have -1 elements"), ([5], 8, "multiple of 16, not 8"), ([5], -16, "multiple of 16, not -16")])
def test_runs_that_cannot_be_are_refused(elements: list[int], block_elements: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TRITON.Runs(elements, block_elements, "cpu")


# ---- machine code ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Facts of the code of every kernel for H100, and of some for A100; see ``compiled_triton``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    result = subprocess.run([sys.executable, "-m", "tests.compiled_triton"], cwd=REPOSITORY, env=environment,
                            text=True, capture_output=True, timeout=250)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_nothing_that_is_compiled_flushes_subnormal_numbers_or_rounds_once_where_numpy_rounds_twice(
        compiled: dict[str, dict[str, Any]]) -> None:
    for label, facts in compiled.items():
        for instruction in facts["instructions"]:
            name, *modifiers = instruction.split(".")
            assert "ftz" not in modifiers and "approx" not in modifiers and name not in ("fma", "ex2", "rcp"), label
            assert not (name == "mad" and modifiers[-1].startswith("f")), label


def test_what_rounds_in_float64_is_given_and_multiplied_in_float64(compiled: dict[str, dict[str, Any]]) -> None:
    scaled = {label: facts for label, facts in compiled.items() if label.endswith((" unpack", " weigh", " pop_digits"))}
    assert len(scaled) > 10
    for label, facts in scaled.items():
        assert "scale" in facts["float64"] and "mul.rn.f64" in facts["instructions"], label
    of_digits = {label: facts for label, facts in compiled.items() if label.endswith("digits")}
    for label, facts in of_digits.items():
        assert {"radix", "negative"} <= set(facts["float64"]), label
        assert label.endswith("push_digits") or "div.rn.f64" in facts["instructions"], label


def test_aligned_tensors_are_read_and_written_16_bytes_at_a_time(compiled: dict[str, dict[str, Any]]) -> None:
    for label, facts in compiled.items():
        narrow = "unaligned" in label
        if label.endswith(" quantize"):
            assert (facts["wide loads"], facts["wide stores"]) == ((0, 0) if narrow else (8, 4)), label
        if label.endswith((" unpack", " weigh")):
            assert (facts["wide stores"] > 0) != narrow, label


def test_registers_are_enough(compiled: dict[str, dict[str, Any]]) -> None:
    """ptxas may put aside a few numbers that are needed outside of loops, to have room for more threads."""
    for label, facts in compiled.items():
        assert facts["stack"] <= (64 if "unaligned" in label else 32) and facts["local"] == 0, label
