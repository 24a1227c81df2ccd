"""The statements of ranks: equal digests exactly where the same collectives follow, and a sentence where not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hvd_twobit.agreement import NBYTES, Exchanged, Statement, difference
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.transports import plan_buckets

BIAS, WEIGHT = Exchanged("bias", 10, False, False, "bias"), Exchanged("weight", 4096, True, True, "weight")


def statement(*tensors: Exchanged, ranks: int = 3, **arguments: Any) -> Statement:
    config = TwoBitConfig.from_arguments(**{"threshold": 0.5, **arguments})
    buckets = plan_buckets(config, [(tensor.name, (tensor.elements,)) for tensor in tensors if tensor.compressed],
                           ranks)
    return Statement.of(config, tensors, buckets, ranks)


def changed(tensor: Exchanged, **values: Any) -> Exchanged:
    return dataclasses.replace(tensor, **values)


BASE = statement(BIAS, WEIGHT)


def test_a_digest_has_32_bytes() -> None:
    assert len(BASE.digest) == NBYTES == 32


def test_the_order_of_tensors_does_not_matter() -> None:
    assert statement(WEIGHT, BIAS) == BASE


def test_settings_do_not_matter_where_they_decide_the_same() -> None:
    assert statement(BIAS, WEIGHT, min_elements=2048, warmup_steps=3, threshold=0.1).digest == BASE.digest


def test_whatever_changes_a_collective_changes_the_digest() -> None:
    others = [statement(changed(BIAS, compressible=True), WEIGHT), statement(BIAS, changed(WEIGHT, compressed=False)),
              statement(changed(BIAS, elements=11), WEIGHT),
              statement(changed(BIAS, name="biaz"), WEIGHT), statement(WEIGHT),
              statement(BIAS, changed(WEIGHT, group="bias")), statement(BIAS, WEIGHT, threshold="auto"),
              statement(BIAS, WEIGHT, threshold="auto", block_elements=512), statement(BIAS, WEIGHT, ranks=4),
              statement(BIAS, WEIGHT, transport="sra"), statement(BIAS, WEIGHT, bucket_cap_mb=0.01)]
    assert len({other.digest for other in [BASE, *others]}) == 12


def test_ranks_that_ask_how_they_share_machines_have_to_ask_for_the_same() -> None:
    def asking(hierarchical: bool | str, ranks_per_machine: int = 0) -> Statement:
        config = TwoBitConfig.from_arguments(hierarchical=hierarchical)
        return Statement.of(config, (), (), 2, ranks_per_machine)

    assert asking(True).digest != asking("auto").digest, "of one machine only the first makes process sets"
    assert asking(True, 2).digest == asking("auto", 2).digest
    assert asking(True).digest != asking(False, 1).digest
    assert told(asking(True), asking("auto")).startswith("hierarchical is True on rank 0, which finds 0 ranks")


def test_ranks_send_from_gpus_or_none_does() -> None:
    gpu = dataclasses.replace(BASE, from_gpu=True)
    assert gpu.digest != BASE.digest
    assert told(BASE, BASE, gpu).startswith("rank 2 compresses and sends gradients on its GPU and rank 0 on its CPU")


def told(*statements: Statement) -> str:
    return difference(b"".join(statement.to_json() for statement in statements))


def test_another_min_elements_is_told_with_tensor_ranks_and_values() -> None:
    other = statement(changed(BIAS, compressible=True), WEIGHT, min_elements=0)
    assert told(BASE, BASE, other) == ("tensor 'bias' (10 elements) is compressed by rank 2 and not by rank 0: "
                                       "min_elements is 1024 on rank 0 and 0 on rank 2; give every rank the same")
    assert "compressed by rank 0 and not by rank 1" in told(other, BASE)


def test_a_gradient_that_is_sparse_on_one_rank_is_told() -> None:
    sparse = statement(BIAS, changed(WEIGHT, compressible=False, compressed=False))
    assert told(BASE, sparse) == ("tensor 'weight' (4096 elements) is compressed by rank 0 and not by rank 1: on rank "
                                  "1 its gradient is sparse, or not a variable's; compute the same kind of gradient on "
                                  "every rank")


def test_another_warm_up_is_told() -> None:
    assert told(BASE, statement(BIAS, changed(WEIGHT, compressed=False), warmup_steps=5)) == (
        "tensor 'weight' (4096 elements) is compressed by rank 0 and not by rank 1: warmup_steps is 0 on rank 0 and 5 "
        "on rank 1; give every rank the same")


def test_another_progress_of_the_warm_up_is_told() -> None:
    assert told(statement(BIAS, changed(WEIGHT, compressed=False)), BASE) == (
        "tensor 'weight' (4096 elements) is compressed by rank 1 and not by rank 0: rank 0 is still in its "
        "uncompressed steps; load states of the same step on every rank, or call "
        "residuals_of(optimizer).forget_levels() on every rank")


def test_adaptive_levels_on_one_rank_only_are_told() -> None:
    assert told(BASE, statement(BIAS, WEIGHT, threshold="auto")) == (
        'rank 0 has a fixed threshold and rank 1 has threshold="auto" with block_elements=1024: give TwoBit the same '
        "arguments on every rank")


def test_another_group_is_told() -> None:
    assert told(BASE, statement(BIAS, changed(WEIGHT, group="bias"))) == (
        "tensor 'weight' is exchanged in the group of 'weight' on rank 0 and in that of 'bias' on rank 1: form the "
        "same groups on every rank")


def test_another_size_is_told() -> None:
    assert told(BASE, statement(changed(BIAS, elements=12), WEIGHT)) == (
        "tensor 'bias' has 10 elements on rank 0 and 12 on rank 1: build the same model on every rank")


def test_a_missing_tensor_is_told_whichever_rank_lacks_it() -> None:
    short = statement(WEIGHT)
    assert told(BASE, short).startswith("tensor 'bias' is exchanged by rank 0 and not by rank 1")
    assert told(short, BASE).startswith("tensor 'bias' is exchanged by rank 1 and not by rank 0")


def test_another_version_is_told() -> None:
    newer = json.dumps({**json.loads(BASE.to_json()), "version": 9}).encode() + b"\n"
    assert difference(BASE.to_json() + newer) == (
        "rank 1 sends payloads of version 9, rank 0 of version 1: install the same hvd_twobit on every rank")


def test_names_with_line_breaks_do_not_break_the_statement() -> None:
    odd = Exchanged("a\nb\u2028", 1, True, True, "a")
    assert "'a\\nb" in told(statement(odd), statement(changed(odd, elements=2)))


def test_another_transport_is_told_with_both_and_how_to_mend_it() -> None:
    assert told(BASE, statement(BIAS, WEIGHT, transport="sra")) == (
        "transport is 'auto' on rank 0 and 'sra' on rank 1: give TwoBit the same on every rank, also in the "
        "environment variable HVD_TWOBIT_TRANSPORT")


def test_transports_that_are_the_same_in_effect_do_not_clash() -> None:
    assert statement(BIAS, WEIGHT, transport="allgather").digest == BASE.digest


def test_another_size_of_buckets_is_told() -> None:
    assert told(BASE, BASE, statement(BIAS, WEIGHT, bucket_cap_mb=0.01)) == (
        "bucket_cap_mb is 25.0 on rank 0 and 0.01 on rank 2: give TwoBit the same on every rank")


def test_another_number_of_ranks_is_told() -> None:
    assert told(BASE, statement(BIAS, WEIGHT, ranks=4)) == (
        "rank 0 exchanges with 3 ranks in all and rank 1 with 4: give the optimizers of all ranks the same process set")


def test_another_order_of_parameters_is_told() -> None:
    other = changed(WEIGHT, name="other", group="other")
    assert told(statement(WEIGHT, other), statement(other, WEIGHT)) == (
        "tensor 'weight' of rank 0 is where rank 1 has tensor 'other' in the order of parameters: give the optimizers "
        "of all ranks the same parameters in the same order")
