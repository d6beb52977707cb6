"""Where results go: found out before the work, and without touching what is there."""

import os

import pytest

from plait.destination import check_file, make_folder, write_text
from plait.errors import FileError


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path):
    kept, new, link = tmp_path / "kept", tmp_path / "new", tmp_path / "link"
    kept.write_text("before")
    link.symlink_to("not-yet")
    for path in (kept, new, link):
        check_file(path, setting="--out")
    check_file(tmp_path / "/dev/null", setting="--out")
    assert kept.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["kept", "link"]


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_file(tmp_path / "pipe", setting="--out")  # opening it would wait for a reader


BAD_FILES = [
    (".", "Is a directory"),
    ("no/such", "No such file or directory"),
    ("file/x", "Not a directory"),
    ("/proc/x", "No such file or directory"),
    ("x" * 300, "File name too long"),
]


@pytest.mark.parametrize(("path", "reason"), BAD_FILES)
def test_a_file_that_cannot_be_written_is_refused(tmp_path, path, reason):
    (tmp_path / "file").write_text("")
    for act in (check_file, lambda path, setting: write_text(path, "x", setting=setting)):
        with pytest.raises(FileError, match=f"cannot be written: {reason}") as caught:
            act(tmp_path / path, setting="--out")
        assert caught.value.setting == "--out"
        assert caught.value.works is not None


@pytest.mark.parametrize(
    ("path", "reason"), [("file", "File exists"), ("file/x", "Not a directory"), ("/proc/x", "No such file")]
)
def test_a_folder_that_cannot_be_is_refused(tmp_path, path, reason):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=f"cannot be written: {reason}") as caught:
        make_folder(tmp_path / path, setting="--logs")
    assert caught.value.setting == "--logs"


def test_a_folder_is_made_and_left_empty(tmp_path):
    for _ in range(2):
        make_folder(tmp_path / "a" / "b", setting="--logs")
    assert os.listdir(tmp_path / "a" / "b") == []
    write_text(tmp_path / "a" / "b" / "c", "\N{GREEK SMALL LETTER MU}", setting="--out")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"\xce\xbc"
    with pytest.raises(FileError, match="/dev/full cannot be written: No space left"):
        write_text(tmp_path / "/dev/full", "x", setting="--out")
