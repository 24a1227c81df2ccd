"""Shares of tensors that a machine's ranks divide: where cuts are, and that no residual is lost when they change."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_twobit import checkpoint
from hvd_twobit.buckets import Bucket, Part
from hvd_twobit.codec import Codec
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.elastic import follow_rank_0
from hvd_twobit.errors import PayloadError, ResidualError
from hvd_twobit.hierarchy import TwoLevelLayout
from hvd_twobit.residuals import ResidualRegistry
from hvd_twobit.sharding import ShardedResiduals, shares_of
from hvd_twobit.state import share_name, split_share

SHAPES = {"wide": (70, 61), "row": (1500,), "one block": (64,), "empty": (0, 3)}
BLOCK = 64


@given(elements=st.integers(0, 5000), start=st.integers(0, 10), ranks=st.integers(1, 9), name=st.text(max_size=3))
def test_shares_are_whole_blocks_and_cover_a_part_once(elements: int, start: int, ranks: int, name: str) -> None:
    part = Part(name, (start * BLOCK + elements,), start * BLOCK, start * BLOCK + elements)
    shares = sorted(shares_of(part, ranks, BLOCK), key=lambda share: (share.start, share.stop))
    assert len(shares) == ranks
    assert [part.start, *(share.stop for share in shares)] == [*(share.start for share in shares), part.stop]
    assert all(share.start % BLOCK == 0 or share.start == part.stop for share in shares)
    assert max(share.elements for share in shares) - min(share.elements for share in shares) <= 2 * BLOCK
    assert all(split_share(share.name) == (name, share.start, share.stop) for share in shares)


def test_many_small_tensors_are_divided_evenly() -> None:
    held = [0] * 4
    for number in range(1000):
        for rank, share in enumerate(shares_of(Part(f"layer{number}.weight", (64,), 0, 64), 4, BLOCK)):
            held[rank] += share.elements
    assert max(held) < 1.2 * min(held), held


@pytest.mark.parametrize("name", ["w", "w[1:2", "[]", "w[1:2]x", "w[-1:2]", "w[1:]", "w[1]"])
def test_other_names_are_no_shares(name: str) -> None:
    assert split_share(name) is None
    assert split_share(share_name(name, 3, 7)) == (name, 3, 7)


class Rank:
    """What one rank keeps of ``SHAPES``, before or after its machine was divided among ranks."""

    def __init__(self, averages: bool = True, **arguments: object) -> None:
        self.config = TwoBitConfig.from_arguments(min_elements=0, block_elements=BLOCK, bucket_cap_mb=1, **arguments)
        self.residuals = ResidualRegistry()
        self.residuals.is_divided = True
        for name, shape in SHAPES.items():
            self.residuals.declare(name, shape)
        self.shares = ShardedResiduals(self.config, Codec(self.config, self.residuals), self.residuals, averages)

    def divide(self, rank: int, ranks: int) -> None:
        self.shares.divide(rank, ranks, SHAPES, [Bucket.of(name, shape) for name, shape in SHAPES.items()])
        self.shares.adopt()

    def whole(self, weight: float = 1) -> dict[str, np.ndarray]:
        """What is held of each tensor: shares, weighted, and what lies beside them."""
        total = {name: np.zeros(int(np.prod(shape)), np.float64) for name, shape in SHAPES.items()}
        for entry in self.residuals:
            tensor, start, stop = split_share(entry) or (entry, 0, self.residuals[entry].size)
            total[tensor][start:stop] += self.residuals[entry].reshape(-1) * (weight if split_share(entry) else 1)
        return total


def observed(ranks: int, numbers: int) -> list[Rank]:
    """The ranks of ``numbers // ranks`` machines whose levels are known and which hold a residual each."""
    generator = np.random.default_rng(3)
    reduced = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    made = []
    for number in range(numbers):
        rank = Rank()
        rank.divide(number % ranks, ranks)
        for name in SHAPES:
            assert not rank.shares.ready(name)
            rank.shares.observe(name, reduced[name].reshape(-1), 2, 0.5)
            assert rank.shares.ready(name)
        for entry in rank.residuals.names():
            if entry not in SHAPES or ranks == 1:
                shape = rank.residuals.shared()["shapes"][entry]
                rank.residuals.residual(entry, shape)[:] = 6 * generator.integers(-8, 8, int(np.prod(shape)))
        made.append(rank)
    return made


