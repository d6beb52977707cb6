import json
from dataclasses import dataclass

import pytest

from plait.document import checked, fields_of, read_json
from plait.errors import FileError, UsageError


@dataclass(frozen=True, kw_only=True)
class Thing:
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    width: int

    def __post_init__(self):
        if self.width < 1:
            raise UsageError(f"a width of {self.width}", setting="width", works="1")


def test_a_thing_comes_back(tmp_path):
    file = tmp_path / "thing.json"
    file.write_text(json.dumps({"format": "thing/1", "width": 3}))
    assert checked(Thing, read_json(file), format="thing/1", source="x") == Thing(width=3)
    assert fields_of(read_json(file), format="thing/1", source="x") == {"width": 3}


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ([], r"x: field 'format' is 'list'"),
        ({"width": 3}, r"x: field 'format' is None"),
        ({"format": "thing/2", "width": 3}, r"'thing/2'.*works: 'thing/1'"),
        ({"format": "thing/1"}, r"x: field 'width'"),
        ({"format": "thing/1", "width": 3, "height": 1}, r"x: field 'height'"),
        ({"format": "thing/1", "width": 0}, r"x: field .*a width of 0"),
    ],
)
def test_what_is_wrong_is_named(data, what):
    with pytest.raises(FileError, match=what):
        checked(Thing, data, format="thing/1", source="x")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot be read: .*No such file"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"a":\n', "is no JSON, or not whole: .* in line 2"),
        (b"[" * 100_000, "is no JSON, or not whole: maximum recursion depth"),
    ],
)
def test_a_file_that_is_no_json_says_what_works(tmp_path, content, what):
    file = tmp_path / "thing.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FileError, match=rf"thing\.json {what}") as caught:
        read_json(file, works="what Thing.save writes", setting="THING")
    assert (caught.value.setting, caught.value.works) == ("THING", "what Thing.save writes")
