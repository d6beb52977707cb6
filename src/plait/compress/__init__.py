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
    from plait.compress.message import dequantize as dequantize
    from plait.compress.message import quantize as quantize

_HOME = {
    "Cast": "plait.compress.codec",
    "Codec": "plait.compress.codec",
    "Exact": "plait.compress.codec",
    "Quantizer": "plait.compress.codec",
    "dequantize": "plait.compress.message",
    "quantize": "plait.compress.message",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
