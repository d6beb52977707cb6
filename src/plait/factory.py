"""A function that every worker can find again: its importable name and the arguments to give it.

Workers on other hosts build a job themselves, so what a job is made of travels as a name and plain
values, never as code. A name is ``module:function`` or, for a file that is not on the import path (a
script, a jobs file), ``path/to/file.py:function``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import FileError, PlaitError, UsageError

_AT_TOP_LEVEL = "a function at the top level of a module, or its name 'module:function'"


@dataclass(frozen=True, init=False)
class Factory:
    """An importable function with keyword arguments: ``Factory("torch.optim:AdamW", lr=3e-4)``."""

    target: str
    """``module:function`` or ``path/to/file.py:function``."""
    arguments: Mapping[str, Any]
    """Keyword arguments, as JSON would hold them."""

    def __init__(self, function: str | Callable[..., Any], /, **arguments: Any) -> None:
        target = _checked(function, "factory") if isinstance(function, str) else name_of(function)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "arguments", _plain(arguments, target))

    @classmethod
    def of(cls, value: Factory | str | Callable[..., Any] | dict[str, Any], *, setting: str) -> Factory:
        """Read what a user may write: a factory, a name, a function, a partial of one; or what JSON holds."""
        if isinstance(value, Factory):
            return value
        if isinstance(value, str):
            return cls(_checked(value, setting))
        if isinstance(value, dict):
            return cls._from_plain(value, setting)
        if isinstance(value, functools.partial):
            if value.args:
                raise UsageError(
                    f"a partial of {len(value.args)} positional arguments cannot be written down by name",
                    setting=setting,
                    works="keyword arguments only: functools.partial(function, layers=4)",
                )
            return cls(name_of(value.func, setting=setting), **value.keywords)
        return cls(name_of(value, setting=setting))

    @classmethod
    def _from_plain(cls, value: dict[str, Any], setting: str) -> Factory:
        shape = {"call": str, "arguments": dict}
        if {key: type(part) for key, part in value.items()} != shape:
            raise UsageError(
                f"{value!r} is not a call",
                setting=setting,
                works='{"call": "module:function", "arguments": {}}',
            )
        return cls(_checked(value["call"], setting), **value["arguments"])

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"call": self.target, "arguments": dict(self.arguments)}

    def load(self, *, setting: str, given: Sequence[str] | None = None) -> functools.partial[Any]:
        """Import the function and return it with its arguments filled in, after checking that they fit.

        ``given`` names what it will be called with, in order; None leaves that unchecked.
        """
        function = _resolve(self.target, setting)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some builtins do not tell
            return functools.partial(function, **self.arguments)
        takes = signature.parameters
        if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            for name in self.arguments:
                if name not in takes or takes[name].kind is inspect.Parameter.POSITIONAL_ONLY:
                    raise UsageError(
                        f"{self.target} takes no argument {name!r}",
                        setting=setting,
                        works=f"one of: {', '.join(takes)}" if takes else "no arguments",
                    )
        if given is not None:
            self._check_call(signature, given, setting)
        return functools.partial(function, **self.arguments)

    def _check_call(self, signature: inspect.Signature, given: Sequence[str], setting: str) -> None:
        try:
            signature.bind(*given, **self.arguments)
        except TypeError as error:
            names = ", ".join(given)
            raise UsageError(
                f"{self.target}({', '.join(signature.parameters)}) is called with ({names}): {error}",
                setting=setting,
                works=f"a function of ({names}), with a default or functools.partial for all else it takes",
            ) from None

    def __hash__(self) -> int:
        return hash((self.target, json.dumps(self.arguments, sort_keys=True)))


Importable = Factory | str | Callable[..., Any]
"""A function by name, itself (at the top level of a module), as `functools.partial`, or as `Factory`."""


def name_of(function: Callable[..., Any], *, setting: str = "factory") -> str:
    """The name under which another process finds a function or class, or an error that says why not."""
    name = getattr(function, "__qualname__", None)
    if name is None:
        raise UsageError(
            f"a {type(function).__name__} object has no name to import it by",
            setting=setting,
            works=_AT_TOP_LEVEL,
        )
    if "<lambda>" in name:
        raise UsageError(
            "a lambda has no name, so workers cannot import it", setting=setting, works=_AT_TOP_LEVEL
        )
    if "<locals>" in name:
        raise UsageError(
            f"{name} is defined inside a function, so workers cannot import it",
            setting=setting,
            works=_AT_TOP_LEVEL,
        )
    module = sys.modules.get(function.__module__)
    if module is None or _attribute(module, name) != function:
        bound = "is bound to an object" if inspect.ismethod(function) else "is not what its module holds"
        raise UsageError(
            f"{name} {bound}, so workers would import something else under the name "
            f"'{function.__module__}:{name}'",
            setting=setting,
            works=_AT_TOP_LEVEL,
        )
    return f"{_module_name(module, setting)}:{name}"


def load_file(path: str | Path) -> ModuleType:
    """Import a Python file by its path, once per process; its folder joins the import path, as a script's."""
    file = Path(path).resolve()
    main = sys.modules.get("__main__")
    if main is not None and _same_file(main, file):
        return main
    name = f"plait_file_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileError(f"there is no Python file {file}", setting="path", works="path/to/jobs.py")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    ours, sys.argv = sys.argv, [str(file)]  # what this process was started with is not the file's
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SystemExit) and not _of_a_signal(error):
            raise FileError(
                f"{file}{_line_in(file, error)}: it ended the interpreter (exit code {error.code}) while it "
                "was loaded: as a script that reads a command line of its own, it has no job to offer",
                setting="path",
                works="job = Job(...) at its top, and what the script does under: if __name__ == '__main__'",
            ) from error
        if isinstance(error, PlaitError) or not isinstance(error, Exception):
            raise
        raise FileError(
            f"{file}{_line_in(file, error)}: {_reason(error)}",
            setting="path",
            works="a file that Python runs",
        ) from error
    finally:
        sys.argv = ours
    return module


