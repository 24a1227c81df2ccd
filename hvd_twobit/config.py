"""The parameters of ``TwoBit``: what they are, what is refused and why. No framework, no arrays.

Both ways of writing them (keyword arguments, MXNet's dictionaries) end in one frozen ``TwoBitConfig``, which is
checked when it is made: everything behind this file may trust it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import ConfigError

AUTO = "auto"
"""The ``threshold`` that stands for adaptive levels, and the ``transport`` that is chosen for each bucket."""

MXNET_THRESHOLD = 0.5
"""MXNet's default threshold, in the unit of the gradient."""

DEFAULT_MIN_ELEMENTS = 1024
"""Tensors with fewer elements (biases, norms) travel uncompressed: their bytes do not count, their precision does."""

DEFAULT_BLOCK_ELEMENTS = 1024
"""Consecutive elements that share an adaptive level; its table takes 8 bytes, 3 % of their codes."""

DEFAULT_BUCKET_CAP_MB = 25.0
"""MiB of float32 gradient in a bucket: large enough that a collective's latency does not count, small enough that one
bucket travels while another is compressed."""

TRANSPORTS = ("allgather", "sra", "allreduce")
"""How compressed gradients may travel."""

TRANSPORT_VARIABLE = "HVD_TWOBIT_TRANSPORT"
"""The environment variable that overrides ``transport``."""

HIERARCHICAL_VARIABLE = "HVD_TWOBIT_HIERARCHICAL"
"""The environment variable that overrides ``hierarchical``."""

KERNELS_VARIABLE = "HVD_TWOBIT_KERNELS"
"""The environment variable that tells where gradients on a device are compressed."""

KERNELS = (AUTO, "numba", "triton")
"""Its values: on the device where that works, on the host, or with PyTorch on the device or not at all."""

_HIERARCHICAL = {"1": True, "true": True, "0": False, "false": False, AUTO: AUTO}

_BLOCK_GRANULE = 16  # Blocks are whole words of packed codes.


def kernels_asked_for() -> str:
    """One of ``KERNELS``, as the environment says.

    Raises:
        ConfigError: it says something else.
    """
    asked = os.environ.get(KERNELS_VARIABLE) or AUTO
    if asked not in KERNELS:
        raise ConfigError(f"the environment variable {KERNELS_VARIABLE} must be auto, numba or triton, not {asked!r}")
    return asked


