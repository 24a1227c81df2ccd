"""Where TwoBit meets the internals of Horovod's TensorFlow front end; the only file that touches its private names.

Horovod's tape, its optimizer for ``tf.compat.v1`` and its Keras optimizers all get the function that reduces their
gradients from ``horovod.tensorflow._make_allreduce_grads_fn``, looked up when they are made, and call it with gradients
and variables. ``install`` replaces it, and four functions that need a check, by functions that do what Horovod does,
unless the compression is a ``TwoBit``; and the methods of elastic states, see ``elastic``. It refuses a Horovod whose
functions it does not know.

Horovod's public functions that take ``compression=`` are replaced to refuse an ``op`` that two-bit codes cannot take
part in, and ``join``, after which ranks have to agree on levels again. Whoever imported such a function before is told
as well, where it is about to send what ``TwoBit.compress`` made.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import horovod
import horovod._keras as horovod_keras
import horovod.tensorflow as hvd
import horovod.tensorflow.mpi_ops as horovod_ops
import tensorflow as tf
from horovod.common.elastic import ObjectState

from ..calls import hold_words, in_group
from ..compression import is_twobit
from ..errors import ConfigError, UnsupportedOperationError
from ..horovod_form import Expected, arguments, check_form, replace
from ..reduction import Reduction, refuse_op, refuse_reducescatter
from ..residuals import ResidualRegistry
from . import elastic, hierarchy
from .allreduce import follow_after
from .compressor import TwoBit
from .exchange import exchange
from .graphs import refuse_argument
from .loss_scale import follow_optimizers, gradients_of, scale_in_force
from .plan import Settings, describe, groups_of, labels_of
from .variables import VariableResiduals, residuals_of_tapes

_TAPE = "DistributedGradientTape"
"""The name under which Horovod's tape asks for its function."""

_MAKE_PARAMETERS = ["name", "device_dense", "device_sparse", "compression", "sparse_as_dense", "op",
                    "gradient_predivide_factor", "groups", "process_set"]
_USES = ["_make_allreduce_grads_fn", "_allreduce_grads"]


def install() -> None:
    """Teach Horovod's TensorFlow and Keras front ends about TwoBit; a second call does nothing.

    Raises:
        UnsupportedHorovodError: Horovod's version or the form of its functions is not one that was tested.
    """
    if getattr(hvd, "_knows_twobit", False):
        return
    check_horovod(horovod.__version__, hvd, horovod_keras)
    replace(hvd, "_make_allreduce_grads_fn", _make_allreduce_grads_fn)
    replace(hvd._DistributedAdasumOptimizer, "__init__", _refuse_adasum)
    replace(hvd._DistributedGradientTape, "gradient", _gradient)
    replace(horovod_keras, "create_distributed_optimizer", _refuse_keras_3)
    replace(horovod_keras, "load_model", _refuse_keras_3_models)
    for function in (elastic.__init__, elastic.save, elastic.restore, elastic.sync):
        replace(ObjectState, function.__name__, function)
    for name in ("allreduce", "grouped_allreduce"):
        replace(hvd, name, _allreduce)
        replace(hvd, f"_{name}", _allreduce_words)
    for name in ("reducescatter", "grouped_reducescatter"):
        replace(hvd, name, _reducescatter)
        replace(hvd, f"_{name}", _reducescatter_words)
    replace(horovod_ops, "join", _join)
    hvd.join = horovod_ops.join
    follow_optimizers()
    hvd._knows_twobit = True


