"""The residuals and levels of one optimizer, by the tensors' names, and their way into and out of checkpoints.

The registry knows nothing of codes or ranks; ``codec`` is what changes a tensor's state during a step.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import checkpoint
from .errors import ResidualError
from .levels import within_limits
from .state import RankState, split_share
from .statistics import TensorSummary
from .tensor_state import TensorState


class ResidualRegistry:
    """Residuals and levels of one optimizer on this rank, by tensor name. All are in the unit of the gradient, float32.

    A residual begins at zero and takes its memory (4 bytes per element) when its tensor is first compressed. Names
    and shapes may be declared before, so that a checkpoint of another model is refused at once. Methods may be called
    from any thread, but not while a step is between its first gradient hook and the end of ``synchronize()``.

    Attributes:
        can_undo: whether ``undo_step`` can bring residuals back, for which a second copy of each is kept.
        loss_scale: by what the gradients were multiplied that residuals and levels come from; None where nothing told.
        is_divided: whether the ranks of a machine may divide tensors, so that each knows its share only.
        ranks_per_machine: among how many ranks shares of tensors are divided, see ``sharding``; 1 where there are none.
        revision: grows whenever a state was taken from elsewhere.
        division: stands for how ``sharding`` divided tensors last, and at which revision.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, TensorState] = {}
        self._declared: set[str] = set()
        self._lock = threading.Lock()
        self.can_undo = False
        self.loss_scale: float | None = None
        self.is_divided = False
        self.ranks_per_machine = 1
        self.revision = 0
        self.division: object = None

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        """Announce a tensor that may be compressed later.

        Raises:
            ResidualError: another tensor of this registry bears the name.
        """
        with self._lock:
            if name in self._tensors:
                raise ResidualError(f"tensor {name!r} is declared twice: names of compressed tensors must be unique")
            self._tensors[name] = TensorState(tuple(shape))
            self._declared.add(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> TensorState:
        """The state of a tensor, made where the name is new.

        Raises:
            ResidualError: the tensor had another shape before.
        """
        with self._lock:
            state = self._tensors.get(name)
            if state is None:
                state = self._tensors[name] = TensorState(tuple(shape))
            if state.shape != tuple(shape):
                raise ResidualError(f"tensor {name!r} has shape {tuple(shape)}, but its residual was kept for shape "
                                    f"{state.shape}: give a tensor of another shape another name, or reset() the "
                                    "registry")
            return state

    def residual(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The residual of a tensor, flat: float32[elements]; zeros at first. The registry's own memory, on the host.

        Raises:
            ResidualError: the tensor had another shape before.
        """
        return self.tensor(name, shape).residual

    def names(self) -> list[str]:
        """Names of all tensors that are known, with or without a residual."""
        return list(self._tensors)

    def discard(self, name: str) -> None:
        """Forget one tensor, its residual and its shape; nothing where the name is unknown."""
        with self._lock:
            self._tensors.pop(name, None)
            self._declared.discard(name)

    def _with_residual(self) -> dict[str, TensorState]:
        return {name: state for name, state in list(self._tensors.items()) if state.has_residual}

    def __len__(self) -> int:
        return len(self._with_residual())

    def __contains__(self, name: object) -> bool:
        return name in self._with_residual()

    def __iter__(self) -> Iterator[str]:
        return iter(self._with_residual())

    def __getitem__(self, name: str) -> Any:
        """The residual of a tensor in its shape, as a view of the registry's memory.

        A NumPy array; where gradients are compressed on the device on which they lie, a tensor of that device.
        """
        return self._with_residual()[name].array

    @property
    def nbytes(self) -> int:
        """Bytes of memory that residuals and levels take on this rank."""
        return sum(state.nbytes for state in list(self._tensors.values()))

    def norms(self) -> dict[str, float]:
        """Euclidean norm of each residual, in the unit of the gradient (computed in float64)."""
        return {name: float(state.norm) for name, state in self._with_residual().items()}

    def stats(self) -> dict[str, TensorSummary]:
        """What is known of each tensor that was exchanged: levels, codes, norms, bytes. See ``TensorSummary``.

        Costs no pass over a gradient or residual, so it may be called at every step.
        """
        summaries = {name: state.statistics.summary() for name, state in list(self._tensors.items())}
        return {name: summary for name, summary in summaries.items() if summary is not None}

    def reset(self) -> None:
        """Forget everything, also shapes: what was not sent yet is lost, and warm-up begins anew."""
        with self._lock:
            self._tensors.clear()
            self._declared.clear()
            self.revision += 1

    def forget_levels(self) -> None:
        """Let warm-up begin anew and levels be learnt again; residuals stay.

        To be called on every rank alike, for example where one has loaded no state: all must have the same levels.
        """
        for state in list(self._tensors.values()):
            state.relearn(None, 0)

    def scale(self, factor: float) -> None:
        """Multiply every residual and level, for example when the gradients' unit changes.

        Raises:
            ResidualError: the factor is not a finite number above zero.
        """
        if not (np.isfinite(factor) and factor > 0):
            raise ResidualError(f"residuals can be scaled by a finite factor above zero, not by {factor!r}")
        for state in list(self._tensors.values()):
            state.settle()
            state.scale(factor)
            if state.levels is not None:
                state.levels = within_limits(state.levels.astype(np.float64) * factor)

    def follow_loss_scale(self, loss_scale: float) -> None:
        """Bring residuals and levels into the unit of gradients that are multiplied by ``loss_scale``.

        Where no loss scale was told before, they are taken for those of gradients that were not multiplied.

        Raises:
            ResidualError: the loss scale is not a finite number above zero.
        """
        if loss_scale != self.loss_scale:
            self.scale(loss_scale / (self.loss_scale or 1.0))
            self.loss_scale = loss_scale

    def begin_step(self) -> None:
        """The step before counts; ``undo_step`` goes back to here."""
        for state in list(self._tensors.values()):
            state.settle()

    def undo_step(self) -> None:
        """Bring back what residuals, levels and counters were at ``begin_step``: the step's gradients are not used.

        Residuals that are not new in this step come back only where ``can_undo`` was set before it.
        """
        for state in list(self._tensors.values()):
            state.undo()

    def shared(self) -> dict[str, Any]:
        """A copy of what is the same on all ranks: shapes, levels, counters and the loss scale."""
        tensors = list(self._tensors.items())
        return {"shapes": {name: state.shape for name, state in tensors},
                "levels": {name: state.levels.copy() for name, state in tensors if state.levels is not None},
                "uncompressed_steps": {name: state.uncompressed_steps for name, state in tensors
                                       if state.uncompressed_steps},
                "loss_scale": self.loss_scale}

    def take_shared(self, shared: Mapping[str, Any]) -> None:
        """Replace by what another rank's ``shared()`` returned; residuals stay, in the unit of its loss scale.

        Raises:
            ResidualError: a tensor has another shape on that rank.
        """
        for name, shape in shared["shapes"].items():
            self.tensor(name, shape)
        if shared["loss_scale"] != self.loss_scale:
            self.follow_loss_scale(shared["loss_scale"] or 1.0)
            self.loss_scale = shared["loss_scale"]
        for name, state in list(self._tensors.items()):
            state.relearn(shared["levels"].get(name), shared["uncompressed_steps"].get(name, 0))
        self.revision += 1

    def state_dict(self) -> dict[str, Any]:
        """A deep copy of this rank's state as plain numbers and NumPy arrays, residuals in the tensors' shapes.

        Residuals differ from rank to rank, levels do not: a job that resumes needs the state of every rank, saved by
        each. See ``checkpoint.redistribute`` for one that resumes with another number of ranks.
        """
        residuals = {name: np.array(state.values).reshape(state.shape)
                     for name, state in self._with_residual().items()}
        return RankState(residuals=residuals, **self.shared(),
                         ranks_per_machine=self.ranks_per_machine).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by a copy of what ``state_dict()`` returned.

        Tensors must be the same. Only what became known without being declared, as under TensorFlow, where a variable
        is met in its first step, may be missing from ``state``, and begins anew; and a registry that knows no tensor
        yet takes any state.

        Raises:
            ResidualError: ``state`` is not of this format, or of other tensors: the first that differs is named. Then
                nothing is changed.
        """
        loaded = RankState.of(state)
        with self._lock:
            self._check_tensors(loaded)
            residuals = {name: np.array(value, order="C").reshape(-1) for name, value in loaded.residuals.items()}
            for name in [name for name in self._tensors if name not in self._declared and split_share(name)]:
                del self._tensors[name]
            for name, shape in loaded.shapes.items():
                self._tensors.setdefault(name, TensorState(shape))
            for name, known in self._tensors.items():
                levels = loaded.levels.get(name)
                known.replace(residuals.get(name), None if levels is None else np.array(levels),
                              loaded.uncompressed_steps.get(name, 0))
            self.loss_scale = loaded.loss_scale
            self.ranks_per_machine = loaded.ranks_per_machine
            self.revision += 1

    def _check_tensors(self, loaded: RankState) -> None:
        """Raise ResidualError unless the state is one of this registry's tensors, or of shares of them."""
        divided = {share[0] for share in map(split_share, loaded.shapes) if share}
        for name in sorted(loaded.shapes.keys() | self._declared) if self._tensors else ():
            if name in loaded.shapes:
                self._check_tensor(name, loaded.shapes[name])
            elif name not in divided:
                raise ResidualError(f"the state has nothing of tensor {name!r}, which this optimizer compresses: "
                                    "it was saved for another model, or with another min_elements")

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ResidualError unless a residual of this name and shape is one of this registry's tensors or shares."""
        tensor, *bounds = (name,) if name in self._tensors else split_share(name) or (name,)
        if tensor not in self._tensors:
            raise ResidualError(f"the state has a residual of tensor {name!r}, which this optimizer does not "
                                f"compress; it compresses {', '.join(sorted(self._tensors))}")
        whole = self._tensors[tensor].shape
        if not bounds and shape != whole:
            raise ResidualError(f"the residual of tensor {name!r} has shape {shape}, but the tensor has shape {whole}")
        if bounds and (bounds[0] > bounds[1] or bounds[1] > math.prod(whole) or shape != (bounds[1] - bounds[0],)):
            raise ResidualError(f"the residual of {name!r} has shape {shape}, but tensor {tensor!r} has shape {whole}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict()`` to a file of this name (npz); each rank needs a name of its own.

        Raises:
            OSError: the file cannot be written; one that was there is untouched.
        """
        checkpoint.write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace everything by what ``save`` wrote.

        Raises:
            OSError: there is no such file.
            ResidualError: the file is not one of ``save``, or see ``load_state_dict``. Then nothing is changed.
        """
        self.load_state_dict(checkpoint.read(path))
