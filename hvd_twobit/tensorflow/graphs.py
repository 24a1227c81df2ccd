"""What TensorFlow's graphs must tell and remember while an exchange is built: names, arguments, XLA.

The state lies on the graph that it is about, so that it ends with the graph and a retrace begins anew.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from ..errors import ConfigError, UnsupportedOperationError
from .variables import unique


def collective_name(kind: str, label: str, prefix: str = "twobit") -> str:
    """A name for Horovod's operation, for ``ignore_name_scope=True``: ``<prefix>.<label>``, the same on every rank.

    Ranks meet under the part after the last slash. It is unique in the outermost graph, so that two optimizers whose
    variables bear equal names may exchange in one step; it depends on nothing but the order in which that graph is
    built. The part before names the kind of operation, by which ``hvd.elastic.run`` recognizes a failed collective in
    an error message (Horovod 0.28.1). The slash at the end tells TensorFlow to add no scope and no number.

    Collectives that are not part of every rank's graph need a prefix of their own, with a character that no label has
    here: they must not make others of equal label take another name on some ranks only.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", re.sub(r":0(?=$|_|\.)", "", label).replace("/", "."))
    return f"{kind}/{_unique(f'{prefix}.{plain}')}/"


def meeting_name(kind: str, label: str) -> str:
    """As ``collective_name``, but the same for all exchanges, of which none is under way together with another.

    Ranks of which each is in another exchange meet here, and are told so. In graphs of ``tf.compat.v1`` exchanges are
    in no order, and have names of their own.
    """
    return f"{kind}/{_unique(label)}/twobit.{label}/" if _keeps_order() else collective_name(kind, label)


def _unique(name: str) -> str:
    """``name``, or with a number behind it, as no other one of the outermost graph that is being built."""
    taken = _state(_outermost(tf.compat.v1.get_default_graph()), "_twobit_names", set)
    found = unique(name, taken)
    taken.add(found)
    return found


def held_until(agreed: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, once ``agreed`` is there (a zero, known in the step only); to be handed to a collective.

    A control dependency is not enough: Horovod 0.28.1 does not declare its operations stateful, so TensorFlow would
    call a collective of a constant gradient to fold it while it optimizes the graph, before ranks have agreed. A shape
    that is not known before the step prevents that, and costs no copy.
    """
    held = tf.reshape(tensor, tf.shape(tensor) + agreed)
    held.set_shape(tensor.shape)
    return held


def run_now(build: Callable[[], tf.Tensor]) -> np.ndarray:
    """What ``build`` makes of nothing, in a graph of its own that is run at once; also while another one is built."""
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        wanted = build()
        with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})) as session:
            return session.run(wanted)


def exchanges_before() -> tf.Tensor:
    """How many exchanges have ended; known when the one before this has.

    One graph may be called several times in a step: a function by others, a loop's body. Its exchanges then have the
    same names: Horovod 0.28.1 refuses a name that is on its way, and ranks could meet in different calls. TensorFlow
    keeps in order what reads and changes a variable, so every exchange begins with this and ends with
    ``count_exchange``. (A graph of ``tf.compat.v1`` is built once, with names that differ.)
    """
    return _exchanges().read_value() if _keeps_order() else tf.constant(0, tf.int64)


def count_exchange(reduced: Sequence[Any]) -> None:
    """Mark the end of an exchange: all that it returns is there."""
    if _keeps_order():
        with tf.control_dependencies(tf.nest.flatten(list(reduced), expand_composites=True)):
            _exchanges().assign_add(1)


def _keeps_order() -> bool:
    return tf.compat.v1.executing_eagerly_outside_functions()


@functools.cache
def _exchanges() -> tf.Variable:
    """Counts this process's exchanges; made when first needed, as the import must not start TensorFlow's runtime."""
    with tf.init_scope(), tf.device("/cpu:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="twobit_exchanges")


def refuse_argument(variable: tf.Variable) -> None:
    """Raise ConfigError for a variable that a function gets as an argument.

    TensorFlow traces such a function with the first variable and then calls the same graph with others of its shape,
    so the graph cannot tell whose residual to use.

    Raises:
        ConfigError: a function that is being traced has the variable among its arguments.
    """
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):
        # TensorFlow 2.15 names what a graph takes from its surroundings after the operation that uses it, with a
        # slash, or with a number, and an argument as the user does.
        name = graph.capture(variable.handle).op.name
        if "/" not in name and not name.partition("_")[0].isdigit():
            raise ConfigError(f"variable {variable.name!r} is the argument {name!r} of a tf.function, which may be "
                              "called with another one without being traced again, so that TwoBit could not tell whose "
                              "residual to use: let the function take the variable from its surroundings instead")
        graph = graph.outer_graph


def refuse_xla() -> None:
    """Raise UnsupportedOperationError while a graph is built that XLA is to compile (``jit_compile=True``)."""
    # No public function tells; TensorFlow 2.15 to 2.18 have this one.
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedOperationError("jit_compile=True compiles the training step with XLA, and Horovod's "
                                        "collectives cannot be part of that, with TwoBit or without: leave "
                                        "jit_compile out")


def _outermost(graph: Any) -> Any:
    """The graph of the outermost function, or the graph of the session around it."""
    in_session = not tf.compat.v1.executing_eagerly_outside_functions()
    while hasattr(graph, "outer_graph") and (in_session or hasattr(graph.outer_graph, "outer_graph")):
        graph = graph.outer_graph
    return graph


def _state(graph: Any, attribute: str, make: Any) -> Any:
    if not hasattr(graph, attribute):
        setattr(graph, attribute, make())
    return getattr(graph, attribute)
