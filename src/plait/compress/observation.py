"""What quantizing a layer's gradient costs in error and in bytes, at every width.

The error of stochastic rounding has a closed form. An element that lies a fraction f of the way between two
levels a ``unit`` apart is rounded up with probability f, so its expected squared error is unit^2 f (1 - f);
rounded to the nearest level it is unit^2 min(f, 1 - f)^2. Nothing has to be quantized to know either.

A bucket of n elements with range r = max - min contributes n r^2 / (2^b - 1)^2 times the mean of f (1 - f).
In a layer of many buckets the first factor is computed for all, and the mean for m of them, drawn with
probability proportional to r^2. The sampled means are then independent, right on average, and lie in
[0, 1/4]: by Hoeffding's inequality their mean is off by more than 1/4 sqrt(ln(2 k / p) / 2m) at any of k
widths with probability p at most. ``LayerError.sampling_bound`` states that for p = 1e-6, as a share of the
1/6 that evenly spread elements have; the usual deviation is ten times smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from plait.errors import UsageError
from plait.units import parse_whole

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
"""The widths in bits that there are."""

_MISSED = 1e-6
"""The probability with which ``sampling_bound`` may be passed."""


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """One layer: its squared error and its bytes on the wire at every width."""

    name: str
    count: int
    """Elements."""
    widths: tuple[int, ...]
    squared_error: tuple[float, ...]
    """By width; not finite where the gradient was not."""
    payload_bytes: tuple[int, ...]
    """By width."""
    exact_bytes: int
    """Uncompressed."""
    squared_norm: float
    sampling_bound: float = 0.0
    """How far the errors may be off, as a share of what evenly spread elements have (count unit^2 / 6);
    0 where every element was measured."""

    def __post_init__(self) -> None:
        for field in ("widths", "squared_error", "payload_bytes"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        _check_widths(self.widths)
        for field in ("squared_error", "payload_bytes"):
            figures = getattr(self, field)
            if len(figures) != len(self.widths):
                raise UsageError(
                    f"layer {self.name!r} has {len(figures)} {field} for {len(self.widths)} widths",
                    setting=field,
                    works="one for each width",
                )
        for field in ("count", "exact_bytes", "squared_norm", "sampling_bound"):
            if getattr(self, field) < 0:
                raise UsageError(
                    f"layer {self.name!r}: {field} is {getattr(self, field)}",
                    setting=field,
                    works="0 or more",
                )
        if any(figure < 0 for figure in (*self.payload_bytes, *self.squared_error)):
            raise UsageError(
                f"layer {self.name!r} has the bytes {self.payload_bytes} and the errors {self.squared_error}",
                setting="squared_error, payload_bytes",
                works="0 or more",
            )

    @cached_property
    def finite(self) -> bool:
        """Whether its errors are known at all widths."""
        return all(math.isfinite(error) for error in self.squared_error)

    @property
    def relative(self) -> LayerError:
        """The same layer with a mean square of 1, so that errors are shares of its own gradient."""
        scale = self.count / self.squared_norm if self.squared_norm else 0.0
        errors = tuple(scale * error for error in self.squared_error)
        return replace(self, squared_error=errors, squared_norm=float(self.count if scale else 0))

    def error_at(self, bits: int | None) -> float:
        """Squared error at a width; None is uncompressed."""
        return 0.0 if bits is None else self.squared_error[self._place(bits)]

    def bytes_at(self, bits: int | None) -> int:
        """Bytes on the wire at a width; None is uncompressed."""
        return self.exact_bytes if bits is None else self.payload_bytes[self._place(bits)]

    def _place(self, bits: int) -> int:
        if bits not in self.widths:
            raise UsageError(
                f"layer {self.name!r} was not measured at {bits} bits",
                setting="widths",
                works=", ".join(map(str, self.widths)),
            )
        return self.widths.index(bits)


def average(observations: Sequence[Sequence[LayerError]]) -> tuple[LayerError, ...]:
    """The mean of several observations of the same layers, over steps or over ranks.

    A layer's non-finite observations are left out (a step that a GradScaler skips has them); a layer that has
    no other stays non-finite.
    """
    if not observations:
        raise UsageError("there is no observation", setting="observations", works="one or more")
    for other in observations[1:]:
        check_same(observations[0], other)
    return tuple(_mean(layers) for layers in zip(*observations, strict=True))


def check_same(one: Sequence[LayerError], other: Sequence[LayerError]) -> None:
    """Refuse observations of different layers; the first difference is named."""
    for a, b in zip(one, other, strict=False):
        for field in ("name", "count", "widths", "payload_bytes", "exact_bytes"):
            if getattr(a, field) != getattr(b, field):
                raise UsageError(
                    f"layer {a.name!r} has {field} {getattr(a, field)!r} in one observation "
                    f"and {getattr(b, field)!r} in another",
                    setting="layers",
                    works="the same layers in the same order",
                )
    if len(one) != len(other):
        raise UsageError(
            f"one observation has {len(one)} layers, another {len(other)}",
            setting="layers",
            works="the same layers in the same order",
        )


def _mean(layers: Sequence[LayerError]) -> LayerError:
    finite = [layer for layer in layers if layer.finite]
    if not finite:
        return layers[0]
    errors = zip(*(layer.squared_error for layer in finite), strict=True)
    return replace(
        finite[0],
        # fsum rounds once, so the mean does not depend on the order of steps or ranks.
        squared_error=tuple(math.fsum(of_width) / len(finite) for of_width in errors),
        squared_norm=math.fsum(layer.squared_norm for layer in finite) / len(finite),
        sampling_bound=max(layer.sampling_bound for layer in finite),
    )


def measure(
    gradient: Tensor,
    *,
    name: str,
    widths: Sequence[int] = WIDTHS,
    bucket: int = 1024,
    stochastic: bool = True,
    sample: int = 512,
    seed: int = 0,
) -> LayerError:
    """The expected squared error of quantizing a gradient once, at every width, and its bytes.

    At most ``sample`` whole buckets are looked at element by element (all of them where there are no more);
    ``seed`` draws them.
    """
    from plait.compress.codec import Exact, Quantizer

    bucket, sample = parse_whole(bucket, setting="bucket"), parse_whole(sample, setting="sample")
    widths = tuple(widths)
    _check_widths(widths)
    flat = gradient.detach().reshape(-1)
    if not flat.is_floating_point():
        raise UsageError(
            f"the gradient of {name!r} is of type {flat.dtype}", setting="gradient", works="torch.float32"
        )
    errors, bound, norm = _expected(flat, widths, bucket, stochastic, sample, seed)
    codecs = [Quantizer(bits=bits, bucket=bucket, stochastic=stochastic) for bits in widths]
    return LayerError(
        name=name,
        count=flat.numel(),
        widths=widths,
        squared_error=tuple(errors),
        payload_bytes=tuple(codec.payload_bytes(flat.numel()) for codec in codecs),
        exact_bytes=Exact().payload_bytes(flat.numel()),
        squared_norm=norm,
        sampling_bound=bound,
    )


def _expected(
    flat: Tensor, widths: tuple[int, ...], bucket: int, stochastic: bool, sample: int, seed: int
) -> tuple[list[float], float, float]:
    """Squared error by width, its sampling bound, and the squared norm."""
    import torch

    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    if not math.isfinite(norm):
        return [math.inf] * len(widths), 0.0, norm
    whole = flat.numel() // bucket * bucket
    buckets, tail = flat[:whole].view(-1, bucket), flat[whole:].view(1, -1)
    errors = _of_buckets(tail, widths, stochastic).sum(dim=0)
    if len(buckets) <= sample:
        return (errors + _of_buckets(buckets, widths, stochastic).sum(dim=0)).tolist(), 0.0, norm
    low, high = buckets.aminmax(dim=1)
    weights = (high.double() - low.double()).square().cpu()
    varied = weights.nonzero().view(-1)
    if not len(varied):
        return errors.tolist(), 0.0, norm
    ends = weights[varied].cumsum(0)
    drawn = torch.rand(sample, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * ends[-1]
    place = varied[torch.searchsorted(ends, drawn, right=True).clamp_(max=len(varied) - 1)]
    sampled = _of_buckets(buckets[place.to(flat.device)], widths, stochastic)
    errors += (sampled / weights[place, None]).mean(dim=0) * ends[-1]
    return errors.tolist(), 6 / 4 * math.sqrt(math.log(2 * len(widths) / _MISSED) / (2 * sample)), norm


def _of_buckets(buckets: Tensor, widths: tuple[int, ...], stochastic: bool) -> Tensor:
    """Expected squared error of each bucket (row) at each width (column), in float64 on the CPU."""
    import torch

    errors = torch.zeros(len(buckets), len(widths), dtype=torch.float64)
    if not buckets.numel():
        return errors
    low, high = (edge.double() for edge in buckets.aminmax(dim=1, keepdim=True))
    span = high - low
    # In float64, where no range overflows; from there on float32 places an element to 1e-7 of the range.
    position = ((buckets.double() - low) / torch.where(span > 0, span, 1.0)).float()
    for column, bits in enumerate(widths):
        levels = 2**bits - 1
        part = (position * levels).frac_()
        if stochastic:
            part.sub_(part.square())
        else:
            part = torch.minimum(part, 1 - part).square_()
        unit = span.view(-1) / levels
        errors[:, column] = (part.sum(dim=1, dtype=torch.float64) * unit.square()).cpu()
    return errors


def _check_widths(widths: tuple[int, ...]) -> None:
    if not widths or list(widths) != sorted(set(widths) & set(WIDTHS)):
        raise UsageError(
            f"{list(widths)} are not widths in ascending order", setting="widths", works=str(list(WIDTHS))
        )