def check_horovod(version: str, tensorflow: Any, keras: Any) -> None:
    """Raise UnsupportedHorovodError unless the version is supported and the modules have the expected form."""
    check_form(version, [
        Expected(tensorflow, "_make_allreduce_grads_fn", _MAKE_PARAMETERS),
        Expected(tensorflow._DistributedGradientTape, "__init__", [
            "self", "tape", "device_dense", "device_sparse", "compression", "sparse_as_dense", "op",
            "gradient_predivide_factor", "groups", "persistent", "watch_accessed_variables", "process_set",
            "scale_local_gradients"], [*_USES, _TAPE]),
        Expected(tensorflow._DistributedGradientTape, "gradient", [
            "self", "target", "sources", "output_gradients", "use_generic_names"], ["_allreduce_grads"]),
        Expected(tensorflow._DistributedOptimizer, "__init__", [
            "self", "optimizer", "name", "use_locking", "device_dense", "device_sparse", "compression",
            "sparse_as_dense", "op", "gradient_predivide_factor", "backward_passes_per_step",
            "average_aggregated_gradients", "groups", "process_set", "scale_local_gradients"], _USES),
        Expected(tensorflow._DistributedAdasumOptimizer, "__init__", [
            "self", "optimizer", "name", "use_locking", "device_dense", "device_sparse", "compression",
            "backward_passes_per_step"]),
        Expected(keras, "create_distributed_optimizer", [
            "keras", "optimizer", "name", "device_dense", "device_sparse", "compression", "sparse_as_dense",
            "gradient_predivide_factor", "op", "backward_passes_per_step", "average_aggregated_gradients", "groups",
            "process_set", "scale_local_gradients"], _USES),
        Expected(ObjectState, "__init__", ["self", "bcast_object", "get_rank", "kwargs"], ["_bcast_object"]),
        Expected(ObjectState, "save", ["self"]),
        Expected(ObjectState, "restore", ["self"]),
        Expected(ObjectState, "sync", ["self"], ["_bcast_object"]),
        *_functions(tensorflow)])


def _functions(tensorflow: Any) -> list[Expected]:
    """The public functions that compress, and those that they hand compressed tensors to."""
    factors = ["prescale_factor", "postscale_factor"]
    reduce = ["average", "device_dense", "device_sparse", "compression", "op", *factors]
    uses = ["compress", "decompress"]
    return [
        Expected(tensorflow, "allreduce", ["tensor", *reduce, "name", "process_set", "ignore_name_scope"],
                 [*uses, "_allreduce"]),
        Expected(tensorflow, "grouped_allreduce", ["tensors", *reduce, "process_set", "ignore_name_scope", "name"],
                 [*uses, "_grouped_allreduce"]),
        Expected(tensorflow, "reducescatter", ["tensor", "device_dense", "compression", "op", "name", "process_set",
                                               "ignore_name_scope", *factors], [*uses, "_reducescatter"]),
        Expected(tensorflow, "grouped_reducescatter", ["tensors", "device_dense", "compression", "op", "process_set",
                                                       *factors], [*uses, "_grouped_reducescatter"]),
        Expected(tensorflow, "_allreduce", ["tensor", "name", "op", *factors, "ignore_name_scope", "process_set"]),
        Expected(tensorflow, "_grouped_allreduce", ["tensors", "name", "op", *factors, "ignore_name_scope",
                                                    "process_set"]),
        Expected(tensorflow, "join", [])]


def residuals_of(optimizer_or_tape: Any) -> ResidualRegistry:
    """The residuals of an optimizer, also one in a LossScaleOptimizer, or tape made with ``compression=TwoBit``.

    A tape's residuals belong to the variables (see ``TwoBit``): they are those of the variables that its ``gradient``
    was last asked for or, before that, of those that the tape watches. So a tape in a function that was traced, or a
    new tape around a forward pass, shows what all tapes of that model share, and a checkpoint can be loaded into it.

    Args:
        optimizer_or_tape: what ``hvd.DistributedOptimizer`` or ``hvd.DistributedGradientTape`` returned.

    Returns:
        The registry itself, by variable name, not a copy.

    Raises:
        ConfigError: it does not use TwoBit; or a tape's variables are not known yet, or first appeared in tapes of
            different models.
    """
    reduce = getattr(optimizer_or_tape, "_allreduce_grads", None)
    if isinstance(reduce, _OfOptimizer):
        return reduce.home.residuals
    if isinstance(reduce, _OfTape):
        return reduce.residuals(optimizer_or_tape)
    inner = getattr(optimizer_or_tape, "inner_optimizer", None)
    if inner is not None and inner is not optimizer_or_tape:
        return residuals_of(inner)
    raise ConfigError(f"{type(optimizer_or_tape).__name__} has no residuals: it was not made by "
                      "hvd.DistributedOptimizer or hvd.DistributedGradientTape with compression=TwoBit")


