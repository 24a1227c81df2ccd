"""On which devices gradients are compressed where they lie, and residuals in variables there.

A gradient is where its variable is: what applies it is placed there, and of a tensor in a graph that is being built
nothing else tells. Devices that count are GPUs. ``DEVICES_VARIABLE`` names others, so that a CPU device can play one.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .. import kernels as interface
from ..config import kernels_asked_for
from ..errors import ConfigError
from ..memory import Memory
from ..payload import BLOCK_TABLE
from . import kernels

DEVICES_VARIABLE = "HVD_TWOBIT_TENSORFLOW_DEVICES"
"""Environment variable: kinds of devices, or single ones, separated by commas (``GPU:0,GPU:1``); or ``none``."""

HOST_DEVICE = "/cpu:0"

logger = logging.getLogger("hvd_twobit")

_DEFAULT = "GPU"
_TRIED_BLOCK = 1024
_FLOAT32_MAX = np.finfo(np.float32).max
_ELEMENTS_AT_ONCE = 1 << 22  # Keeps temporaries in float64 small.


def device_of(variable: Any) -> str | None:
    """The device on which a variable's gradient is compressed; None where that is done on the host.

    That is where ``HVD_TWOBIT_KERNELS`` says ``numba``, in graphs of ``tf.compat.v1``, which have no place for
    residuals, and where the device's kernels cannot be used, which is logged.

    Raises:
        ConfigError: an environment variable has a value that is none of its own.
    """
    chosen = _chosen(os.environ.get(DEVICES_VARIABLE) or _DEFAULT)
    on_host = kernels_asked_for() == "numba" or not tf.compat.v1.executing_eagerly_outside_functions()
    name = getattr(variable, "device", None)
    if on_host or not name:
        return None
    device = _kind_and_index(name)
    if device not in chosen and (device[0], None) not in chosen:
        return None
    return name if _why_unusable(name) is None else None


@functools.cache
def _why_unusable(device: str) -> str | None:
    """What is wrong with the kernels on a device; None where a few elements are compressed as on the host."""
    gradient = np.array([0, 0, 1.5, -0.75, np.nan, np.inf, 0.1, 3e38, *[0.3] * 1020], np.float32)
    residual = np.array([0, 0, 0.25, 0.25, 1, 2, 0.5, 3e38, *[1 / 3] * 1020], np.float32)
    gradient.view(np.uint32)[:2], residual.view(np.uint32)[:2] = (1, 0x80012345), (7, 0x12345)  # Subnormal numbers.
    blocks = interface.block_count(gradient.size, _TRIED_BLOCK)
    level = np.full(blocks, 0.6, np.float32)
    codes, left = np.empty(interface.packed_nbytes(gradient.size), np.uint8), residual.copy()
    host = interface.load(interface.DEFAULT_BACKEND)
    sums, counts = host.quantize_pack(gradient, left, codes,
                                      interface.Quantizer(_TRIED_BLOCK, level, -level, level, -level))
    table = np.empty(blocks, BLOCK_TABLE)
    table["selected_sum"], table["selected_count"] = sums, counts
    pair = np.stack([level, -level], axis=1)
    wanted = np.empty_like(gradient)
    host.unpack_sum(codes[None], pair[None], _TRIED_BLOCK, wanted, 1 / 3)
    try:
        with tf.init_scope(), tf.device(device):
            sent, kept = on_device(kernels.quantized, device, block_elements=_TRIED_BLOCK, with_table=True)(
                *map(tf.constant, (gradient, residual, pair, pair)))
            out = on_device(kernels.unpack_sum, device, block_elements=_TRIED_BLOCK, levels_of_all=True)(
                tf.constant(codes[None]), tf.constant(pair[None]), tf.constant(gradient.size),
                tf.constant(1 / 3, tf.float64))
        same = (sent.numpy().tobytes() == codes.tobytes() + table.tobytes() and kept.numpy().tobytes() == left.tobytes()
                and np.array_equal(out.numpy(), wanted, equal_nan=True))
        problem = None if same else "their results are not those of the host"
        if _kind_and_index(kept.device) != _kind_and_index(device):  # As TensorFlow may do where there is none.
            problem = f"TensorFlow ran them on {kept.device}"
    except Exception as error:  # Whatever TensorFlow or XLA lacks: the host can do it.
        problem = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if problem is not None:
        logger.warning("hvd_twobit: gradients on %s are compressed on the host, as kernels cannot be used there: %s",
                       device, problem)
    return problem


@functools.cache
def _kind_and_index(device: str) -> tuple[str, int | None]:
    found = tf.DeviceSpec.from_string(device)
    return found.device_type, found.device_index


@functools.cache
def _chosen(setting: str) -> Sequence[tuple[str, int | None]]:
    """Kinds and numbers of devices."""
    if setting.lower() == "none":
        return ()
    found: list[tuple[str, int | None]] = []
    for entry in setting.split(","):
        kind, colon, number = entry.strip().partition(":")
        if not kind.isalpha() or colon and not number.isdecimal():
            raise ConfigError(f"the environment variable {DEVICES_VARIABLE} must name devices such as GPU or GPU:0, "
                              f"separated by commas, or be none, not {setting!r}")
        found.append((kind.upper(), int(number) if colon else None))
    return found


def on_device(function: Any, device: str, **options: Any) -> Any:
    """One of ``kernels``, as it is called on a device: compiled by XLA, but for a CPU.

    Args:
        function: which one.
        device: where it will be called; the caller says so to TensorFlow, too.
        options: those of its arguments that are numbers of Python.
    """
    by_xla = tf.DeviceSpec.from_string(device).device_type != "CPU"
    return kernels.traced(function, by_xla, None if by_xla else device, **options)


class DeviceMemory(Memory):
    """The place of one residual: a variable on a device, which graphs may hold.

    Methods are called by NumPy functions, too, in threads that TensorFlow runs graphs with. So they call operations,
    which run in the thread that calls them, and no function: it would wait for other such threads, and these perhaps
    for a lock that this one holds.

    Args:
        name: of the variable.
        device: where it lies.
        elements: of the residual; None where its size is known in the step only.

    Attributes:
        variable: float32[elements].
    """

    def __init__(self, name: str, device: str, elements: int | None) -> None:
        self._device = device
        with tf.init_scope(), tf.device(device):
            self.variable = tf.Variable(tf.zeros([elements or 0]), trainable=False, shape=[elements], name=name)

    def zeros(self, elements: int) -> tf.Variable:
        return self._assigned(lambda: tf.zeros([elements]))

    def take(self, values: np.ndarray) -> tf.Variable:
        return self._assigned(lambda: tf.constant(values))

    def _assigned(self, values: Callable[[], tf.Tensor]) -> tf.Variable:
        with tf.init_scope(), tf.device(self._device):
            self.variable.assign(values())
        return self.variable

    def read(self, array: Any) -> np.ndarray:
        return array.numpy()

    def duplicate(self, array: tf.Variable, into: Any = None) -> tf.Tensor:
        """What the variable is now. It has that memory until it is assigned to, which takes other memory."""
        with tf.init_scope():
            return array.read_value()

    def restore(self, array: tf.Variable, duplicate: tf.Tensor) -> None:
        self._assigned(lambda: duplicate)

    def shaped(self, array: tf.Variable, shape: tuple[int, ...]) -> tf.Tensor:
        with tf.init_scope(), tf.device(self._device):
            return tf.reshape(array, shape)

    def scale(self, array: tf.Variable, factor: float) -> None:
        def scaled() -> tf.Tensor:
            values = array * np.float32(factor)
            return tf.where(tf.math.is_inf(values), tf.sign(values) * _FLOAT32_MAX, values)

        self._assigned(scaled)

    def norm(self, array: Any) -> float:
        return math.sqrt(sum(float(tf.reduce_sum(tf.square(tf.cast(part, tf.float64)))) for part in self._parts(array)))

    def mean_magnitude(self, array: Any) -> float:
        total = sum(float(tf.reduce_sum(tf.abs(tf.cast(part, tf.float64)))) for part in self._parts(array))
        return total / max(int(tf.size(array)), 1)

    def largest(self, array: Any) -> float:
        return max((float(tf.reduce_max(tf.abs(part))) for part in self._parts(array)), default=0.0)

    def _parts(self, array: Any) -> Iterator[tf.Tensor]:
        with tf.init_scope(), tf.device(self._device):
            values = tf.convert_to_tensor(array)
            for start in range(0, int(tf.size(values)), _ELEMENTS_AT_ONCE):
                yield values[start:start + _ELEMENTS_AT_ONCE]
