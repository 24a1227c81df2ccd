"""The processes that import NumPy, Horovod and the frameworks, and tell what they found.

    python -m hvd_twobit.checks.probes PROBE FILE        # started by ``probe``
"""

from __future__ import annotations

import importlib
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from .. import jobs
from . import kernels, steps

LIMIT_S = 180
"""A framework's import takes seconds, but minutes on a busy machine with a cold disk."""


def probe(name: str, limit_s: float = LIMIT_S) -> steps.Outcome:
    """Run one of ``PROBES`` in a process of its own.

    Args:
        name: of the probe.
        limit_s: after so many seconds the process is ended.
    """
    with tempfile.TemporaryDirectory(prefix="hvd_twobit_check_") as folder:
        path = pathlib.Path(folder, "steps")
        command = [sys.executable, "-m", __name__, name, str(path)]
        with jobs.child(command, env=jobs.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE) as process:
            try:
                _, stderr = process.communicate(timeout=limit_s)
                ended = _how(process.returncode, stderr)
            except subprocess.TimeoutExpired:
                ended = f"no end within {limit_s:g} s"
        return steps.read(path, list(PROBES[name]), ended)


def _how(status: int, stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    return (f"the process was ended by {signal.Signals(-status).name}" if status < 0
            else f"the process ended with status {status}") + last


def _horovod() -> dict[str, Any]:
    import horovod
    return {"version": horovod.__version__, "path": str(pathlib.Path(horovod.__file__).parent)}


def _torch() -> dict[str, Any]:
    import torch
    return {"version": torch.__version__,
            "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]}


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf
    return {"version": tf.__version__, "gpus": [device.name for device in tf.config.list_physical_devices("GPU")]}


def _keras() -> dict[str, Any]:
    """The Keras whose optimizers ``tf.keras`` has, which is the one that Horovod is given."""
    import tensorflow as tf
    base = next(kind for kind in tf.keras.optimizers.SGD.__mro__ if kind.__name__ == "Optimizer")
    package = base.__module__.partition(".")[0]
    return {"package": package, "version": importlib.import_module(package).__version__}


def _built(front_end: str) -> dict[str, bool]:
    """What Horovod's extension for a framework was built with, as ``horovodrun --check-build`` tells it."""
    hvd = importlib.import_module(f"horovod.{front_end}")
    return {name: bool(getattr(hvd, f"{function}_built")())
            for name, function in (("Gloo", "gloo"), ("MPI", "mpi"), ("NCCL", "nccl"), ("DDL", "ddl"), ("CCL", "ccl"))}


def _hooks(front_end: str) -> None:
    """Import the front end, which refuses a Horovod of another form and puts its functions into it."""
    importlib.import_module(f"hvd_twobit.{front_end}")


def _torch_devices() -> dict[str, Any]:
    """Of each CUDA device, why gradients cannot be compressed there, or nothing; and whether they are sent from it."""
    import torch

    from ..torch.placement import horovod_takes, trial
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return {"unusable": {str(device): trial(device) for device in devices},
            "sends": all(horovod_takes(device) for device in devices)}


PROBES: dict[str, Mapping[str, Callable[[], Any]]] = {
    "kernels": kernels.STEPS,
    "horovod": {"import": _horovod},
    "torch": {"framework": _torch, "extension": lambda: _built("torch"), "hooks": lambda: _hooks("torch"),
              "devices": _torch_devices},
    "tensorflow": {"framework": _tensorflow, "keras": _keras, "extension": lambda: _built("tensorflow"),
                   "hooks": lambda: _hooks("tensorflow")},
}

if __name__ == "__main__":
    steps.carry_out(pathlib.Path(sys.argv[2]), PROBES[sys.argv[1]])
