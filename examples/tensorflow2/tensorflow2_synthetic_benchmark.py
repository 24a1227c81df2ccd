"""Measures how many random images per second a Keras application trains on, with the compression of your choice.

    horovodrun --gloo -np 2 python examples/tensorflow2/tensorflow2_synthetic_benchmark.py --twobit-allreduce

It follows Horovod's benchmark of the same name, on CPUs: a gradient tape within a ``tf.function``. ``--model`` takes
any name in ``tf.keras.applications``; weights are random, so nothing is downloaded. Run it between hosts, over the link
that is in question: on one machine, where no link is in the way, compression has little to win.
"""

import argparse
import timeit

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_twobit.tensorflow import TwoBit, residuals_of


def threshold(text):
    return text if text == "auto" else float(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description="TensorFlow Synthetic Benchmark",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="ResNet50", help="model to benchmark")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--image-size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--num-warmup-batches", type=int, default=10,
                        help="number of warm-up batches that don't count towards benchmark")
    parser.add_argument("--num-batches-per-iter", type=int, default=10,
                        help="number of batches per benchmark iteration")
    parser.add_argument("--num-iters", type=int, default=10, help="number of benchmark iterations")
    parser.add_argument("--num-threads", type=int, default=1, help="CPU threads of a rank")
    compression = parser.add_mutually_exclusive_group()
    compression.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    compression.add_argument("--twobit-allreduce", action="store_true", help="send gradients as two bits an element")
    parser.add_argument("--twobit-threshold", type=threshold, default="auto",
                        help="what two bits stand for, plus or minus: a number, or auto for levels that adapt")
    parser.add_argument("--twobit-transport", choices=["auto", "allgather", "sra", "allreduce"], default="auto",
                        help="how two bits travel; auto takes what a cost model finds fastest")
    return parser.parse_args()


def log(text):
    # Horovod: print output only on first rank.
    if hvd.rank() == 0:
        print(text, flush=True)


def main():
    args = parse_arguments()

    # Horovod: initialize Horovod.
    hvd.init()
    # Horovod: limit # of CPU threads to be used per worker.
    tf.config.threading.set_intra_op_parallelism_threads(args.num_threads)

    model = getattr(tf.keras.applications, args.model)(weights=None, input_shape=(args.image_size, args.image_size, 3))
    # Horovod: adjust learning rate based on number of ranks.
    optimizer = tf.keras.optimizers.SGD(0.01 * hvd.size())
    optimizer.build(model.trainable_variables)

    # One batch of fixed random data.
    images = tf.random.uniform([args.batch_size, args.image_size, args.image_size, 3])
    labels = tf.random.uniform([args.batch_size], maxval=1000, dtype=tf.int64)

    # Horovod: (optional) compression algorithm.
    if args.twobit_allreduce:
        compression = TwoBit(threshold=args.twobit_threshold, transport=args.twobit_transport)
        if hvd.size() == 1:
            print("One process sends nothing, so nothing is compressed: start several with horovodrun --gloo -np 2.")
    else:
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    tapes = []

    @tf.function
    def benchmark_step():
        with tf.GradientTape() as tape:
            probabilities = model(images, training=True)
            loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(labels, probabilities))
        # Horovod: add Horovod Distributed GradientTape.
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        tapes.append(tape)  # Once, when the step is traced: residuals belong to the variables, and any tape shows them.

    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    log(f"Model: {args.model}, {model.count_params():,} parameters")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of workers: {hvd.size()}")

    # With TwoBit the first batch travels uncompressed, in which levels are learnt, so let it be a warm-up batch.
    log("Running warmup...")
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)

    log("Running benchmark...")
    rates = []
    for number in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {rates[-1]:.1f} img/sec per worker")

    mean, deviation = np.mean(rates), 1.96 * np.std(rates)
    log(f"Img/sec per worker: {mean:.1f} +-{deviation:.1f}")
    log(f"Total img/sec on {hvd.size()} worker(s): {hvd.size() * mean:.1f} +-{hvd.size() * deviation:.1f}")
    if args.twobit_allreduce:
        statistics = residuals_of(tapes[0]).stats().values()
        compressed = [summary for summary in statistics if summary.compressed_exchanges]
        log(f"TwoBit compressed {len(compressed)} of {len(model.trainable_variables)} gradients, to "
            f"{sum(summary.nbytes for summary in compressed) / 1e6:.2f} MB of codes and levels in a step")


if __name__ == "__main__":
    main()
