"""Codecs: numbers to fewer bytes and back, behind one small interface, priced without running.

:class:`Quantizer` is per-bucket max-min uniform quantization with 1 to 8 bits, as CGX uses it
(I. Markov, H. Ramezanikebrya, D. Alistarh, "CGX: adaptive system support for communication-efficient deep
learning", Middleware 2022), which follows QSGD (D. Alistarh et al., NeurIPS 2017). Each bucket of numbers
is laid on a grid between its lowest and its highest:

    =====================  ==========================================================
    unit                   (max - min) / (2^bits - 1)
    code of x              floor((x - min) / unit + r), in 0 .. 2^bits - 1
    decoded                min + code * unit
    r                      random in [0, 1): unbiased; or 1/2: to the nearest
    =====================  ==========================================================

Encoding and decoding take one pass each over memory. Where we differ: r is random by default, and a
function of (seed, step, rank, phase, parameter, index), so the bytes do not depend on chunks or threads;
the unit is rounded up if need be, so that no code is ever beyond the last; ranges that fp32 cannot hold,
and ranges below its normal numbers, work; and a bucket with an Inf or a NaN arrives as NaN in every
element, so that a GradScaler sees it. docs/wire.md has every detail.

Importing this needs no torch.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from plait.compress import kernels, wire
from plait.compress.estimate import Estimate, cast_error, normal_range, rounding_error
from plait.compress.given import expect
from plait.compress.rounding import checked_key
from plait.errors import UsageError
from plait.units import parse_whole

if TYPE_CHECKING:
    from torch import Tensor, dtype


Narrow = Literal["fp16", "bf16"]


@runtime_checkable
class Codec(Protocol):
    """Writes numbers as bytes, reads them back, and knows beforehand what that costs."""

    def payload_bytes(self, count: int) -> int:
        """Bytes that ``count`` numbers take."""

    def compress(
        self, source: Tensor, payload: Tensor, *, key: int, first: int = 0, residual: Tensor | None = None
    ) -> None:
        """Write the numbers of the source (fp32, fp16, bf16) into the payload (uint8).

        The source is the stretch of a parameter that starts at element ``first``; ``key`` names the
        stream of random numbers (see :func:`plait.compress.rounding.stream_key`). ``residual`` (fp32)
        receives what is lost, source - decoded, and 0 where that is not finite; it may be the source.
        """

    def extract(self, payload: Tensor, target: Tensor, *, add: bool = False) -> None:
        """Read as many numbers as the target (fp32, fp16, bf16) has over it, or add them to it."""

    def estimate(self, count: int) -> Estimate:
        """The bytes of ``count`` numbers, and the error if they are normal with mean zero."""


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Codes of 1 to 8 bits on a grid of each bucket's own."""

    bits: int = 4
    """Of a code."""
    bucket: int = 1024
    """Elements that share a grid; each bucket costs 8 bytes."""
    stochastic: bool = True
    """Round at random, so that the mean of what is decoded is what was encoded; else to the nearest."""
    threads: int = field(default=1, compare=False)
    """Threads of the compiled kernels; the bytes do not depend on it."""

    def __post_init__(self) -> None:
        wire.checked_bits(self.bits)
        wire.checked_bucket(self.bucket)
        expect(self.stochastic, bool, setting="stochastic", works="False")
        parse_whole(self.threads, setting="threads")

    def payload_bytes(self, count: int) -> int:
        """Bytes that ``count`` numbers take: 8 a bucket, and the codes."""
        return wire.payload_bytes(parse_whole(count, setting="count", least=0), self.bits, self.bucket)

    def compress(
        self, source: Tensor, payload: Tensor, *, key: int, first: int = 0, residual: Tensor | None = None
    ) -> None:
        """Write the records of the source; ``first`` is a multiple of the bucket. See :class:`Codec`."""
        check_tensors(self, source, "source", payload, residual)
        checked_key(key)
        if parse_whole(first, setting="first", least=0) % self.bucket:
            raise UsageError(
                f"element {first} is not the first of a bucket of {self.bucket}",
                setting="first",
                works=str(first // self.bucket * self.bucket),
            )
        _implementation(source, self.bucket).quantize(
            source,
            payload,
            bits=self.bits,
            bucket=self.bucket,
            stochastic=self.stochastic,
            key=key,
            first_bucket=first // self.bucket,
            residual=residual,
            threads=self.threads,
        )

    def extract(self, payload: Tensor, target: Tensor, *, add: bool = False) -> None:
        """Decode the records. See :class:`Codec`."""
        check_tensors(self, target, "target", payload)
        _implementation(target, self.bucket).dequantize(
            payload,
            target,
            bits=self.bits,
            bucket=self.bucket,
            add=add,
            threads=self.threads,
        )

    def estimate(self, count: int, *, bucket_range: float | None = None) -> Estimate:
        """What ``count`` numbers will cost.

        ``bucket_range`` is the measured range of the buckets (highest less lowest, root mean square) as a
        multiple of the root mean square of the numbers; without it, that of normal numbers is taken.
        """
        size = self.payload_bytes(count)
        if bucket_range is not None and not 0 <= bucket_range < math.inf:
            what = f"a bucket has a range of {bucket_range}"
            raise UsageError(what, setting="bucket_range", works="0 or more, about 6.5 for normal numbers")
        error = 0.0
        for elements in (count // self.bucket * self.bucket, count % self.bucket):
            n = min(self.bucket, elements)
            if n > 2:
                reach = normal_range(n) if bucket_range is None else bucket_range
                # The lowest and the highest of a bucket lie on the grid.
                each = rounding_error(self.bits, reach, self.stochastic) * (n - 2) / n
                error += each * elements / count
        return Estimate(payload_bytes=size, relative_squared_error=error)


@dataclass(frozen=True)
class Cast:
    """Numbers of 16 bits, rounded to the nearest; what is beyond their range becomes infinite."""

    to: Narrow = "fp16"

    def __post_init__(self) -> None:
        if self.to not in get_args(Narrow):
            raise UsageError(f"there is no cast to {self.to!r}", setting="to", works="fp16, bf16")

    def payload_bytes(self, count: int) -> int:
        """Bytes that ``count`` numbers take: 2 each."""
        return 2 * parse_whole(count, setting="count", least=0)

    def compress(
        self, source: Tensor, payload: Tensor, *, key: int = 0, first: int = 0, residual: Tensor | None = None
    ) -> None:
        """Cast; nothing random, so ``key`` and ``first`` do not matter. See :class:`Codec`."""
        check_tensors(self, source, "source", payload, residual)
        _cast(source, payload, self._dtype, residual)

    def extract(self, payload: Tensor, target: Tensor, *, add: bool = False) -> None:
        """Cast back. See :class:`Codec`."""
        check_tensors(self, target, "target", payload)
        _read(payload, target, self._dtype, add)

    def estimate(self, count: int) -> Estimate:
        """Bytes, and the error of rounding to 10 or 7 bits after the point."""
        error = cast_error(10 if self.to == "fp16" else 7) if count else 0.0
        return Estimate(payload_bytes=self.payload_bytes(count), relative_squared_error=error)

    @property
    def _dtype(self) -> dtype:
        import torch

        return torch.float16 if self.to == "fp16" else torch.bfloat16


@dataclass(frozen=True)
class Exact:
    """Numbers as they are, in fp32."""

    def payload_bytes(self, count: int) -> int:
        """Bytes that ``count`` numbers take: 4 each."""
        return 4 * parse_whole(count, setting="count", least=0)

    def compress(
        self, source: Tensor, payload: Tensor, *, key: int = 0, first: int = 0, residual: Tensor | None = None
    ) -> None:
        """Copy; nothing is lost. See :class:`Codec`."""
        import torch

        check_tensors(self, source, "source", payload, residual)
        _cast(source, payload, torch.float32, residual)

    def extract(self, payload: Tensor, target: Tensor, *, add: bool = False) -> None:
        """Copy back. See :class:`Codec`."""
        import torch

        check_tensors(self, target, "target", payload)
        _read(payload, target, torch.float32, add)

    def estimate(self, count: int) -> Estimate:
        """Bytes; no error."""
        return Estimate(payload_bytes=self.payload_bytes(count), relative_squared_error=0.0)


def check_tensors(
    codec: Codec, numbers: Tensor, name: str, payload: Tensor, residual: Tensor | None = None
) -> None:
    """Refuse tensors that the codec cannot work on, before it writes anything."""
    _check_numbers(numbers, name, wire.DTYPES, numbers)
    _check_numbers(payload, "payload", ("uint8",), numbers)
    if residual is not None:
        _check_numbers(residual, "residual", ("float32",), numbers)
    for tensor, what, size in (
        (payload, "payload", codec.payload_bytes(numbers.numel())),
        (residual, "residual", numbers.numel()),
    ):
        if tensor is not None and tensor.numel() != size:
            raise UsageError(
                f"the {what} has {tensor.numel()} elements where {numbers.numel()} numbers take {size}",
                setting=what,
                works=f"torch.empty({size}, dtype={tensor.dtype})",
            )


def _check_numbers(tensor: Tensor, name: str, dtypes: tuple[str, ...], like: Tensor) -> None:
    if _name(tensor.dtype) not in dtypes:
        raise UsageError(f"the {name} is of {tensor.dtype}", setting=name, works=", ".join(dtypes))
    if not tensor.is_contiguous():
        raise UsageError(
            f"the {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            setting=name,
            works="a contiguous tensor",
        )
    if tensor.device != like.device:
        raise UsageError(
            f"the {name} is on {tensor.device} and the numbers on {like.device}",
            setting=name,
            works=f"{name}.to({str(like.device)!r})",
        )


@functools.cache
def _name(kind: dtype) -> str:
    return str(kind).removeprefix("torch.")


def _implementation(tensor: Tensor, bucket: int) -> Any:
    """The module that has ``quantize`` and ``dequantize`` for a tensor there; all give the same bytes."""
    if tensor.device.type == "cpu" and kernels.available():
        return kernels
    if tensor.device.type == "cuda" and importlib.util.find_spec("triton"):
        from plait.compress import triton_kernels

        if bucket <= triton_kernels.LARGEST_BUCKET:
            return triton_kernels
    from plait.compress import plain

    return plain


def _cast(source: Tensor, payload: Tensor, to: dtype, residual: Tensor | None) -> None:
    flat, payload = source.detach().view(-1), payload.view(-1)
    if _holds(payload, to):
        payload.view(to).copy_(flat)
    else:
        payload.copy_(flat.to(to).view(payload.dtype))
    if residual is not None:
        lost = flat.float() - flat.to(to).float()
        residual.detach().view(-1).copy_(lost.nan_to_num_(0.0, 0.0, 0.0))


def _read(payload: Tensor, target: Tensor, to: dtype, add: bool) -> None:
    numbers = (payload if _holds(payload, to) else payload.clone()).view(-1).view(to)
    flat = target.detach().view(-1)
    # Added in fp32 whatever the target is, as every codec does.
    flat.copy_(flat.float() + numbers.float() if add else numbers)


def _holds(payload: Tensor, to: dtype) -> bool:
    """Whether the bytes can be seen as numbers where they are."""
    return payload.storage_offset() % to.itemsize == 0
