"""TensorFlow and Keras: mistakes are clear errors on every rank, neither hangs nor wrong sums."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import types

import pytest

from hvd_twobit.errors import UnsupportedHorovodError

from .jobs import results_of, waits_for_the_job
from .launcher import REPOSITORY

pytestmark = waits_for_the_job

UNSUPPORTED = r"UnsupportedOperationError: TwoBit cannot be used with op=hvd\.{}: two-bit codes can be summed"
DISAGREE = r"DisagreementError: ranks do not agree on what to exchange, seen by rank {rank}: "
BIAS = DISAGREE + (r"tensor '(bias|dense/bias):0' \(40 elements\) is compressed by rank 0 and not by rank 1: "
                   r"min_elements is 0 on rank 0 and 1024 on rank 1; give every rank the same")
JIT_COMPILE = "UnsupportedOperationError: jit_compile=True compiles the training step with XLA, and Horovod's"
KERAS_3 = (r"UnsupportedOperationError: {} is an optimizer of Keras 3\.[\d.]+, .* every rank would train on its own\. "
           r"Set TF_USE_LEGACY_KERAS=1 .* or use TensorFlow 2\.15")
HIERARCHICAL = (r"DisagreementError: ranks do not agree on what to exchange, seen by rank \d: hierarchical is {} on "
                r"rank 0, which finds {} ranks per machine, and {} on rank 1, which finds {} \(0: not asked yet\)")
DAMAGED = (r"PayloadError: tensors? 'b:0.*: (the payload of rank 0 begins with|rank 1 of this machine's 2 could not "
           "exchange its share)")
MESSAGES = {
    "adasum": UNSUPPORTED.format("Adasum"),
    "adasum_optimizer": UNSUPPORTED.format("Adasum"),
    "minimum": UNSUPPORTED.format("Min"),
    "complex_gradients": r"UnsupportedOperationError: tensor 'a:0' has a gradient of dtype complex64",
    "residuals_of_another_optimizer": r"ConfigError: SGD has no residuals: it was not made by",
    "residuals_of_a_new_tape": r"ConfigError: the tape has no residuals yet",
    "residuals_of_two_models": r"ConfigError: the variables of this tape have residuals in 2 places",
    "unknown_argument": r"ConfigError: unknown argument treshold=0\.1 \(did you mean threshold\?\)",
    "a_variable_as_an_argument": r"ConfigError: variable 'a:0' is the argument 'variable' of a tf\.function",
    "a_variable_as_an_argument_under_autograph": r"ConfigError: variable 'a:0' is the argument 'variable' of a tf\.f",
    "variables_in_a_list_as_an_argument": r"ConfigError: variable 'a:0' is the argument 'listed.*' of a tf\.function",
    "jit_compile_in_fit": JIT_COMPILE,
    "jit_compile_of_a_function": JIT_COMPILE,
    "keras_3": KERAS_3.format("SGD"),
    "keras_3_by_horovod_tensorflow": KERAS_3.format("SGD"),
    "keras_3_in_mixed_precision": KERAS_3.format(r"LossScaleOptimizer\w*"),
    "keras_3_model_loaded": KERAS_3.format("SGD"),
    "keras_3_variables_on_a_tape": r"UnsupportedOperationError: source 'a' of the tape is a Variable of Keras 3\.[\d.]+"
                                   r", .*\[variable\.value for variable in model\.trainable_variables\]",
    "another_min_elements": BIAS,
    "another_min_elements_in_a_function": BIAS,
    "another_min_elements_in_a_group": BIAS,
    "another_min_elements_in_fit": BIAS,
    "auto_on_one_rank": DISAGREE + 'rank 0 has a fixed threshold and rank 1 has threshold="auto"',
    "another_transport": DISAGREE + r"transport is 'allgather' on rank 0 and 'sra' on rank 1: give TwoBit the same",
    "another_min_elements_by_allreduce": BIAS,
    "another_threshold_by_allreduce": r"PayloadError: tensor 'weight:0': ranks have thresholds .*0\.5.*1\.5.*, and "
                                      r'transport="allreduce" cannot add up codes that mean different numbers',
    "another_bucket_cap": DISAGREE + r"bucket_cap_mb is 0\.006 on rank 0 and 1\.0 on rank 1: give TwoBit the same",
    "other_groups_on_one_rank": DISAGREE + r"tensor 'b:0' is exchanged in the group of 'b:0' on rank 0 and in that of "
                                           r"'a:0' on rank 1",
    "levels_of_another_step": r"PayloadError: tensor 'weight:0': the payload of rank \d has a levels_checksum of 0x\w+",
    "no_gradient_on_one_rank": DISAGREE + r"tensor 'b:0' is exchanged by rank 0 and not by rank 1",
    "another_shape_on_one_rank": DISAGREE + r"tensor 'a:0' has 10 elements on rank 0 and 11 on rank 1",
    "another_size_of_unknown_shape": DISAGREE + r"tensor 'a:0' has 10 elements on rank 0 and 11 on rank 1",
    "another_version_of_payload": r"PayloadError: tensor 'a:0': the payload of rank \d has version \d",
    "another_shape_under_a_known_name": r"ResidualError: tensor 'a:0' has shape \(11,\), but its residual was kept",
    "hierarchical_on_rank_0": HIERARCHICAL.format(True, 0, False, 1),
    "hierarchical_on_rank_1_in_a_function": HIERARCHICAL.format(False, 1, True, 0),
    "hierarchical_on_rank_1_by_allreduce": HIERARCHICAL.format(False, 1, True, 0),
    "hierarchical_auto_on_rank_1": HIERARCHICAL.format(True, 0, "'auto'", 0),
    "hierarchical_on_rank_0_after_an_exchange": HIERARCHICAL.format(True, 2, False, 1),
    "hierarchical_within_a_process_set": r"UnsupportedOperationError: hierarchical=True exchanges among all ranks, and "
                                         r"this optimizer has a process set of ranks \[0\]: leave one of the two out",
    "hierarchical_in_an_elastic_job": "UnsupportedOperationError: hierarchical=True cannot be used with TensorFlow in "
                                      'an elastic job: .* give TwoBit hierarchical="auto"',
    "hierarchical_without_process_sets": r"^ConfigError: hierarchical=True needs a process set of the ranks \[0\], "
                                         "which Horovod does not have: initialize it with",
    "hierarchical_after_process_sets_were_removed": "no error",
    "another_shape_under_a_known_name_on_two_levels": r"ResidualError: tensor 'a:0' has shape \(11,\), but its resid",
    "a_share_that_arrives_damaged": DAMAGED,
    "a_share_that_arrives_damaged_and_cannot_be_summed": DAMAGED,
}

IN_A_GRAPH = {"another_min_elements": "DisagreementError", "another_min_elements_in_fit": "DisagreementError",
              "another_version_of_payload": "PayloadError", "another_shape_under_a_known_name": "ResidualError"}


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    """What each of two real ranks was told in every scenario."""
    return results_of("tensorflow", 2, "bad_input")


@pytest.mark.parametrize("scenario", MESSAGES)
def test_every_rank_is_told_what_is_wrong(scenario: str, told: list[dict[str, str]]) -> None:
    for rank, messages in enumerate(told):
        assert re.search(MESSAGES[scenario].replace("{rank}", str(rank)), messages[scenario]), messages[scenario]


def test_tensorflow_wraps_what_a_running_graph_raises_and_the_text_names_our_error(told: list[dict[str, str]]) -> None:
    for messages in told:
        for scenario, error in IN_A_GRAPH.items():
            wrapped, _, text = messages[scenario].partition(": ")
            assert wrapped in ("UnknownError", "InvalidArgumentError") and f"{error}: " in text, messages[scenario]


def test_elastic_training_does_not_take_a_mistake_for_a_lost_rank(told: list[dict[str, str]]) -> None:
    # hvd.elastic.run of Horovod 0.28.1 tells a failed collective by these words in an error of TensorFlow's, and
    # would try again for ever.
    for messages in told:
        for message in messages.values():
            assert not re.search("HorovodAllreduce|HorovodAllgather|HorovodBroadcast", message), message


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=REPOSITORY, text=True, timeout=120,
                          env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}, capture_output=True)


def test_one_process_trains_uncompressed_as_horovod_exchanges_nothing() -> None:
    ran = run_python("""
        import numpy as np, tensorflow as tf, horovod.tensorflow.keras as hvd
        from hvd_twobit.keras import TwoBit, residuals_of
        hvd.init()
        model = tf.keras.Sequential([tf.keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")])
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=TwoBit(min_elements=0))
        model.compile(optimizer, lambda _, output: tf.reduce_sum(output))
        model.fit(np.full((1, 3), 0.75), np.zeros((1, 2)), verbose=0)
        print(model.get_weights()[0].ravel().tolist(), list(residuals_of(optimizer)))
    """)
    assert ran.stdout.splitlines()[-1:] == [f"{[-0.75] * 6} []"], ran.stderr


def test_an_unsupported_horovod_is_refused_at_import() -> None:
    ran = run_python("""
        import horovod
        horovod.__version__ = "0.27.0"
        import hvd_twobit.keras
    """)
    assert ran.returncode == 1
    assert "UnsupportedHorovodError: Horovod 0.27.0 is installed, hvd_twobit supports Horovod 0.28.1" in ran.stderr


def test_a_horovod_of_another_form_is_refused_at_import() -> None:
    import horovod
    import horovod._keras
    import horovod.tensorflow

    from hvd_twobit.tensorflow.hook import check_horovod

    def create_distributed_optimizer(keras, optimizer):
        """Takes two arguments, as no released Horovod does."""

    changed = types.ModuleType("changed")
    changed.create_distributed_optimizer = create_distributed_optimizer
    check_horovod(horovod.__version__, horovod.tensorflow, horovod._keras)
    form = r"its changed\.create_distributed_optimizer is not that of a released Horovod 0\.28\.1: parameters \['keras'"
    with pytest.raises(UnsupportedHorovodError, match=form):
        check_horovod(horovod.__version__, horovod.tensorflow, changed)
