"""README and docs/: every block is run or checked, links lead somewhere, tables agree with the code, the site builds.

Blocks of Python run in the jobs of ``tests.jobs``, see ``tests.scenarios.documents``; commands that end soon are run,
others are read by the program that they are for, without being carried out.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import inspect
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from horovod.runner import launch
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin

import hvd_twobit.torch
from hvd_twobit import checkpoint, errors
from hvd_twobit.cli import commands
from hvd_twobit.codec import Codec
from hvd_twobit.config import HIERARCHICAL_VARIABLE, TRANSPORT_VARIABLE, TwoBitConfig
from hvd_twobit.residuals import ResidualRegistry

from .documents import DOCS, Block, blocks, of_kind, pages
from .exchanges import payload
from .jobs import results_of, waits_for_the_job
from .launcher import REPOSITORY, horovodrun
from .scenarios.documents import QUICK_START

FRAMEWORK = {"torch": "torch", "keras": "tensorflow", "tensorflow": "tensorflow"}
"""By the word after ``python``, the job in which a block is run."""

INDENTED_COMMANDS = ("make ", "python ")
"""How indented blocks of commands begin; pages that a command writes have no fences."""

NOT_RUN = {
    ("README.md", "2 ranks, 151,306 parameters"): "printed by make demo; test_examples checks accuracy and bytes",
    ("docs/convergence.md", "digits, SGD, 4 workers"): "printed by benchmarks/convergence.py, after hours",
    ("docs/design.md", "r = r + g"): "rules; test_kernels",
    ("docs/design.md", "errors, config "): "a list of modules, see below",
    ("docs/design.md", "quantize_pack("): "signatures with shapes; test_kernels",
    ("docs/design.md", "offset  bytes  field"): "bytes of a payload; test_payload",
    ("docs/design.md", "0      4  magic"): "bytes of sums; test_payload",
    ("docs/design.md", "exchange = for each bucket"): "a formula; test_cost_model",
    ("docs/grace.md", 'params = {"compressor": "terngrad"'): "GRACE's, for Horovod 0.21",
}
"""By page and beginning, the blocks that nothing runs, and why."""


def reason_not_to_run(block: Block) -> str | None:
    """What NOT_RUN says of a block."""
    return next((reason for (page, beginning), reason in NOT_RUN.items()
                 if page == block.page and block.text.lstrip().startswith(beginning)), None)


def shell_blocks() -> Sequence[Block]:
    return [block for block in blocks()
            if block.info == "sh" or not block.info and block.text.startswith(INDENTED_COMMANDS)]


def inline_tokens(page: pathlib.Path) -> Iterator[Any]:
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        yield from token.children or ()


def output_of(block: Block) -> Block | None:
    """The block of text that follows a block of commands at once: what they print."""
    return next((text for text in of_kind("text") if (text.page, text.line) == (block.page, block.end + 1)), None)


def messages() -> Sequence[Block]:
    """Blocks of text that quote a message of hvd_twobit."""
    return [block for block in of_kind("text") if block.page == "docs/troubleshooting.md"]


# Nothing is left out.

def test_every_block_is_run_or_checked_or_has_a_reason_not_to_be() -> None:
    treated = {*of_kind(*(f"python {front_end}" for front_end in FRAMEWORK), "pycon"), redistribution(),
               *shell_blocks(), *messages(), *filter(None, map(output_of, shell_blocks()))}
    # Sphinx carries out directives, and says so where it cannot.
    left = [f"{block} ({block.info or 'indented'}): {block.text[:60]!r}" for block in blocks()
            if block not in treated and not reason_not_to_run(block) and not block.info.startswith("{")]
    assert not left, "blocks that no test runs:\n" + "\n".join(left)


def test_every_reason_belongs_to_a_block() -> None:
    assert set(NOT_RUN.values()) == set(map(reason_not_to_run, blocks())) - {None}


# Python.

@pytest.mark.parametrize("front_end", FRAMEWORK)
@waits_for_the_job
def test_python_runs_on_two_ranks(front_end: str) -> None:
    found = of_kind(f"python {front_end}")
    assert found
    for result in results_of(FRAMEWORK[front_end], 2, "documents"):
        assert {str(block) for block in found} <= result["errors"].keys()
        for block in found:
            assert not result["errors"][str(block)], f"{block}:\n{result['errors'][str(block)]}"


@functools.cache
def told(front_end: str) -> dict[str, Any]:
    """What rank 0 told of the blocks."""
    return results_of(FRAMEWORK[front_end], 2, "documents")[0]


def printed(page: str, front_end: str) -> str:
    return "".join(text for block, text in told(front_end)["printed"].items()
                   if block.startswith(page) and block in map(str, of_kind(f"python {front_end}")))


@pytest.mark.parametrize("front_end", ["torch", "tensorflow"])
@waits_for_the_job
def test_the_quick_start_compresses_from_its_second_step_on(front_end: str) -> None:
    lines = re.findall(r"compressed (\d+) times, (\d+\.\d) times smaller", printed(QUICK_START, front_end))
    assert [times for times, _ in lines] == ["19", "19"]
    assert all(float(ratio) > 15 for _, ratio in lines)


@waits_for_the_job
def test_checkpoints_of_both_front_ends_are_a_file_or_folder_per_rank() -> None:
    torch_facts = told("torch")["facts"]["docs/checkpoints.md torch"]
    assert torch_facts == {"files": ["checkpoint_0.pt", "checkpoint_1.pt", "residuals_0.npz", "residuals_1.npz"],
                           "residuals": 0}  # The last block resets them.
    assert told("keras")["facts"]["docs/checkpoints.md keras"] == {"files": ["checkpoint_0", "checkpoint_1"]}


@pytest.mark.parametrize("front_end, steps", [("torch", 19), ("keras", 20)])
@waits_for_the_job
def test_statistics_appear_in_tensorboard(front_end: str, steps: int) -> None:
    scalars = told(front_end)["facts"][f"docs/tuning.md {front_end}"]["scalars"]
    for number in ("level", "nonzero_share", "residual_ratio", "nbytes"):
        assert list(scalars.values()) == [steps] * len(scalars)
        assert sum(re.fullmatch(rf"twobit/.+/{number}", tag) is not None for tag in scalars) == 2


@waits_for_the_job
def test_residuals_follow_the_loss_scale_and_a_state_its_batches() -> None:
    facts = told("torch")["facts"]
    assert facts["docs/mixed_precision.md torch"] == {"loss_scale": 65536.0, "scale": 65536.0}
    assert told("keras")["facts"]["docs/mixed_precision.md keras"] == {"loss_scale": 32768.0}
    assert facts["docs/elastic.md torch"] == {"batch": 40}
    assert "min_elements=0" in facts["docs/mxnet.md torch"]["compression"]


def redistribution() -> Block:
    """The block that one process runs, on the files of four ranks."""
    return next(block for block in of_kind("python") if "redistribute(" in block.text)


def test_files_of_residuals_become_those_of_another_number_of_ranks(tmp_path: pathlib.Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    block = redistribution()
    registry = ResidualRegistry()
    payload(Codec(TwoBitConfig(0.5, -0.5), registry), "layer.weight", (64, 64), np.ones(4096, np.float32))
    monkeypatch.chdir(tmp_path)
    for rank in range(4):
        registry.save(f"residuals_{rank}.npz")
    exec(compile(block.text, str(block), "exec"), {})
    assert len(list(tmp_path.glob("residuals_of_3_?.npz"))) == 3
    sums = checkpoint.read("residuals_of_3_0.npz")["residuals"]
    np.testing.assert_array_equal(sums["layer.weight"], 2 * registry["layer.weight"])


@pytest.mark.parametrize("block", of_kind("pycon"), ids=str)
def test_a_session_prints_what_the_page_says(block: Block) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {}, str(block), block.page, block.line)
    said: list[str] = []
    failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert attempted and not failed, "".join(said)


def test_code_of_other_projects_is_python() -> None:
    for block in of_kind("python"):
        ast.parse(block.text)


# Commands.

def commands_of(block: Block) -> Iterator[tuple[dict[str, str], list[str]]]:
    """What a block sets in the environment, and the words of the command, line by line."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        environment = dict(assignments(words))
        if words[len(environment):]:
            yield environment, words[len(environment):]


