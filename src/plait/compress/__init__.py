"""Gradients in fewer bits: quantization of 1 to 8 bits a number, and what is built on it.

The public names live here and are loaded on first use, so importing the package needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.lazy import exports

if TYPE_CHECKING:
    from plait.compress.adapt import Adaptation as Adaptation
    from plait.compress.adapt import Log as Log
    from plait.compress.attachment import Attachment as Attachment
    from plait.compress.codec import Cast as Cast
    from plait.compress.codec import Codec as Codec
    from plait.compress.codec import Exact as Exact
    from plait.compress.codec import Quantizer as Quantizer
    from plait.compress.collectives import CompressedCollective as CompressedCollective
    from plait.compress.collectives import all_gather as all_gather
    from plait.compress.collectives import all_reduce as all_reduce
    from plait.compress.collectives import reduce_scatter as reduce_scatter
    from plait.compress.communicator import shutdown as shutdown
    from plait.compress.compression import Compression as Compression
    from plait.compress.hook import attach as attach
    from plait.compress.hook import attachment_of as attachment_of
    from plait.compress.lowrank import LowRank as LowRank
    from plait.compress.message import dequantize as dequantize
    from plait.compress.message import quantize as quantize
    from plait.compress.rules import Rule as Rule
    from plait.compress.settings import Settings as Settings
    from plait.compress.sparse import TopK as TopK

_HOME = {
    "Adaptation": "plait.compress.adapt",
    "Attachment": "plait.compress.attachment",
    "Cast": "plait.compress.codec",
    "Codec": "plait.compress.codec",
    "CompressedCollective": "plait.compress.collectives",
    "Compression": "plait.compress.compression",
    "Exact": "plait.compress.codec",
    "Log": "plait.compress.adapt",
    "LowRank": "plait.compress.lowrank",
    "Quantizer": "plait.compress.codec",
    "Rule": "plait.compress.rules",
    "Settings": "plait.compress.settings",
    "TopK": "plait.compress.sparse",
    "all_gather": "plait.compress.collectives",
    "all_reduce": "plait.compress.collectives",
    "attach": "plait.compress.hook",
    "attachment_of": "plait.compress.hook",
    "dequantize": "plait.compress.message",
    "quantize": "plait.compress.message",
    "reduce_scatter": "plait.compress.collectives",
    "shutdown": "plait.compress.communicator",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = exports(__name__, _HOME)
