"""What to do about what a check found."""

from __future__ import annotations

from collections.abc import Iterable

from ..horovod_form import SUPPORTED_HOROVOD

HOROVOD = SUPPORTED_HOROVOD[-1]

FRAMEWORKS = "install PyTorch (pip install torch) or TensorFlow (pip install tensorflow-cpu==2.15.1), then Horovod"
PYTHON = "use Python 3.9, 3.10 or 3.11, such as python3.11 -m venv: TensorFlow 2.15 can be installed on no later one"
TENSORFLOW = "pip install tensorflow-cpu==2.15.1, the last release with Keras 2, then build Horovod for it"
KERAS = ("set TF_USE_LEGACY_KERAS=1 in the environment of every rank and pip install tf_keras of TensorFlow's version, "
         "or use TensorFlow 2.15: Horovod 0.28.1 does not exchange the gradients of Keras 3's optimizers")
KERNELS = ("pip install --force-reinstall numba llvmlite numpy; if that does not help, report it with this output: "
           "training would compute something else")
TRITON = ("pip install \"hvd_twobit[gpu]\"; Triton also needs a C compiler, and a GPU that it knows. "
          "HVD_TWOBIT_KERNELS=numba says that the CPU shall compress, and nothing is told")
HOST_NAME = "add the name to the line 127.0.0.1 of /etc/hosts: Horovod 0.28.1's ranks end in a segmentation fault else"
ONE_PROCESS = ("start programs with the horovodrun of this Horovod, python -m horovod.runner.launch -np 2 ..., and no "
               "other launcher; with one process nothing is exchanged, and nothing compressed")
DIFFERENT = "report it with this output: what ranks computed is not what TwoBit is defined to compute"
HANG = ("ranks cannot reach one another, or need longer. Let the firewall pass what this machine sends to itself; name "
        "the interface, HOROVOD_GLOO_IFACE=lo here, horovodrun --network-interfaces eth0 in a cluster; where the "
        "machine is busy, give a longer --time-limit")
JOB = ("see what a job says by itself: horovodrun --verbose -np 2 with a script that calls hvd.init(); name the "
       "network interface, HOROVOD_GLOO_IFACE=lo")


def build(front_ends: Iterable[str], again: bool = False) -> str:
    """How to install Horovod for front ends, ``"torch"`` and ``"tensorflow"``; ``again``: over another build."""
    flags = {"torch": "HOROVOD_WITH_PYTORCH=1", "tensorflow": "HOROVOD_WITH_TENSORFLOW=1"}
    options = "--force-reinstall --no-deps " if again else ""
    front_ends = list(front_ends)
    newer = (" (PyTorch's headers need C++17, Horovod asks for C++14: scripts/setup.sh of hvd_twobit has the compiler "
             "wrapper)" if "torch" in front_ends else "")
    return (f"with a C++ compiler and cmake: HOROVOD_WITH_GLOO=1 {' '.join(flags[name] for name in front_ends)} "
            f"CMAKE_POLICY_VERSION_MINIMUM=3.5 pip install --no-cache-dir --no-build-isolation {options}"
            f"horovod=={HOROVOD}{newer}")