def assignments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The assignments with which a command begins."""
    for word in words:
        if not re.match(r"[A-Z_]+=", word):
            return
        name, _, value = word.partition("=")
        yield name, value


@pytest.fixture
def no_command_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """hvd-twobit reads and checks its arguments, and leaves it at that."""

    def silence(group: click.Group) -> None:
        for command in group.commands.values():
            if isinstance(command, click.Group):
                silence(command)
            else:
                monkeypatch.setattr(command, "callback", lambda **_: None)

    silence(commands)


def check_make(words: list[str]) -> None:
    """Its targets are in the Makefile."""
    done = subprocess.run(["make", "--dry-run", *words], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_hvd_twobit(words: list[str]) -> str:
    """What it prints; nothing where ``no_command_does_anything``."""
    result = CliRunner().invoke(commands, words, prog_name="hvd-twobit")
    assert result.exit_code == 0, result.output
    return result.output


def check_horovodrun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that horovodrun would run on each rank."""
    monkeypatch.setattr(sys, "argv", ["horovodrun", *words])
    arguments = launch.parse_args()
    assert arguments.use_gloo, "Horovod is built without MPI: horovodrun needs --gloo"
    return arguments.command


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command calls knows these arguments."""
    command, *arguments = words
    if command == "make":
        check_make(arguments)
    elif command == "hvd-twobit":
        check_hvd_twobit(arguments)
    elif command == "horovodrun":
        check_command(check_horovodrun(arguments, monkeypatch), monkeypatch)
    elif command == "python":  # A script of this repository, or the one that the reader is told to write.
        script, = arguments
        assert script == "train.py" or (REPOSITORY / script).is_file()
    else:  # It would change the environment.
        assert words == ["pip", "install", "."] and (REPOSITORY / "setup.py").is_file()


@pytest.mark.parametrize("block", shell_blocks(), ids=str)
def test_commands_are_understood_by_what_they_call(block: Block, monkeypatch: pytest.MonkeyPatch,
                                                   no_command_does_anything: None) -> None:
    for environment, words in commands_of(block):
        assert environment.keys() <= {TRANSPORT_VARIABLE, HIERARCHICAL_VARIABLE, "HOROVOD_DYNAMIC_PROCESS_SETS"}
        check_command(words, monkeypatch)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_commands_that_a_sentence_names_are_there(page: pathlib.Path) -> None:
    for token in inline_tokens(page):
        program, *words = token.content.split() if token.type == "code_inline" else [""]
        if program == "make":
            check_make(words)
        elif program == "hvd-twobit" or [program, *words[:2]] == ["python", "-m", "hvd_twobit"]:
            command: click.Command = commands
            for word in words[2:] if program == "python" else words:
                if isinstance(command, click.Group):
                    assert word in command.commands, f"{page.name}: {token.content}"
                    command = command.commands[word]
                elif word.startswith("-"):
                    assert any(word in parameter.opts for parameter in command.params), f"{page.name}: {token.content}"


@pytest.mark.parametrize("block", [block for block in shell_blocks() if output_of(block)], ids=str)
def test_a_command_prints_what_the_page_says(block: Block) -> None:
    (_, (command, *words)), = commands_of(block)
    output = output_of(block)
    assert command == "hvd-twobit" and output
    assert [line.rstrip() for line in check_hvd_twobit(words).splitlines()] == output.text.splitlines()


@pytest.mark.timeout(300)
def test_the_first_program_runs_as_the_quick_start_says(tmp_path: pathlib.Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    program = next(block for block in of_kind("python torch") if block.page == QUICK_START)
    (_, (command, *words)), = commands_of(next(
        block for block in of_kind("sh") if block.page == QUICK_START and "train.py" in block.text))
    assert command == "horovodrun"
    script = tmp_path / "train.py"
    script.write_text(program.text + 'print("trained by", hvd.rank())\nhvd.barrier()\n')
    assert check_horovodrun(words, monkeypatch) == ["python", "train.py"]
    output = horovodrun(2, [sys.executable, str(script)])
    assert all(f"trained by {rank}" in output for rank in range(2))


# Links, names and tables.

def anchors(page: pathlib.Path) -> set[str]:
    """The headings' anchors, as GitHub and MyST make them."""
    parser = MarkdownIt().use(anchors_plugin, max_level=3)
    return {str(token.attrs["id"]) for token in parser.parse(page.read_text()) if "id" in token.attrs}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: pathlib.Path) -> None:
    for token in inline_tokens(page):
        target = token.attrs.get("href") or token.attrs.get("src")
        if target is None or target.startswith(("http://", "https://")):
            continue
        path, _, anchor = str(target).partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: pathlib.Path) -> None:
    folders = ("benchmarks/", "docs/", "examples/", "hvd_twobit/", "requirements/", "scripts/", "tests/")
    for token in inline_tokens(page):
        if token.type == "code_inline" and re.fullmatch(rf"({'|'.join(folders)})[\w/.]*", token.content):
            path = REPOSITORY / token.content
            assert path.exists() or path.with_suffix(".py").exists(), f"{page.name}: {token.content}"


