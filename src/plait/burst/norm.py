"""BatchNorm over the rows of all ranks of a block, so that it normalises as one device does.

Every rank finds count, mean and sum of squared differences of its own rows; all ranks gather the three and
join them (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979), which loses no digits where the mean is far from zero. Backward needs two sums over all
rows, as in Ioffe and Szegedy, "Batch Normalization", 2015.

The operation is caught where it runs, so that it need not be a module: blocks of a traced model call it
directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Gather = Callable[[Tensor], list[Tensor]]
"""A tensor of this rank, from all ranks of the block."""

_ORDERED = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_CALLS: dict[Any, tuple[tuple[str, ...], bool]] = {
    functional.batch_norm: (_FUNCTIONAL, False),
    torch.batch_norm: (_ORDERED, False),
    torch.ops.aten.batch_norm.default: (_ORDERED, False),
    torch.ops.aten.native_batch_norm.default: (_ORDERED, True),
    torch.ops.aten.cudnn_batch_norm.default: (_ORDERED, True),
}
"""Argument names, and whether statistics are returned too."""


class SynchronizedNorm(TorchFunctionMode):
    """While it is active, BatchNorm in training takes the statistics of all ranks."""

    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self._gather = gather

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace BatchNorm, and nothing else."""
        kwargs = kwargs or {}
        call = _CALLS.get(func)
        if call is None:
            return func(*args, **kwargs)
        given: dict[str, Any] = {
            "weight": None,
            "bias": None,
            "training": False,
            "momentum": 0.1,
            "eps": 1e-5,
        }
        given.update(zip(call[0], args, strict=False))
        given.update(kwargs)
        if not given["training"]:
            return func(*args, **kwargs)
        out, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            given["input"], given["weight"], given["bias"], given["eps"], self._gather
        )
        if given.get("running_mean") is not None:
            momentum = given["momentum"]
            unbiased = variance * (count / max(count - 1, 1))
            with torch.no_grad():
                given["running_mean"].mul_(1 - momentum).add_(mean, alpha=momentum)
                given["running_var"].mul_(1 - momentum).add_(unbiased, alpha=momentum)
        return (out, mean, torch.rsqrt(variance + given["eps"])) if call[1] else out


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, gather: Gather
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        axes = [axis for axis in range(x.ndim) if axis != 1]
        wide = x.double() if x.dtype == torch.float64 else x.float()
        count = wide.numel() // wide.shape[1]
        mean = wide.mean(axes)
        shape = [1, -1] + [1] * (x.ndim - 2)
        squares = (wide - mean.view(shape)).square().sum(axes)
        parts = gather(torch.cat([torch.full_like(mean[:1], count), mean, squares]))
        total, mean, squares = _joined(parts)
        variance = squares / total
        inverse = torch.rsqrt(variance + eps)
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.gather, ctx.axes, ctx.shape, ctx.total, ctx.dtype = gather, axes, shape, total, x.dtype
        ctx.mark_non_differentiable(mean, variance)
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        return out.to(x.dtype), mean, variance, int(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        normal, inverse, weight = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        sums, products = wide.sum(ctx.axes), (wide * normal).sum(ctx.axes)
        parts = ctx.gather(torch.cat([sums, products]))
        all_sums, all_products = torch.stack(list(parts)).sum(0).chunk(2)
        found = wide - (all_sums.view(ctx.shape) + normal * all_products.view(ctx.shape)) / ctx.total
        scale = inverse if weight is None else inverse * weight
        into = (found * scale.view(ctx.shape)).to(ctx.dtype)
        # The gradients of weight and bias are this rank's part: they are added up with all others.
        to_weight = products.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        to_bias = sums.to(gradient.dtype) if ctx.needs_input_grad[2] else None
        return into, to_weight, to_bias, None, None


def _joined(parts: list[Tensor]) -> tuple[float, Tensor, Tensor]:
    """Count, mean and sum of squared differences of all parts together, each of which has these in a row."""
    first, *others = parts
    count = float(first[0])
    mean, squares = first[1:].chunk(2)
    for other in others:
        more = float(other[0])
        its_mean, its_squares = other[1:].chunk(2)
        total = count + more
        difference = its_mean - mean
        mean = mean + difference * (more / total)
        squares = squares + its_squares + difference.square() * (count * more / total)
        count = total
    return count, mean, squares
