"""Is what a front end needs installed? Told when it is imported, by what has to be done. No framework.

A framework, Horovod compiled against it, and a version of Horovod that is known: where one is not there, what Python
tells is a module that nobody asked for, and what Horovod 0.28.1 tells is printed, or an undefined symbol.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
from collections.abc import Iterator

from .errors import RequirementError, TwoBitError
from .horovod_form import SUPPORTED_HOROVOD, check_version

_FRAMEWORKS = {"torch": ("PyTorch", "HOROVOD_WITH_PYTORCH"), "tensorflow": ("TensorFlow", "HOROVOD_WITH_TENSORFLOW")}
"""By the module of a framework: its name, and the variable that has Horovod's installation insist on it."""


@contextlib.contextmanager
def explained(framework: str) -> Iterator[None]:
    """Turn an error of the imports within it into one that says what has to be installed.

    Args:
        framework: name of the front end, which is that of the framework's module and of Horovod's front end.

    Raises:
        RequirementError: the framework, Horovod, or Horovod's library for it is missing or does not load.
        UnsupportedHorovodError: Horovod's version is not one that was tested.
    """
    try:
        if _folder("horovod") is not None:  # First of all: another version may fail in any way.
            check_version(importlib.import_module("horovod").__version__)
        yield
    except TwoBitError:
        raise
    except Exception as error:
        reason = _reason(framework, error)
        if reason is None:
            raise
        raise RequirementError(f"hvd_twobit.{framework} {reason}") from error


def _reason(framework: str, error: Exception) -> str | None:
    """What is missing, and what to do; None where it is something else."""
    name, variable = _FRAMEWORKS[framework]
    build = (f"{variable}=1 pip install --no-build-isolation --no-binary horovod horovod=={SUPPORTED_HOROVOD[-1]} (or "
             "as scripts/setup.sh of hvd_twobit does)")
    if _folder(framework) is None:
        return f"needs {name}, which is not installed: install it, and then Horovod, which is compiled against it"
    folder = _folder("horovod")
    if folder is None:
        return f"needs Horovod, which is not installed: compile it against the {name} that is here, {build}"
    if not list((folder / framework).glob("mpi_lib*.so")):
        return f"needs a Horovod that was compiled with {name}, and the installed one was not: compile it anew, {build}"
    try:
        version = importlib.import_module(framework).__version__
    except Exception:
        return None  # The framework itself tells best what it lacks.
    if "mpi_lib" in str(error):
        return (f"cannot load Horovod's library for {name} ({error}): it was compiled against another {name} than "
                f"{version}, which is installed; compile it anew, {build}")
    return None


def _folder(module: str) -> pathlib.Path | None:
    """Where a package is, or None if there is none."""
    try:
        found = importlib.util.find_spec(module)
    except ValueError:  # It has no specification: someone put something else in its place.
        return None
    return pathlib.Path(found.origin).parent if found is not None and found.origin is not None else None
