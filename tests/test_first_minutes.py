"""What a new user's first mistakes are told: something is missing, or was imported from the wrong place."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import horovod
import horovod.tensorflow
import horovod.torch
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_twobit.keras
import hvd_twobit.tensorflow
import hvd_twobit.torch
from hvd_twobit.errors import ConfigError, WrongImportError

from .launcher import REPOSITORY

HOROVOD = pathlib.Path(horovod.__file__).parent
BUILD = r"HOROVOD_WITH_{}=1 pip install --no-build-isolation --no-binary horovod horovod==0\.28\.1"


def last_line(program: str, path: pathlib.Path | None = None) -> str:
    """The last line of the traceback with which a program ends; packages under ``path`` come first."""
    folders = [str(folder) for folder in (path, REPOSITORY) if folder is not None]
    ran = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120, cwd="/",
                         env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("front_end, missing, told", [
    ("torch", "torch", r"hvd_twobit\.torch needs PyTorch, which is not installed: install it, and then Horovod"),
    ("tensorflow", "tensorflow", r"hvd_twobit\.tensorflow needs TensorFlow, which is not installed: install it, and"),
    ("torch", "horovod", rf"hvd_twobit\.torch needs Horovod, which is not installed: .* {BUILD.format('PYTORCH')}"),
    ("keras", "horovod", rf"hvd_twobit\.tensorflow needs Horovod, which .* {BUILD.format('TENSORFLOW')}"),
])
def test_what_is_not_installed_is_told_with_what_to_install(front_end: str, missing: str, told: str) -> None:
    line = last_line(f"import sys; sys.modules['{missing}'] = None; import hvd_twobit.{front_end}")
    assert re.match("hvd_twobit.errors.RequirementError: " + told, line), line


@pytest.fixture
def other_horovod(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with Horovod's Python files, without its libraries."""
    shutil.copytree(HOROVOD, tmp_path / "horovod", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


@pytest.mark.parametrize("front_end, name", [("torch", "PyTorch"), ("tensorflow", "TensorFlow")])
def test_a_horovod_without_the_framework_is_told(front_end: str, name: str, other_horovod: pathlib.Path) -> None:
    line = last_line(f"import hvd_twobit.{front_end}", other_horovod)
    assert re.match(rf"hvd_twobit\.errors\.RequirementError: hvd_twobit\.{front_end} needs a Horovod that was compiled "
                    rf"with {name}, and the installed one was not: .* {BUILD.format(name.upper())}", line), line


def test_a_horovod_that_was_compiled_against_another_pytorch_is_told(other_horovod: pathlib.Path) -> None:
    for library in (HOROVOD / "torch").glob("mpi_lib*.so"):
        # The dynamic linker no longer finds what the library asks PyTorch's for.
        code = library.read_bytes().replace(b"\0_ZN2at", b"\0_ZN2aq").replace(b"\0_ZN3c10", b"\0_ZN3c1q")
        (other_horovod / "horovod" / "torch" / library.name).write_bytes(code)
    line = last_line("import hvd_twobit.torch", other_horovod)
    assert re.match(r"hvd_twobit\.errors\.RequirementError: hvd_twobit\.torch cannot load Horovod's library for "
                    rf"PyTorch \(.*undefined symbol.*compile it anew, {BUILD.format('PYTORCH')}", line), line


@pytest.mark.parametrize("front_end", ["torch", "keras"])
def test_another_version_of_horovod_is_told_before_anything_of_it_is_used(front_end: str,
                                                                          tmp_path: pathlib.Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text('__version__ = "0.27.0"')
    assert last_line(f"import hvd_twobit.{front_end}", tmp_path) == (
        "hvd_twobit.errors.UnsupportedHorovodError: Horovod 0.27.0 is installed, hvd_twobit supports Horovod 0.28.1: "
        "install horovod==0.28.1")


@pytest.mark.parametrize("name", ["TwoBit", "residuals_of"])
def test_the_package_itself_names_the_front_ends_to_import_from(name: str) -> None:
    with pytest.raises(WrongImportError, match=rf"use `from hvd_twobit\.torch import {name}` with horovod\.torch, "):
        exec(f"from hvd_twobit import {name}")
    with pytest.raises(WrongImportError):
        getattr(hvd_twobit, name)


def test_a_front_end_that_was_not_imported_is_told_with_its_import() -> None:
    assert last_line("import hvd_twobit; hvd_twobit.torch.TwoBit") == (
        "AttributeError: hvd_twobit.torch is not imported: write `import hvd_twobit.torch`, or `from hvd_twobit.torch "
        "import TwoBit`")
    with pytest.raises(AttributeError, match="module 'hvd_twobit' has no attribute 'jax'"):
        hvd_twobit.jax  # noqa: B018


def in_torch(compression: Any) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    horovod.torch.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), compression=compression)