@dataclasses.dataclass(frozen=True)
class TwoBitConfig:
    """Checked parameters of one ``TwoBit``.

    Attributes:
        positive_threshold: > 0, in the unit of the gradient, exactly representable in float32. A residual at or above
            it is sent as this value. None, like ``negative_threshold``: levels adapt to the gradient.
        negative_threshold: < 0, likewise for residuals at or below it.
        min_elements: tensors with fewer elements travel uncompressed in Horovod's own allreduce; 0 compresses all.
        warmup_steps: exchanges at the beginning in which a tensor travels uncompressed; with adaptive levels, after
            the first one, which always does.
        block_elements: elements that share an adaptive level, a multiple of 16.
        transport: one of ``TRANSPORTS``, or ``"auto"``: chosen for each bucket by ``cost_model``.
        bucket_cap_mb: MiB of float32 gradient that travel together at most.
        hierarchical: whether the ranks of a machine add their gradients up in full precision before the machine
            compresses them; ``"auto"``: where there are several machines with equally many ranks, more than one.

    Raises:
        ConfigError: a value cannot be used; the message names the parameter, the value and what is expected.
    """

    positive_threshold: float | None = None
    negative_threshold: float | None = None
    min_elements: int = DEFAULT_MIN_ELEMENTS
    warmup_steps: int = 0
    block_elements: int = DEFAULT_BLOCK_ELEMENTS
    transport: str = AUTO
    bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB
    hierarchical: bool | str = False

    def __post_init__(self) -> None:
        if (self.positive_threshold is None) != (self.negative_threshold is None):
            raise ConfigError("positive_threshold and negative_threshold are given together, or neither is")
        if not self.adaptive:
            positive = _float32("positive_threshold", self.positive_threshold)
            negative = _float32("negative_threshold", self.negative_threshold)
            if positive < 0:
                raise ConfigError(f"positive_threshold must be above zero, not {self.positive_threshold!r}")
            if negative > 0:
                raise ConfigError(f"negative_threshold must be below zero, not {self.negative_threshold!r}")
            object.__setattr__(self, "positive_threshold", positive)
            object.__setattr__(self, "negative_threshold", negative)
        for name, unit in (("min_elements", "elements"), ("warmup_steps", "steps"), ("block_elements", "elements")):
            object.__setattr__(self, name, _whole(name, unit, getattr(self, name)))
        if self.block_elements % _BLOCK_GRANULE or not 0 < self.block_elements < 2**31:
            raise ConfigError(f"block_elements must be a positive multiple of {_BLOCK_GRANULE} elements below 2**31, "
                              f"not {self.block_elements}")
        _check_transport("transport", self.transport, repr)
        object.__setattr__(self, "bucket_cap_mb", _size("bucket_cap_mb", self.bucket_cap_mb))
        if not (isinstance(self.hierarchical, bool) or self.hierarchical == AUTO):
            raise ConfigError(f"hierarchical must be True, False or {AUTO!r}, not {self.hierarchical!r}")

    @property
    def adaptive(self) -> bool:
        """Whether levels follow the gradient (``threshold="auto"``)."""
        return self.positive_threshold is None

    @property
    def symmetric(self) -> bool:
        """Whether negative levels are the positive ones but for the sign."""
        return self.adaptive or self.positive_threshold == -self.negative_threshold  # type: ignore[operator]

    def compresses(self, elements: int) -> bool:
        """Whether a tensor of so many elements is compressed at all."""
        return elements >= self.min_elements

    @property
    def uncompressed_steps(self) -> int:
        """Exchanges in which a tensor travels uncompressed before it is compressed."""
        return self.warmup_steps + self.adaptive

    @classmethod
    def from_arguments(cls, threshold: Any = None, positive_threshold: Any = None, negative_threshold: Any = None,
                       block_elements: Any = None, **others: Any) -> TwoBitConfig:
        """Make a configuration from the keyword arguments of ``TwoBit``.

        ``threshold="auto"`` asks for adaptive levels and is the default; ``threshold=t`` is short for
        ``positive_threshold=t, negative_threshold=-t``. An argument that is None takes its default; where one side of
        the pair is given, the other is MXNet's default of 0.5 or -0.5. Where the environment has HVD_TWOBIT_TRANSPORT
        or HVD_TWOBIT_HIERARCHICAL, these count.

        Raises:
            ConfigError: an argument is unknown, contradicts another or has a value that cannot be used.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        _refuse_unknown("argument", others, ["threshold", *known])
        sides = {"positive_threshold": positive_threshold, "negative_threshold": negative_threshold}
        given = {name: value for name, value in sides.items() if value is not None}
        if threshold is not None:
            for name, value in given.items():
                raise ConfigError(f"threshold={threshold!r} already stands for both thresholds; "
                                  f"leave it out, or leave out {name}={value!r}")
            if not isinstance(threshold, str) or threshold != AUTO:
                given = _both_sides(threshold)
        elif given:
            given = {"positive_threshold": MXNET_THRESHOLD, "negative_threshold": -MXNET_THRESHOLD, **given}
        if block_elements is not None:
            if given:
                raise ConfigError(f"block_elements={block_elements!r} belongs to threshold={AUTO!r}: a fixed threshold "
                                  "is the same for all elements; leave one of them out")
            given["block_elements"] = block_elements
        from_environment = os.environ.get(TRANSPORT_VARIABLE)
        if from_environment:
            _check_transport(f"the environment variable {TRANSPORT_VARIABLE}", from_environment, str)
            others["transport"] = from_environment
        from_environment = os.environ.get(HIERARCHICAL_VARIABLE)
        if from_environment:
            if from_environment.lower() not in _HIERARCHICAL:
                raise ConfigError(f"the environment variable {HIERARCHICAL_VARIABLE} must be 1, 0 or {AUTO}, not "
                                  f"{from_environment!r}")
            others["hierarchical"] = _HIERARCHICAL[from_environment.lower()]
        return cls(**given, **{name: value for name, value in others.items() if value is not None})

    @classmethod
    def from_params(cls, params: Mapping[str, Any], **arguments: Any) -> TwoBitConfig:
        """Make a configuration from a dictionary of MXNet's kvstore, in either of its two forms.

        ``{"compress": "2bit", "positive_threshold": 0.5, "negative_threshold": -0.5}`` (``set_compress``; thresholds
        may be left out) or ``{"type": "2bit", "threshold": 0.5}`` (``set_gradient_compression``, as released; the
        threshold may be left out). ``arguments`` are those of ``TwoBit`` that MXNet has no key for: MXNet compresses
        every tensor, however small, which is ``min_elements=0`` here.

        Raises:
            ConfigError: a key is unknown (the nearest valid one is named), missing, or of the other form, or a value
                cannot be used.
        """
        if not isinstance(params, Mapping):
            raise ConfigError(f'from_params takes a dictionary such as {{"compress": "2bit"}}, not {params!r}')
        forms = {"compress": ["compress", "positive_threshold", "negative_threshold"], "type": ["type", "threshold"]}
        present = [selector for selector in forms if selector in params]
        if len(present) == 2:
            raise ConfigError('"compress" and "type" are keys of two different forms; keep "compress" with '
                              'positive_threshold and negative_threshold, or "type" with threshold')
        if not present:
            _refuse_unknown("key", params, [key for keys in forms.values() for key in keys])
            raise ConfigError(f'the key "compress" is missing from {dict(params)!r}: {{"compress": "2bit"}} '
                              "is the least that from_params takes")
        selector = present[0]
        _refuse_unknown("key", params, forms[selector])
        if params[selector] != "2bit":
            raise ConfigError(f'{selector!r}: {params[selector]!r} is not a compression that TwoBit offers; '
                              f'the only one is "2bit"{_did_you_mean(params[selector], ["2bit"])}')
        values = {key: value for key, value in params.items() if key != selector}
        for key, value in values.items():
            _float32(key, value)
        for name in arguments:
            if "threshold" in name:
                raise ConfigError(f"{name}={arguments[name]!r}: the thresholds are those of the dictionary")
        if not values:
            values = {"threshold": MXNET_THRESHOLD}
        return cls.from_arguments(**arguments, **values)


def _both_sides(threshold: Any) -> dict[str, Any]:
    if isinstance(threshold, str):
        raise ConfigError(f"threshold must be a number in the unit of the gradient or {AUTO!r}, not {threshold!r}"
                          f"{_did_you_mean(threshold, [AUTO])}")
    value = _float32("threshold", threshold)
    if value < 0:
        raise ConfigError(f"threshold must be above zero, not {threshold!r}")
    return {"positive_threshold": value, "negative_threshold": -value}


def _whole(name: str, unit: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be a whole number of {unit}, not {value!r}")
    if value < 0:
        raise ConfigError(f"{name} must be 0 or more {unit}, not {value}")
    return int(value)


def _check_transport(what: str, value: Any, shown: Callable[[str], str]) -> None:
    valid = [AUTO, *TRANSPORTS]
    if value not in valid:
        raise ConfigError(f"{what} must be one of {', '.join(map(shown, valid))}, not {value!r}"
                          f"{_did_you_mean(value, valid)}")


def _size(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number of MiB, not {value!r}")
    size = float(value)
    if not 0 < size < math.inf:
        raise ConfigError(f"{name} must be above zero and finite, not {value!r}")
    return size


def _float32(name: str, value: Any) -> float:
    """``value`` rounded to float32, or ConfigError unless it is a real number that is finite and non-zero there."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number in the unit of the gradient, not {value!r} "
                          f"({type(value).__name__})")
    try:
        number = float(value)
        if math.isnan(number) or math.isinf(number):
            raise ConfigError(f"{name} must be finite, not {value!r}")
        if number == 0:
            raise ConfigError(f"{name} must not be zero: at zero every element would be sent at every step")
        rounded = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        raise ConfigError(f"{name} is beyond the range of float32, in which gradients are compressed: "
                          f"{value!r:.60}") from None
    if rounded == 0:
        raise ConfigError(f"{name}={value!r} vanishes in float32, in which gradients are compressed; "
                          "the smallest threshold is about 1.4e-45")
    return rounded


def _refuse_unknown(kind: str, given: Iterable[Any], known: list[str]) -> None:
    for name in given:
        if name not in known:
            hint = _did_you_mean(name, known) or f"; known: {', '.join(known)}"
            value = f"={given[name]!r}" if isinstance(given, Mapping) else ""
            raise ConfigError(f"unknown {kind} {name if isinstance(name, str) else repr(name)}{value}{hint}")


def _did_you_mean(name: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def describe(config: TwoBitConfig) -> str:
    """The arguments that make ``config``, for a ``repr``."""
    fields: dict[str, Any]
    if config.adaptive:
        fields = {"threshold": AUTO, "block_elements": config.block_elements}
    elif config.positive_threshold == -config.negative_threshold:  # type: ignore[operator]
        fields = {"threshold": config.positive_threshold}
    else:
        fields = {name: getattr(config, name) for name in ("positive_threshold", "negative_threshold")}
    fields.update(min_elements=config.min_elements, warmup_steps=config.warmup_steps, transport=config.transport,
                  bucket_cap_mb=config.bucket_cap_mb)
    if config.hierarchical:
        fields["hierarchical"] = config.hierarchical
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())