def _of_a_signal(error: SystemExit) -> bool:
    """Whether a process leaves because a signal told it to, as plait's commands do: with 128 + its number."""
    return isinstance(error.code, int) and error.code > 128


def _line_in(file: Path, error: BaseException) -> str:
    """Where in a file an error arose, or the call that led to it elsewhere."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == str(file)
    ]
    return f", line {lines[-1]}" if lines else ""


def _reason(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _module_name(module: ModuleType, setting: str) -> str:
    """A module's name where a fresh process would find the same file under it, else the file's path."""
    name = module.__name__
    spec = getattr(module, "__spec__", None)
    if name == "__main__" and spec is not None:  # python -m package.module
        name = spec.name
    file = getattr(module, "__file__", None)
    if file is None:
        if name in sys.builtin_module_names:
            return name
        raise UsageError(
            f"{name} is not in a file, so workers cannot import from it",
            setting=setting,
            works="write the function into a file and run or import that",
        )
    return name if _origin(name) == os.path.realpath(file) else os.path.realpath(file)


def _origin(name: str) -> str | None:
    """The file that a fresh process would load for a module, whatever this one has loaded under its name."""
    parts, path, spec = name.split("."), None, None
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        specs = (finder.find_spec(part, path) for finder in sys.meta_path)
        spec = next((found for found in specs if found is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return os.path.realpath(spec.origin) if spec is not None and spec.origin else None


def _same_file(module: ModuleType, file: Path) -> bool:
    here = getattr(module, "__file__", None)
    return here is not None and os.path.realpath(here) == str(file)


def _checked(target: str, setting: str) -> str:
    place, colon, name = target.rpartition(":")
    named = colon and all(part.isidentifier() for part in name.split("."))
    dotted = all(part.isidentifier() for part in place.split("."))
    if not (named and (dotted or place.endswith(".py"))):
        raise UsageError(
            f"{target!r} does not name a function",
            setting=setting,
            works="'module:function' or 'path/to/file.py:function'",
        )
    return f"{os.path.realpath(place)}:{name}" if place.endswith(".py") else target


def _resolve(target: str, setting: str) -> Callable[..., Any]:
    place, _, name = target.rpartition(":")
    try:
        module = load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except PlaitError:
        raise
    except Exception as error:  # whatever its code does when it is imported
        raise UsageError(
            f"{target} cannot be imported: {error if isinstance(error, ImportError) else _reason(error)}",
            setting=setting,
            works="a module that this Python can import, or path/to/file.py:function",
        ) from error
    function = _attribute(module, name)
    if function is None:
        raise UsageError(f"{place} has no {name!r}", setting=setting, works=f"a name that {place} defines")
    if not callable(function):
        raise UsageError(
            f"{target} is a {type(function).__name__}, not a function", setting=setting, works=_AT_TOP_LEVEL
        )
    return function  # type: ignore[no-any-return]


def _attribute(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _plain(arguments: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The arguments as JSON gives them back, so that a job and its copy read from a file are equal."""
    for name, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"argument {name}={value!r} of {target} cannot be written as JSON: {error}",
                setting=name,
                works="numbers, strings, true, false, none, and lists and dicts of them",
            ) from None
    return json.loads(json.dumps(dict(arguments)))  # type: ignore[no-any-return]
