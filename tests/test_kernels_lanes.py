"""Sums of what a quantizing pass does not sum up have the bits that the pass would have given."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvd_twobit import kernels
from hvd_twobit.kernels.lanes import magnitude_sums

reference = kernels.load("numpy")


@given(st.integers(0, 5000), st.sampled_from([16, 48, 1024, 1040, 4096, 8192]), st.integers(0, 2**32 - 1))
def test_magnitudes_of_chosen_blocks_are_added_as_selected_ones_are(elements: int, block_elements: int,
                                                                    seed: int) -> None:
    random = np.random.default_rng(seed)
    values = (random.standard_normal(elements) * 10.0 ** random.integers(-46, 38, elements)).astype(np.float32)
    count = kernels.block_count(elements, block_elements)
    blocks = np.flatnonzero(random.integers(0, 3, count))
    expected = np.array([reference.sum_in_lanes(np.abs(values[block * block_elements:(block + 1) * block_elements]))
                         for block in blocks], np.float32)
    assert magnitude_sums(values, block_elements, blocks).tobytes() == expected.tobytes()


def test_a_sum_beyond_float32_is_infinite() -> None:
    assert magnitude_sums(np.full(16, 3e38, np.float32), 16, np.arange(1)).tolist() == [np.inf]
