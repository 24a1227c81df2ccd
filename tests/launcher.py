"""Run a function on real Horovod ranks, started by ``horovodrun``, and bring back what each rank returned.

``run_ranks(2, "tests.scenarios.torch_bad_input:disagreement", key=1)`` calls ``disagreement(key=1)`` on two ranks
after ``hvd.init()`` of ``horovod.torch``, or of another ``framework``; the function returns JSON values and NumPy
arrays, nested in dictionaries and lists.
Run as a module, this file is the program of one rank.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import types
from typing import Any

import numpy as np

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 240


class RanksFailed(AssertionError):
    """horovodrun ended with an error, or not at all; the message holds what the ranks printed."""


MACHINES = ("localhost", "127.0.0.1", "127.0.1.1")
"""Names of this machine, which Horovod takes for several."""


def horovodrun(np_ranks: int, command: list[str], environment: dict[str, str] | None = None,
               timeout_s: float = TIMEOUT_S, ranks_per_machine: int | None = None) -> str:
    """Run ``command`` on ranks of this machine and return what they printed.

    Args:
        np_ranks: number of ranks.
        command: what each of them runs.
        environment: variables that they get beside this process's.
        timeout_s: when the job is ended.
        ranks_per_machine: how many of them Horovod takes for those of one machine; all, where it is left out.

    Raises:
        RanksFailed: the exit status was not 0, or the time was up (then the job was ended).
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
                   **(environment or {})}
    per_machine = ranks_per_machine or np_ranks
    # horovodrun starts as many as the hosts have place for, whatever -np says.
    hosts = [f"{name}:{min(per_machine, np_ranks - first)}"
             for name, first in zip(MACHINES, range(0, np_ranks, per_machine))]
    process = subprocess.Popen([sys.executable, "-m", "tests.horovodrun", "--gloo", "-np", str(np_ranks),
                                "-H", ",".join(hosts), *command],
                               env=environment, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # horovodrun ends its ranks.
        output, _ = process.communicate(timeout=30)
        raise RanksFailed(f"no end after {timeout_s} s: {command}\n{_of_ranks(output)}") from None
    if process.returncode != 0:
        raise RanksFailed(f"exit status {process.returncode}: {command}\n{_of_ranks(output)}")
    return output


def _of_ranks(output: str) -> str:
    """The lines that ranks printed, rank by rank, and how they ended, without horovodrun's own traceback."""
    lines = [line for line in output.splitlines() if line.startswith(("[", "Process "))]
    return "\n".join(sorted(lines, key=lambda line: line.partition("]")[0])[-200:]) or output[-6000:]


def run_ranks(np_ranks: int, function: str, environment: dict[str, str] | None = None, framework: str = "torch",
              timeout_s: float = TIMEOUT_S, ranks_per_machine: int | None = None, **arguments: Any) -> list[Any]:
    """Call ``module:function(**arguments)`` on every rank; the results in rank order."""
    with tempfile.TemporaryDirectory(prefix="hvd_twobit_") as folder:
        horovodrun(np_ranks, [sys.executable, "-m", "tests.launcher", folder, framework, function,
                              json.dumps(arguments)], environment, timeout_s, ranks_per_machine)
        return [_load(pathlib.Path(folder, f"{rank}")) for rank in range(np_ranks)]


def _save(stem: pathlib.Path, value: Any) -> None:
    arrays: dict[str, np.ndarray] = {}

    def without_arrays(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            arrays[str(len(arrays))] = item
            return {"__array__": str(len(arrays) - 1)}
        if isinstance(item, dict):
            return {key: without_arrays(part) for key, part in item.items()}
        return [without_arrays(part) for part in item] if isinstance(item, (list, tuple)) else item

    stem.with_suffix(".json").write_text(json.dumps(without_arrays(value)))
    np.savez(stem.with_suffix(".npz"), **arrays)


def _load(stem: pathlib.Path) -> Any:
    with np.load(stem.with_suffix(".npz"), allow_pickle=False) as arrays:
        return json.loads(stem.with_suffix(".json").read_text(),
                          object_hook=lambda item: arrays[item["__array__"]] if "__array__" in item else item)


def without_torch_compile() -> None:
    """Keep PyTorch 2.13 from importing torch.compile when the first optimizer is made: five seconds of every process.

    Nothing is compiled here, and without that the two functions that optimizers call in it do nothing.
    """
    import torch

    dynamo: Any = types.ModuleType("torch._dynamo")
    dynamo.disable = lambda function, *arguments, **options: function
    dynamo.graph_break = lambda: None
    sys.modules[dynamo.__name__] = torch._dynamo = dynamo


def _main() -> None:
    folder, framework, function, arguments = sys.argv[1:]
    if framework == "torch":
        without_torch_compile()
    hvd = importlib.import_module(f"horovod.{framework}")
    module, name = function.split(":")
    target = getattr(importlib.import_module(module), name)
    hvd.init()
    result = target(**json.loads(arguments))
    _save(pathlib.Path(folder, str(hvd.rank())), result)
    hvd.allgather_object(0, name="end")  # A barrier, which horovod.tensorflow does not have.


if __name__ == "__main__":
    _main()
