"""scripts/setup.sh: what it trusts, what it builds once, and what it says when something is missing or fails.

All but one of the tests run it in a copy of the checkout's set-up files, with an interpreter that stands in for
Python: it records what it is asked to install, installs nothing, and fails where the test wants it to.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

# Questions (python -c) go to the interpreter of the tests; venv and pip only leave traces.
STAND_IN = r"""#!/usr/bin/env bash
echo "$*" >> "$CALLS"
if [ -n "${FAIL:-}" ] && [[ "$*" == *$FAIL* ]]; then echo "no luck with $FAIL"; exit 1; fi
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip wheel "*)
        while [ "$1" != --wheel-dir ]; do shift; done
        mkdir "$2" && touch "$2/begun" && /bin/sleep "${BUILD_SECONDS:-0}" && mv "$2/begun" "$2/horovod-0-any.whl" ;;
    "-m pip "*"--report "*)
        while [ "$1" != --report ]; do shift; done
        echo '{"metadata": {"name": "nvidia-cublas"}}' > "$2" ;;
    "-m pip "*) ;;
    *"gloo_built"*) ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Checkout:
    """A copy of what scripts/setup.sh needs, and how to run it there."""

    def __init__(self, path):
        self.path = path
        for name in ("scripts", "requirements", "hvd_twobit"):
            shutil.copytree(REPOSITORY / name, path / name)
        for name in ("setup.cfg", "setup.py"):
            shutil.copy(REPOSITORY / name, path)
        self.python = path / "stand-in"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        self.calls_file = path / "calls"
        self.environment = {**os.environ, "PYTHON": str(self.python), "REAL_PYTHON": sys.executable,
                            "CALLS": str(self.calls_file), "XDG_CACHE_HOME": str(path.parent / "cache")}

    def start(self, **environment):
        return subprocess.Popen([str(self.path / "scripts" / "setup.sh")], env={**self.environment, **environment},
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                start_new_session=True)

    def setup(self, **environment):
        """Run it; exit status and what it printed."""
        self.calls_file.unlink(missing_ok=True)
        process = self.start(**environment)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def calls(self, part):
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [line for line in lines if part in line]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "checkout")


