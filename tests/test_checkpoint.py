"""Files of residuals: what was saved comes back, to any number of ranks, and what is no such file is refused whole."""

from __future__ import annotations

import io
import pathlib
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_twobit import checkpoint
from hvd_twobit.errors import ResidualError
from hvd_twobit.residuals import ResidualRegistry

from .fuzz.archives import archive_of, npy, zipped
from .fuzz.choices import Choices


def test_a_saved_file_brings_back_the_same_bits(registry: ResidualRegistry, tmp_path: pathlib.Path) -> None:
    registry.tensor("a", (2, 3)).replace(registry["a"].reshape(-1), np.array([0.1], np.float32), 3)
    registry.follow_loss_scale(8.0)
    registry.save(tmp_path / "residuals_0.npz")
    other = ResidualRegistry()
    other.load(tmp_path / "residuals_0.npz")
    for name in registry:
        np.testing.assert_array_equal(other[name], registry[name])
    assert other.tensor("a", (2, 3)).levels == np.float32(0.1) * 8 and other.loss_scale == 8.0
    assert other.tensor("a", (2, 3)).uncompressed_steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["residuals_0.npz"]


def test_names_may_be_any_text(tmp_path: pathlib.Path) -> None:
    registry = ResidualRegistry()
    for name in ("dense/kernel:0", "residuals/x", "file", "ä b"):
        registry.residual(name, (2,))[:] = len(name)
    registry.save(tmp_path / "r.npz")
    other = ResidualRegistry()
    other.load(tmp_path / "r.npz")
    assert other.norms() == registry.norms()


def test_a_file_that_cannot_be_written_leaves_the_one_before(registry: ResidualRegistry, tmp_path: pathlib.Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.npz"
    registry.save(path)
    before = path.read_bytes()
    registry.scale(2.0)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        registry.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"not a file of numpy", b"PK\x03\x04 broken", b"\x93NUMPY\x01\x00"])
def test_another_file_is_refused_by_name(content: bytes, registry: ResidualRegistry, tmp_path: pathlib.Path) -> None:
    (tmp_path / "r.npz").write_bytes(content)
    with pytest.raises(ResidualError, match="r.npz is not a file of residuals"):
        registry.load(tmp_path / "r.npz")
    assert registry.norms() == {"a": 5.0, "b": 2.0}


def test_a_pickle_is_never_loaded(registry: ResidualRegistry, tmp_path: pathlib.Path) -> None:
    np.savez(tmp_path / "r.npz", **{"format_version": 1, "residuals/a": np.array([print], object)})
    with pytest.raises(ResidualError, match=r"entry 'residuals/a.npy' is not a plain array of <f4: .*'descr': '\|O'"):
        registry.load(tmp_path / "r.npz")
    assert registry.norms() == {"a": 5.0, "b": 2.0}


def test_numpy_reads_the_files(registry: ResidualRegistry, tmp_path: pathlib.Path) -> None:
    registry.tensor("a", (2, 3)).replace(registry["a"].reshape(-1), np.array([0.5], np.float32), 3)
    registry.save(tmp_path / "r.npz")
    with np.load(tmp_path / "r.npz", allow_pickle=False) as arrays:
        found = {key: array.tolist() for key, array in arrays.items()}
    assert found == {"format_version": 1, "shapes/a": [2, 3], "shapes/b": [], "levels/a": [0.5],
                     "residuals/a": [[3, 0, 0], [0, 0, 4]], "residuals/b": -2, "uncompressed_steps/a": 3}


def test_bytes_are_those_of_a_file(registry: ResidualRegistry) -> None:
    other = ResidualRegistry()
    other.load_state_dict(checkpoint.from_bytes(checkpoint.to_bytes(registry.state_dict())))
    assert other.norms() == {"a": 5.0, "b": 2.0}


def test_what_is_no_state_is_not_written(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ResidualError, match="a state of residuals is a dictionary"):
        checkpoint.write(tmp_path / "r.npz", {"model": 1})
    assert not list(tmp_path.iterdir())


