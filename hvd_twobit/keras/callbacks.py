"""Keras callback that writes the statistics of compression to TensorBoard."""

from __future__ import annotations

import os
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..errors import ConfigError
from ..tensorflow import residuals_of


class TwoBitTensorBoard(tf.keras.callbacks.Callback):
    """Writes ``residuals_of(model.optimizer).stats()`` as ``twobit/<tensor>/<number>``, on rank 0.

    The numbers are those of ``hvd_twobit.statistics.TensorSummary``.

    Args:
        log_dir: directory of TensorBoard's files; may be that of ``tf.keras.callbacks.TensorBoard``.
        update_freq: training steps from one entry to the next.

    Raises:
        ConfigError: ``update_freq`` is no whole number above zero; at the beginning of training, the optimizer was not
            made with ``compression=TwoBit``.
    """

    def __init__(self, log_dir: str | os.PathLike[str], update_freq: int = 100) -> None:
        super().__init__()
        if isinstance(update_freq, bool) or not isinstance(update_freq, int) or update_freq < 1:
            raise ConfigError(f"update_freq must be a whole number of steps above zero, not {update_freq!r}")
        self._log_dir, self._update_freq = os.fspath(log_dir), update_freq
        self._writer: tf.summary.SummaryWriter | None = None
        self._step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._residuals = residuals_of(self.model.optimizer)
        if hvd.rank() == 0 and self._writer is None:
            self._writer = tf.summary.create_file_writer(self._log_dir)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        if self._step % self._update_freq == 0:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _write(self) -> None:
        if self._writer is None:
            return
        with self._writer.as_default(step=self._step):
            for tensor, summary in self._residuals.stats().items():
                for name, number in summary.scalars().items():
                    tf.summary.scalar(f"twobit/{tensor}/{name}", number)
