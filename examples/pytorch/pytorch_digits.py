"""Trains a small CNN on scikit-learn's digits, data-parallel, with the gradient compression of your choice.

    horovodrun --gloo -np 2 python examples/pytorch/pytorch_digits.py --twobit-allreduce
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from hvd_twobit.bench.sent_bytes import SentBytes
from hvd_twobit.torch import TwoBit


class Net(nn.Module):
    """A CNN of 151,306 parameters for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(64 * 4 * 4, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def threshold(text):
    return text if text == "auto" else float(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description="PyTorch digits example",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank; times the number of ranks")
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
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def evaluate(model, test_set):
    """Mean loss and accuracy over the test set; each rank computes its share of it."""
    model.eval()
    images, labels = (tensor[hvd.rank()::hvd.size()] for tensor in test_set.tensors)
    with torch.no_grad():
        scores = model(images)
    loss = F.cross_entropy(scores, labels, reduction="sum")
    correct = (scores.argmax(1) == labels).sum()
    # Horovod: add up the ranks' shares.
    totals = hvd.allreduce(torch.stack([loss, correct.float()]), op=hvd.Sum, name="test_totals")
    return [total.item() / len(test_set) for total in totals]


def main():
    args = parse_arguments()

    # Horovod: initialize library.
    hvd.init()
    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    first = hvd.rank() == 0

    train_set, test_set = load_data()
    # Horovod: use DistributedSampler to partition the training data.
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    model = Net()
    # Horovod: scale learning rate by the number of ranks.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)

    # Horovod: broadcast parameters & optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Horovod: (optional) compression algorithm.
    if args.twobit_allreduce:
        compression = TwoBit(threshold=args.twobit_threshold, transport=args.twobit_transport)
        if hvd.size() == 1:
            print("One process sends nothing, so nothing is compressed: start several with horovodrun --gloo -np 2.")
    else:
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    sent = SentBytes("torch")
    history = []
    # Horovod: show progress on rank 0 only.
    live = first and (args.progress_bar or sys.stderr.isatty())
    bar = tqdm(total=args.epochs * len(loader), disable=not live, ncols=64, file=sys.stderr, unit="step")
    for epoch in range(1, args.epochs + 1):
        model.train()
        # Horovod: set epoch to sampler for shuffling.
        sampler.set_epoch(epoch)
        losses, seconds, sent_before = [], [], sent.total
        for images, labels in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
            bar.update()
        bytes_per_step = (sent.total - sent_before) / len(loader)

        # Horovod: average metric values across workers.
        train_loss = hvd.allreduce(torch.tensor(statistics.fmean(losses)), name="train_loss").item()
        test_loss, accuracy = evaluate(model, test_set)
        history.append({"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": accuracy,
                        "bytes_sent_per_step": bytes_per_step, "seconds_per_step": statistics.median(seconds)})
        bar.set_postfix_str(f"loss {train_loss:.3f}")
        # Horovod: print output only on first rank.
        if first and not live:
            print(f"epoch {epoch:2}/{args.epochs}  train loss {train_loss:.4f}  test loss {test_loss:.4f}  "
                  f"test accuracy {accuracy:.4f}", flush=True)
    bar.close()

    if first and args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        parameters = sum(p.numel() for p in model.parameters())
        measured = {"front_end": "PyTorch", "ranks": hvd.size(), "parameters": parameters,
                    "steps_per_epoch": len(loader), "arguments": vars(args), "epochs": history}
        args.output.write_text(json.dumps(measured, indent=1, default=str) + "\n")
    # Horovod: end together, so that no rank takes another's end for a failure.
    hvd.barrier()


if __name__ == "__main__":
    main()
