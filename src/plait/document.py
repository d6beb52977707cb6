"""Files of plain data: a dataclass as JSON with a ``format``; errors name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from plait.errors import FileError

_T = TypeVar("_T")


def read_json(path: str | Path, *, works: str = "a JSON file", setting: str = "file") -> Any:
    """The data in a JSON file; an error names the file, and says ``works``."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}", setting=setting, works=works) from None
    except (ValueError, RecursionError) as error:
        where = f"{error.msg} in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else error
        raise FileError(f"{path} is no JSON, or not whole: {where}", setting=setting, works=works) from None


def fields_of(data: Any, *, format: str, source: str) -> dict[str, Any]:
    """The data without its ``format``, which must be the one given."""
    if not isinstance(data, Mapping) or data.get("format") != format:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise FileError(f"{source}: field 'format' is {found!r}", setting="format", works=repr(format))
    return {name: value for name, value in data.items() if name != "format"}


def checked(kind: type[_T], data: Any, *, format: str, source: str) -> _T:
    """A dataclass from the data of its file; an error names the file and the field."""
    from pydantic import TypeAdapter, ValidationError

    plain = fields_of(data, format=format, source=source)
    try:
        return TypeAdapter(kind).validate_python(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "format"
        what = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else first["msg"]
        raise FileError(f"{source}: field {where!r}: {what}", setting=where, works=format) from None
