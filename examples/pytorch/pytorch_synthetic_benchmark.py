"""Measures how many random images per second a model trains on, with the gradient compression of your choice.

    horovodrun --gloo -np 2 python examples/pytorch/pytorch_synthetic_benchmark.py --twobit-allreduce

It follows Horovod's benchmark of the same name, on GPUs where PyTorch sees some. ResNet-50, -101 and -152 are defined
here, so that torchvision is not needed; where it is installed, ``--model`` takes its classifiers too, such as vgg16.
Run it between hosts, over the link that is in question: on one machine, where no link is in the way, compression has
little to win.
"""

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hvd_twobit.torch import TwoBit, residuals_of

RESNET_BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}


class Bottleneck(nn.Module):
    """Three convolutions around which the input is added to their output."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False),
                                          nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """K. He et al., "Deep Residual Learning for Image Recognition", 2015, table 1, for 1000 classes.

    As in torchvision, the 3 x 3 convolution of a block has its stride.
    """

    def __init__(self, blocks):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        layers, channels = [], 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for number in range(count):
                layers.append(Bottleneck(channels, width, stride=2 if stage and number == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        return self.fc(self.blocks(x).mean((2, 3)))


def make_model(name):
    if name in RESNET_BLOCKS:
        return ResNet(RESNET_BLOCKS[name])
    try:
        from torchvision import models
    except ImportError:
        raise SystemExit(f"--model {name} needs torchvision; without it there are {', '.join(RESNET_BLOCKS)}") from None
    return models.get_model(name)


def threshold(text):
    return text if text == "auto" else float(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description="PyTorch Synthetic Benchmark",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="model to benchmark")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--image-size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--num-warmup-batches", type=int, default=10,
                        help="number of warm-up batches that don't count towards benchmark")
    parser.add_argument("--num-batches-per-iter", type=int, default=10,
                        help="number of batches per benchmark iteration")
    parser.add_argument("--num-iters", type=int, default=10, help="number of benchmark iterations")
    parser.add_argument("--num-threads", type=int, default=1, help="CPU threads of a rank")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU, also where there are GPUs")
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

    # Horovod: initialize library.
    hvd.init()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    if args.cuda:
        # Horovod: pin GPU to local rank.
        torch.cuda.set_device(hvd.local_rank())
    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(args.num_threads)

    model = make_model(args.model)
    # Horovod: scale learning rate by the number of ranks.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())

    # Horovod: (optional) compression algorithm.
    if args.twobit_allreduce:
        compression = TwoBit(threshold=args.twobit_threshold, transport=args.twobit_transport)
        if hvd.size() == 1:
            print("One process sends nothing, so nothing is compressed: start several with horovodrun --gloo -np 2.")
    else:
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    # Horovod: broadcast parameters & optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if args.cuda:
        model.cuda()  # Now and not before: a Horovod that was built without GPU operations broadcasts from the CPU.

    # One batch of fixed random data.
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(1000, (args.batch_size,))
    if args.cuda:
        images, labels = images.cuda(), labels.cuda()

    def benchmark_step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    log(f"Model: {args.model}, {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
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
        statistics = residuals_of(optimizer).stats().values()
        compressed = [summary for summary in statistics if summary.compressed_exchanges]
        log(f"TwoBit compressed {len(compressed)} of {len(list(model.parameters()))} gradients, to "
            f"{sum(summary.nbytes for summary in compressed) / 1e6:.2f} MB of codes and levels in a step")
    # Horovod: end together, so that no rank takes another's end for a failure.
    hvd.barrier()


if __name__ == "__main__":
    main()
