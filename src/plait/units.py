"""Quantities as people write them (``1gbit``, ``2GiB``, ``40us``), read and printed in one way."""

from __future__ import annotations

import math
import operator
import re

from plait.errors import UsageError

_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-zA-Zµμ/]*)\s*", re.IGNORECASE)
_SIZE = re.compile(r"(?i:([kmgt]?))(?:((?i:i)?)(B|b))?")
_RATE = re.compile(r"(?i:([kmgt]?)(i?))(?:(b|(?i:bit))|B)(?i:/s|ps)?")

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_BYTES = 2**63
"""Offsets and counters of the system are signed 64-bit numbers; beyond, they wrap around."""
_MOST_WHOLE = _MOST_BYTES - 1
"""For counts and seeds alike."""
LEAST_RATE = 0.125
"""Bytes a second, one bit: with less, the length of a step soon is no number any more."""
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


def _split(value: object, what: str, setting: str, works: str) -> tuple[int | float, str | None]:
    """A number and its unit as written (None for what is a number already); whole numbers stay exact."""
    number: int | float
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        text, unit = match.groups()
        number = float(text)
        if math.isfinite(number) and text.isdecimal():
            number = int(text)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number, unit = value, None
    else:
        raise UsageError(f"{value!r} is not a {what}", setting=setting, works=works)
    if not _is_finite(number):
        raise UsageError(f"{value!r} is not a finite {what}", setting=setting, works=works)
    return number, unit


def _is_finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number that no float holds
        return False


def parse_bytes(text: str | int | float, *, setting: str = "memory") -> int:
    """Read a size: ``"2GiB"``, ``"512MB"``, ``4096``. A bare ``k/m/g/t`` is binary.

    A small ``b`` is a bit wherever networks are sold, and in :func:`parse_rate`: nobody can tell what
    ``4Gb`` of memory was meant to be, so it is refused.
    """
    works = "2GiB"
    number, unit = _split(text, "size", setting, works)
    match = _SIZE.fullmatch(unit or "")
    if match is None or (match[2] and not match[1]):
        raise UsageError(f"{text!r} has no unit of size that plait knows", setting=setting, works=works)
    prefix, binary, byte = match.groups()
    if byte == "b":
        raise UsageError(
            f"{text!r} ends in a small b, which is a bit; sizes are in bytes",
            setting=setting,
            works=f"{number:g}{prefix.upper()}iB" if prefix else f"{number:g}B",
        )
    scale = (_BINARY if binary or not byte else _DECIMAL)[prefix.lower()]
    if number < 0:
        raise UsageError(f"a size cannot be negative: {text!r}", setting=setting, works=works)
    count = number * scale
    if count >= _MOST_BYTES:
        what = f"{text!r} is more than any memory or file can hold, {format_bytes(_MOST_BYTES)}"
        raise UsageError(what, setting=setting, works=works)
    return round(count)


def parse_rate(text: str | int | float, *, setting: str = "rate") -> float:
    """Read a bandwidth and return bytes/s: ``"1gbit"``, ``"100Mb/s"``, ``"1.2GB/s"``; a number is bytes/s.

    As networks are sold: a small ``b`` is a bit, a capital ``B`` a byte.
    """
    works = "1gbit"
    number, unit = _split(text, "rate", setting, works)
    rate = float(number)
    if unit is not None:
        match = _RATE.fullmatch(unit)
        if match is None:
            raise UsageError(f"{text!r} has no unit of rate that plait knows", setting=setting, works=works)
        prefix, binary, bits = match.groups()
        rate *= (_BINARY if binary else _DECIMAL)[prefix.lower()] / (8 if bits else 1)
    if not rate > 0:
        raise UsageError(f"a rate must be above zero: {text!r}", setting=setting, works=works)
    if rate == math.inf:
        raise UsageError(f"{text!r} is not a finite rate", setting=setting, works=works)
    if rate < LEAST_RATE:
        what = f"{text!r} is less than the smallest rate that plait knows, 1 bit/s"
        raise UsageError(what, setting=setting, works=works)
    return rate


def parse_seconds(text: str | int | float, *, setting: str = "latency") -> float:
    """Read a duration and return seconds: ``"40us"``, ``"3ms"``, ``"2s"``; a number is seconds."""
    works = "40us"
    number, unit = _split(text, "duration", setting, works)
    scale = 1.0 if unit is None else _SECONDS.get(unit.lower())
    if scale is None:
        raise UsageError(f"{text!r} has no unit of time that plait knows", setting=setting, works=works)
    if number < 0:
        raise UsageError(f"a duration cannot be negative: {text!r}", setting=setting, works=works)
    return float(number * scale)


def parse_whole(value: object, *, setting: str, least: int = 1, works: int | None = None) -> int:
    """Read a count: a whole number of at least ``least`` that 63 bits can hold; a Boolean is none.

    ``works`` is the one to name where it is refused.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    example = str(max(least, 1) if works is None else works)
    if isinstance(value, bool) or number < least:
        what = f"{setting} is {_shown(value)}, not a whole number of at least {least}"
        raise UsageError(what, setting=setting, works=example)
    if number > _MOST_WHOLE:
        what = f"{setting} is {_shown(value)}, more than {_MOST_WHOLE} (2**63 - 1)"
        raise UsageError(what, setting=setting, works=example)
    return number


def _shown(value: object) -> str:
    """A value as it was given; Python does not print a number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def format_bytes(count: float) -> str:
    """Print a size in binary units: ``"1.50 GiB"``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def counted(count: int, noun: str) -> str:
    """A number of things, as one writes it: ``1 shard``, ``2 shards``, ``2 processes``."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"


def format_rate(bytes_per_second: float) -> str:
    """Print a bandwidth in bits, as networks are sold: ``"1.00 Gbit/s"``."""
    bits = bytes_per_second * 8
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= scale:
            return f"{bits / scale:.2f} {unit}"
    return f"{bits:.0f} bit/s"


def format_seconds(seconds: float) -> str:
    """Print a duration with the unit that fits: ``"3.2 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale or seconds == 0:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