# ---- hostile files -------------------------------------------------------------------------------------------------

VERSION = ("format_version.npy", npy("<i8", "()", b"\x01" + bytes(7)))
SHAPE = ("shapes/a.npy", npy("<i8", "(2,)", struct.pack("<qq", 2, 3)))


@pytest.mark.parametrize("entries, message", [
    ([VERSION, SHAPE, SHAPE], "two entries have the same name"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", "(1099511627776,)"))], "24 bytes, which are no <f4 of shape"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", "(4294967296, 4294967296)"))], "24 bytes, which are no <f4"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", "(" + "1, " * 9 + "6)"))], "has shape .*but the tensor has shape"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", "(" + "1, " * 70 + "6)"))], "not a file of residuals"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("|O"))], "not a plain array of <f4"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f8", "(3,)"))], "not a plain array of <f4"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy(">f4"))], "not a plain array of <f4"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", order="True"))], "not a plain array of <f4: .*fortran"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", "__import__('os').abort()"))], "not a plain array of <f4"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", "(" * 5000))], "not a plain array of <f4"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", "(9" + "9" * 6000 + ",)"))], "residuals"),
    ([VERSION, SHAPE, ("residuals/a.npy", npy("<f4", "(0, 99999999999999999999)", b""))], "not a file of residuals"),
    ([VERSION, SHAPE, ("residuals/a.npy", b"")], "not a plain array"),
    ([VERSION, SHAPE, ("residuals/a.npy", b"\x93NUMPY\x03\x00" + npy()[8:])], "not a plain array"),
    ([VERSION, SHAPE, ("residuals/a.npy", b"\x80\x04cposix\nsystem\n.")], "not a plain array"),
    ([VERSION, ("shapes/a.npy", npy("<i8", "(1,)", struct.pack("<q", -6)))], "shape of tensor 'a' is .-6,., not"),
    ([VERSION, ("shapes/a.npy", npy("<i8", "(1, 1)", struct.pack("<q", 6)))], "8 bytes, which are no <i8 of shape"),
    ([VERSION, ("uncompressed_steps/a.npy", npy("<i8", "(1,)", bytes(8)))], "8 bytes, which are no <i8 of shape"),
    ([VERSION, ("../../escaped.npy", npy())], "an entry '../../escaped.npy', which no file of residuals has"),
    ([VERSION, ("residuals/a", npy())], "an entry 'residuals/a', which no file of residuals has"),
    ([("format_version.npy", npy("<i8", "()", b"\x02" + bytes(7))), ("new", b"")], "format version 2"),
    ([("format_version.npy", npy("<i8", "()", bytes(7)))], "7 bytes, which are no <i8"),
    ([SHAPE], "a state of residuals is a dictionary with the keys format_version"),
])
def test_a_hostile_entry_is_refused_and_nothing_is_changed(registry: ResidualRegistry, tmp_path: pathlib.Path,
                                                           entries: Any, message: str) -> None:
    (tmp_path / "r.npz").write_bytes(zipped(entries))
    with pytest.raises(ResidualError, match=message):
        registry.load(tmp_path / "r.npz")
    assert registry.norms() == {"a": 5.0, "b": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["r.npz"]


def _peak_of(function: Callable[[], Any]) -> int:
    """The most bytes of Python's and NumPy's memory that a call which is refused had at once."""
    tracemalloc.start()
    try:
        with pytest.raises(ResidualError):
            function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_compressed_bomb_is_not_unpacked() -> None:
    bomb = zipped([VERSION, ("residuals/a.npy", npy("<f4", "(16777216,)", bytes(1 << 26)))], zipfile.ZIP_DEFLATED)
    assert len(bomb) < 100_000
    assert _peak_of(lambda: checkpoint.from_bytes(bomb)) < 4 * len(bomb) + 100_000


def test_entries_that_overlap_are_not_read() -> None:
    """A directory of 1,000 entries that are all the same megabyte."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("residuals/0.npy", npy("<f4", "(262144,)", bytes(1 << 20)))
        first = archive.infolist()[0]
        for number in range(1, 1000):
            entry = zipfile.ZipInfo(f"residuals/{number}.npy")
            entry.CRC, entry.file_size, entry.compress_size = first.CRC, first.file_size, first.compress_size
            entry.header_offset = first.header_offset
            archive.filelist.append(entry)
        archive._didModify = True
    assert len(file.getvalue()) < 1_200_000
    assert _peak_of(lambda: checkpoint.from_bytes(file.getvalue())) < 4_000_000


def test_a_header_that_claims_more_than_the_entry_has_takes_no_memory() -> None:
    for shape in ("(1099511627776,)", "(4194304,)"):
        content = zipped([VERSION, ("residuals/a.npy", npy("<f4", shape))])
        assert _peak_of(lambda content=content: checkpoint.from_bytes(content)) < 100_000


def test_a_device_is_not_read() -> None:
    with pytest.raises(ResidualError, match="/dev/zero is not a file"):
        checkpoint.read("/dev/zero")


@pytest.fixture(scope="module")
def valid() -> bytes:
    """A file with everything that a state can have."""
    made = ResidualRegistry()
    made.residual("w", (2, 3))[:] = [3, 0, 0, 0, 0, 4]
    made.tensor("w", (2, 3)).levels = np.array([0.5], np.float32)
    made.tensor("w", (2, 3)).uncompressed_steps = 1
    made.loss_scale = 1024.0
    return checkpoint.to_bytes(made.state_dict())


def _loaded_or_refused(content: bytes) -> None:
    loaded = ResidualRegistry()
    try:
        loaded.load_state_dict(checkpoint.from_bytes(content))
    except ResidualError:
        assert loaded.state_dict() == ResidualRegistry().state_dict()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_loaded_or_refused(content: bytes) -> None:
    _loaded_or_refused(content)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=100))
def test_any_archive_is_loaded_or_refused(content: bytes) -> None:
    _loaded_or_refused(archive_of(Choices(content)))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_damaged_file_is_loaded_or_refused(valid: bytes, data: st.DataObject) -> None:
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at:at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    _loaded_or_refused(bytes(damaged))


def test_a_file_that_was_cut_is_refused(valid: bytes) -> None:
    for length in range(0, len(valid), 7):
        with pytest.raises(ResidualError):
            checkpoint.from_bytes(valid[:length])


def test_a_flipped_bit_in_a_residual_is_noticed(valid: bytes) -> None:
    at = valid.index(struct.pack("<6f", 3, 0, 0, 0, 0, 4))
    for position in range(at, at + 24):
        damaged = bytearray(valid)
        damaged[position] ^= 1
        with pytest.raises(ResidualError, match="Bad CRC-32"):
            checkpoint.from_bytes(bytes(damaged))


# ---- another number of ranks ---------------------------------------------------------------------------------------

def states_of(ranks: int) -> list[dict[str, Any]]:
    """Of a job of so many ranks, after some step: random residuals, a tensor that only rank 0 has one of, levels."""
    states = []
    for rank in range(ranks):
        random = np.random.default_rng(rank)
        made = ResidualRegistry()
        made.declare("never exchanged", (5000,))
        made.residual("w", (37, 61))[:] = random.standard_normal(37 * 61) * 10.0 ** random.integers(-8, 8, 37 * 61)
        made.tensor("w", (37, 61)).levels = np.array([0.5, 0.25, 2], np.float32)
        made.tensor("w", (37, 61)).uncompressed_steps = 4
        made.tensor("b", (16,)).levels = np.array([1], np.float32)
        if rank == 0:
            made.residual("b", (16,))[:] = np.arange(16)
        made.loss_scale = 8.0
        states.append(made.state_dict())
    return states


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("before", [1, 2, 4, 5])
def test_the_sum_over_ranks_is_kept_by_another_number_of_ranks(before: int, ranks: int) -> None:
    old = states_of(before)
    new = checkpoint.redistribute(old, ranks)
    assert len(new) == ranks
    for name in ("w", "b"):
        was = sum(state["residuals"][name].astype(np.float64) for state in old if name in state["residuals"])
        parts = [state["residuals"][name].astype(np.float64) for state in new if name in state["residuals"]]
        # One rounding of each new residual.
        np.testing.assert_allclose(sum(parts), was, rtol=0, atol=2.0 ** -24 * float(sum(abs(p) for p in parts).max()))
    for rank, state in enumerate(new):
        own = [old[number] for number in range(rank, before, ranks)]
        assert ("w" in state["residuals"]) == bool(own)
        if own:
            wanted = sum(part["residuals"]["w"].astype(np.float64) for part in own).astype(np.float32)
            np.testing.assert_array_equal(state["residuals"]["w"], wanted)
        assert {name: levels.tolist() for name, levels in state["levels"].items()} == {"w": [0.5, 0.25, 2], "b": [1]}
        assert state["uncompressed_steps"] == {"w": 4} and state["loss_scale"] == 8.0
        assert state["shapes"] == {"w": (37, 61), "b": (16,), "never exchanged": (5000,)}
        ResidualRegistry().load_state_dict(state)


def test_states_for_another_number_of_ranks_share_no_memory() -> None:
    old = states_of(2)
    arrays = [array for state in [*old, *checkpoint.redistribute(old, 3)] for part in ("residuals", "levels")
              for array in state[part].values()]
    assert not any(np.shares_memory(one, other) for at, one in enumerate(arrays) for other in arrays[:at])


def test_residuals_that_overflow_when_they_are_added_stay_finite() -> None:
    made = ResidualRegistry()
    made.residual("w", (2,))[:] = [3e38, -3e38]
    state, = checkpoint.redistribute([made.state_dict()] * 4, 1)
    largest = np.finfo(np.float32).max
    assert state["residuals"]["w"].tolist() == [largest, -largest]


def test_files_of_all_ranks_become_files_of_another_number(tmp_path: pathlib.Path) -> None:
    for rank, state in enumerate(states_of(4)):
        checkpoint.write(tmp_path / f"old_{rank}.npz", state)
    states = [checkpoint.read(tmp_path / f"old_{rank}.npz") for rank in range(4)]
    for rank, state in enumerate(checkpoint.redistribute(states, 3)):
        checkpoint.write(tmp_path / f"new_{rank}.npz", state)
    registry = ResidualRegistry()
    registry.load(tmp_path / "new_1.npz")
    np.testing.assert_array_equal(registry["w"], states[1]["residuals"]["w"])


def _with_levels(state: dict[str, Any]) -> None:
    state["levels"]["w"] = state["levels"]["w"] * 2


@pytest.mark.parametrize("change, message", [
    (_with_levels, "rank 1 has another state than the ranks before: tensor 'w' has other levels; use"),
    (lambda state: state["levels"].pop("b"), "another state than the ranks before: tensor 'b' has other levels"),
    (lambda state: state["uncompressed_steps"].update(w=3), "tensor 'w' has 3 uncompressed_steps instead of 4"),
    (lambda state: state.update(loss_scale=4.0), "loss scale 4.0 instead of 8.0"),
    (lambda state: state["shapes"].update(a=(3,)), r"tensor 'a' has shape \(3,\) instead of None"),
    (lambda state: state["residuals"].update(w=np.zeros(4, np.float32)), "rank 1: the residual of tensor 'w'"),
])
def test_states_that_are_not_of_one_step_are_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    states = states_of(3)
    change(states[1])
    with pytest.raises(ResidualError, match=message):
        checkpoint.redistribute(states, 2)


@pytest.mark.parametrize("before, ranks", [(0, 2), (2, 0), (2, -1)])
def test_states_need_a_rank_to_go_to(before: int, ranks: int) -> None:
    with pytest.raises(ResidualError, match=f"the states of {before} ranks cannot be given to {ranks}"):
        checkpoint.redistribute(states_of(before), ranks)