def levels_of(ranks: list[Rank]) -> dict[str, np.ndarray]:
    """The levels of all blocks, from the shares of a machine's ranks."""
    known: dict[str, dict[int, np.ndarray]] = {}
    for rank in ranks:
        for entry, levels in rank.residuals.state_dict()["levels"].items():
            tensor, start, stop = split_share(entry) or (entry, 0, 1)
            if start < stop:
                known.setdefault(tensor, {})[start] = levels
    return {name: np.concatenate([levels for _, levels in sorted(parts.items())]) for name, parts in known.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_learn_the_levels_that_the_whole_tensor_would(ranks: int) -> None:
    one, divided = observed(1, 1), observed(ranks, ranks)
    wanted, found = levels_of(one), levels_of(divided)
    for name in ("wide", "row", "one block"):
        assert (found[name] == wanted[name]).all()


def test_tensors_may_become_known_one_after_the_other_and_end() -> None:
    saved = observed(4, 4)[3]
    rank = Rank()
    rank.residuals.load_state_dict(saved.residuals.state_dict())
    rank.shares.divide(1, 2, {}, [])
    for name in ("row", "wide"):
        rank.shares.include({name: SHAPES[name]}, [Bucket.of(name, SHAPES[name])])
        rank.shares.adopt()
    whole = rank.whole(2)
    for name in ("row", "wide"):
        assert (whole[name] == saved.whole(4)[name]).all(), "whatever the number of ranks was when it was saved"
    before = rank.residuals.names()
    rank.shares.adopt()
    assert rank.residuals.names() == before
    rank.shares.forget("row")
    rank.shares.adopt()
    assert not any(entry.startswith("row[") for entry in rank.residuals.names())


def test_the_same_tensors_may_be_divided_with_other_parameters_in_turn() -> None:
    rank = observed(2, 2)[1]
    other = ShardedResiduals(rank.config, Codec(rank.config, rank.residuals), rank.residuals, True)
    parts = [Part("wide", SHAPES["wide"], *bounds) for bounds in ((0, 1024), (1024, 70 * 61))]
    other.divide(1, 2, {"wide": SHAPES["wide"]}, [Bucket((part,)) for part in parts])
    held = rank.whole(2)["wide"]
    for shares in (other, rank.shares, other):
        shares.adopt()
        assert (rank.whole(2)["wide"] == held).all()


def test_a_share_goes_by_a_key_where_names_differ_between_ranks() -> None:
    named = [shares_of(Part(f"kernel_of_rank_{rank}", (64,), 0, 64), 4, BLOCK, "grad_0") for rank in (0, 1)]
    assert [share.elements for share in named[0]] == [share.elements for share in named[1]]


def test_an_element_that_is_not_finite_counts_for_no_share() -> None:
    rank = Rank()
    rank.divide(0, 2)
    reduced = np.ones(1500, np.float32)
    mine = [split_share(entry)[1:] for entry in rank.residuals.names() if entry.startswith("row[")]
    outside = next(element for element in range(1500) if not any(start <= element < stop for start, stop in mine))
    reduced[outside] = np.nan
    rank.shares.observe("row", reduced, 2, 0.5)
    assert not rank.shares.ready("row")


@pytest.mark.parametrize("before, after", [pair for pair in itertools.product([1, 2, 3], repeat=2) if pair != (1, 1)])
def test_what_was_not_sent_is_kept_when_a_machine_is_divided_otherwise(before: int, after: int) -> None:
    ranks = observed(before, 6)
    levels = levels_of(ranks[:before])
    total = {name: sum(rank.whole(before)[name] for rank in ranks) for name in SHAPES}
    states = [rank.residuals.state_dict() for rank in ranks]
    for number in range(6):
        ranks[number] = Rank()
        ranks[number].residuals.load_state_dict(states[number])
    shared = [rank.residuals.shared() for rank in ranks]
    for number, rank in enumerate(ranks):
        follow_rank_0(rank.residuals, lambda _: None, lambda _: copy.deepcopy(shared))
        rank.divide(number % after, after)
        assert rank.residuals.ranks_per_machine == after
        assert all(rank.shares.ready(name) for name in SHAPES)
    kept = {name: sum(rank.whole(after)[name] for rank in ranks) for name in SHAPES}
    for name in SHAPES:
        assert (kept[name] == total[name]).all()
    found = levels_of(ranks[:after])
    assert all((found[name] == levels[name]).all() for name in ("wide", "row", "one block"))


def test_what_lies_beside_the_shares_is_added_to_the_next_gradient_once() -> None:
    rank = observed(1, 1)[0]
    held = rank.whole()["row"]
    rank.divide(1, 2)
    gradient = np.full(1500, 0.25, np.float32)
    gradient[5] = np.inf
    taken = rank.shares.take_over("row", gradient)
    assert (np.delete(taken, 5) == np.delete(held + 0.25, 5)).all() and gradient[4] == 0.25
    kept = rank.residuals["row"]
    assert kept[5] == held[5] and not np.delete(kept, 5).any(), "what cannot be sent waits"
    rank.residuals.begin_step()
    rank.shares.settle()
    gradient[5] = 0
    assert rank.shares.take_over("row", gradient)[5] == held[5]
    rank.residuals.begin_step()
    rank.shares.settle()
    assert rank.shares.take_over("row", gradient) is gradient
    assert "row" not in rank.residuals


def test_a_step_that_is_undone_leaves_it_beside_the_shares() -> None:
    rank = observed(1, 1)[0]
    rank.residuals.can_undo = True
    held = rank.whole()["row"]
    rank.divide(1, 2)
    rank.residuals.begin_step()
    rank.shares.take_over("row", np.zeros(1500, np.float32))
    rank.residuals.undo_step()
    rank.shares.settle()
    assert (rank.residuals["row"] == held).all()


@pytest.mark.parametrize("after", [2, 4, 8])
def test_a_checkpoint_goes_on_with_another_number_of_machines(after: int, tmp_path: object) -> None:
    ranks = observed(2, 6)
    total = {name: sum(rank.whole(2)[name] for rank in ranks) for name in SHAPES}
    levels = levels_of(ranks[:2])
    for number, rank in enumerate(ranks):
        rank.residuals.save(tmp_path / f"{number}.npz")
    states = checkpoint.redistribute([checkpoint.read(tmp_path / f"{number}.npz") for number in range(6)], after)
    resumed = []
    for number, state in enumerate(states):
        rank = Rank()
        rank.residuals.load_state_dict(state)
        rank.divide(number % 2, 2)
        resumed.append(rank)
    assert not any(entry in SHAPES for rank in resumed for entry in rank.residuals), "shares stay shares"
    for name in SHAPES:
        assert (sum(rank.whole(2)[name] for rank in resumed) == total[name]).all()
    for first in range(0, after, 2):
        found = levels_of(resumed[first:first + 2])
        assert all((found[name] == levels[name]).all() for name in ("wide", "row", "one block"))


def test_levels_that_no_rank_of_a_world_knows_are_learnt_anew_on_all() -> None:
    ranks = observed(4, 4)[:2]  # Of four shares, the ranks of two have survived.
    shared = [rank.residuals.shared() for rank in ranks]
    for number, rank in enumerate(ranks):
        follow_rank_0(rank.residuals, lambda _: None, lambda _: copy.deepcopy(shared))
        rank.divide(number, 2)
    ready = [[rank.shares.ready(name) for name in SHAPES] for rank in ranks]
    assert ready[0] == ready[1]
    assert dict(zip(SHAPES, ready[0]))["wide"] is False


def test_an_empty_share_is_no_readier_than_others() -> None:
    for number in range(2):
        rank = Rank()
        rank.residuals.load_state_dict({"format_version": 1, "shapes": SHAPES, "residuals": {}, "levels": {},
                                        "uncompressed_steps": {name: 1 for name in SHAPES}})  # Of fixed thresholds.
        rank.divide(number, 2)
        assert not any(rank.shares.ready(name) for name in SHAPES)


def test_ranks_that_join_learn_the_levels_of_shares_again() -> None:
    from hvd_twobit import joining

    first, second = observed(2, 2)
    for rank in first, second:
        rank.residuals.ranks_per_machine = 2
    joining.track("shares", first.residuals)
    joining.follow(joining.shared_of_all())
    assert not any(first.shares.ready(name) for name in SHAPES)
    assert len(first.residuals), "what was not sent stays"


def test_shares_of_another_step_are_found_by_redistribute_on_any_rank() -> None:
    states = [rank.residuals.state_dict() for rank in observed(2, 4)]
    name = next(name for name, levels in states[3]["levels"].items() if levels.size > 1)
    states[3]["levels"][name] = 2 * states[3]["levels"][name]
    with pytest.raises(ResidualError, match=r"rank 3 has another state than the ranks before: tensor .* other levels"):
        checkpoint.redistribute(states, 2)


def test_states_of_ranks_that_are_divided_differently_are_refused() -> None:
    with pytest.raises(ResidualError, match="1 ranks per machine instead of 2"):
        checkpoint.redistribute([observed(2, 2)[0].residuals.state_dict(), observed(1, 1)[0].residuals.state_dict()], 2)


@pytest.mark.parametrize("entry, size, message", [
    ("wide[0:64]", 63, r"the residual of 'wide\[0:64\]' has shape \(63,\), but tensor 'wide' has shape \(70, 61\)"),
    ("wide[4224:4288]", 64, r"tensor 'wide' has shape \(70, 61\)"),
    ("tall[0:64]", 64, r"a residual of tensor 'tall\[0:64\]', which this optimizer does not compress"),
])
def test_shares_that_are_none_of_the_optimizers_tensors_are_refused(entry: str, size: int, message: str) -> None:
    state = observed(2, 2)[0].residuals.state_dict()
    state["shapes"][entry] = (size,)
    with pytest.raises(ResidualError, match=message):
        Rank().residuals.load_state_dict(state)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("averages", [True, False])
def test_a_bucket_is_put_together_from_the_shares_of_all_ranks(ranks: int, averages: bool) -> None:
    bucket = Bucket(tuple(Bucket.of(name, shape).parts[0] for name, shape in SHAPES.items()))
    generator = np.random.default_rng(0)
    gradients = [{name: generator.standard_normal(int(np.prod(shape))).astype(np.float32)
                  for name, shape in SHAPES.items()} for _ in range(ranks)]
    layouts = [TwoLevelLayout(bucket, rank, ranks, BLOCK) for rank in range(ranks)]
    sent = []
    for layout, gradient in zip(layouts, gradients):
        sent.append(np.empty(layout.elements, np.float32))
        for name in SHAPES:
            layout.put(name, gradient[name], sent[-1])
    results = []
    for rank, layout in enumerate(layouts):
        ends = np.cumsum(layout.splits)
        received = np.concatenate([one[end - layout.splits[rank]:end] for one, end in zip(sent, [ends[rank]] * ranks)])
        results.append(layout.result())
        mine = layout.machine_gradient(received, averages)
        for (_, _, out), (_, _, values) in zip(layout.of_own(results[-1]), layout.of_own(mine)):
            out[:] = values
    gathered = np.concatenate(results)
    for name in SHAPES:
        out = np.empty_like(gradients[0][name])
        layouts[0].check(gathered)
        layouts[0].take(name, gathered, out)
        wanted = gradients[0][name]
        for other in gradients[1:]:
            wanted = wanted + other[name]
        assert (out == (wanted / np.float32(ranks) if averages else wanted)).all()
    results[-1][-1] = 1
    with pytest.raises(PayloadError, match=f"tensors 'wide' to 'empty': rank {ranks - 1} of this machine's {ranks} "):
        layouts[0].check(np.concatenate(results))
    with pytest.raises(PayloadError, match=rf"sent {gathered.size - 1} elements .* instead of {gathered.size}"):
        layouts[0].check(gathered[1:])
