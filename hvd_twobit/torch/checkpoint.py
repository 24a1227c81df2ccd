"""A rank's state of residuals in a PyTorch checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """What ``state_dict()`` returned with PyTorch's tensors instead of NumPy's arrays, on the same memory.

    ``torch.load(weights_only=True)`` reads these, and refuses NumPy's arrays. ``load_state_dict`` takes either, from
    the CPU's memory.

    Args:
        state: what ``ResidualRegistry.state_dict`` returned; dictionaries of NumPy arrays and numbers.

    Returns:
        The same dictionaries and numbers, with a CPU tensor of equal shape and dtype for each array.
    """
    return {key: as_tensors(value) if isinstance(value, Mapping)
            else torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in state.items()}
