"""A rank's state (``ResidualRegistry.state_dict``) in a file: NumPy's npz, plain arrays, no pickle.

The keys are ``format_version``, ``loss_scale`` where there is one, and ``residuals/<tensor>``, ``levels/<tensor>`` and
``uncompressed_steps/<tensor>``. A file appears under its name when it is complete: whatever ends the writing, what was
there before stays whole.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import ResidualError


def write(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write what ``state_dict()`` returned to a file of this name.

    Raises:
        OSError: the file cannot be written; one that was there is untouched.
    """
    arrays = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            arrays.update({f"{key}/{name}": np.asarray(part) for name, part in value.items()})
        else:
            arrays[key] = np.asarray(value)
    target = pathlib.Path(path)
    handle, unfinished = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:
        os.unlink(unfinished)
        raise


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``write`` was given, for ``load_state_dict``, which checks it.

    Raises:
        OSError: there is no such file.
        ResidualError: the file is not one of ``write``.
    """
    state: dict[str, Any] = {"residuals": {}, "levels": {}, "uncompressed_steps": {}}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for key in arrays.files:
                part, slash, name = key.partition("/")
                if not slash:
                    state[key] = arrays[key][()]
                elif part in state:
                    state[part][name] = arrays[key][()] if part == "uncompressed_steps" else arrays[key]
                else:
                    raise ResidualError(f"{os.fspath(path)} has an entry {key!r}, which no state of residuals has")
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError, AttributeError, NotImplementedError) as error:
        if isinstance(error, ResidualError):
            raise
        raise ResidualError(f"{os.fspath(path)} is not a file of residuals: {error}") from error
    return state
