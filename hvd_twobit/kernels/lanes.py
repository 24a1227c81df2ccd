"""Sums of magnitudes in the order in which the kernels add, for what a quantizing pass does not sum up."""

from __future__ import annotations

import numpy as np

from . import ELEMENTS_PER_WORD, SUM_CHUNK_ELEMENTS

_BLOCKS_AT_ONCE = 256  # Keeps temporaries small.


def magnitude_sums(values: np.ndarray, block_elements: int, blocks: np.ndarray) -> np.ndarray:
    """Sums of the magnitudes of some blocks, added as ``quantize_pack`` adds those that it selects.

    That is, in 16 float32 lanes within ``SUM_CHUNK_ELEMENTS`` elements, and these chunks in float64: bits that every
    backend can give, on whatever device the values lie.

    Args:
        values: float32[n].
        block_elements: elements of a block, a multiple of 16.
        blocks: numbers of blocks, in ascending order.

    Returns:
        float32[len(blocks)]; infinite where a sum overflows.
    """
    whole = values[:values.size // block_elements * block_elements].reshape(-1, block_elements)
    sums = np.zeros(blocks.size, np.float32)
    for start in range(0, blocks.size, _BLOCKS_AT_ONCE):
        numbers = blocks[start:start + _BLOCKS_AT_ONCE]
        numbers = numbers[numbers < len(whole)]
        sums[start:start + numbers.size] = _row_sums(whole[numbers])
    if blocks.size and blocks[-1] == len(whole):  # The last block is shorter; zeros behind it change no sum.
        rest = values[whole.size:]
        padded = np.zeros((1, -(-rest.size // ELEMENTS_PER_WORD) * ELEMENTS_PER_WORD), np.float32)
        padded[0, :rest.size] = rest
        sums[-1:] = _row_sums(padded)
    return sums


def _row_sums(rows: np.ndarray) -> np.ndarray:
    """Sum of the magnitudes of each row, float32[rows, whole words]."""
    magnitudes = np.abs(rows)
    total = np.zeros(len(rows))
    with np.errstate(over="ignore"):
        for start in range(0, rows.shape[1], SUM_CHUNK_ELEMENTS):
            lanes = np.zeros((len(rows), ELEMENTS_PER_WORD), np.float32)
            for word in range(start, min(start + SUM_CHUNK_ELEMENTS, rows.shape[1]), ELEMENTS_PER_WORD):
                lanes += magnitudes[:, word:word + ELEMENTS_PER_WORD]
            while lanes.shape[1] > 1:
                lanes = lanes[:, :lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2:]
            total += lanes[:, 0]
        return total.astype(np.float32)
