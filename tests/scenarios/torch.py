"""Every scenario of PyTorch in one job; see ``tests.jobs``."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd

from tests.scenarios import (
    torch_allreduce,
    torch_amp,
    torch_bad_input,
    torch_documents,
    torch_optimizer,
    torch_payloads,
)


def run() -> dict[str, Any]:
    """By scenario file, what it returns on this rank; all but the configurations of optimizers and cases of allreduce
    run on 2 ranks or on 4 only."""
    # The process sets that two levels add stay, and Horovod has no two of the same ranks.
    results: dict[str, Any] = {"allreduce": torch_allreduce.run(),
                               "optimizer": torch_optimizer.run(list(torch_optimizer.CONFIGURATIONS))}
    if hvd.size() == 2:
        results["amp"] = torch_amp.run(list(torch_amp.CONFIGURATIONS))
        results["documents"] = torch_documents.run()
        results["payloads"] = torch_payloads.run()
        results["two_optimizers"] = torch_bad_input.two_optimizers()
        results["moved"] = torch_bad_input.moved()
        results["allreduce_mistakes"] = torch_allreduce.mistakes()
        results["amp_mistakes"] = torch_amp.mistakes()
        results["bad_input"] = torch_bad_input.run()
    else:
        results["allreduce_join"] = torch_allreduce.join()
        results["optimizer_join"] = torch_optimizer.join()
    return results
