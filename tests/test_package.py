"""What users install: the source distribution and the wheel that is built from it, in an environment of its own.

The environment sees the packages of the tests' environment (Horovod and the frameworks, too large to be installed
again), but not the hvd_twobit that is installed there for development.
"""

from __future__ import annotations

import email.message
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

import hvd_twobit

from .launcher import REPOSITORY

ENVIRONMENT = {**{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
               "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
SOURCES = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "hvd_twobit").rglob("*.py"))


def run(*command: str | os.PathLike[str], cwd: pathlib.Path, status: int = 0) -> str:
    """What a command prints; it has to end with the status."""
    result = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from what a checkout holds, leftovers of work in it included."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("hvd_twobit", "tests"):
        shutil.copytree(REPOSITORY / name, folder / name)
    (folder / "hvd_twobit" / "kernels" / "__pycache__").mkdir(exist_ok=True)
    (folder / "hvd_twobit" / "kernels" / "__pycache__" / "cpu.py.nbi").touch()  # Numba's machine code
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", cwd=folder)
    made, = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: pathlib.Path) -> pathlib.Path:
    """Built from the source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    folder, = (path for path in sdist.parent.iterdir() if path.is_dir())
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('..')", cwd=folder)
    made, = sdist.parent.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The interpreter of the environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("user")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')", cwd=folder)
    # A path file in a folder that a path file names is not read: there the hvd_twobit under development is found.
    pathlib.Path(site, "packages.pth").write_text(sysconfig.get_path("purelib"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--ignore-installed", wheel,
        cwd=folder)
    return python


def test_the_source_distribution_holds_sources_and_metadata_and_nothing_else(sdist: pathlib.Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    assert sorted(name for name in names if "egg-info" not in name) == sorted([
        *SOURCES, "hvd_twobit/py.typed", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md",
        "pyproject.toml", "setup.cfg", "setup.py"])


def test_the_wheel_holds_the_package_and_its_licence_and_nothing_else(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        licences = [archive.read(name) for name in names if pathlib.PurePath(name).name == "LICENSE"]
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted([*SOURCES, "hvd_twobit/py.typed"])
    assert licences == [(REPOSITORY / "LICENSE").read_bytes()]
    assert wheel.name.endswith("-py3-none-any.whl")  # nothing is compiled when it is installed


def test_requirements_are_neither_horovod_nor_a_framework(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name, = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata: email.message.Message = email.message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist", [])
    assert [line for line in required if "extra ==" not in line] == ["click", "numba", "numpy", "rich"]
    assert {extra for extra in metadata.get_all("Provides-Extra", [])} >= {"torch", "tensorflow", "test"}
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_installed_command_tells_its_version(python: pathlib.Path) -> None:
    printed = run(python.with_name("hvd-twobit"), "--version", cwd=python.parent)
    assert printed == f"hvd-twobit, version {hvd_twobit.__version__}\n"
    assert importlib.metadata.version("hvd-twobit") == hvd_twobit.__version__


def test_importing_the_package_imports_no_other_package(python: pathlib.Path) -> None:
    program = "import hvd_twobit, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    imported = set(run(python, "-c", program, cwd=python.parent).split())
    assert imported - {"hvd_twobit", "__main__"} <= sys.stdlib_module_names | {"sitecustomize", "usercustomize"}


def test_kernels_are_loaded_when_they_are_first_used(python: pathlib.Path) -> None:
    """Numba takes a second."""
    program = "import sys, hvd_twobit.named, hvd_twobit.codec; print('numba' in sys.modules)"
    assert run(python, "-c", program, cwd=python.parent).strip() == "False"


USER = '''
from hvd_twobit import checkpoint
from hvd_twobit.keras import callbacks
from hvd_twobit.tensorflow import TwoBit as TensorFlowTwoBit
from hvd_twobit.torch import TwoBit, as_tensors, residuals_of
import torch

optimizer = torch.optim.SGD([torch.zeros(3)], lr=0.1)
TwoBit(0.5, transport="sra", scaler=torch.amp.GradScaler())
checkpoint.write("file", residuals_of(optimizer).state_dict())
share: float = residuals_of(optimizer).stats()["weight"].nonzero_share
as_tensors(checkpoint.read("file"))
'''
MISTAKES = [
    "TwoBit(min_elements='1024')", "TwoBit(min_element=1024)", "TensorFlowTwoBit(threshold=[0.5])",
    "TensorFlowTwoBit(scaler=None)", "residuals_of(optimizer).save(3)",
    "residuals_of(optimizer).stats()['weight'].nonzero", "TwoBit().named(7)", "checkpoint.redistribute([], '3')",
    "callbacks.TwoBitTensorBoard(3)", "from hvd_twobit.torch import TwoBits",
]


def test_a_type_checker_reports_what_a_users_script_gets_wrong_and_nothing_else(python: pathlib.Path,
                                                                                tmp_path: pathlib.Path) -> None:
    (tmp_path / "user.py").write_text(USER + "\n".join(MISTAKES) + "\n")
    # PyTorch's own types take most of mypy's time, and are not what is tested.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    printed = run(sys.executable, "-m", "mypy", "--python-executable", python, "--no-error-summary", "user.py",
                  cwd=tmp_path, status=1)
    first = len(USER.splitlines()) + 1
    found = sorted({int(line.split(":")[1]) - first for line in printed.splitlines() if ": error: " in line})
    assert found == list(range(len(MISTAKES))), printed
    assert all(line.startswith("user.py:") for line in printed.splitlines()), printed
