"""What the variable PLAIT_COMPRESS says: ``auto``, ``4``, ``off``, or fields, ``bits=3,error_feedback=true``.

Fields are those of ``Compression`` that can be written in a word; those of its parts have a dot in their
names, as in ``adaptation.alpha=2``. The first item may be the bits alone: ``auto,seed=1``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from plait.errors import FileError, UsageError
from plait_autoload import OFF, VARIABLE

if TYPE_CHECKING:
    from plait.compress.compression import Compression

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def asked_for(environment: Mapping[str, str] | None = None) -> Compression | None:
    """The compression that the environment asks for; None where it asks for none."""
    env = os.environ if environment is None else environment
    return parse(env.get(VARIABLE, ""))


def parse(text: str, *, setting: str = VARIABLE) -> Compression | None:
    """Read a value of the variable; None is "off"."""
    if text.strip().lower() in OFF:
        return None
    from plait.compress.compression import Compression

    given: dict[str, str] = {}
    for place, item in enumerate(text.split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals and place == 0:
            name, value = "bits", name
        elif not (equals and name and value):
            raise UsageError(
                f"{setting}={text!r}: {item.strip()!r} is no field with its value",
                setting=setting,
                works="auto, 4, off, or fields such as bits=3,error_feedback=true",
            )
        if name in given:
            raise UsageError(f"{setting}={text!r} gives {name} twice", setting=setting, works="it once")
        given[name] = value
    kinds = dict(_kinds(Compression))
    for name in given:
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            raise UsageError(
                f"{setting}={text!r}: there is no field {name!r}",
                setting=setting,
                works=_examples_of(near[0], kinds[near[0]]) if near else ", ".join(kinds),
            )
    values = {name: _read(value, kinds[name], name, setting) for name, value in given.items()}
    try:
        compression: Compression = _filled(Compression(), values)
    except (UsageError, FileError) as error:
        what = f"{setting}={text!r}: {error.what}"
        raise type(error)(what, setting=setting, works=error.works) from None
    return compression


def _kinds(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields that a word can give, with their types; those of a part have its name before theirs."""
    hints = get_type_hints(owner)
    for field in fields(owner):
        kind = hints[field.name]
        if is_dataclass(kind):
            yield from _kinds(kind, f"{prefix}{field.name}.")
        elif any(_is_word(option) for option in _options(kind)):
            yield prefix + field.name, kind


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_word(kind: Any) -> bool:
    return kind in (bool, int, float, str) or get_origin(kind) is Literal


def _read(text: str, kind: Any, name: str, setting: str) -> object:
    """A value of the type, from text."""
    word = text.lower()
    for option in _options(kind):
        if option is NoneType and word == "none":
            return None
        if option is bool and word in _WORDS:
            return _WORDS[word]
        if get_origin(option) is Literal:
            found = [choice for choice in get_args(option) if str(choice) == word]
            if found:
                return found[0]
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
        if option is str:
            return text
    works = _examples_of(name, kind)
    raise UsageError(f"{setting}: {name} cannot be {text!r}", setting=setting, works=works)


def _examples_of(name: str, kind: Any) -> str:
    """Values that a field takes, as they are written."""
    return " or ".join(f"{name}={example}" for option in _options(kind) for example in _examples(option))


def _examples(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return tuple(str(choice) for choice in get_args(kind))
    return {bool: ("true", "false"), int: ("4",), float: ("0.5",), NoneType: ("none",)}.get(kind, ())


def _filled(owner: Any, values: Mapping[str, object]) -> Any:
    """A copy of a dataclass with these fields; what it checks of itself, it checks."""
    own: dict[str, object] = {}
    parts: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        part, dot, rest = name.partition(".")
        if dot:
            parts.setdefault(part, {})[rest] = value
        else:
            own[name] = value
    for part, inner in parts.items():
        own[part] = _filled(getattr(owner, part), inner)
    return replace(owner, **own)
