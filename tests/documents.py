"""The code blocks of README and of the pages in docs/: what there is, and of which kind.

A block says by its first line what is done with it: ```` ```python torch ```` is run by PyTorch's ranks, ``keras`` and
``tensorflow`` by TensorFlow's, plain ``python`` and ``pycon`` in one process, ``sh`` by a shell, ``{...}`` by Sphinx.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from markdown_it import MarkdownIt

from .launcher import REPOSITORY

DOCS = REPOSITORY / "docs"


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced or indented block.

    Attributes:
        page: its path in the repository.
        line: number of its first line, from 1.
        end: number of the first line behind it.
        info: what follows the fence; empty for an indented block.
        text: the lines within.
    """

    page: str
    line: int
    end: int
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> Sequence[pathlib.Path]:
    """README and every page of the documentation."""
    return [REPOSITORY / "README.md", *sorted(DOCS.glob("**/*.md"))]


@functools.cache
def blocks() -> Sequence[Block]:
    """All of them, page by page, in the order in which they are read."""
    return [Block(str(page.relative_to(REPOSITORY)), token.map[0] + 1, token.map[1] + 1,
                  token.info.strip(), token.content)
            for page in pages() for token in MarkdownIt().enable("table").parse(page.read_text())
            if token.type in ("fence", "code_block") and token.map]


def of_kind(*infos: str) -> Sequence[Block]:
    """Those that say one of these after the fence."""
    return [block for block in blocks() if block.info in infos]
