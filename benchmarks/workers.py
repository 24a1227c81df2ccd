"""Data-parallel training of several workers in one process, and the ways in which their gradients are reduced.

Workers have equal weights at every step, so one model stands for all of them; gradients are computed one worker after
the other. What TwoBit returns is not imitated: each worker has a ``Codec`` of its own, and they exchange payloads as
the ranks of a job do. Horovod's part, which is to carry bytes and to add up uncompressed gradients, is done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from problems import Problem
from torch import nn

from hvd_twobit.buckets import Bucket
from hvd_twobit.codec import Codec
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.residuals import ResidualRegistry

TRAINING_TAIL = 20
"""Steps at the end whose mean is reported as the training loss: a single batch says little."""

Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Uncompressed:
    """Gradients are added in float32, in the order of workers, and divided by their number."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        """What one worker has handed over for the exchange so far."""

    def begin_step(self) -> None:
        """Tell that the gradients of a new step follow."""

    def average(self, name: str, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The average of one tensor's gradients, one of each worker, as all workers receive it."""
        self.sent_bytes += gradients[0].numel() * gradients[0].element_size()
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        return total / len(gradients)


class HalfPrecision(Uncompressed):
    """Horovod's ``Compression.fp16``: gradients become float16, are added and divided in it, and become float32."""

    def average(self, name: str, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return super().average(name, [gradient.half() for gradient in gradients]).float()


class TwoBit(Uncompressed):
    """Gradients pass through the codecs of hvd_twobit, one for each worker.

    Args:
        config: the parameters, the same for all workers.
        workers: number of workers.
    """

    def __init__(self, config: TwoBitConfig, workers: int) -> None:
        super().__init__()
        self._registries = [ResidualRegistry() for _ in range(workers)]
        self._codecs = [Codec(config, registry, warns=False) for registry in self._registries]

    def begin_step(self) -> None:
        for registry in self._registries:
            registry.begin_step()

    def average(self, name: str, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, elements, workers = tuple(gradients[0].shape), gradients[0].numel(), len(gradients)
        scale = 1 / workers
        if not self._codecs[0].compresses(elements):
            return super().average(name, gradients)
        if not self._codecs[0].ready(name, shape):
            averaged = super().average(name, gradients)
            for codec in self._codecs:
                codec.observe(name, shape, averaged.reshape(-1).numpy(), workers, scale)
            return averaged
        layout = self._codecs[0].layout(Bucket.of(name, shape), 1)
        payloads = [layout.new() for _ in self._codecs]
        for codec, payload, gradient in zip(self._codecs, payloads, gradients):
            codec.encode(layout, payload, name, gradient.reshape(-1).numpy())
            codec.seal(layout, payload)
        gathered = np.concatenate(payloads)
        self.sent_bytes += layout.nbytes
        received = [np.empty(elements, np.float32) for _ in self._codecs]
        for codec, out in zip(self._codecs, received):
            codec.decode(codec.receive(layout, gathered, workers), name, out, scale)
        if any(out.tobytes() != received[0].tobytes() for out in received[1:]):
            raise RuntimeError(f"workers decoded different gradients of {name!r}")
        return torch.from_numpy(received[0]).view(shape)


def train(problem: Problem, optimizer: Optimizer, reducer: Uncompressed, workers: int, seed: int) -> dict:
    """Train a new model to the end.

    Args:
        problem: model and data.
        optimizer: makes the optimizer of given parameters.
        reducer: how the workers' gradients become one; used for this training only.
        workers: number of workers.
        seed: of weights and batches.

    Returns:
        ``losses``: the mean over workers of each step's training loss, in nats, before the step; they end early where
        one is infinite or NaN. ``train_loss``: mean of the last ``TRAINING_TAIL``, or infinite. ``test_loss`` and
        ``test_accuracy`` of the trained model. ``bytes_per_step``: what one worker sent per step.
        ``mean_gradient``: mean magnitude of a worker's gradient elements, over the whole training.
    """
    torch.manual_seed(seed)
    model = problem.model()
    named = dict(model.named_parameters())
    stepper = optimizer(list(named.values()))
    losses: list[float] = []
    magnitude = 0.0
    for batches in problem.steps(workers, seed):
        worker_losses, worker_gradients = [], []
        for batch in batches:
            loss = problem.loss(model, batch)
            worker_gradients.append(torch.autograd.grad(loss, list(named.values())))
            worker_losses.append(loss.item())
        losses.append(math.fsum(worker_losses) / workers)
        if not math.isfinite(losses[-1]):
            break
        magnitude += sum(gradient.abs().sum().item() for gradient in worker_gradients[0])
        reducer.begin_step()
        for (name, parameter), gradients in zip(named.items(), zip(*worker_gradients)):
            parameter.grad = reducer.average(name, gradients)
        if problem.largest_norm is not None:
            nn.utils.clip_grad_norm_(named.values(), problem.largest_norm)
        stepper.step()
    tail = losses[-TRAINING_TAIL:]
    return {"train_loss": math.fsum(tail) / len(tail) if math.isfinite(losses[-1]) else math.inf,
            **problem.evaluate(model),
            "bytes_per_step": reducer.sent_bytes / len(losses),
            "mean_gradient": magnitude / len(losses) / sum(parameter.numel() for parameter in named.values()),
            "losses": losses}
