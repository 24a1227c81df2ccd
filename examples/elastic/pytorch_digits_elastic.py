"""Trains a small CNN on scikit-learn's digits while workers come and go, with the gradient compression of your choice.

    echo 'echo localhost:2' > discover_hosts.sh && chmod +x discover_hosts.sh
    horovodrun --gloo -np 2 --min-np 1 --max-np 4 --network-interfaces lo \\
        --host-discovery-script ./discover_hosts.sh \\
        python examples/elastic/pytorch_digits_elastic.py --twobit-allreduce --epochs 200

Write another number of slots into discover_hosts.sh while it trains: workers join or leave. Where one is killed, the
others go back to the last commit and train on. What two bits could not say yet, the residual, is part of the elastic
state, so that nothing is lost of what was committed, but for the residual of a worker that is gone.
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_twobit.torch import TwoBit, residuals_of


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
    parser = argparse.ArgumentParser(description="Elastic PyTorch digits example",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--batches-per-commit", type=int, default=5,
                        help="steps that are trained again, at most, where a worker is lost")
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


def log(text):
    # Horovod: print output only on first rank.
    if hvd.rank() == 0:
        print(text, flush=True)


def main():
    args = parse_arguments()

    # Horovod: initialize library.
    hvd.init()
    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    train_set, test_set = load_data()
    # Horovod: use ElasticSampler to partition the training data, anew whenever workers come or go.
    sampler = hvd.elastic.ElasticSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    model = Net()
    # Horovod: scale learning rate by the number of ranks.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)

    # Horovod: (optional) compression algorithm.
    if args.twobit_allreduce:
        compression = TwoBit(threshold=args.twobit_threshold, transport=args.twobit_transport)
    else:
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    # Horovod: what every worker has to have when workers come or go; with TwoBit, residuals and levels too.
    compressed = {"residuals": residuals_of(optimizer)} if args.twobit_allreduce else {}
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=1, batch=0, **compressed)

    def on_state_reset():
        # Horovod: adjust learning rate on reset.
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()
        # Horovod: partition the rest of the epoch anew; Horovod 0.28.1 does not where workers have only left.
        sampler.reset()

    state.register_reset_callbacks([on_state_reset])

    @hvd.elastic.run
    def train(state):
        # Horovod: entered again whenever workers have come or gone; state is then what was committed last.
        log(f"{hvd.size()} rank(s) train from epoch {state.epoch}, batch {state.batch}")
        if args.twobit_allreduce and hvd.size() == 1:
            print("One process sends nothing, so nothing is compressed until another worker joins.")
        while state.epoch <= args.epochs:
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                # Horovod: tell which images are done, so that they are not given out again in this epoch.
                sampler.record_batch(state.batch, args.batch_size)
                state.batch += 1
                if state.batch % args.batches_per_commit == 0:
                    # Horovod: keep a copy to go back to, and look for new workers.
                    state.commit()
            test_loss, accuracy = evaluate(model, test_set)
            log(f"epoch {state.epoch:2}/{args.epochs}  {hvd.size()} rank(s)  test loss {test_loss:.4f}  "
                f"test accuracy {accuracy:.4f}")
            state.epoch, state.batch = state.epoch + 1, 0
            # Horovod: set epoch to sampler for shuffling, at the end of the epoch.
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    # Horovod: end together, so that no rank takes another's end for a failure.
    hvd.barrier()


if __name__ == "__main__":
    main()
