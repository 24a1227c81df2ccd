"""README's pieces of Python that need no second rank do what README says."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import hvd_twobit.torch
from hvd_twobit.codec import Codec
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.residuals import ResidualRegistry

from .exchanges import payload
from .launcher import REPOSITORY


def block_with(text: str) -> str:
    """The block of Python in README that contains a text."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    block, = [block for block in blocks if text in block]
    return block


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> ResidualRegistry:
    """What ``residuals_of`` returns in these tests; one tensor was compressed once."""
    made = ResidualRegistry()
    payload(Codec(TwoBitConfig(0.5, -0.5), made), "layer.weight", (64, 64), np.ones(4096, np.float32))
    monkeypatch.setattr(hvd_twobit.torch, "residuals_of", lambda optimizer: made)
    return made


def test_statistics_appear_in_tensorboard(registry: ResidualRegistry, tmp_path: pathlib.Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        exec(block_with("add_scalar"), {"optimizer": None, "writer": writer, "step": 7})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]} == pytest.approx({
        f"twobit/layer.weight/{name}": value
        for name, value in registry.stats()["layer.weight"].scalars().items()})
    assert events.Scalars("twobit/layer.weight/nonzero_share")[0].step == 7


def test_residuals_survive_a_file(registry: ResidualRegistry, tmp_path: pathlib.Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    before = registry["layer.weight"].copy()
    monkeypatch.chdir(tmp_path)
    save, load = block_with("in the job that resumes").strip().rsplit("\n", 1)
    rank = type("hvd", (), {"rank": staticmethod(lambda: 3)})
    names = {"optimizer": None, "hvd": rank}
    exec(save, names)
    registry.residual("layer.weight", (64, 64))[:] = 9
    exec(load, names)
    np.testing.assert_array_equal(registry["layer.weight"], before)
    assert (tmp_path / "residuals_3.npz").exists()


def test_files_of_residuals_become_those_of_another_number_of_ranks(
        registry: ResidualRegistry, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in range(4):
        registry.save(f"residuals_{rank}.npz")
    exec(block_with("redistribute("), {})
    assert len(list(tmp_path.glob("residuals_of_3_?.npz"))) == 3
    other = ResidualRegistry()
    other.load("residuals_of_3_0.npz")
    for name in registry:
        np.testing.assert_array_equal(other[name], 2 * registry[name])
