"""A fuzzer of received payloads, run by test_fuzz: any bytes are decoded, or refused with nothing changed.

The arguments are libFuzzer's. What arrives lies right before a page that may not be touched, and so does the memory
for the gradient: one byte too far in the compiled kernels ends the process.
"""

from __future__ import annotations

import sys

import atheris
import numpy as np

from hvd_twobit import kernels
from tests.fuzz.choices import Choices
from tests.fuzz.limits import limit_memory
from tests.guarded import Guarded

kernels.load("numba")  # Before the rest is instrumented: Numba compiles bytecode as it is written.

with atheris.instrument_imports(include=["hvd_twobit"]):
    from hvd_twobit.buckets import Bucket
    from hvd_twobit.codec import Codec
    from hvd_twobit.config import TwoBitConfig
    from hvd_twobit.errors import PayloadError
    from hvd_twobit.residuals import ResidualRegistry

CONFIGS = [TwoBitConfig(positive_threshold=0.5, negative_threshold=-0.25, min_elements=0),
           TwoBitConfig(min_elements=0, block_elements=16), TwoBitConfig(min_elements=0)]
_received, _reduced = Guarded(), Guarded()


def one_input(content: bytes) -> None:
    """What some ranks sent, most of it damaged as the input says: payloads, or what each has summed."""
    choices = Choices(content)
    config, ranks = choices.one_of(CONFIGS), 1 + choices.number(3)
    elements = choices.one_of((0, 1, 15, 16, 17, 100, 1023, 1024, 1025, 2000))
    damaged = choices.one_of(("payloads", "payloads to sum", "sums"))
    registry = ResidualRegistry()
    codec = Codec(config, registry, warns=False)
    if config.adaptive:
        codec.observe("w", (elements,), np.ones(elements, np.float32), ranks, 1.0)
    layout = codec.layout(Bucket.of("w", (elements,)), 1 if damaged == "payloads" else ranks)
    payloads = layout.new()
    codec.encode(layout, payloads, "w", np.linspace(-1, 1, elements, dtype=np.float32))
    codec.seal(layout, payloads)
    rank = choices.number(ranks - 1)
    sent = np.tile(layout.chunks[min(rank, len(layout.chunks) - 1)].of(payloads), ranks)
    if damaged == "sums":
        sent = np.concatenate([codec.sum(layout, rank, np.tile(layout.chunks[rank].of(payloads), ranks), ranks)
                               for rank in range(ranks)])
    arrived = bytearray(sent.tobytes())
    for _ in range(choices.number(3)):
        at = choices.number(min(len(arrived), 65535))
        replacement = choices.some_bytes(choices.number(8))
        arrived[at:at + (len(replacement) if choices.number(7) else choices.number(64))] = replacement
    received = _received.place(np.frombuffer(arrived, np.uint8), at_end=True)
    out = _reduced.place(np.full(elements, 7, np.float32), at_end=True)
    levels = registry.tensor("w", (elements,)).levels
    try:
        if damaged == "payloads to sum":
            codec.sum(layout, rank, received, ranks)
            return
        contents = codec.receive(layout, received, ranks) if damaged == "payloads" else codec.receive_sums(
            layout, received)
    except PayloadError:
        assert (out == 7).all() and registry.tensor("w", (elements,)).levels is levels
        return
    codec.decode(contents, "w", out, 1 / ranks)
    after = registry.tensor("w", (elements,)).levels
    assert after is None or (np.isfinite(after).all() and (after > 0).all())


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    limit_memory()
    atheris.Fuzz()
