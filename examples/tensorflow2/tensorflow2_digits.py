"""Trains a small CNN on scikit-learn's digits with a gradient tape, with the gradient compression of your choice.

    horovodrun --gloo -np 2 python examples/tensorflow2/tensorflow2_digits.py --twobit-allreduce
"""

import argparse
import json
import pathlib
import statistics
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hvd_twobit.bench.sent_bytes import SentBytes
from hvd_twobit.tensorflow import TwoBit


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
    parser = argparse.ArgumentParser(description="TensorFlow 2 digits example",
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
    parser.add_argument("--output", type=pathlib.Path, help="write what was measured to this JSON file")
    return parser.parse_args()


def load_data():
    """Images and labels of 1,437 digits to train on and 360 to test on, the same on every rank."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    train_x, test_x, train_y, test_y = train_test_split(images, digits.target.astype(np.int64), test_size=0.2,
                                                        random_state=0, stratify=digits.target)
    return (train_x, train_y), (test_x, test_y)


def main():
    args = parse_arguments()

    # Horovod: initialize Horovod.
    hvd.init()
    # Horovod: limit # of CPU threads to be used per worker.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(args.seed)
    first = hvd.rank() == 0

    (train_x, train_y), (test_x, test_y) = load_data()
    # Horovod: every rank trains on its share of the data.
    share = tf.data.Dataset.from_tensor_slices((train_x, train_y)).shard(hvd.size(), hvd.rank())
    steps = len(train_x) // hvd.size() // args.batch_size
    train = share.shuffle(len(train_x), seed=args.seed).batch(args.batch_size, drop_remainder=True).take(steps)

    model = make_model()
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Horovod: adjust learning rate based on number of ranks.
    optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=args.momentum)
    optimizer.build(model.trainable_variables)

    # Horovod: (optional) compression algorithm.
    if args.twobit_allreduce:
        compression = TwoBit(threshold=args.twobit_threshold, transport=args.twobit_transport)
        if hvd.size() == 1:
            print("One process sends nothing, so nothing is compressed: start several with horovodrun --gloo -np 2.")
    else:
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    @tf.function
    def training_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # Horovod: add Horovod Distributed GradientTape.
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    sent = SentBytes("tensorflow")
    history = []
    for epoch in range(1, args.epochs + 1):
        losses, seconds, sent_before = [], [], sent.total
        for images, labels in train:
            start = time.perf_counter()
            losses.append(float(training_step(images, labels)))
            seconds.append(time.perf_counter() - start)
        bytes_per_step = (sent.total - sent_before) / steps

        # Horovod: average metric values across workers.
        train_loss = float(hvd.allreduce(tf.constant(statistics.fmean(losses)), name="train_loss"))
        scores = model(test_x, training=False)
        test_loss = float(loss_of(test_y, scores))
        accuracy = float(np.mean(np.argmax(scores, axis=1) == test_y))
        history.append({"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": accuracy,
                        "bytes_sent_per_step": bytes_per_step, "seconds_per_step": statistics.median(seconds)})
        # Horovod: print output only on first rank.
        if first:
            print(f"epoch {epoch:2}/{args.epochs}  train loss {train_loss:.4f}  test loss {test_loss:.4f}  "
                  f"test accuracy {accuracy:.4f}", flush=True)

    if first and args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        measured = {"front_end": "TensorFlow", "ranks": hvd.size(), "parameters": model.count_params(),
                    "steps_per_epoch": steps, "arguments": vars(args), "epochs": history}
        args.output.write_text(json.dumps(measured, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
