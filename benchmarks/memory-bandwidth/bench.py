"""How fast the kernels read, copy and checksum memory."""

from __future__ import annotations

import zlib
from functools import partial

import numpy as np

from plait import native
from plait.bench import Bench


def run(bench: Bench) -> None:
    import torch

    torch.set_num_threads(1)
    size = bench.pick(quick=64 << 20, full=256 << 20)
    repetitions = bench.pick(quick=5, full=21)
    bench.configure(size_bytes=size, threads=1, isa=native.isa())
    source = np.random.default_rng(bench.seed).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros_like(source)
    words = source.view(np.uint64)
    tensor, other = torch.from_numpy(source), torch.from_numpy(target)
    compiled = [isa for isa in native.isas() if isa != "python"]
    sides = {"numpy xor": lambda: np.bitwise_xor.reduce(words), "torch copy_": lambda: other.copy_(tensor)}
    sides["zlib.crc32"] = lambda: zlib.crc32(source)
    for isa in compiled:
        sides[f"read, {isa}"] = partial(native.read, source, isa=isa)
        sides[f"copy, {isa}"] = partial(native.copy, target, source, isa=isa)
        sides[f"checksum, {isa}"] = partial(native.checksum, source, isa=isa)
    figures = bench.interleave(sides, repetitions=repetitions, retries=bench.pick(quick=0, full=2))
    speed = {name: figure.rate(size / 1e9) for name, figure in zip(sides, figures, strict=True)}
    reads = [speed[f"read, {isa}"] for isa in compiled] + [speed["numpy xor"]]
    limit = ("plain read", max(reads, key=lambda read: read.value))
    peers = {"read": "numpy xor", "copy": "torch copy_", "checksum": "zlib.crc32"}
    bounds = {"read": 0.9, "copy": 0.9, "checksum": 3.0}
    for kernel, peer in peers.items():
        for isa in compiled:
            bench.case(
                f"{kernel}, {isa}",
                speed[f"{kernel}, {isa}"],
                unit="GB/s",
                against=(peer, speed[peer]),
                limit=limit,
                # Only the implementation in use has to keep its bound; the others inform.
                at_least=bounds[kernel] if isa == native.isa() else None,
            )
    for isa in {"scalar", "avx2", "avx512"} - set(compiled):
        bench.skip(isa, native.missing() or "this machine does not have these instructions")
    piece = source[: 8 << 20]
    (slow,) = bench.interleave({"python": lambda: native.checksum(piece, isa="python")}, repetitions=5)
    bench.case("checksum, python", slow.rate(piece.nbytes / 1e9), unit="GB/s")
