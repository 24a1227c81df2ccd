"""The documentation's blocks of Python, run on real ranks as a reader would: one after the other, page by page.

Every page begins with the names with which the quick start's program of the framework ends (``hvd``, ``model``,
``optimizer``, ``inputs``, ...), and its blocks find those of the blocks before. The working directory is empty when a
page begins, and the same for all ranks.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pathlib
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.documents import Block, of_kind

QUICK_START = "docs/quickstart.md"

Facts = Mapping[str, Callable[[dict[str, Any]], Any]]


def run(front_ends: Sequence[str], hvd: Any, facts: Facts) -> dict[str, Any]:
    """Run the blocks of these front ends, the words after ``python``.

    Args:
        front_ends: each has a program in the quick start, its first block there.
        hvd: Horovod's module of the framework.
        facts: what to tell of the names with which a page ends; by page and front end. Rank 0 is asked.

    Returns:
        By block ``"errors"``, a traceback or an empty text, and ``"printed"``; by page and front end ``"facts"``.
    """
    told: dict[str, Any] = {"errors": {}, "printed": {}, "facts": {}}
    for front_end in front_ends:
        program, *others = sorted(of_kind(f"python {front_end}"), key=lambda block: block.page != QUICK_START)
        for page, blocks in itertools.groupby(others, key=lambda block: block.page):
            with _one_folder(hvd):
                names: dict[str, Any] = {}
                for block in [program, *blocks]:
                    printed = io.StringIO()
                    told["errors"][str(block)] = _error(block, names, printed)
                    told["printed"][str(block)] = printed.getvalue()
                    hvd.allgather_object(0, name="end of a block")  # Files that one rank has written are there.
                of_page = f"{page} {front_end}"
                if of_page in facts and hvd.rank() == 0:
                    told["facts"][of_page] = facts[of_page](names)
    return told


def _error(block: Block, names: dict[str, Any], printed: io.StringIO) -> str:
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
    except Exception:
        return traceback.format_exc()
    return ""


@contextlib.contextmanager
def _one_folder(hvd: Any) -> Iterator[None]:
    """A new working directory, for all ranks the same."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="hvd_twobit_docs_") as mine:
        os.chdir(hvd.broadcast_object(mine, root_rank=0, name="folder of a page"))
        try:
            yield
        finally:
            os.chdir(before)
            hvd.allgather_object(0, name="end of a page")  # Rank 0 removes it now.


def scalars_in(folder: str) -> dict[str, int]:
    """By tag, the step of the last entry of TensorBoard's files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, {"tensors": 0})
    events.Reload()
    tags = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    tags.update({tag: events.Tensors(tag) for tag in events.Tags()["tensors"]})
    return {tag: int(entries[-1].step) for tag, entries in tags.items()}


def files() -> list[str]:
    """What is in the working directory, by name."""
    return sorted(str(path) for path in pathlib.Path().glob("*"))
