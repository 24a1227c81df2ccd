"""How many parameters well-known models have, in how many tensors; ``tests/test_plan.py`` counts them anew."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's size.

    Attributes:
        parameters: trainable parameters.
        tensors: trainable tensors.
        source: whose implementation was counted.
    """

    parameters: int
    tensors: int
    source: str


_TORCHVISION = "torchvision.models.{}(), 1000 classes"
_TRANSFORMERS = "Hugging Face transformers, {}"

MODELS = {
    "resnet50": Model(25_557_032, 161, _TORCHVISION.format("resnet50")),
    "resnet101": Model(44_549_160, 314, _TORCHVISION.format("resnet101")),
    "vgg16": Model(138_357_544, 32, _TORCHVISION.format("vgg16")),
    "vit-b16": Model(86_567_656, 152, _TORCHVISION.format("vit_b_16")),
    "bert-base": Model(109_482_240, 199, _TRANSFORMERS.format("BertModel of bert-base-uncased")),
    "bert-large": Model(335_141_888, 391, _TRANSFORMERS.format("BertModel of bert-large-uncased")),
    "gpt2": Model(124_439_808, 148, _TRANSFORMERS.format("GPT2LMHeadModel of gpt2, input and output embedding shared")),
}
