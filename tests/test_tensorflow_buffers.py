"""Memory that goes to TensorFlow and back: used again when it is free, never before."""

from __future__ import annotations

import numpy as np

from hvd_twobit.tensorflow.buffers import Recycled, aligned_zeros


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    recycled = Recycled()
    array = recycled.empty(1000)
    address = array.ctypes.data
    assert address % 64 == 0 and array.dtype == np.float32 and array.shape == (1000,)
    part = array[5:].reshape(5, 199).view(np.uint8)
    del array
    assert recycled.empty(1000).ctypes.data != address
    del part
    assert address in {recycled.empty(1000).ctypes.data for _ in range(2)}


def test_any_number_of_arrays_may_be_kept() -> None:
    recycled = Recycled()
    kept = [recycled.empty(10) for _ in range(7)]
    for number, array in enumerate(kept):
        array[:] = number
    assert [array.tolist() for array in kept] == [[number] * 10 for number in range(7)]
    assert len(recycled._pieces) == 2


def test_cleared_memory_is_aligned_and_of_the_size_that_was_asked_for() -> None:
    for size in (0, 1, 48, 1001):
        memory = aligned_zeros(size)
        assert memory.tolist() == [0] * size
        assert not size or memory.ctypes.data % 64 == 0  # An empty slice of NumPy lies where its array begins.


def test_tensors_that_are_kept_are_not_overwritten() -> None:
    import tensorflow as tf

    recycled = Recycled()

    def decode(value: np.ndarray) -> np.ndarray:
        array = recycled.empty(10_000)
        array[:] = value
        return array

    step = tf.function(lambda value: tf.reshape(tf.numpy_function(decode, [value], tf.float32), [100, 100]))
    kept = [step(tf.constant(float(number))) for number in range(6)]
    for _ in range(4):
        step(tf.constant(-1.0))
    assert [float(tensor[7, 7]) for tensor in kept] == [0, 1, 2, 3, 4, 5]
