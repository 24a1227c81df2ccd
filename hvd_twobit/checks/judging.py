"""The checks: what probes and self-tests found, judged. None of them imports a framework or Horovod."""

from __future__ import annotations

import dataclasses
import platform
import socket
import sys
from collections.abc import Mapping, Sequence

from .. import __version__
from ..horovod_form import SUPPORTED_HOROVOD
from . import remedies
from .results import Check, Status
from .steps import Failure, Outcome

PYTHONS = ((3, 9), (3, 11))
"""The first and the last that are supported: those for which TensorFlow 2.15 can be installed."""

TENSORFLOW = "2.15"


@dataclasses.dataclass(frozen=True)
class FrontEnd:
    """A front end.

    Attributes:
        option: on the command line.
        label: in what is printed.
        module: of the framework, of Horovod's front end and of ours.
    """

    option: str
    label: str
    module: str


FRONT_ENDS = {front_end.option: front_end for front_end in (
    FrontEnd("pytorch", "PyTorch", "torch"), FrontEnd("tensorflow", "TensorFlow", "tensorflow"))}


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Is this Python one that everything can be installed on?"""
    found = f"{'.'.join(map(str, version))} ({platform.python_implementation()}, {platform.machine()})"
    if PYTHONS[0] <= version[:2] <= PYTHONS[1]:
        return Check("Python", Status.OK, found)
    return Check("Python", Status.FAILED, f"{found}; supported are 3.9 to 3.11", remedies.PYTHON)


def check_package() -> Check:
    """The version of hvd_twobit."""
    return Check("hvd_twobit", Status.OK, f"{__version__}, for Horovod {', '.join(SUPPORTED_HOROVOD)}")


def check_library(name: str, outcome: Outcome) -> Check:
    """NumPy or Numba, of which the kernels' probe has a step each."""
    step = name.lower()
    if step in outcome.found:
        return Check(name, Status.OK, outcome.found[step])
    return _failed(name, outcome, step, f"pip install {step}; with TensorFlow 2.15, numpy<2")


def check_kernels(outcome: Outcome) -> Check:
    """Do the kernels that training uses compute what the reference in NumPy does?"""
    found = outcome.found.get("kernels")
    if found is None:
        return _failed("kernels", outcome, "kernels", remedies.KERNELS)
    return Check("kernels", Status.OK, f"training uses {found['backend']}; {found['kernels']} kernels equal NumPy's "
                                       f"bit for bit ({found['elements']:,} elements)")


def check_host_name(name: str | None = None) -> Check:
    """Does this machine's own name have an address? Horovod's ranks look it up."""
    name = socket.gethostname() if name is None else name
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Check("host name", Status.FAILED, f"{name} has no address: {error}", remedies.HOST_NAME)
    return Check("host name", Status.OK, f"{name} is {', '.join(addresses)}")


def check_horovod(outcome: Outcome, installed: Sequence[str]) -> Check:
    """Is Horovod there, and of a supported version? ``installed``: modules of the frameworks that are there."""
    if outcome.failure is not None:
        remedy = remedies.build(installed) if installed else remedies.FRAMEWORKS
        if outcome.failure.missing == "horovod":
            return Check("Horovod", Status.FAILED, "not installed", remedy)
        return _failed("Horovod", outcome, "import", remedies.build(installed, again=True) if installed else remedy)
    found = outcome.found["import"]
    if found["version"] not in SUPPORTED_HOROVOD:
        return Check("Horovod", Status.FAILED, f"{found['version']}; supported is {', '.join(SUPPORTED_HOROVOD)}",
                     remedies.build(installed, again=True) if installed else remedies.FRAMEWORKS)
    return Check("Horovod", Status.OK, f"{found['version']} in {found['path']}")


def check_any_front_end(outcomes: Mapping[FrontEnd, Outcome]) -> Check:
    """Is one of the frameworks there?"""
    present = [front_end.label for front_end, outcome in outcomes.items() if is_installed(front_end, outcome)]
    if present:
        return Check("front ends", Status.OK, " and ".join(present))
    return Check("front ends", Status.FAILED,
                 f"not installed: {', '.join(front_end.label for front_end in outcomes)}", remedies.FRAMEWORKS)


def check_framework(front_end: FrontEnd, outcome: Outcome) -> Check:
    """Does the framework load, and is it of a version that is tested?"""
    if not is_installed(front_end, outcome):
        return Check(front_end.label, Status.NOT_INSTALLED, f"no module {front_end.module}")
    if "framework" not in outcome.found:
        return _failed(front_end.label, outcome, "framework",
                       f"find out why `import {front_end.module}` fails; a new environment is often the shortest way")
    version = outcome.found["framework"]["version"]
    if front_end.module == "tensorflow" and not version.startswith(f"{TENSORFLOW}."):
        return Check(front_end.label, Status.WARNING, f"{version}; tested with {TENSORFLOW}", remedies.TENSORFLOW)
    return Check(front_end.label, Status.OK, version)


def check_keras(outcome: Outcome) -> Check:
    """Is the Keras of ``tf.keras`` Keras 2?"""
    if "framework" not in outcome.found:
        return Check("Keras", Status.SKIPPED, "TensorFlow was not imported")
    if "keras" not in outcome.found:
        return _failed("Keras", outcome, "keras", remedies.KERAS)
    found = outcome.found["keras"]
    text = f"{found['version']} ({found['package']})"
    if int(found["version"].partition(".")[0]) >= 3:
        return Check("Keras", Status.FAILED, f"{text}, which Horovod does not know", remedies.KERAS)
    return Check("Keras", Status.OK, text)