class _AllreduceGrads:
    """What an optimizer or tape calls to reduce its gradients: Horovod's ``allreduce_grads``, with TwoBit."""

    def __init__(self, settings: Settings, sparse_as_dense: bool, groups: Any) -> None:
        self._settings = settings
        self._sparse_as_dense = sparse_as_dense
        self._groups = groups

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], vars: Sequence[Any] | None = None,
                 use_generic_names: bool = False) -> list[Any]:
        if vars is None:
            raise UnsupportedOperationError("TwoBit needs to know the variables whose gradients it compresses: "
                                            "allreduce_grads was called without them")
        grads = list(grads)
        for position, (gradient, variable) in enumerate(zip(grads, vars)):
            if self._sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                grads[position] = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
        present = [position for position, gradient in enumerate(grads) if gradient is not None]
        variables = [vars[position] for position in present]
        named = [variable for variable in variables if isinstance(variable, tf.Variable)]
        for variable in named if tf.compat.v1.executing_eagerly_outside_functions() else ():
            refuse_argument(variable)
        homes = iter(self._homes(named))
        labels = labels_of(vars, use_generic_names)
        tensors = [describe(self._settings.config, grads[position], variable, labels[position],
                            next(homes) if isinstance(variable, tf.Variable) else None, group)
                   for position, variable, group in zip(present, variables, groups_of(self._groups, variables))]
        reduced = exchange(self._settings, tensors, [grads[position] for position in present], scale_in_force())
        for position, gradient in zip(present, reduced):
            grads[position] = gradient
        return grads

    def _homes(self, variables: Sequence[tf.Variable]) -> list[VariableResiduals]:
        raise NotImplementedError


class _OfOptimizer(_AllreduceGrads):
    def __init__(self, settings: Settings, sparse_as_dense: bool, groups: Any) -> None:
        super().__init__(settings, sparse_as_dense, groups)
        self.home = VariableResiduals()

    def _homes(self, variables: Sequence[tf.Variable]) -> list[VariableResiduals]:
        return [self.home] * len(variables)


class _OfTape(_AllreduceGrads):
    _asked: list[VariableResiduals] | None = None

    def residuals(self, tape: tf.GradientTape) -> ResidualRegistry:
        """See ``residuals_of``."""
        homes = self._asked
        if homes is None:
            homes = list(dict.fromkeys(residuals_of_tapes(tape.watched_variables(), self._recipients())))
        if not homes:
            raise ConfigError("the tape has no residuals yet: its gradient() was not called and it watches no variable")
        if len(homes) > 1:
            raise ConfigError(f"the variables of this tape have residuals in {len(homes)} places, as they first "
                              "appeared in different tapes: ask for the residuals of those")
        return homes[0].residuals

    def _homes(self, variables: Sequence[tf.Variable]) -> list[VariableResiduals]:
        homes = residuals_of_tapes(variables, self._recipients())
        self._asked = list(dict.fromkeys(homes))
        return homes

    def _recipients(self) -> Any:
        return self._settings.reduction, self._settings.process_set


# The functions below take the place of Horovod's; ``original`` is Horovod's.

