"""How fast one core quantizes, and decodes and adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from plait import native
from plait.bench import Bench

COPY, READ, MOVE = "torch copy_", "plain read", "copy past the caches"


def run(bench: Bench) -> None:
    import torch

    torch.set_num_threads(1)
    count = bench.pick(quick=1 << 22, full=1 << 24)
    repetitions = bench.pick(quick=11, full=31)
    bench.configure(count=count, size_bytes=4 * count, bucket=1024, threads=1, isa=native.isa())
    source = torch.randn(count, generator=torch.Generator().manual_seed(bench.seed))
    other = torch.zeros(count)
    sides = {
        COPY: partial(other.copy_, source),
        READ: partial(native.read, source),
        MOVE: partial(native.copy, other, source),
        **codec_sides(source, other),
    }
    if native.missing():
        bench.skip("compiled kernels", str(native.missing()))
    figures = bench.interleave(sides, repetitions=repetitions, retries=bench.pick(quick=0, full=3))
    speed = {figure.name: figure.rate(4 * count / 1e9) for figure in figures}
    bounds = {"quantize, 4 bits": (0.8, 1.2), "decode and add, 4 bits": (1.2, 1.6)}
    for name in [name for name in sides if name not in (COPY, READ, MOVE)]:
        at_least, aim = bounds.get(name, (None, None))
        bench.case(
            name,
            speed[name],
            unit="GB/s",
            against=(COPY, speed[COPY]),
            limit=(READ, speed[READ]) if name.startswith("quantize") else (MOVE, speed[MOVE]),
            at_least=at_least,
            aim=aim,
        )
    other_implementations(bench, source[: 1 << 20])


def codec_sides(source, other) -> dict[str, Callable[[], object]]:
    """Every width, the residual, and 16-bit numbers, with the implementation in use."""
    import torch

    from plait.compress import Quantizer

    total = torch.zeros_like(source)
    sides: dict[str, Callable[[], object]] = {}
    for bits in (4, 8, 2, 1, 3):
        codec = Quantizer(bits=bits)
        payload = torch.zeros(codec.payload_bytes(source.numel()), dtype=torch.uint8)
        codec.compress(source, payload, key=1)
        sides[f"quantize, {bits} bits"] = partial(codec.compress, source, payload, key=1)
        sides[f"decode and add, {bits} bits"] = partial(codec.extract, payload, total, add=True)
        if bits == 4:
            nearest, both = Quantizer(stochastic=False), Quantizer(threads=2)
            sides["quantize, 4 bits, to the nearest"] = partial(nearest.compress, source, payload, key=1)
            sides["quantize, 4 bits, with residual"] = partial(
                codec.compress, source, payload, key=1, residual=other
            )
            sides["quantize, 4 bits, from bf16"] = partial(codec.compress, source.bfloat16(), payload, key=1)
            sides["quantize, 4 bits, two threads"] = partial(both.compress, source, payload, key=1)
            sides["decode and add, 4 bits, two threads"] = partial(both.extract, payload, total, add=True)
    return sides


def other_implementations(bench: Bench, source) -> None:
    """The same bytes, slower: on fewer numbers, because plain torch takes its time."""
    import torch

    from plait.compress import kernels, plain, wire

    layout = {"bits": 4, "bucket": 1024}
    payload = torch.zeros(wire.payload_bytes(source.numel(), **layout), dtype=torch.uint8)
    settings = {**layout, "stochastic": True, "key": 1, "first_bucket": 0}
    target = torch.zeros_like(source)
    sides = {
        "quantize, 4 bits, plain torch": partial(plain.quantize, source, payload, **settings),
        "decode and add, 4 bits, plain torch": partial(plain.dequantize, payload, target, add=True, **layout),
    }
    for isa in native.isas():
        if isa not in ("python", native.isa()):
            sides[f"quantize, 4 bits, {isa}"] = partial(
                kernels.quantize, source, payload, isa=isa, **settings
            )
            sides[f"decode and add, 4 bits, {isa}"] = partial(
                kernels.dequantize, payload, target, add=True, isa=isa, **layout
            )
    for figure in bench.interleave(sides, repetitions=5):
        bench.case(figure.name, figure.rate(source.nbytes / 1e9), unit="GB/s")
    for isa in sorted({"scalar", "avx2", "avx512"} - set(native.isas())):
        bench.skip(isa, native.missing() or "this machine does not have these instructions")
