"""A worker of an elastic PyTorch job: trains until it is told to end, and tells of every world and every commit.

Gradients depend on rank and batch, so that residuals differ from rank to rank. After every step it is checked that what
arrived is the average of what the ranks of this world took out of gradient and residual: nothing else was decoded, for
no other number of ranks, and nothing was lost.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_twobit.state import split_share
from hvd_twobit.torch import TwoBit, residuals_of
from tests.launcher import without_torch_compile
from tests.scenarios.elastic import Reporter, leave


def main(folder: str) -> None:
    without_torch_compile()
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(24, 160), torch.nn.Tanh(), torch.nn.Linear(160, 12))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                                         named_parameters=model.named_parameters(),
                                         compression=TwoBit(transport="sra", bucket_cap_mb=0.01))
    residuals = residuals_of(optimizer)
    reporter = Reporter(folder, residuals)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, residuals=residuals, batch=0)

    def weights() -> list[Any]:
        return [parameter.detach().numpy() for parameter in model.parameters()]

    def number() -> int:
        """Ranks of one number have the same levels."""
        return hvd.local_rank() if residuals.is_divided else 0

    @hvd.elastic.run
    def train(state: Any) -> None:
        world = hvd.broadcast_object(uuid.uuid4().hex, name="world")
        reporter.world(world, weights(), batch=state.batch, rank=hvd.rank(), size=hvd.size(), number=number(),
                       in_flight=bool(optimizer._twobit._in_flight))
        while True:
            orders = hvd.broadcast_object(reporter.orders() if hvd.rank() == 0 else None, name="orders")
            if orders.get("end"):
                return
            reporter.serve(orders)
            try:
                step(state)
            except HorovodInternalError:
                reporter.tell("failed", batch=state.batch)
                raise

    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: gradients.update({name: gradient.clone()}))

    def kept(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The residual of a tensor before a step or after it, in the unit of one rank's gradient; a copy.

        A share of the mean of a machine's ranks counts as often as there are such ranks.
        """
        total = residuals[name].copy() if name in residuals else np.zeros(tuple(parameter.shape), np.float32)
        for entry in residuals:
            tensor, *bounds = split_share(entry) or (entry,)
            if tensor == name and bounds:
                total.reshape(-1)[slice(*bounds)] += residuals.ranks_per_machine * residuals[entry]
        return torch.from_numpy(total)

    def step(state: Any) -> None:
        generator = torch.Generator().manual_seed(1000 * state.batch + hvd.rank())
        optimizer.zero_grad()
        before = {name: kept(name, parameter) for name, parameter in model.named_parameters()}
        loss = (model(torch.randn(16, 24, generator=generator)) - torch.randn(16, 12, generator=generator)).square()
        loss.mean().backward()
        optimizer.step()
        lost = 0.0
        for name, parameter in model.named_parameters():
            sent = hvd.allreduce(before[name] + gradients[name] - kept(name, parameter), name=f"sent.{name}")
            lost = max(lost, float((sent - parameter.grad).abs().max() / sent.abs().max()))
        state.batch += 1
        state.save()
        reporter.tell("commit", weights(), batch=state.batch, lost=lost, number=number())
        state.check_host_updates()

    train(state)
    reporter.tell("end", weights(), batch=state.batch)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
