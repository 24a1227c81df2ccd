"""The gradients that are exchanged: shapes only, no framework."""

from __future__ import annotations

from collections.abc import Iterator

TENSOR_ELEMENTS = 25_600_000
MODELS = ("tensor", "resnet50")


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Shapes of a model's parameters, in the order in which they are registered.

    Args:
        model: ``"tensor"``, one tensor of 25,600,000 elements; ``"tensor:ELEMENTS"``, one of so many; ``"resnet50"``.

    Raises:
        ValueError: there is no such model.
    """
    kind, colon, elements = model.partition(":")
    if model == "resnet50":
        return list(_resnet50())
    if kind == "tensor" and not colon:
        return [(TENSOR_ELEMENTS,)]
    if kind == "tensor" and elements.isdecimal() and int(elements):
        return [(int(elements),)]
    raise ValueError(f"no model {model!r}: take tensor, tensor:ELEMENTS or resnet50")


def _resnet50() -> Iterator[tuple[int, ...]]:
    """ResNet-50 for 1000 classes: K. He et al., "Deep Residual Learning for Image Recognition", 2015, table 1."""
    yield from _convolution(3, 64, 7)
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            yield from _convolution(channels, width, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(width, 4 * width, 1)
            if block == 0:
                yield from _convolution(channels, 4 * width, 1)  # The shortcut, where the number of channels changes.
            channels = 4 * width
    yield 1000, channels
    yield 1000,


def _convolution(channels: int, filters: int, side: int) -> Iterator[tuple[int, ...]]:
    """A convolution without bias, and weight and bias of the batch norm behind it."""
    yield filters, channels, side, side
    yield filters,
    yield filters,
