"""Versions of a model that changes a little from each to the next, and the deltas between them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightrl.messages.weights import DeltaOffer, PublishWeights
from lightrl.weights.delta.file import DeltaManifest, open_packed
from lightrl.weights.version.layout import ITEMSIZES
from lightrl.weights.version.manifest import VersionFile, read_manifest
from lightrl.weights.version.write import TensorBytes, write_version
from tests.support.delta_files import offer_of, write_delta

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]

# A tensor across two buckets, small ones of several dtypes between, a head that is tied to the
# embedding and therefore not here, a router's bias, a counter, an odd end.
SHAPES: Shapes = {
    "embed.weight": ("bfloat16", (4500, 1000)),
    "layers.0.bias": ("float32", (3,)),
    "layers.0.experts": ("float16", (5, 7)),
    "layers.0.router.correction": ("float32", (999,)),
    "layers.0.router.count": ("int64", (9,)),
    "layers.1.weight": ("float32", (3000, 700)),
    "norm.scale": ("float8_e4m3fn", (37,)),
}
# of eight buckets
LARGER: Shapes = {**SHAPES, "layers.2.weight": ("bfloat16", (21_000, 1000))}


def write_changed(
    path: Path, number: int, changed: float = 0.01, shapes: Shapes = SHAPES
) -> VersionFile:
    """The version of this number: that before it with about this share of all elements changed by
    one."""
    random = np.random.default_rng(0)
    tensors = []
    for name, (dtype, shape) in shapes.items():
        kind = f"u{ITEMSIZES[dtype]}"
        data = random.integers(0, 1 << 8, (*shape, ITEMSIZES[dtype]), np.uint8).view(kind)
        for s in range(number):
            steps = np.random.default_rng(s + 1).random(data.shape) < changed
            data = data + steps.astype(kind)
        tensors.append(TensorBytes(name, dtype, shape, memoryview(data).cast("B")))
    return write_version(path, number, tensors)


def delta_of(base: VersionFile, target: VersionFile, path: Path, threads: int = 2) -> VersionFile:
    written = write_delta(base, target, read_manifest(target).tensors, path, threads)
    assert written is not None
    return written[0]


def manifest_of(delta: VersionFile) -> DeltaManifest:
    return open_packed(Path(delta.path), delta.num_bytes).manifest


def link_of(delta: VersionFile) -> DeltaOffer:
    return offer_of(delta, manifest_of(delta))


def with_deltas(offer: PublishWeights, *deltas: VersionFile) -> PublishWeights:
    return replace(offer, deltas=tuple(map(link_of, deltas)))
