"""Runs an example as one rank, and writes to a file of its own what the example does not print.

    python -m tests.example_rank FOLDER [--stop-at HOST:ENCODES] EXAMPLE [ARGUMENT ...]

The file, ``worker-PID.jsonl``, has the form of those of ``tests.elastic_job``: ``start``; ``encoded``, where the rank
of that host stands still for ever after so many calls of ``Codec.encode``, one per tensor and step; ``end``, with this
rank's weights as a digest, the compression that was handed to Horovod, and how often each tensor was compressed. The
example is run as it is; Horovod's functions are only watched.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pathlib
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_twobit.codec import Codec


def watch(module: Any, function: str, note: Callable[..., None]) -> None:
    """Call ``note(result, *args, **kwargs)`` after each call of a function of a module."""
    original = getattr(module, function)

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    setattr(module, function, watched)


class Watch:
    """What an example has handed to Horovod."""

    compression: Any = None
    compressing: Any = None
    variables: Any = None

    def compress(self, made: Any, *args: Any, compression: Any, **kwargs: Any) -> None:
        """An optimizer or tape was made."""
        self.compressing, self.compression = made, compression

    def broadcast(self, _: None, variables: Any, root_rank: int) -> None:
        """TensorFlow's variables were broadcast: first the model's, later the optimizer's."""
        self.variables = self.variables or variables

    def weights(self) -> list[np.ndarray]:
        """The trainable weights of the model."""
        if self.variables is not None:
            return [variable.numpy() for variable in self.variables if variable.trainable]
        return [parameter.detach().numpy() for group in self.compressing.param_groups for parameter in group["params"]]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--stop-at")
    args, example = parser.parse_known_args()
    host = os.environ["HOROVOD_HOSTNAME"]
    file = (args.folder / f"worker-{os.getpid()}.jsonl").open("a")

    def tell(kind: str, **details: Any) -> None:
        file.write(json.dumps({"kind": kind, "host": host, **details}) + "\n")
        file.flush()

    tell("start")
    if args.stop_at and args.stop_at.split(":")[0] == host:
        encodes = iter(range(1, int(args.stop_at.split(":")[1])))

        def stop(_: Any, *args: Any) -> None:
            if next(encodes, None) is None:
                tell("encoded")
                while True:
                    signal.pause()

        watch(Codec, "encode", stop)

    front_end = "tensorflow" if "tensorflow2" in example[0] else "torch"
    hvd = importlib.import_module(f"horovod.{front_end}")
    seen = Watch()
    if front_end == "torch":
        watch(hvd, "DistributedOptimizer", seen.compress)
    else:
        watch(hvd, "DistributedGradientTape", seen.compress)
        watch(hvd, "broadcast_variables", seen.broadcast)

    sys.argv = example
    runpy.run_path(example[0], run_name="__main__")

    residuals = importlib.import_module(f"hvd_twobit.{front_end}").residuals_of(seen.compressing)
    digest = hashlib.blake2b(b"".join(np.ascontiguousarray(weights).tobytes() for weights in seen.weights()))
    tell("end", rank=hvd.rank(), size=hvd.size(), weights=digest.hexdigest(), compression=repr(seen.compression),
         compressed={name: summary.compressed_exchanges for name, summary in residuals.stats().items()})


if __name__ == "__main__":
    main()
