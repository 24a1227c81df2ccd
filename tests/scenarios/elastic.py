"""What workers of an elastic job tell the test and read from it; see ``tests.elastic_job``. No framework."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from hvd_twobit.codec import Codec
from hvd_twobit.residuals import ResidualRegistry


class Reporter:
    """This worker's file of events, one JSON object per line, and the orders for all.

    Args:
        folder: where both are.
        residuals: what is told of at each event.
    """

    def __init__(self, folder: str, residuals: ResidualRegistry) -> None:
        self._folder = pathlib.Path(folder)
        self._file = (self._folder / f"worker-{os.getpid()}.jsonl").open("a")
        self._residuals = residuals
        self._world = ""
        self.host = os.environ["HOROVOD_HOSTNAME"]

    def orders(self) -> dict[str, Any]:
        """What the test wants; to be read by one rank, for all."""
        return json.loads((self._folder / "orders.json").read_text())

    def tell(self, kind: str, weights: Sequence[np.ndarray] = (), **details: Any) -> None:
        """Write an event, with digests of weights, levels and residuals."""
        state = self._residuals.state_dict()
        event = {"kind": kind, "host": self.host, "world": self._world, "weights": _digest(enumerate(weights)),
                 "levels": _digest([*state["levels"].items(), *state["uncompressed_steps"].items()]),
                 "residual": _residual(state["residuals"]), **details}
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def world(self, name: str, weights: Sequence[np.ndarray], **details: Any) -> None:
        """Tell of a new world, whose name is the same on all of its ranks."""
        self._world = name
        self.tell("world", weights, **details)

    def serve(self, orders: Mapping[str, Any]) -> None:
        """Do what the orders want of this worker in the coming step."""
        if orders.get("stop_after_encode") == self.host:
            self._stop_after_encode()

    def _stop_after_encode(self) -> None:
        """Stand still for ever in the next step, between encode and decode."""
        original = Codec.encode

        def encode(codec: Codec, *args: Any) -> NoReturn:
            original(codec, *args)
            self.tell("encoded")
            while True:
                signal.pause()

        Codec.encode = encode


def leave() -> NoReturn:
    """End this process: Horovod 0.28.1 hangs now and then where a lone elastic process ends by itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _digest(arrays: Any) -> str:
    content = hashlib.blake2b(digest_size=8)
    for name, array in sorted(arrays, key=lambda item: str(item[0])):
        content.update(f"{name}:".encode() + np.ascontiguousarray(array).tobytes())
    return content.hexdigest()


def _residual(residuals: Mapping[str, np.ndarray]) -> str:
    if not residuals:
        return "none"
    return _digest(residuals.items()) if any(array.any() for array in residuals.values()) else "zero"