def test_the_design_lists_every_module() -> None:
    tree = next(block.text for block in blocks() if block.page == "docs/design.md" and "config  " in block.text)
    listed = set(re.findall(r"[\w.]+", " ".join(line[:31] for line in tree.splitlines())))
    for module in (REPOSITORY / "hvd_twobit").glob("*.py"):
        assert module.stem in {*listed, "__init__", "__main__"}, f"docs/design.md lacks {module.name}"


def rows(page: str, header: str) -> list[list[str]]:
    """Cells of the tables on a page whose first line begins so."""
    tables = re.findall(rf"^\| {header} .*\n\|[ :|-]+\n((?:\|.*\n)+)", (DOCS / page).read_text(), re.MULTILINE)
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
            for table in tables for line in table.splitlines()]


def test_the_table_of_parameters_has_every_argument_and_its_default() -> None:
    documented = {row[0].strip("`| "): ast.literal_eval(row[1]) for row in rows("parameters.md", "argument")}
    defaults = {field.name: field.default for field in dataclasses.fields(TwoBitConfig)}
    arguments = [name for name in [*inspect.signature(hvd_twobit.torch.TwoBit.__bases__[0]).parameters, "scaler"]
                 if name != "unknown"]
    assert documented == {name: "auto" if name == "threshold" else defaults.get(name) for name in arguments}


