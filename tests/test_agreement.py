"""The statements of ranks: equal digests exactly where the same collectives follow, and a sentence where not."""

from __future__ import annotations

import json

from hvd_twobit.agreement import NBYTES, Statement, difference

BASE = Statement(1024, (("bias", 10, False), ("weight", 4096, True)))


def test_a_digest_has_32_bytes() -> None:
    assert len(BASE.digest) == NBYTES == 32


def test_min_elements_alone_does_not_matter_where_it_decides_the_same() -> None:
    assert Statement(2048, BASE.tensors).digest == BASE.digest


def test_another_decision_another_size_or_another_name_changes_the_digest() -> None:
    others = [Statement(0, (("bias", 10, True), ("weight", 4096, True))),
              Statement(1024, (("bias", 11, False), ("weight", 4096, True))),
              Statement(1024, (("biaz", 10, False), ("weight", 4096, True))),
              Statement(1024, (("weight", 4096, True),))]
    assert len({statement.digest for statement in [BASE, *others]}) == 5


def told(*statements: Statement) -> str:
    return difference(b"".join(statement.to_json() for statement in statements))


def test_another_min_elements_is_told_with_tensor_ranks_and_values() -> None:
    other = Statement(0, (("bias", 10, True), ("weight", 4096, True)))
    assert told(BASE, BASE, other) == ("tensor 'bias' (10 elements) is compressed by rank 2 and not by rank 0: "
                                       "min_elements is 1024 on rank 0 and 0 on rank 2; give every rank the same")
    assert "compressed by rank 0 and not by rank 1" in told(other, BASE)


def test_another_size_is_told() -> None:
    assert told(BASE, Statement(1024, (("bias", 12, False), ("weight", 4096, True)))) == (
        "tensor 'bias' has 10 elements on rank 0 and 12 on rank 1: build the same model on every rank")


def test_a_missing_tensor_is_told_whichever_rank_lacks_it() -> None:
    short = Statement(1024, (("weight", 4096, True),))
    assert told(BASE, short).startswith("tensor 'bias' is exchanged by rank 0 and not by rank 1")
    assert told(short, BASE).startswith("tensor 'bias' is exchanged by rank 1 and not by rank 0")


def test_another_version_is_told() -> None:
    newer = json.dumps({**json.loads(BASE.to_json()), "version": 9}).encode() + b"\n"
    assert difference(BASE.to_json() + newer) == (
        "rank 1 sends payloads of version 9, rank 0 of version 1: install the same hvd_twobit on every rank")


def test_names_with_line_breaks_do_not_break_the_statement() -> None:
    odd = Statement(0, (("a\nb\u2028", 1, True),))
    assert "'a\\nb" in told(odd, Statement(0, (("a\nb\u2028", 2, True),)))
