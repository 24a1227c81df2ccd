"""Runs the checks one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from .. import jobs
from . import judging
from .judging import FrontEnd
from .probes import probe
from .results import Check, Status
from .self_test import self_test
from .steps import Outcome


@dataclasses.dataclass(frozen=True)
class SelfTests:
    """How front ends are tested.

    Attributes:
        wanted: whether they are.
        limit_s: for each job, in seconds.
        launcher: the module that is run as horovodrun.
    """

    wanted: bool = True
    limit_s: float = 120
    launcher: str = jobs.HOROVODRUN


def stages(front_ends: Sequence[FrontEnd], self_tests: SelfTests) -> int:
    """How often ``all_checks`` tells what it does."""
    return 2 + (2 if self_tests.wanted else 1) * len(front_ends)


def all_checks(front_ends: Sequence[FrontEnd], self_tests: SelfTests, tell: Callable[[str], None]) -> Iterator[Check]:
    """All checks, in the order in which they are printed; ``tell`` is told what is being looked at."""
    tell("kernels")
    kernels = probe("kernels")
    tell("Horovod")
    horovod = probe("horovod")
    outcomes = {}
    for front_end in front_ends:
        tell(front_end.label)
        outcomes[front_end] = probe(front_end.module)
    installed = [front_end.module for front_end, outcome in outcomes.items()
                 if judging.is_installed(front_end, outcome)]
    common = [
        _checked("Python", judging.check_python),
        _checked("hvd_twobit", judging.check_package),
        _checked("NumPy", lambda: judging.check_library("NumPy", kernels)),
        _checked("Numba", lambda: judging.check_library("Numba", kernels)),
        _checked("kernels", lambda: judging.check_kernels(kernels)),
        _checked("host name", judging.check_host_name),
        _checked("Horovod", lambda: judging.check_horovod(horovod, installed)),
        _checked("Horovod's build", lambda: judging.check_build(outcomes)),
        _checked("front ends", lambda: judging.check_any_front_end(outcomes)),
        _checked("GPU", lambda: judging.check_gpu(outcomes))]
    yield from common
    for front_end, outcome in outcomes.items():
        of_front_end = list(_of_front_end(front_end, outcome, installed))
        yield from of_front_end
        if self_tests.wanted:
            tell(f"{front_end.label} self-test")
        if judging.is_installed(front_end, outcome):
            yield _self_tested(front_end, outcome, [*common, *of_front_end], self_tests)


def _of_front_end(front_end: FrontEnd, outcome: Outcome, installed: Sequence[str]) -> Iterator[Check]:
    yield _checked(front_end.label, lambda: judging.check_framework(front_end, outcome))
    if not judging.is_installed(front_end, outcome):
        return
    if front_end.module == "tensorflow":
        yield _checked("Keras", lambda: judging.check_keras(outcome))
    yield _checked(f"{front_end.label} hooks", lambda: judging.check_hooks(front_end, outcome, installed))


def _self_tested(front_end: FrontEnd, outcome: Outcome, before: Sequence[Check], self_tests: SelfTests) -> Check:
    """The self-test, unless something that it needs has failed."""
    name = f"{front_end.label} self-test"
    failed = [check.name for check in before if check.status is Status.FAILED and check.name != "Python"]
    if failed or not self_tests.wanted:
        return Check(name, Status.SKIPPED, f"needs {', '.join(failed)}" if failed else "as --no-self-test says")

    def test() -> Check:
        controller = "gloo" if outcome.found["extension"]["Gloo"] else "mpi"
        ranks = self_test(front_end.module, controller, self_tests.limit_s, self_tests.launcher)
        return judging.check_self_test(front_end, ranks, controller)

    return _checked(name, test)


def _checked(name: str, check: Callable[[], Check]) -> Check:
    """What a check found; an error of its own is a failure, and no reason to leave out the others."""
    try:
        return check()
    except Exception as error:
        return Check(name, Status.FAILED, f"the check itself failed: {type(error).__name__}: {error}",
                     "report it with this output")
