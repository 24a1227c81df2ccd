"""Whose residual is whose: variables are told apart by identity, and named for people.

TensorFlow lets two variables bear one name, and makes a new tape for every step. So a ``VariableResiduals`` keeps the
residuals of a set of variables under names that are unique in it, and finds a variable's by the object itself. Each
optimizer owns one. With tapes, the variables themselves hold it, so that it lives as long as they do and two models
never meet in one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from .. import joining
from ..codec import Codec
from ..config import TwoBitConfig
from ..residuals import ResidualRegistry
from ..sharding import ShardedResiduals
from .buffers import Recycled
from .devices import DeviceMemory


class VariableResiduals:
    """The residuals of a set of variables, and what else has to outlive a step.

    Attributes:
        residuals: the residuals, by the variables' names.
        lock: held while residuals change.
        functions: the traced exchanges of eager steps, by everything that they depend on; the second part of a key
            are the tensors.
    """

    def __init__(self) -> None:
        self.residuals = ResidualRegistry()
        joining.track("variables", self.residuals)
        self.lock = threading.Lock()
        self.functions: dict[tuple[Any, ...], Any] = {}
        self._holders: dict[str, weakref.ref[Any]] = {}
        self._names: dict[int, str] = {}
        self._codecs: dict[TwoBitConfig, Codec] = {}
        self._shares: dict[Any, ShardedResiduals] = {}
        self._keys: dict[str, str] = {}
        self._memory: dict[tuple[str, str], Recycled] = {}
        self._on_device: dict[tuple[str, str, int | None], DeviceMemory] = {}

    def name_of(self, variable: tf.Variable) -> str:
        """The name of the variable's residual: the variable's, with ``_1``, ``_2`` … where another one bears it."""
        variable = _itself(variable)
        known = self._names.get(id(variable))
        if known is not None and self._holders[known]() is variable:
            return known
        self._forget_dead()
        name = unique(variable.name, self._holders)
        self._holders[name] = weakref.ref(variable)
        self._names[id(variable)] = name
        return name

    def __contains__(self, name: object) -> bool:
        """Whether a variable has the name."""
        holder = self._holders.get(str(name))
        return holder is not None and holder() is not None

    def codec(self, config: TwoBitConfig) -> Codec:
        """The codec that works on these residuals with the given parameters."""
        if config not in self._codecs:
            self._codecs[config] = Codec(config, self.residuals, warns=hvd.rank() == 0)
        return self._codecs[config]

    def shares(self, config: TwoBitConfig, averages: bool, rank: int, ranks: int) -> ShardedResiduals:
        """What this rank keeps of the variables: its share of each, or all; see ``sharding``."""
        key = config, averages, rank, ranks
        if key not in self._shares:
            self._shares[key] = ShardedResiduals(config, self.codec(config), self.residuals, averages)
            self._shares[key].divide(rank, ranks, {}, ())
        return self._shares[key]

    def key(self, name: str, label: str) -> str:
        """The first label under which the variable of a name was exchanged: it is the same on all ranks, and stays."""
        return self._keys.setdefault(name, label)

    def memory(self, name: str, use: str = "gradient") -> Recycled:
        """Memory for what belongs to a name: where its gradients are decoded, and other uses."""
        return self._memory.setdefault((name, use), Recycled())

    def on_device(self, name: str, device: str, elements: int | None) -> DeviceMemory:
        """The place of the residual of a name on a device, made once; ``elements`` None: its size may change."""
        key = name, device, elements
        if key not in self._on_device:
            self._on_device[key] = DeviceMemory(f"twobit_residual/{name.partition(':')[0]}", device, elements)
        return self._on_device[key]

    def _forget_dead(self) -> None:
        dead = {name for name, holder in self._holders.items() if holder() is None}
        for name in dead:
            del self._holders[name]
            self._keys.pop(name, None)
            for shares in self._shares.values():
                shares.forget(name)
            self.residuals.discard(name)
        self._memory = {use: memory for use, memory in self._memory.items() if use[0] not in dead}
        self._on_device = {place: memory for place, memory in self._on_device.items() if place[0] not in dead}
        self._names = {identity: name for identity, name in self._names.items() if name in self._holders}


def residuals_of_tapes(variables: Sequence[tf.Variable], recipients: Hashable) -> list[VariableResiduals]:
    """The residuals that tapes use for each of the variables; those without get them, together.

    Args:
        variables: what a tape differentiates by.
        recipients: who receives the gradients and how they are reduced: where that differs, what was not sent does.
    """
    held = [_held(variable).get(recipients) for variable in variables]
    home = next((residuals for residuals in held if residuals is not None), None) or VariableResiduals()
    for variable, residuals in zip(variables, held):
        if residuals is None:
            _held(variable)[recipients] = home
    return [residuals or home for residuals in held]


def _itself(variable: tf.Variable) -> tf.Variable:
    """The variable within what Keras wraps around it in mixed precision: tapes watch the one, models list the other."""
    inner = getattr(variable, "_variable", None)  # Nothing public of TensorFlow 2.15 leads there.
    return inner if isinstance(inner, tf.Variable) else variable


def _held(variable: tf.Variable) -> dict[Hashable, VariableResiduals]:
    variable = _itself(variable)
    if not hasattr(variable, "_twobit_residuals"):
        variable._twobit_residuals = {}
    return variable._twobit_residuals


def unique(name: str, taken: Any) -> str:
    """``name``, or the first of ``name_1``, ``name_2`` … that is not among ``taken``."""
    candidate, count = name, 0
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    return candidate
