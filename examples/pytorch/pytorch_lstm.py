"""Trains a character model, an LSTM, on the text of Python's own documentation, with the compression of your choice.

    horovodrun --gloo -np 2 python examples/pytorch/pytorch_lstm.py --twobit-allreduce

The text is what ``help()`` knows of the language; it ships with Python. Gradients are clipped, after the exchange, as
Horovod asks for: ``optimizer.synchronize()``, clip, and ``optimizer.step()`` within ``optimizer.skip_synchronize()``.
"""

import argparse
import math
import pydoc_data.topics
import statistics
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

from hvd_twobit.bench.sent_bytes import SentBytes
from hvd_twobit.torch import TwoBit


class CharacterModel(nn.Module):
    """Scores of the next character, for each character of each sequence."""

    def __init__(self, characters, embedding_size, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding_size)
        self.lstm = nn.LSTM(embedding_size, hidden_size, batch_first=True)
        self.output = nn.Linear(hidden_size, characters)

    def forward(self, text, state=None):
        outputs, state = self.lstm(self.embedding(text), state)
        return self.output(outputs), state


def threshold(text):
    return text if text == "auto" else float(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description="PyTorch character model example",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training text")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step and rank")
    parser.add_argument("--sequence-length", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--embedding-size", type=int, default=64, help="numbers that stand for a character")
    parser.add_argument("--hidden-size", type=int, default=256, help="numbers that the LSTM remembers")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of Adam")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the averaged gradient")
    parser.add_argument("--characters", type=int, help="take only so many characters of the text")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights")
    compression = parser.add_mutually_exclusive_group()
    compression.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    compression.add_argument("--twobit-allreduce", action="store_true", help="send gradients as two bits an element")
    parser.add_argument("--twobit-threshold", type=threshold, default="auto",
                        help="what two bits stand for, plus or minus: a number, or auto for levels that adapt")
    parser.add_argument("--twobit-transport", choices=["auto", "allgather", "sra", "allreduce"], default="auto",
                        help="how two bits travel; auto takes what a cost model finds fastest")
    return parser.parse_args()


def load_text(length):
    """Numbers of the text's characters, a tenth apart to validate with, and how many different ones there are."""
    text = "\n".join(pydoc_data.topics.topics.values())[:length]
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    encoded = torch.tensor([numbers[character] for character in text])
    split = len(encoded) * 9 // 10
    return encoded[:split], encoded[split:], len(numbers)


def sequences_of(text, batch_size, length):
    """This rank's batches of characters and of those that follow them, int64[batch_size, length], in reading order.

    The text is cut into as many strips as all ranks have sequences in a step; a batch holds the next piece of each
    strip, so that the LSTM's state passes from batch to batch.
    """
    strips = batch_size * hvd.size()
    strip_length = (len(text) - 1) // strips
    if strip_length == 0:
        raise SystemExit(f"{len(text):,} characters are too few for {hvd.size()} ranks with {batch_size} sequences "
                         "each: give more --characters or a smaller --batch-size")
    # Horovod: every rank reads its share of the strips.
    mine = slice(hvd.rank() * batch_size, (hvd.rank() + 1) * batch_size)
    current, following = (part[:strips * strip_length].view(strips, strip_length)[mine].split(length, dim=1)
                          for part in (text, text[1:]))
    return list(zip(current, following))


def evaluate(model, batches):
    """Mean loss over the validation text in nats; each rank computes its share."""
    model.eval()
    losses, state = [], None
    with torch.no_grad():
        for text, following in batches:
            scores, state = model(text, state)
            losses.append(F.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum").item())
    mean = sum(losses) / sum(following.numel() for _, following in batches)
    # Horovod: average metric values across workers.
    return hvd.allreduce(torch.tensor(mean), name="validation_loss").item()


def main():
    args = parse_arguments()

    # Horovod: initialize library.
    hvd.init()
    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    train_text, validation_text, characters = load_text(args.characters)
    train = sequences_of(train_text, args.batch_size, args.sequence_length)
    validation = sequences_of(validation_text, args.batch_size, args.sequence_length)

    model = CharacterModel(characters, args.embedding_size, args.hidden_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

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
    for epoch in range(1, args.epochs + 1):
        model.train()
        losses, seconds, sent_before, state = [], [], sent.total, None
        for text, following in train:
            start = time.perf_counter()
            optimizer.zero_grad()
            scores, state = model(text, state)
            state = [part.detach() for part in state]
            loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
            loss.backward()
            # Horovod: wait for the averaged gradients before they are clipped.
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
        bytes_per_step = (sent.total - sent_before) / len(train)

        # Horovod: average metric values across workers.
        train_loss = hvd.allreduce(torch.tensor(statistics.fmean(losses)), name="train_loss").item()
        validation_loss = evaluate(model, validation)
        # Horovod: print output only on first rank.
        if hvd.rank() == 0:
            print(f"epoch {epoch}/{args.epochs}  train perplexity {math.exp(train_loss):.3f}  "
                  f"validation perplexity {math.exp(validation_loss):.3f}  "
                  f"bits per character {validation_loss / math.log(2):.3f}  "
                  f"bytes sent per step {bytes_per_step:,.0f}  ms per step {1000 * statistics.median(seconds):.0f}",
                  flush=True)
    # Horovod: end together, so that no rank takes another's end for a failure.
    hvd.barrier()


if __name__ == "__main__":
    main()
