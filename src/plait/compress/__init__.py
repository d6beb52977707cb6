"""Gradients in fewer bits: quantization of 1 to 8 bits a number, and what is built on it.

The public names live here and are loaded on first use, so importing the package needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.compress.codec import Cast as Cast
    from plait.compress.codec import Codec as Codec
    from plait.compress.codec import Exact as Exact
    from plait.compress.codec import Quantizer as Quantizer
    from plait.compress.collectives import CompressedCollective as CompressedCollective
    from plait.compress.collectives import all_gather as all_gather
    from plait.compress.collectives import all_reduce as all_reduce
    from plait.compress.collectives import reduce_scatter as reduce_scatter
    from plait.compress.message import dequantize as dequantize
    from plait.compress.message import quantize as quantize
    from plait.compress.settings import Settings as Settings

_HOME = {
    "Cast": "plait.compress.codec",
    "Codec": "plait.compress.codec",
    "CompressedCollective": "plait.compress.collectives",
    "Exact": "plait.compress.codec",
    "Quantizer": "plait.compress.codec",
    "Settings": "plait.compress.settings",
    "all_gather": "plait.compress.collectives",
    "all_reduce": "plait.compress.collectives",
    "dequantize": "plait.compress.message",
    "quantize": "plait.compress.message",
    "reduce_scatter": "plait.compress.collectives",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