def _make_allreduce_grads_fn(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = arguments(original, args, kwargs)
    compression = TwoBit.instance(given["compression"])
    if compression is None:
        return original(*args, **kwargs)
    reduction = Reduction.of(hvd, given["op"], given["gradient_predivide_factor"])
    settings = Settings(compression.config, reduction, given["process_set"], given["device_dense"],
                        given["device_sparse"])
    hierarchy.check(settings)
    kind = _OfTape if given["name"] == _TAPE else _OfOptimizer
    return kind(settings, given["sparse_as_dense"], given["groups"])


def _refuse_adasum(original: Any, *args: Any, **kwargs: Any) -> None:
    if TwoBit.instance(arguments(original, args, kwargs)["compression"]) is not None:
        refuse_op(hvd, hvd.Adasum)
    original(*args, **kwargs)


def _refuse_keras_3(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = arguments(original, args, kwargs)
    if TwoBit.instance(given["compression"]) is not None:
        kind = type(given["optimizer"])
        version = _version_of_keras_3(kind)
        if version is not None:
            raise UnsupportedOperationError(
                f"{kind.__name__} is an optimizer of Keras {version}, whose gradients Horovod {horovod.__version__} "
                "does not exchange: every rank would train on its own. Set TF_USE_LEGACY_KERAS=1 before TensorFlow is "
                "imported, install tf_keras and take optimizers from tf.keras, or use TensorFlow 2.15")
    return original(*args, **kwargs)


def _refuse_keras_3_models(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = arguments(original, args, kwargs)
    sgd = given["keras"].optimizers.SGD
    if _version_of_keras_3(sgd) is not None:
        # Keras 3 would make the optimizer without wrapping it. Only this function knows the compression.
        given["wrap_optimizer"](sgd)()
    return original(*args, **kwargs)


@tf.autograph.experimental.do_not_convert
def _gradient(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = arguments(original, args, kwargs)
    if not isinstance(given["self"]._allreduce_grads, _OfTape):
        return original(*args, **kwargs)
    for source in tf.nest.flatten(given["sources"]):
        version = _version_of_keras_3(type(source))
        if version is not None:
            raise UnsupportedOperationError(
                f"source {source.path!r} of the tape is a Variable of Keras {version}, which the tape of Horovod "
                f"{horovod.__version__} cannot tell from others: give it the TensorFlow variable within, "
                "tape.gradient(loss, [variable.value for variable in model.trainable_variables])")
    with gradients_of(given["target"]):
        return original(*args, **kwargs)


@tf.autograph.experimental.do_not_convert
def _allreduce(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = arguments(original, args, kwargs)
    TwoBit.refuse_foreign(given["compression"])
    if not is_twobit(given["compression"]):
        return original(*args, **kwargs)
    if given["op"] not in (None, hvd.Average, hvd.Sum):
        refuse_op(hvd, given["op"])
    with in_group() if "tensors" in given else contextlib.nullcontext():
        return original(*args, **kwargs)


@tf.autograph.experimental.do_not_convert
def _allreduce_words(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    op = arguments(original, (tensors, *args), kwargs)["op"]
    if op not in (hvd.Average, hvd.Sum) and hold_words(tensors):
        refuse_op(hvd, op)
    return original(tensors, *args, **kwargs)


@tf.autograph.experimental.do_not_convert
def _reducescatter(original: Any, *args: Any, **kwargs: Any) -> Any:
    if is_twobit(arguments(original, args, kwargs)["compression"]):
        refuse_reducescatter(original.__name__)
    return original(*args, **kwargs)


@tf.autograph.experimental.do_not_convert
def _reducescatter_words(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if hold_words(tensors):
        refuse_reducescatter("reducescatter")
    return original(tensors, *args, **kwargs)


@tf.autograph.experimental.do_not_convert
def _join(original: Any) -> tf.Tensor:
    return follow_after(original())


def _version_of_keras_3(kind: type) -> str | None:
    """The version of Keras that a class comes from, if that is 3 or newer."""
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "0")
        if package == "keras" and int(version.partition(".")[0]) >= 3:
            return version
    return None
