"""Gradients on a device that compresses them: a second CPU device plays one."""

from __future__ import annotations

import os

import tensorflow as tf

from hvd_twobit.tensorflow.devices import DEVICES_VARIABLE

DEVICE = "/CPU:1"

# Before TensorFlow starts its runtime. Only what is put on the second device notices it.
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                           [tf.config.LogicalDeviceConfiguration()] * 2)
os.environ[DEVICES_VARIABLE] = "CPU:1"
