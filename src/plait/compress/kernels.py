"""The compiled kernels of the codec, for tensors in host memory: see native/codec.h.

They take what the codec has checked: flat, contiguous tensors whose sizes fit each other.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

from plait import native
from plait.compress import wire

if TYPE_CHECKING:
    from torch import Tensor, dtype


def available() -> bool:
    """Whether a compiled implementation is in use (see ``plait.native``)."""
    return _chosen() != "python"


def quantize(
    source: Tensor,
    payload: Tensor,
    *,
    bits: int,
    bucket: int,
    stochastic: bool,
    key: int,
    first_bucket: int,
    residual: Tensor | None = None,
    threads: int = 1,
    isa: str | None = None,
) -> None:
    """Write the records of a source; ``isa`` is an instruction set of ``native.isas()``."""
    _compiled().quantize(
        source=source.data_ptr(),
        dtype=_place(source.dtype),
        count=source.numel(),
        bits=bits,
        bucket=bucket,
        stochastic=stochastic,
        key=key,
        first_bucket=first_bucket,
        payload=payload.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        threads=threads,
        isa=isa or _chosen(),
    )


def dequantize(
    payload: Tensor,
    target: Tensor,
    *,
    bits: int,
    bucket: int,
    add: bool,
    threads: int = 1,
    isa: str | None = None,
) -> None:
    """Decode the records over a target, or add them to it."""
    _compiled().dequantize(
        payload=payload.data_ptr(),
        count=target.numel(),
        bits=bits,
        bucket=bucket,
        target=target.data_ptr(),
        dtype=_place(target.dtype),
        add=add,
        threads=threads,
        isa=isa or _chosen(),
    )


# A call for a few thousand numbers takes microseconds, so nothing is looked up twice.


def _chosen() -> str:
    return _isa(os.environ.get("PLAIT_NATIVE"))


@functools.cache
def _isa(setting: str | None) -> str:
    """What ``native.isa()`` says while the environment has that setting."""
    return native.isa()


@functools.cache
def _compiled() -> ModuleType:
    return importlib.import_module("plait._native")


@functools.cache
def _place(kind: dtype) -> int:
    return wire.DTYPES.index(str(kind).removeprefix("torch."))
