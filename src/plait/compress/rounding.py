"""Random numbers for rounding, each a function of where it is used and of nothing else.

A stream is named by (seed, step, rank, phase, parameter) and has one number for each element of the
parameter. Nothing is drawn in sequence, so the numbers do not depend on chunks, on threads or on what was
rounded before; and since the rank is part of the name, the ranks' errors are independent and average out.

1. The name is hashed to a 64-bit key, once (BLAKE2b).
2. The key and the number of a bucket give two 32-bit words, a start s and a twist t: step ``bucket`` of
   SplitMix64 from that key (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
   OOPSLA 2014).
3. Word w of the bucket is a hash of 32 bits, in the manner of that finaliser, with multipliers that were
   searched for low bias (C. Wellons, "hash-prospector"); all modulo 2^32::

       h = s + w * 0x9E3779B1
       h = (h ^ h >> 16) * 0x7FEB352D
       h = (h ^ h >> 15 ^ t) * 0x846CA68B
       h = h ^ h >> 16

4. A word serves two elements, 16 bits each: in every 32 elements of a bucket, word w of 16 has its lower
   half for element w and its upper half for element w + 16. So processors with vectors of 8 or of 16
   numbers use whole words.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from plait.errors import UsageError
from plait.units import parse_whole

if TYPE_CHECKING:
    from torch import Tensor, device

BLOCK = 32
"""Elements that sixteen words serve."""
WEYL = 0x9E3779B1
FIRST = 0x7FEB352D
SECOND = 0x846CA68B
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def stream_key(
    *, seed: int = 0, step: int = 0, rank: int = 0, phase: int = 0, parameter: str | int = ""
) -> int:
    """The 64-bit key of the stream of that name; the phase tells uses of a parameter in one step apart."""
    name = hashlib.blake2b(digest_size=8, person=b"plait.rounding")
    for what, number in (("seed", seed), ("step", step), ("rank", rank), ("phase", phase)):
        name.update(parse_whole(number, setting=what, least=0).to_bytes(8, "little"))
    # A number and its digits are different names.
    if isinstance(parameter, str):
        name.update(b"str:" + parameter.encode())
    else:
        name.update(b"int:%d" % parse_whole(parameter, setting="parameter", least=0))
    return int.from_bytes(name.digest(), "little")


def checked_key(key: int) -> int:
    """The key, if it is one."""
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**64:
        raise UsageError(
            f"key is {key!r}, not a number of 64 bits", setting="key", works="stream_key(seed=0)"
        )
    return key


def draw(key: int, first_bucket: int, buckets: int, elements: int, device: device) -> Tensor:
    """The numbers, 0 to 65535, of the first elements of each of so many buckets: int32, a row a bucket.

    Torch has no unsigned arithmetic of 32 bits: words live in the lower half of int64, and are cut back
    after each step.
    """
    import torch

    bucket = torch.arange(first_bucket + 1, first_bucket + 1 + buckets, device=device)
    z = _signed(key) + bucket * _signed(GOLDEN)
    z = (z ^ _right(z, 30)) * _signed(MIX_1)
    z = (z ^ _right(z, 27)) * _signed(MIX_2)
    z = z ^ _right(z, 31)
    start, twist = (z & 0xFFFFFFFF)[:, None], _right(z, 32)[:, None]
    blocks = -(-elements // BLOCK)
    word = torch.arange(blocks * BLOCK // 2, device=device)
    h = (start + word * WEYL) & 0xFFFFFFFF
    h = ((h ^ h >> 16) * FIRST) & 0xFFFFFFFF
    # A factor below 2^31 in size keeps the product within 63 bits.
    h = ((h ^ h >> 15 ^ twist) * (SECOND - 2**32)) & 0xFFFFFFFF
    h = (h ^ h >> 16).view(buckets, blocks, 1, BLOCK // 2)
    halves = torch.cat([h & 0xFFFF, h >> 16], dim=2)
    return halves.view(buckets, blocks * BLOCK)[:, :elements].to(torch.int32)


def _signed(word: int) -> int:
    """The number of 64 bits as torch's int64 holds it."""
    return word - 2**64 if word >= 2**63 else word


def _right(z: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros coming in, where torch would bring in the sign."""
    return z >> bits & (1 << 64 - bits) - 1
