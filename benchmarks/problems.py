"""What ``convergence.py`` trains: models, data and their shares for the workers. Nothing of gradients or compression.

Both problems use data that are installed anyway: scikit-learn's digits and the text of Python's own help.
"""

from __future__ import annotations

import importlib
import pathlib
import pydoc_data.topics
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]

_EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples" / "pytorch"


class Problem(Protocol):
    """A model with its data.

    Attributes:
        name: short name, for tables.
        largest_norm: to what length a gradient is cut before the optimizer sees it; None: not at all.
    """

    name: str
    largest_norm: float | None

    def model(self) -> nn.Module:
        """A new model, with weights from torch's default generator."""

    def steps(self, workers: int, seed: int) -> Iterator[Sequence[Batch]]:
        """For every step, the batch of each worker. The batches of all together do not depend on ``workers``."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss over a batch, in nats."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Measures on data that is never trained on: ``test_loss`` in nats and ``test_accuracy``."""


class Digits:
    """The CNN and the data of examples/pytorch/pytorch_digits.py: 151,306 parameters, 1,437 images to train on."""

    name = "digits"
    largest_norm = None

    def __init__(self, epochs: int, batch_size: int) -> None:
        if str(_EXAMPLES) not in sys.path:
            sys.path.insert(0, str(_EXAMPLES))
        self._example = importlib.import_module("pytorch_digits")
        self._train, self._test = self._example.load_data()
        self._epochs, self._batch_size = epochs, batch_size

    def model(self) -> nn.Module:
        return self._example.Net()

    def steps(self, workers: int, seed: int) -> Iterator[Sequence[Batch]]:
        images, labels = self._train.tensors
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self._epochs):
            order = torch.randperm(len(labels), generator=generator)
            whole = len(order) // self._batch_size * self._batch_size
            for chosen in order[:whole].split(self._batch_size):
                yield [(images[share], labels[share]) for share in chosen.chunk(workers)]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return _evaluate(model, self._test.tensors)


class CharacterLSTM(nn.Module):
    """Predicts the next character: embedding of 64, one LSTM layer of 128."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.output = nn.Linear(128, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(x))
        return self.output(states).transpose(1, 2)  # Classes second, as cross_entropy wants them.


class Text:
    """A character LSTM on the text of Python's help, which differs a little from one Python to the next.

    The last twentieth of the text is what is evaluated on.
    """

    name = "LSTM"
    largest_norm = 1.0

    def __init__(self, steps: int, batch_size: int, length: int = 48, evaluated: int = 400) -> None:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
        characters = sorted(set(text))
        numbers = torch.tensor([characters.index(character) for character in text])
        cut = len(numbers) * 19 // 20
        self._train, test = numbers[:cut], numbers[cut:]
        windows = test[:len(test) // (length + 1) * (length + 1)].view(-1, length + 1)
        windows = windows[torch.linspace(0, len(windows) - 1, min(evaluated, len(windows))).long()]
        self._test = windows[:, :-1], windows[:, 1:]
        self._characters = len(characters)
        self._steps, self._batch_size, self._length = steps, batch_size, length

    def model(self) -> nn.Module:
        return CharacterLSTM(self._characters)

    def steps(self, workers: int, seed: int) -> Iterator[Sequence[Batch]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self._steps):
            starts = torch.randint(len(self._train) - self._length, (self._batch_size,), generator=generator)
            windows = self._train[starts[:, None] + torch.arange(self._length + 1)]
            yield [(share[:, :-1], share[:, 1:]) for share in windows.chunk(workers)]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        characters, following = batch
        return F.cross_entropy(model(characters), following)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return _evaluate(model, self._test)


def _evaluate(model: nn.Module, data: Sequence[torch.Tensor]) -> dict[str, float]:
    inputs, wanted = data
    with torch.no_grad():
        scores = model(inputs)
        return {"test_loss": F.cross_entropy(scores, wanted).item(),
                "test_accuracy": (scores.argmax(1) == wanted).float().mean().item()}