def in_keras(compression: Any) -> None:
    import horovod.tensorflow.keras

    horovod.tensorflow.keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=compression)


def in_tape(compression: Any) -> None:
    horovod.tensorflow.DistributedGradientTape(tf.GradientTape(), compression=compression)


def in_allreduce_of_torch(compression: Any) -> None:
    horovod.torch.allreduce(torch.zeros(3), compression=compression)


def in_allreduce_of_tensorflow(compression: Any) -> None:
    horovod.tensorflow.allreduce(tf.zeros(3), compression=compression)


@pytest.mark.parametrize("use", [in_torch, in_allreduce_of_torch, in_keras, in_tape, in_allreduce_of_tensorflow])
@pytest.mark.parametrize("made", [lambda front_end: front_end.TwoBit, lambda front_end: front_end.TwoBit(0.5)],
                         ids=["class", "instance"])
def test_a_twobit_of_the_other_framework_is_told_where_it_is_passed(use: Any, made: Any) -> None:
    right, wrong = hvd_twobit.torch, hvd_twobit.tensorflow
    if "torch" not in use.__name__:
        right, wrong = wrong, right
    with pytest.raises(ConfigError) as told:
        use(made(wrong))
    assert str(told.value) == (f"{wrong.__name__}.TwoBit does not go with horovod.{right.__name__.split('.')[1]}: take "
                               f"TwoBit from {right.__name__}")


@pytest.mark.parametrize("use, module, right", [
    (in_torch, hvd_twobit.torch, "hvd_twobit.torch"), (in_allreduce_of_torch, hvd_twobit, "hvd_twobit.torch"),
    (in_keras, hvd_twobit.keras, "hvd_twobit.tensorflow"),
    (in_allreduce_of_tensorflow, hvd_twobit.tensorflow, "hvd_twobit.tensorflow")])
def test_a_module_in_place_of_the_class_is_told(use: Any, module: Any, right: str) -> None:
    with pytest.raises(ConfigError) as told:
        use(module)
    assert str(told.value) == f"compression={module.__name__} is a module: pass the class in it, {right}.TwoBit"


def test_a_tensor_of_the_other_framework_is_told_where_horovod_was_not_prepared_for_it() -> None:
    """With the right front end not imported, Horovod itself calls the compression."""
    with pytest.raises(ConfigError, match=r"given a tensorflow\..*EagerTensor, no torch\.Tensor: with horovod\.tensor"):
        hvd_twobit.torch.TwoBit.compress(tf.zeros(2048))
    with pytest.raises(ConfigError, match=r"given a torch\.Tensor: with horovod\.torch take TwoBit from hvd_tw"):
        hvd_twobit.tensorflow.TwoBit.compress(torch.zeros(2048))
    with pytest.raises(ConfigError, match=r"given a numpy\.ndarray, no torch\.Tensor"):
        hvd_twobit.torch.TwoBit.compress(np.zeros(2048))
