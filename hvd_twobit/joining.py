"""Ranks that have joined (``hvd.join``) come back with the levels of those that went on.

A rank that has called ``hvd.join()`` does not see what the others exchange meanwhile, so that its levels are old when
``join`` returns. Then the front ends' hooks have the last rank to join hand over what has to be equal on all ranks:
``shared_of_all`` there, ``follow`` everywhere. Residuals are a rank's own and stay.
"""

from __future__ import annotations

import collections
import pickle
import threading
import weakref

from .residuals import ResidualRegistry

Key = tuple[str, int]
"""A name, and how many were made of that name before: the same on every rank, unlike what is still alive."""

_lock = threading.Lock()
_made: collections.Counter[str] = collections.Counter()
_alive: weakref.WeakValueDictionary[Key, ResidualRegistry] = weakref.WeakValueDictionary()


def track(name: str, residuals: ResidualRegistry) -> None:
    """Bring a registry up to date whenever this rank has joined, for as long as it is alive.

    Args:
        name: what it belongs to; the same on every rank. Registries of one name are told apart by their order.
        residuals: the registry.
    """
    with _lock:
        _alive[name, _made[name]] = residuals
        _made[name] += 1


def shared_of_all() -> bytes:
    """What has to be equal on all ranks of every registry that is alive here, for ``follow``."""
    return pickle.dumps({key: residuals.shared() for key, residuals in _tracked()})


def follow(shared: bytes) -> None:
    """Take over what ``shared_of_all`` returned on one rank; every rank calls this with the same bytes.

    A registry that rank does not have begins anew everywhere, but for residuals; so does one of which each rank of a
    machine knows its shares only.

    Raises:
        ResidualError: a tensor has another shape on that rank.
    """
    found = pickle.loads(shared)  # From a rank of the same job, as with Horovod's own broadcast_object.
    for key, residuals in _tracked():
        if key in found and residuals.ranks_per_machine == 1:
            residuals.take_shared(found[key])
        else:
            residuals.forget_levels()


def _tracked() -> list[tuple[Key, ResidualRegistry]]:
    with _lock:
        return sorted(_alive.items())
