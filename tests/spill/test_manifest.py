"""Manifests: read back as they were written, or an error that names the file."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import FileError, UsageError
from plait.spill.manifest import ENDING, FORMAT, Committed, Copy, Manifest, check_note, name_of
from plait.spill.segment import PAGE_BYTES, Segment

NOTES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def manifest(note=None, group="job"):
    tensors = [("w", (3, 4), "float32"), ("b", (), "bfloat16")]
    full = Segment.pack(f"{group}/weights/0", tensors, persistent=True)
    empty = Segment(key=f"{group}/moments/0", nbytes=2 * PAGE_BYTES, persistent=True)
    return Manifest(
        group=group,
        number=3,
        note=note or {"step": 1},
        segments=(
            Committed(segment=full, slots=(0, 8192), copy=Copy(1, (2**32 - 1,))),
            Committed(segment=empty, slots=(16384,), copy=None),
        ),
    )


def saved(directory, kept):
    path = directory / (name_of(kept.group) + ENDING)
    kept.save(directory).replace(path)
    return path


@given(
    note=st.dictionaries(st.text(), NOTES, min_size=1), group=st.text("job/ é%.-_", min_size=1, max_size=20)
)
def test_what_is_saved_is_loaded(tmp_path_factory, note, group):
    group = group.replace("/", "")
    if group:
        kept = manifest(note, group)
        assert Manifest.load(saved(tmp_path_factory.getbasetemp(), kept)) == kept


def test_it_is_json_of_a_format_that_says_its_name(tmp_path):
    path = saved(tmp_path, manifest())
    assert json.loads(path.read_text())["format"] == FORMAT == "plait.spill.manifest/1"
    assert os.listdir(tmp_path) == ["job.manifest"]


def test_a_changed_byte_is_noticed(tmp_path):
    path = saved(tmp_path, manifest())
    whole = path.read_bytes()
    for at in range(len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(FileError, match=r"job\.manifest") as caught:
            Manifest.load(path)
        assert caught.value.setting == "directory"
    for end in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:end])
        with pytest.raises(FileError, match="is not a manifest"):
            Manifest.load(path)


def test_another_format_another_name_and_no_file_are_refused(tmp_path):
    path = saved(tmp_path, manifest())
    path.rename(tmp_path / "other.manifest")
    with pytest.raises(FileError, match="of group 'job'"):
        Manifest.load(tmp_path / "other.manifest")
    with pytest.raises(FileError, match="cannot be read: No such file"):
        Manifest.load(path)
    path.write_text(json.dumps({"format": "plait.spill.manifest/9", "checksum": "", "content": {}}))
    with pytest.raises(FileError, match=r"has the format 'plait\.spill\.manifest/9'"):
        Manifest.load(path)


def test_one_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = saved(tmp_path, manifest())
    before = path.read_bytes()
    (tmp_path / "job.manifest.partial").mkdir()
    with pytest.raises(FileError, match=r"job\.manifest\.partial cannot be written: Is a directory"):
        manifest({"step": 2}).save(tmp_path)
    assert path.read_bytes() == before


def test_names_that_no_file_can_have_are_refused():
    assert name_of("a job") == "a%20job"
    for group in ("", "x" * 201):
        with pytest.raises(UsageError, match="a group's name cannot be"):
            name_of(group)


def test_a_note_is_copied():
    note = {"losses": [1.0]}
    copied = check_note(note)
    note["losses"].append(2.0)
    assert copied == {"losses": [1.0]}