def path_without(tmp_path, *names):
    """A PATH with every command of the present one but these."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for command in pathlib.Path(directory).glob("*"):
            link = folder / command.name
            link.unlink(missing_ok=True)
            link.symlink_to(command)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return folder


def test_a_second_run_has_nothing_to_do(checkout):
    status, output = checkout.setup()
    assert status == 0, output
    assert "Ready" in output
    start = time.monotonic()
    assert checkout.setup() == (0, "")
    assert time.monotonic() - start < 5
    assert not checkout.calls("-m ")


def test_changed_requirements_make_a_new_environment(checkout):
    checkout.setup()
    (checkout.path / ".venv" / "leftover").touch()
    with open(checkout.path / "requirements" / "project.txt", "a") as file:
        file.write("another\n")
    status, output = checkout.setup()
    assert status == 0, output
    assert len(checkout.calls("-m venv")) == 1
    assert not (checkout.path / ".venv" / "leftover").exists()


def test_a_checkout_that_was_moved_makes_a_new_environment(checkout, tmp_path):
    checkout.setup()
    checkout.path = checkout.path.rename(tmp_path / "moved")
    checkout.environment["PYTHON"] = str(checkout.path / "stand-in")
    checkout.calls_file = checkout.path / "calls"
    checkout.environment["CALLS"] = str(checkout.calls_file)
    assert checkout.setup()[0] == 0
    assert len(checkout.calls("-m venv")) == 1


def test_changed_metadata_only_installs_the_project_again(checkout):
    checkout.setup()
    with open(checkout.path / "setup.cfg", "a") as file:
        file.write("# changed\n")
    status, output = checkout.setup()
    assert status == 0, output
    assert len(checkout.calls("-m pip")) == len(checkout.calls("--editable")) == 1
    assert checkout.setup() == (0, "")


@pytest.mark.parametrize("part, step", [
    ("-m venv", "virtual environment"),
    ("pip install --dry-run", "looking for a CPU build"),
    ("frameworks.txt", "all other requirements"),
    ("pip wheel", "Horovod 0.28.1: building"),
    ("--editable", "hvd_twobit"),
    ("gloo_built", "checking that PyTorch, TensorFlow and Horovod load"),
])
def test_a_failed_step_is_named_and_the_next_run_starts_anew(checkout, part, step):
    status, output = checkout.setup(FAIL=part)
    assert status != 0
    assert re.search(f"failed: .*{step}", output)
    assert f"no luck with {part}" in output  # the end of the log
    assert str(checkout.path / "build" / "setup.log") in output
    status, output = checkout.setup()
    assert status == 0, output
    assert len(checkout.calls("-m venv")) == 1


def test_an_interrupted_build_is_neither_trusted_nor_cached(checkout, tmp_path):
    process = checkout.start(BUILD_SECONDS="60")
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").rglob("begun")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    status, output = checkout.setup()
    assert status == 0, output
    assert "building" in output
    assert len(checkout.calls("-m venv")) == len(checkout.calls("pip wheel")) == 1


def test_a_second_checkout_takes_the_wheel_from_the_cache(checkout, tmp_path):
    checkout.setup()
    second = Checkout(tmp_path / "second")
    status, output = second.setup()
    assert status == 0, output
    assert "from the cache" in output
    assert not second.calls("pip wheel")


def test_two_checkouts_at_once_build_one_wheel(checkout, tmp_path):
    second = Checkout(tmp_path / "second")
    processes = [each.start(BUILD_SECONDS="2") for each in (checkout, second)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len(checkout.calls("pip wheel")) + len(second.calls("pip wheel")) == 1


def test_the_wheel_is_kept_under_all_versions_that_it_depends_on(checkout, tmp_path):
    from importlib.metadata import version

    checkout.setup()
    (wheel,) = (tmp_path / "cache" / "hvd_twobit").glob("*/*.whl")
    key = wheel.parent.name
    assert key.startswith("horovod-0.28.1-")
    for part in (f"torch-{version('torch')}", f"tensorflow-{version('tensorflow-cpu')}", sys.implementation.cache_tag,
                 os.uname().machine):
        assert part in key


def test_the_download_of_cuda_is_announced_before_it_begins(checkout, tmp_path):
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "sleep").write_text(f"#!/bin/sh\ncp {checkout.calls_file} {tmp_path}/calls-before\n")
    (commands / "sleep").chmod(0o755)
    status, output = checkout.setup(FAIL="==2.13.0+cpu", PATH=f"{commands}:{os.environ['PATH']}")
    assert status == 0, output
    assert "NVIDIA" in output and "PIP_EXTRA_INDEX_URL" in output
    assert "build/torch.txt" not in (tmp_path / "calls-before").read_text()
    assert checkout.calls("build/torch.txt")


def test_missing_tools_are_named_with_their_packages_at_once(checkout, tmp_path):
    folder = path_without(tmp_path, "cmake", "g++")
    status, output = checkout.setup(PATH=str(folder), CXX="")
    assert status != 0
    assert "cmake 3.13 or newer" in output and "g++" in output
    assert "apt-get install g++ cmake" in output
    assert not (checkout.path / ".venv").exists()


def test_a_cmake_that_is_too_old_is_named_with_its_version(checkout, tmp_path):
    folder = path_without(tmp_path, "cmake")
    (folder / "cmake").write_text("#!/bin/sh\necho cmake version 3.9.6\n")
    (folder / "cmake").chmod(0o755)
    status, output = checkout.setup(PATH=str(folder))
    assert status != 0
    assert "cmake 3.13 or newer (found 3.9.6)" in output


def test_a_host_name_that_horovod_could_not_resolve_is_named(checkout, tmp_path):
    folder = path_without(tmp_path, "uname")
    (folder / "uname").write_text("#!/bin/sh\necho nowhere.invalid\n")
    (folder / "uname").chmod(0o755)
    status, output = checkout.setup(PATH=str(folder))
    assert status != 0
    assert "nowhere.invalid, has no address" in output


def test_an_unsupported_python_is_refused_before_anything_is_made(checkout):
    checkout.python.write_text("#!/bin/sh\necho 3.13\n")
    status, output = checkout.setup()
    assert status != 0
    assert "needs Python 3.9, 3.10 or 3.11" in output and "3.13" in output
    assert not (checkout.path / ".venv").exists()


def test_an_environment_of_the_users_own_is_left_alone(checkout):
    (checkout.path / ".venv").mkdir()
    (checkout.path / ".venv" / "mine").touch()
    status, output = checkout.setup()
    assert status != 0
    assert "was not made by this script" in output
    assert (checkout.path / ".venv" / "mine").exists()


def test_a_pip_that_reaches_no_index_ends_in_an_error(checkout):
    status, output = checkout.setup(PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_FIND_LINKS="",
                                    PIP_CONFIG_FILE=os.devnull)
    assert status != 0
    assert "failed: virtual environment" in output
    assert "ERROR: " in output  # pip's reason
    assert (checkout.path / ".venv" / "hvd_twobit.stamp").read_text() == ""
