"""TensorBoard's event files, written by hand: no package is needed to write them, any TensorBoard reads them.

A file is a row of records (TensorFlow's "TFRecord"), each of them

    length of the data, 8 bytes | its masked CRC-32C, 4 bytes | data | masked CRC-32C of the data, 4 bytes

with little-endian numbers, where masked(c) is c rotated right by 15 bits plus 0xa282ead8, modulo 2**32. The
data is an ``Event`` as protocol buffers encode it (https://protobuf.dev/programming-guides/encoding/); of its
fields we write these (``tensorboard/compat/proto/event.proto`` and ``summary.proto``):

    Event       1 wall_time, double | 2 step, int64 | 3 file_version, text | 5 summary | 7 session_log
    Summary     1 value, any number of   Value   1 tag, text | 2 simple_value, float
    SessionLog  1 status: 1 is START, upon which a reader forgets all that it has from this step on
"""

from __future__ import annotations

import itertools
import os
import platform
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from plait.destination import not_written

_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its bits reversed."""
_MASK = 0xA282EAD8
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
"""How protocol buffers encode a field's value."""


class EventFile:
    """The scalars of one job in a folder of its own; a file is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._path = folder
        self._last: dict[str, int] = {}
        """By tag, the latest step."""

    def scalars(self, values: Mapping[str, float], step: int, *, at_s: float | None = None) -> None:
        """Add numbers by their tags; one that goes back to an earlier step replaces all from there on."""
        at_s = time.time() if at_s is None else at_s
        records = b""
        if self._fd is None:
            self._fd = self._open(at_s)
            # The run may have been resumed: then the file before this one has steps that are taken again.
            records = record(event(at_s, 0, version=_VERSION)) + record(event(at_s, step, restarted=True))
        elif any(step < self._last.get(tag, step) for tag in values):
            records = record(event(at_s, step, restarted=True))
            self._last.clear()
        self._last |= dict.fromkeys(values, step)
        records += record(event(at_s, step, values=values))
        try:
            os.write(self._fd, records)
        except OSError as error:
            raise not_written(self._path, error, setting="sinks") from None

    def _open(self, at_s: float) -> int:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads a folder's files in the order of their names.
            for number in itertools.count():
                name = f"events.out.tfevents.{int(at_s):010d}.{platform.node()}.{os.getpid()}.{number}"
                self._path = self._folder / name
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                    return os.open(self._path, flags, 0o644)
                except FileExistsError:
                    continue
        except OSError as error:
            raise not_written(self._path, error, setting="sinks") from None
        raise AssertionError("counting has no end")

    def close(self) -> None:
        """Add no more."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None


def record(data: bytes) -> bytes:
    """Data as a record of a file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


def event(
    at_s: float,
    step: int,
    *,
    version: str | None = None,
    values: Mapping[str, float] | None = None,
    restarted: bool = False,
) -> bytes:
    """An ``Event``: the file's version, scalars by tag, or that a job begins again with this step."""
    data = _field(1, _EIGHT_BYTES, struct.pack("<d", at_s)) + _field(2, _VARINT, _varint(step))
    if version is not None:
        data += _text(3, version.encode())
    if values is not None:
        summary = b""
        for tag, value in values.items():
            summary += _text(1, _text(1, tag.encode()) + _field(2, _FOUR_BYTES, _float(value)))
        data += _text(5, summary)
    if restarted:
        data += _text(7, _field(1, _VARINT, _varint(1)))
    return data


def crc32c(data: bytes) -> int:
    """The cyclic redundancy check of RFC 3720 and of TFRecord files."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """A check that is stored beside its data: the check of data with checks in them would be a poor one."""
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        found.append(byte)
    return tuple(found)


def _field(number: int, kind: int, value: bytes) -> bytes:
    return _varint(number << 3 | kind) + value


def _text(number: int, value: bytes) -> bytes:
    return _field(number, _BYTES, _varint(len(value)) + value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; a negative number in two's complement of 64 bits."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # beyond what four bytes hold
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))