def test_the_table_of_the_environment_has_every_variable() -> None:
    source = "".join(path.read_text() for path in (REPOSITORY / "hvd_twobit").rglob("*.py"))
    assert {row[0].strip("`| ") for row in rows("parameters.md", "variable")} == set(
        re.findall(r"HVD_TWOBIT_[A-Z_]+", source))


def test_figures_of_exchanges_are_those_that_the_benchmark_wrote() -> None:
    written = (DOCS / "benchmarks.md").read_text()
    found = rows("when_it_helps.md", "link")
    assert len(found) == 9
    for row in found:
        link, ranks, *times = (cell.strip("| ") for cell in row)
        section = written.partition(f"### resnet50, {link}\n")[2].partition("\n#")[0]
        for gradients, time in zip(("fp32", "fp16", "2-bit, auto"), times):
            assert f"| {ranks} | {gradients} | {time} |" in section


@functools.cache
def texts_in_the_source() -> str:
    """Every text in hvd_twobit, a line each, with … where a value is put in."""
    found = []
    for path in (REPOSITORY / "hvd_twobit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…"
                                     for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[.\d]*[a-z]", "…", node.value))
    return "\n".join(text.replace("\n", " ") for text in found)


@pytest.mark.parametrize("block", messages(), ids=str)
def test_messages_are_those_of_the_code(block: Block) -> None:
    pieces = [re.escape(piece) for piece in block.text.strip().split("…")]
    assert re.search("[^\n]*?".join(pieces), texts_in_the_source()), block.text


# The site.

@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The documentation, built as ``make docs`` does it."""
    recipe = subprocess.run(["make", "--dry-run", "--silent", "docs"], cwd=REPOSITORY, capture_output=True, text=True)
    line = next(line for line in recipe.stdout.splitlines() if "sphinx" in line)
    built = tmp_path_factory.mktemp("docs")
    words = [str(built) if word == "build/docs" else word for word in shlex.split(line)]
    assert "-W" in words and str(built) in words
    done = subprocess.run([sys.executable, *words[1:]], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


def test_the_site_has_every_page_and_picture(site: pathlib.Path) -> None:
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in site.glob("*.html")}
    assert {picture.name for picture in [*DOCS.glob("*.svg"), *DOCS.glob("*.png")]} == {
        picture.name for picture in (site / "_images").iterdir()}


def test_the_reference_has_what_users_import(site: pathlib.Path) -> None:
    reference = (site / "api.html").read_text()
    names = [f"hvd_twobit.{front_end}.{name}" for front_end, exported in (
        ("torch", ["TwoBit", "as_tensors", "residuals_of"]),
        ("tensorflow", ["TwoBit", "CheckpointedResiduals", "residuals_of"])) for name in exported]
    assert sorted(hvd_twobit.torch.__all__) == ["TwoBit", "as_tensors", "residuals_of"]
    names += [f"hvd_twobit.errors.{name}" for name in vars(errors) if name.endswith("Error")]
    for name in [*names, "hvd_twobit.residuals.ResidualRegistry.load_state_dict"]:
        assert f'id="{name}"' in reference, name


def test_the_reference_has_every_command_and_option(site: pathlib.Path) -> None:
    reference = (site / "cli.html").read_text()

    def check(path: str, command: click.Command) -> None:
        assert path in reference
        if isinstance(command, click.Group):
            for name, part in command.commands.items():
                check(f"{path} {name}", part)
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                for option in parameter.opts:
                    assert option in reference, f"{path} {option}"

    check("hvd-twobit", commands)
