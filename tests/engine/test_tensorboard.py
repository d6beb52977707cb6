"""TensorBoard's files, decoded here from their bytes: framing, checks and every field."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.engine.tensorboard import EventFile, crc32c, event, masked
from plait.errors import FileError


@pytest.mark.parametrize(
    ("data", "check"),
    [
        # RFC 3720, appendix B.4, and the check value that catalogues give for this polynomial.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_known_checks(data, check):
    assert crc32c(data) == check


def bitwise(data):
    """The check by its definition, a bit at a time: division by the polynomial, bits reversed."""
    crc = 0xFFFFFFFF
    for byte in data:
        for place in range(8):
            bit = (crc ^ (byte >> place)) & 1
            crc = (crc >> 1) ^ (0x82F63B78 if bit else 0)
    return crc ^ 0xFFFFFFFF


@given(st.binary(max_size=60))
def test_the_check_is_the_polynomials(data):
    assert crc32c(data) == bitwise(data)


def test_masking_is_a_rotation_and_a_sum():
    rotated = int.from_bytes(b"\xe3\x06\x92\x83", "big")
    rotated = ((rotated >> 15) | (rotated << 17)) % 2**32
    assert masked(0xE3069283) == (rotated + 0xA282EAD8) % 2**32
    assert masked(0) == 0xA282EAD8


def records(data):
    """The data of each record of a file; both checks must hold."""
    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        checks = struct.unpack_from("<I", data, at + 8) + struct.unpack_from("<I", data, at + 12 + length)
        body = data[at + 12 : at + 12 + length]
        for part, check in zip((data[at : at + 8], body), checks, strict=True):
            crc = bitwise(part)
            assert check == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        found.append(body)
        at += 16 + length
    assert at == len(data)
    return found


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not data[at - 1] & 0x80:
            return value, at


def fields(data):
    """(number, value) of each field of a message; messages and text stay bytes."""
    found, at = [], 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            size, form = {1: (8, "<d"), 5: (4, "<f")}[kind]
            value, at = struct.unpack_from(form, data, at)[0], at + size
        found.append((key >> 3, value))
    assert at == len(data)
    return found


def told(data):
    """An event as (step, what it is)."""
    found = dict(fields(data))
    step = found[2] - (1 << 64) if found[2] >> 63 else found[2]
    if 3 in found:
        return step, found[3].decode()
    if 7 in found:
        return step, {1: "START"}[dict(fields(found[7]))[1]]
    values = {}
    for number, value in fields(found[5]):
        assert number == 1
        parts = dict(fields(value))
        values[parts[1].decode()] = parts[2]
    return step, values


def written(folder):
    return [told(data) for file in sorted(folder.iterdir()) for data in records(file.read_bytes())]


def test_a_file_of_scalars(tmp_path):
    file = EventFile(tmp_path / "gpt")
    assert not (tmp_path / "gpt").exists()  # nothing to tell yet
    file.scalars({"loss": 2.5}, 0, at_s=1_700_000_000.25)
    file.scalars({"loss": 1.25, "größe/µ": -3.0}, 300, at_s=1_700_000_001.0)
    file.close()
    (path,) = (tmp_path / "gpt").iterdir()
    assert path.name.startswith("events.out.tfevents.1700000000.")
    assert written(tmp_path / "gpt") == [
        (0, "brain.Event:2"),
        (0, "START"),
        (0, {"loss": 2.5}),
        (300, {"loss": 1.25, "größe/µ": -3.0}),
    ]
    times = [dict(fields(data))[1] for data in records(path.read_bytes())]
    assert times == [1_700_000_000.25, 1_700_000_000.25, 1_700_000_000.25, 1_700_000_001.0]


def test_what_is_written_can_be_read_at_once(tmp_path):
    file = EventFile(tmp_path)
    for step in range(3):
        file.scalars({"loss": float(step)}, step)
        assert written(tmp_path)[-1] == (step, {"loss": float(step)})
    file.close()


def test_a_job_that_goes_back_takes_back_what_came_after(tmp_path):
    file = EventFile(tmp_path)
    for step in (0, 1, 2):
        file.scalars({"loss": 1.0}, step)
        file.scalars({"rate": 1.0}, step)
    file.scalars({"evaluation/loss": 1.0}, 1)  # told late, of a tag of its own
    for step in (1, 2):
        file.scalars({"loss": 2.0}, step)
        file.scalars({"rate": 2.0}, step)
    file.close()
    found = [(step, what if isinstance(what, str) else next(iter(what))) for step, what in written(tmp_path)]
    assert found[2:] == [
        (0, "loss"), (0, "rate"), (1, "loss"), (1, "rate"), (2, "loss"), (2, "rate"), (1, "evaluation/loss"),
        (1, "START"), (1, "loss"), (1, "rate"), (2, "loss"), (2, "rate"),
    ]  # fmt: skip


def test_a_resumed_run_has_a_second_file_which_begins_with_where_it_goes_on(tmp_path):
    for begin in (0, 2):
        file = EventFile(tmp_path)
        file.scalars({"loss": 1.0}, begin, at_s=1_700_000_000.0)
        file.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert written(tmp_path)[3:] == [(0, "brain.Event:2"), (2, "START"), (2, {"loss": 1.0})]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1e300, math.inf),
        (-1e300, -math.inf),
        (math.inf, math.inf),
        (0.1, struct.unpack("<f", struct.pack("<f", 0.1))[0]),
    ],
)
def test_numbers_in_four_bytes(value, kept):
    assert told(event(0.0, 1, values={"x": value})) == (1, {"x": kept})


def test_not_a_number_and_large_and_negative_steps():
    step, values = told(event(0.0, 2**40 + 5, values={"x": math.nan}))
    assert step == 2**40 + 5
    assert math.isnan(values["x"])
    assert told(event(0.0, -1, version="v"))[0] == -1


@given(st.integers(0, 2**63 - 1), st.dictionaries(st.text(), st.floats(width=32, allow_nan=False)))
def test_every_event_reads_back(step, values):
    assert told(event(12.5, step, values=values)) == (step, values)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        EventFile(tmp_path / "file" / "gpt").scalars({"loss": 1.0}, 0)
