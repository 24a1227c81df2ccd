"""Trains a small CNN on scikit-learn's digits with Keras's fit, with the gradient compression of your choice.

    horovodrun --gloo -np 2 python examples/tensorflow2/tensorflow2_keras_digits.py --twobit-allreduce
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import time

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from hvd_twobit.bench.sent_bytes import SentBytes
from hvd_twobit.keras import TwoBit


def make_model():
    """A CNN of 151,306 parameters for images of 8 x 8 pixels."""
    return tf.keras.Sequential([
        tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu", input_shape=(8, 8, 1)),
        tf.keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(2),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dense(10),
    ])


def threshold(text):
    return text if text == "auto" else float(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description="TensorFlow 2 Keras digits example",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank; the ranks' number scales it")
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and of the order of the images")
    compression = parser.add_mutually_exclusive_group()
    compression.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    compression.add_argument("--twobit-allreduce", action="store_true", help="send gradients as two bits an element")
    parser.add_argument("--twobit-threshold", type=threshold, default="auto",
                        help="what two bits stand for, plus or minus: a number, or auto for levels that adapt")
    parser.add_argument("--twobit-transport", choices=["auto", "allgather", "sra", "allreduce"], default="auto",
                        help="how two bits travel; auto takes what a cost model finds fastest")
    parser.add_argument("--progress-bar", action="store_true",
                        help="draw a progress bar though the output is no terminal (horovodrun's is)")
    parser.add_argument("--output", type=pathlib.Path, help="write what was measured to this JSON file")
    return parser.parse_args()


def load_data():
    """Images and labels of 1,437 digits to train on and 360 to test on, the same on every rank."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    train_x, test_x, train_y, test_y = train_test_split(images, digits.target, test_size=0.2, random_state=0,
                                                        stratify=digits.target)
    return (train_x, train_y), (test_x, test_y)


class Measure(tf.keras.callbacks.Callback):
    """Collects losses, accuracy, time and traffic of every epoch."""

    def __init__(self, sent):
        super().__init__()
        self.sent = sent
        self.history = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seconds, self.sent_before = [], self.sent.total

    def on_train_batch_begin(self, batch, logs=None):
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)
        self.sent_after = self.sent.total

    def on_epoch_end(self, epoch, logs=None):
        self.history.append({
            "epoch": epoch + 1, "train_loss": float(logs["loss"]), "test_loss": float(logs["val_loss"]),
            "test_accuracy": float(logs["val_accuracy"]),
            "bytes_sent_per_step": (self.sent_after - self.sent_before) / len(self.seconds),
            "seconds_per_step": statistics.median(self.seconds)})


class Progress(tf.keras.callbacks.Callback):
    """Shows how training goes: a bar, or a line per epoch."""

    def __init__(self, live):
        super().__init__()
        self.live = live

    def on_train_begin(self, logs=None):
        self.bar = tqdm(total=self.params["epochs"] * self.params["steps"], disable=not self.live, ncols=64,
                        file=sys.stderr, unit="step")

    def on_train_batch_end(self, batch, logs=None):
        self.bar.update()

    def on_epoch_end(self, epoch, logs=None):
        self.bar.set_postfix_str(f"loss {logs['loss']:.3f}")
        if not self.live:
            print(f"epoch {epoch + 1:2}/{self.params['epochs']}  train loss {logs['loss']:.4f}  "
                  f"test loss {logs['val_loss']:.4f}  test accuracy {logs['val_accuracy']:.4f}", flush=True)

    def on_train_end(self, logs=None):
        self.bar.close()


def main():
    args = parse_arguments()

    # Horovod: initialize Horovod.
    hvd.init()
    # Horovod: limit # of CPU threads to be used per worker.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(args.seed)

    (train_x, train_y), test = load_data()
    # Horovod: every rank trains on its share of the data.
    share = tf.data.Dataset.from_tensor_slices((train_x, train_y)).shard(hvd.size(), hvd.rank())
    steps = math.ceil(len(train_x) / (hvd.size() * args.batch_size))
    train = share.repeat().shuffle(len(train_x), seed=args.seed).batch(args.batch_size)

    model = make_model()
    # Horovod: adjust learning rate based on number of ranks.
    optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=args.momentum)

    # Horovod: (optional) compression algorithm.
    if args.twobit_allreduce:
        compression = TwoBit(threshold=args.twobit_threshold, transport=args.twobit_transport)
        if hvd.size() == 1:
            print("One process sends nothing, so nothing is compressed: start several with horovodrun --gloo -np 2.")
    else:
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    # Horovod: add Horovod DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    measure = Measure(SentBytes("tensorflow"))
    callbacks = [
        # Horovod: broadcast initial variable states from rank 0 to all other processes.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Horovod: average metrics among workers at the end of every epoch.
        hvd.callbacks.MetricAverageCallback(),
        measure,
    ]
    # Horovod: show progress on rank 0 only.
    if hvd.rank() == 0:
        callbacks.append(Progress(live=args.progress_bar or sys.stderr.isatty()))
    model.fit(train, steps_per_epoch=steps, epochs=args.epochs, validation_data=test, callbacks=callbacks, verbose=0)

    if hvd.rank() == 0 and args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        measured = {"front_end": "Keras", "ranks": hvd.size(), "parameters": model.count_params(),
                    "steps_per_epoch": steps, "arguments": vars(args), "epochs": measure.history}
        args.output.write_text(json.dumps(measured, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
