"""Keeps residuals and levels in the unit of gradients that a ``GradScaler`` multiplies.

Horovod exchanges gradients before they are unscaled. So when the scale changes, what was not sent yet has to change
with it; and when the scaler skips a step because of an overflow, residuals and levels must be what they were before
that step, on every rank. Every rank's scaler does the same, as an overflow on one reaches all.

The scaler is known from ``TwoBit(scaler=...)``, or else from its first ``step(optimizer)``, which is in time: until
then the scale has not changed since the optimizer's first exchange. Only where residuals were there before that step
is that too late, if they are in another unit: loaded from a checkpoint, or left by steps without a scaler. Then
``seen`` raises instead of going on with wrong residuals. Residuals follow as soon as the scaler is updated, so that
what is saved with the scaler's state is in its unit.

The scale lies on the scaler's device, and to read it is to wait for that. So it is read when the scaler was updated or
has loaded a state, and not in a gradient hook.
"""

from __future__ import annotations

import weakref

import torch

from ..errors import ConfigError
from ..residuals import ResidualRegistry

_followers: weakref.WeakKeyDictionary[torch.amp.GradScaler, weakref.WeakSet[LossScale]] = weakref.WeakKeyDictionary()


def updated(scaler: torch.amp.GradScaler) -> None:
    """The scaler's scale may have changed, and residuals follow."""
    for loss_scale in list(_followers.get(scaler, ())):
        loss_scale.forget()
        loss_scale.follow()


def reloaded(scaler: torch.amp.GradScaler) -> None:
    """The scaler's scale may have changed; residuals, which may still be loaded, follow at the next step."""
    for loss_scale in list(_followers.get(scaler, ())):
        loss_scale.forget()


class LossScale:
    """The loss scale of one optimizer's gradients.

    Args:
        residuals: what is kept in the gradients' unit.
        scaler: the scaler that the user told of, if any.
    """

    def __init__(self, residuals: ResidualRegistry, scaler: torch.amp.GradScaler | None) -> None:
        self._residuals = residuals
        self._scaler: torch.amp.GradScaler | None = None
        self._scale: float | None = None
        self._began_without_scale = False
        self.applied = False
        """Whether the optimizer's step was applied since ``expect_step``."""
        if scaler is not None and scaler.is_enabled():
            self._bind(scaler)

    def follow(self) -> None:
        """Between two steps: bring residuals and levels into the unit of the next one's gradients."""
        if self._scaler is not None:
            if self._scale is None or not _tells_changes(self._scaler):
                self._scale = self._scaler.get_scale()
            self._residuals.follow_loss_scale(self._scale)
        else:
            self._residuals.can_undo = self._residuals.loss_scale is not None  # A scaler is about to be known.
            self._began_without_scale = self._residuals.loss_scale is None and len(self._residuals) > 0

    def forget(self) -> None:
        """The scale may be another now."""
        self._scale = None

    def expect_step(self) -> None:
        """The scaler is about to apply the optimizer's step, or to skip it."""
        self.applied = False

    def seen(self, scaler: torch.amp.GradScaler) -> None:
        """The scaler has applied or skipped the optimizer's step.

        Raises:
            ConfigError: it is not the scaler that was given, or residuals are in the unit of another scale.
        """
        if self._scaler is not scaler:
            self._learn(scaler)
        if not self.applied:
            self._residuals.undo_step()

    def _learn(self, scaler: torch.amp.GradScaler) -> None:
        if self._scaler is not None:
            raise ConfigError("the optimizer's step was called by another GradScaler than the one before (or than "
                              "TwoBit(scaler=...)): residuals follow the scale of one")
        scale, known = scaler.get_scale(), self._residuals.loss_scale
        if known is not None and known != scale:
            raise ConfigError(f"residuals of gradients that were multiplied by {known:g} were loaded, and the first "
                              f"step's gradients were multiplied by {scale:g}: pass the scaler as TwoBit(scaler=...), "
                              "or load the scaler's state before the first step")
        if self._began_without_scale:
            raise ConfigError("residuals of gradients that no GradScaler had multiplied were there before the first "
                              f"step of one, whose scale was {scale:g}: call residuals_of(optimizer)."
                              "follow_loss_scale(scaler.get_scale()) before its first backward()")
        self._residuals.loss_scale = scale
        self._bind(scaler)

    def _bind(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler, self._scale = scaler, None
        self._residuals.can_undo = True
        _followers.setdefault(scaler, weakref.WeakSet()).add(self)


def _tells_changes(scaler: torch.amp.GradScaler) -> bool:
    """Whether ``updated`` and ``reloaded`` are called of it: subclasses may have methods of their own."""
    kind = type(scaler)
    return (kind.update is torch.amp.GradScaler.update
            and kind.load_state_dict is torch.amp.GradScaler.load_state_dict)
