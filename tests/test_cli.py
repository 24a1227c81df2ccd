"""``hvd-twobit``: what all its commands have in common."""

from __future__ import annotations

import importlib.util

import click
import pytest
from click.testing import CliRunner

from hvd_twobit import __version__
from hvd_twobit.cli import commands

COMMANDS = [(), ("bench",), ("bench", "kernels"), ("bench", "frontends"), ("bench", "collectives"), ("check",),
            ("plan",)]


def test_all_commands_are_listed_here() -> None:
    def paths(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        children = command.commands if isinstance(command, click.Group) else {}
        return [path, *(found for name, child in children.items() for found in paths(child, (*path, name)))]

    assert sorted(paths(commands)) == sorted(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_commands_print_json(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(commands, [*path, "--help"])
    assert result.exit_code == 0 and "Example" in result.output
    assert ("--json" in result.output) == (path not in ((), ("bench",)))


def test_the_version_is_printed() -> None:
    assert __version__ in CliRunner().invoke(commands, ["--version"]).output


@pytest.mark.parametrize("command", ["frontends", "collectives"])
def test_what_is_not_installed_is_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "horovod" else find_spec(name))
    result = CliRunner().invoke(commands, ["bench", command])
    assert (result.exit_code, result.output) == (1, "Error: not installed: horovod; `hvd-twobit check` tells what to "
                                                    "install\n")
