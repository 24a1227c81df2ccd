"""A codec's exchange of a bucket with all ranks in one process, in place of the front ends' collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvd_twobit.buckets import Bucket, Part
from hvd_twobit.codec import BucketLayout, Codec, Contents


def bucket_of(gradients: Mapping[str, np.ndarray]) -> Bucket:
    """One bucket with all tensors, whole."""
    return Bucket(tuple(Part(name, values.shape, 0, values.size) for name, values in gradients.items()))


def encoded(codec: Codec, layout: BucketLayout, gradients: Mapping[str, np.ndarray]) -> np.ndarray:
    """The payloads that a rank sends of a bucket."""
    payloads = layout.new()
    for name, values in gradients.items():
        codec.encode(layout, payloads, name, values.reshape(-1))
    codec.seal(layout, payloads)
    return payloads


def payload(codec: Codec, name: str, shape: tuple[int, ...], gradient: np.ndarray) -> np.ndarray:
    """The payload of a tensor alone in its bucket."""
    return encoded(codec, codec.layout(Bucket.of(name, shape), 1), {name: gradient.reshape(shape)})


def decode(codec: Codec, name: str, shape: tuple[int, ...], gathered: np.ndarray, ranks: int, out: np.ndarray,
           scale: float) -> None:
    """What an allgather returned of a tensor alone in its bucket, decoded into ``out``."""
    codec.decode(codec.receive(codec.layout(Bucket.of(name, shape), 1), gathered, ranks), name, out, scale)


def arrived(codecs: Sequence[Codec], buckets: Bucket, gradients: Sequence[Mapping[str, np.ndarray]],
            transport: str) -> list[Contents]:
    """What every rank has of a bucket after its collectives."""
    ranks = len(codecs)
    layouts = [codec.layout(buckets, ranks if transport == "sra" else 1) for codec in codecs]
    sent = [encoded(*each) for each in zip(codecs, layouts, gradients)]
    if transport == "allgather":
        return [codec.receive(layout, np.concatenate(sent), ranks) for codec, layout in zip(codecs, layouts)]
    sums = [codec.sum(layout, rank, np.concatenate([layout.chunks[rank].of(one) for one in sent]), ranks)
            for rank, (codec, layout) in enumerate(zip(codecs, layouts))]
    return [codec.receive_sums(layout, np.concatenate(sums)) for codec, layout in zip(codecs, layouts)]
