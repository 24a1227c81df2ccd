"""Where TwoBit meets the internals of Horovod's PyTorch optimizer; the only file that touches its private names.

``hvd.DistributedOptimizer`` copies the methods of ``horovod.torch.optimizer._DistributedOptimizer`` into a class of
its own for every optimizer. ``install`` replaces some of them by functions that do what Horovod does, unless the
compression is a ``TwoBit``: then gradients go through an ``Exchange`` that knows their names. Replacing methods, and
not the function ``DistributedOptimizer``, works whatever was imported first. ``install`` refuses a Horovod whose
methods it does not know, instead of finding out during training.

Horovod's public functions that take ``compression=`` are replaced to refuse an ``op`` that two-bit codes cannot take
part in, and ``join``, after which ranks have to agree on levels again. Whoever imported such a function before is told
as well, where it is about to send what ``TwoBit.compress`` made.

Four public methods of PyTorch's ``GradScaler`` are replaced likewise: where a scaler meets an optimizer, and changes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import horovod
import horovod.torch as hvd
import horovod.torch.mpi_ops as horovod_ops
import horovod.torch.optimizer as horovod_optimizer
import numpy as np
import torch

from .. import joining
from ..calls import hold_words, in_group
from ..compression import NamedCompression, is_twobit
from ..errors import ConfigError, UnsupportedOperationError
from ..horovod_form import Expected, arguments, check_form, replace
from ..reduction import refuse_op, refuse_reducescatter
from ..residuals import ResidualRegistry
from .compressor import TwoBit
from .elastic import register
from .exchange import Exchange, Handle, Pending
from .loss_scale import reloaded, updated


def install() -> None:
    """Teach Horovod's PyTorch optimizers about TwoBit; a second call does nothing.

    Raises:
        UnsupportedHorovodError: Horovod's version or the form of its optimizer is not one that was tested.
    """
    optimizer = horovod_optimizer._DistributedOptimizer
    adasum = horovod_optimizer._DistributedAdasumOptimizer
    if getattr(optimizer, "_knows_twobit", False):
        return
    check_horovod(horovod.__version__, optimizer, adasum)
    for function in (__init__, load_state_dict, _allreduce_grad_async, _grouped_allreduce_grad_async, synchronize,
                     step):
        replace(optimizer, function.__name__, function)
    replace(adasum, "__init__", _refuse_adasum)
    replace(torch.amp.GradScaler, "unscale_", _scaler_unscale)
    replace(torch.amp.GradScaler, "step", _scaler_step)
    replace(torch.amp.GradScaler, "update", _scaler_update)
    replace(torch.amp.GradScaler, "load_state_dict", _scaler_load_state_dict)
    for name in ("allreduce", "grouped_allreduce"):
        replace(horovod_ops, name, _allreduce)
        replace(horovod_ops, f"_{name}_async", _allreduce_async)
    for name in ("reducescatter", "grouped_reducescatter"):
        replace(horovod_ops, name, _reducescatter)
        replace(horovod_ops, f"_{name}_async", _reducescatter_async)
    replace(horovod_ops, "join", _join)
    for name in ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter", "join"):
        setattr(hvd, name, getattr(horovod_ops, name))
    register()
    optimizer._knows_twobit = True


def check_horovod(version: str, optimizer: type, adasum: type) -> None:
    """Raise UnsupportedHorovodError unless the version is supported and the classes have the expected form."""
    check_form(version, [
        Expected(optimizer, "__init__", [
            "self", "params", "named_parameters", "compression", "backward_passes_per_step", "op",
            "gradient_predivide_factor", "groups", "sparse_as_dense", "process_set"], [
            "_compression", "_parameter_names", "_handles", "_p_to_group", "_group_counts", "_requires_update"]),
        Expected(optimizer, "load_state_dict", ["self", "args", "kwargs"]),
        Expected(optimizer, "_register_hooks", ["self"]),
        Expected(optimizer, "_allreduce_grad_async", ["self", "p"]),
        Expected(optimizer, "_grouped_allreduce_grad_async", ["self", "ps"]),
        Expected(optimizer, "_sparse_allreduce_grad_async", ["self", "p", "name"]),
        Expected(optimizer, "synchronize", ["self"], ["_compression", "decompress", "_handles", "_requires_update"]),
        Expected(optimizer, "step", ["self", "closure"], ["_should_synchronize", "synchronize"]),
        Expected(adasum, "__init__", [
            "self", "params", "named_parameters", "compression", "backward_passes_per_step"]),
        *_functions(horovod_ops)])


def _functions(module: Any) -> list[Expected]:
    """Those of ``horovod.torch.mpi_ops`` that reduce and compress, and what they call."""
    reduce = ["average", "name", "compression", "op", "prescale_factor", "postscale_factor", "process_set"]
    scatter = ["name", "compression", "op", "process_set", "prescale_factor", "postscale_factor"]
    return [
        Expected(module, "allreduce", ["tensor", *reduce], ["compress", "decompress"]),
        Expected(module, "grouped_allreduce", ["tensors", *reduce], ["compress", "decompress"]),
        Expected(module, "reducescatter", ["tensor", *scatter], ["compress", "decompress"]),
        Expected(module, "grouped_reducescatter", ["tensors", *scatter], ["compress", "decompress"]),
        Expected(module, "allreduce_async", ["tensor", *(name for name in reduce if name != "compression")],
                 ["_allreduce_async"]),
        Expected(module, "_allreduce_async", ["tensor", "output", "name", "op", *reduce[4:]]),
        Expected(module, "_grouped_allreduce_async", ["tensors", "outputs", "name", "op", *reduce[4:]]),
        Expected(module, "_reducescatter_async", ["tensor", "output", *scatter[:1], *scatter[2:]]),
        Expected(module, "_grouped_reducescatter_async", ["tensors", "outputs", *scatter[:1], *scatter[2:]]),
        Expected(module, "join", ["device"])]


def residuals_of(optimizer: torch.optim.Optimizer) -> ResidualRegistry:
    """The residuals of an optimizer made with ``hvd.DistributedOptimizer(..., compression=TwoBit)``.

    Args:
        optimizer: what ``hvd.DistributedOptimizer`` returned.

    Returns:
        The registry itself, by parameter name, not a copy; the same at every call.

    Raises:
        ConfigError: the optimizer does not use TwoBit.
    """
    exchange = getattr(optimizer, "_twobit", None)
    if exchange is None:
        raise ConfigError(f"{type(optimizer).__name__} has no residuals: it was not made by "
                          "hvd.DistributedOptimizer(..., compression=TwoBit)")
    return exchange.residuals


# The functions below take the place of the methods of the same name; ``original`` is Horovod's.

def __init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(self, *args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    compression = TwoBit.instance(values["compression"])
    self._twobit = None
    if compression is None:
        return original(self, *args, **kwargs)
    values["compression"] = compression
    self._twobit = Exchange(compression.config, values["op"], values["gradient_predivide_factor"],
                            values["process_set"], compression.scaler)
    original(*given.args, **given.kwargs)
    names = self._parameter_names
    # Backward computes gradients in about the reverse order in which parameters were registered.
    registered = [p for group in self.param_groups for p in group["params"] if p in self._requires_update]
    self._twobit.declare([(names[p], p, names[self._p_to_group.get(p, (p,))[0]]) for p in reversed(registered)])


def load_state_dict(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # Horovod forgets the handles of a step that was broken off; what they use has to be free before the next step.
    if self._twobit is not None:
        self._twobit.abandon()
        # Horovod 0.28.1 forgets to: the next step would take a group for complete too early.
        self._group_counts.update(dict.fromkeys(self._group_counts, 0))
    original(self, *args, **kwargs)


def _allreduce_grad_async(original: Any, self: Any, p: torch.nn.Parameter) -> tuple[Handle, Pending | None]:
    if self._twobit is None:
        return original(self, p)
    return _start(self, [p])[0]


def _grouped_allreduce_grad_async(original: Any, self: Any, ps: Sequence[torch.nn.Parameter]) -> tuple[Any, Any]:
    if self._twobit is None:
        return original(self, ps)
    handles, pendings = zip(*_start(self, ps))
    return handles, pendings


def synchronize(original: Any, self: Any) -> None:
    if self._twobit is None or not self._requires_update or not self.process_set.included():
        return original(self)
    with self._twobit.agreed():
        _split_groups(self)
        original(self)


def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if self._twobit is not None:
        # Where PyTorch's fused optimizers are told of an overflow, they are called all the same, and skip.
        overflow = getattr(self, "found_inf", None)
        self._twobit.loss_scale.applied = overflow is None or not overflow.item()
    return result


def _scaler_unscale(original: Any, self: torch.amp.GradScaler, optimizer: Any) -> None:
    if getattr(optimizer, "_twobit", None) is not None and self.is_enabled():
        _refuse_unsynchronized(optimizer)
    original(self, optimizer)


def _scaler_step(original: Any, self: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    exchange = getattr(optimizer, "_twobit", None)
    if exchange is None or not self.is_enabled():
        return original(self, optimizer, *args, **kwargs)
    _refuse_unsynchronized(optimizer)
    if optimizer._requires_update and optimizer._should_synchronize:
        raise UnsupportedOperationError(
            "the optimizer's step would exchange gradients that the GradScaler has unscaled, and residuals are in the "
            "unit of scaled ones: call scaler.step(optimizer) within `with optimizer.skip_synchronize():`, after "
            "optimizer.synchronize()")
    exchange.loss_scale.expect_step()
    result = original(self, optimizer, *args, **kwargs)
    exchange.loss_scale.seen(self)
    return result


def _refuse_unsynchronized(optimizer: Any) -> None:
    """Refuse that a scaler looks at gradients before ranks have exchanged them.

    Also those are meant whose exchange has not begun: backward passes are accumulated, or a group is not complete.
    """
    if optimizer._handles:
        raise UnsupportedOperationError(
            "the GradScaler would unscale gradients that are still to be exchanged: call optimizer.synchronize() after "
            "backward(), then scaler.unscale_(optimizer) if you need it, and scaler.step(optimizer) within "
            "`with optimizer.skip_synchronize():`")


def _scaler_update(original: Any, self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    updated(self)


def _scaler_load_state_dict(original: Any, self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    reloaded(self)


def _refuse_adasum(original: Any, self: Any, params: Any, named_parameters: Any, compression: Any, *args: Any,
                   **kwargs: Any) -> None:
    if TwoBit.instance(compression) is not None:
        refuse_op(hvd, hvd.Adasum)
    original(self, params, named_parameters, compression, *args, **kwargs)


def _allreduce(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = arguments(original, args, kwargs)
    compression = given["compression"]
    TwoBit.refuse_foreign(compression)
    if not is_twobit(compression):
        return original(*args, **kwargs)
    if given["op"] not in (None, hvd.Average, hvd.Sum):
        refuse_op(hvd, given["op"])
    try:
        with in_group() if "tensors" in given else contextlib.nullcontext():
            return original(*args, **kwargs)
    finally:
        if isinstance(compression, NamedCompression):
            compression.tensor.abandon()  # Where it failed, that must not be in the way of the next exchange.


def _allreduce_async(original: Any, tensors: Any, outputs: Any, name: Any, op: Any, *args: Any) -> Any:
    if op not in (hvd.Average, hvd.Sum) and hold_words(tensors):
        refuse_op(hvd, op)
    return original(tensors, outputs, name, op, *args)


def _reducescatter(original: Any, *args: Any, **kwargs: Any) -> Any:
    if is_twobit(arguments(original, args, kwargs)["compression"]):
        refuse_reducescatter(original.__name__)
    return original(*args, **kwargs)


def _reducescatter_async(original: Any, tensors: Any, *args: Any) -> Any:
    if hold_words(tensors):
        refuse_reducescatter("reducescatter")
    return original(tensors, *args)


def _join(original: Any, *args: Any, **kwargs: Any) -> int:
    last = original(*args, **kwargs)
    # An allgather to which one rank alone contributes: TensorFlow's ranks do the same.
    shared = joining.shared_of_all() if hvd.rank() == last else b""
    gathered = hvd.allgather(torch.from_numpy(np.frombuffer(shared, np.uint8).copy()), name="twobit.join")
    joining.follow(gathered.numpy().tobytes())
    return last



def _start(self: Any, ps: Sequence[torch.nn.Parameter]) -> list[tuple[Handle, Pending | None]]:
    """Begin the exchange of the parameters' gradients, together where they are several."""
    started: dict[torch.nn.Parameter, tuple[Handle, Pending | None]] = {}
    dense = []
    for p in ps:
        if p.grad is None:
            # The other ranks may have computed one, and wait for this rank's.
            p.grad = torch.zeros_like(p)
        if not p.grad.is_sparse:
            dense.append((p, p.grad))
        elif self.sparse_as_dense:
            dense.append((p, p.grad.to_dense()))
        else:
            self._twobit.exclude(self._parameter_names[p])
            started[p] = self._sparse_allreduce_grad_async(p, self._parameter_names[p])
    exchanged = self._twobit.start_group([(self._parameter_names[p], gradient) for p, gradient in dense])
    started.update(zip((p for p, _ in dense), exchanged))
    return [started[p] for p in ps]


def _split_groups(self: Any) -> None:
    """Turn the handles of groups into handles of their parameters, which Horovod's ``synchronize`` takes one by one.

    A group in which this rank has no gradient for some parameter has not been started: it is now, as the other ranks
    wait for the whole group (Horovod 0.28.1 itself would send the parameters singly, and hang).
    """
    for group in dict.fromkeys(self._p_to_group.values()):
        if group in self._handles:
            handles, pendings = self._handles.pop(group)
            started = list(zip(handles, pendings))
        else:
            started = _start(self, group)
        self._handles.update(zip(group, started))