def check_build(outcomes: Mapping[FrontEnd, Outcome]) -> Check:
    """What was Horovod built with? It needs a front end, and Gloo or MPI."""
    built = {front_end: outcome.found["extension"] for front_end, outcome in outcomes.items()
             if "extension" in outcome.found}
    installed = [front_end.module for front_end, outcome in outcomes.items() if is_installed(front_end, outcome)]
    if not built:
        return Check("Horovod's build", Status.SKIPPED, "no front end of Horovod was imported")
    libraries = [name for name in next(iter(built.values())) if any(found[name] for found in built.values())]
    text = f"{', '.join(libraries) or 'neither Gloo nor MPI'}; {', '.join(front_end.label for front_end in built)}"
    if not {"Gloo", "MPI"} & set(libraries):
        return Check("Horovod's build", Status.FAILED, text, remedies.build(installed, again=True))
    return Check("Horovod's build", Status.OK, text)


def check_hooks(front_end: FrontEnd, outcome: Outcome, installed: Sequence[str]) -> Check:
    """Has Horovod this front end, in the form that is expected, and are TwoBit's functions in it?"""
    name = f"{front_end.label} hooks"
    if "framework" not in outcome.found:
        return Check(name, Status.SKIPPED, f"{front_end.label} was not imported")
    failure = outcome.failure
    if failure is None or "hooks" in outcome.found:
        return Check(name, Status.OK, f"horovod.{front_end.module} has the expected form, TwoBit's functions are in it")
    if failure.missing == "horovod":
        return Check(name, Status.SKIPPED, "Horovod is not installed")
    if failure.step == "hooks" and failure.raised and not failure.error.startswith("UnsupportedHorovodError"):
        return _failed(name, outcome, "hooks", "report it with this output")
    return _failed(name, outcome, failure.step, remedies.build(installed, again=True))


def check_gpu(outcomes: Mapping[FrontEnd, Outcome]) -> Check:
    """Which GPUs do the frameworks see? None is needed."""
    seen = {front_end.label: outcome.found["framework"]["gpus"] for front_end, outcome in outcomes.items()
            if "framework" in outcome.found}
    with_gpus = [f"{label}: {', '.join(gpus)}" for label, gpus in seen.items() if gpus]
    if not with_gpus:
        return Check("GPU", Status.OK, "none seen; none is needed")
    text = "; ".join(with_gpus)
    tried = [outcome.found["devices"] for outcome in outcomes.values() if "devices" in outcome.found]
    devices = tried[0] if tried else {"unusable": {}}
    reasons = [f"{device}: {reason}" for device, reason in devices["unusable"].items() if reason]
    reasons += [outcome.failure.error for outcome in outcomes.values()
                if outcome.failure is not None and outcome.failure.step == "devices"]
    if not devices["unusable"] and not reasons:
        return Check("GPU", Status.OK, f"{text}. Gradients pass through the CPU, which compresses them")
    if reasons:
        return Check("GPU", Status.WARNING, f"{text}. PyTorch's gradients pass through the CPU, which compresses them: "
                                            f"{'; '.join(reasons)}", remedies.TRITON)
    sent = "from there, by NCCL" if devices["sends"] else "from pinned host memory, as Horovod was built without NCCL"
    return Check("GPU", Status.OK, f"{text}. PyTorch's gradients are compressed there and sent {sent}")


def check_self_test(front_end: FrontEnd, ranks: Sequence[Outcome], controller: str) -> Check:
    """Did all ranks compute what they should, and the same?"""
    name = f"{front_end.label} self-test"
    failures = [(rank, outcome.failure) for rank, outcome in enumerate(ranks) if outcome.failure is not None]
    # A rank's own error says more than that the job ended, which the others tell.
    for rank, failure in sorted(failures, key=lambda each: not each[1].raised):
        return Check(name, Status.FAILED, f"rank {rank} at {failure.step}: {failure.error}", _self_test_remedy(failure))
    digests = [{step: found for step, found in outcome.found.items() if found} for outcome in ranks]
    if any(other != digests[0] for other in digests):
        return Check(name, Status.FAILED, f"weights differ between ranks: {digests}", remedies.DIFFERENT)
    return Check(name, Status.OK, f"{len(ranks)} ranks ({controller}) by {', '.join(digests[0])}: equal, and the "
                                  "simulation's to the bit")


def is_installed(front_end: FrontEnd, outcome: Outcome) -> bool:
    """Whether the framework is there, be it broken."""
    return outcome.failure is None or outcome.failure.missing != front_end.module


def _self_test_remedy(failure: Failure) -> str:
    if failure.error.startswith("no end within"):
        return remedies.HANG
    if "processes, but Horovod sees" in failure.error:
        return remedies.ONE_PROCESS
    if "not those of the simulation" in failure.error:
        return remedies.DIFFERENT
    return remedies.JOB


def _failed(name: str, outcome: Outcome, step: str, remedy: str) -> Check:
    """A check whose step was not reached: FAILED where it failed itself, SKIPPED where one before it did."""
    failure = outcome.failure
    assert failure is not None
    if failure.step != step:
        return Check(name, Status.SKIPPED, f"not tried: {failure.step} failed before")
    return Check(name, Status.FAILED, failure.error, remedy)
