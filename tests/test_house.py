"""The house rules: what may import what, what stays light, what things and files are called."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import plait

ROOT = Path(plait.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

STRANDS = {"compress", "pipeline", "spill", "burst"}
BASE = {"compat", "errors", "lazy", "units", "worker", "native", "_native"}
ABOVE = {
    # a room, and the rooms that it may import besides itself, the base and the single files
    **{strand: set() for strand in STRANDS},
    "lab": set(),
    "bench": set(),
    "sim": STRANDS,
    "strategy": STRANDS | {"sim"},
    "engine": STRANDS | {"sim", "strategy", "lab"},
    "cli": STRANDS | {"sim", "strategy", "engine", "lab", "bench", "demo"},
    "demo": STRANDS | {"sim", "strategy", "engine", "lab", "cli"},
}
LIGHT = [
    "plait", "plait.bench", "plait.cli.app", "plait.cluster", "plait.collective", "plait.errors", "plait.job",
    "plait.lab", "plait.native", "plait.profile", "plait.timeline", "plait.units", "plait.worker",
]  # fmt: skip


def room(module):
    return module.split(".")[1] if "." in module else ""


def module_of(file):
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file):
    """(module, names) of every import of plait or torch in a file, at the top or within a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield node.module, [alias.name for alias in node.names]


def plait_imports(file):
    for module, names in imports(file):
        if module == "plait":
            yield from (f"plait.{name}" for name in names)
        elif module.startswith("plait."):
            yield module


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_a_room_imports_only_what_lies_below_it(file):
    own = room(module_of(file))
    for module in plait_imports(file):
        other = room(module)
        if other == own:
            continue
        if own in BASE:
            assert other in BASE, f"{own} is below everything, and imports {module}"
        elif own in ABOVE:
            assert other not in ABOVE or other in ABOVE[own], f"{own} may not import {module}"
        elif own not in ("", "__main__"):  # the single files
            assert other not in ABOVE, f"{own} knows nothing of strands and rooms, and imports {module}"


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_no_private_name_is_taken_from_another_module(file):
    for module, names in imports(file):
        if module.split(".")[0] == "plait":
            private = [
                name for name in [*module.split("."), *names] if name.startswith("_") and name != "_native"
            ]
            assert not [name for name in private if not name.startswith("__")], f"{file}: {module} {names}"


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "compat"], ids=module_of)
def test_private_modules_of_torch_are_named_in_compat_alone(file):
    for module, names in imports(file):
        if module.split(".")[0] == "torch":
            private = [name for name in [*module.split("."), *names] if name.startswith("_")]
            assert not private, (
                f"{file} takes {private} from {module}: put it into compat.py, with the reason"
            )


def test_no_file_is_a_heap():
    heaps = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert not [file for file in FILES if file.stem in heaps or set(file.parts) & heaps]


def test_light_modules_do_not_import_torch():
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n  importlib.import_module(name)\n"
    code += "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code, *LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_in_one_place_and_documented():
    assert plait.__all__ == sorted(plait.__all__)
    for name in plait.__all__:
        value = getattr(plait, name)
        assert inspect.getdoc(value), f"plait.{name} has no docstring"
        if not inspect.ismodule(value):
            assert getattr(importlib.import_module(value.__module__), name) is value
    assert set(plait.__all__) <= set(dir(plait))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.nothing  # noqa: B018


def test_importing_plait_has_no_side_effects():
    code = "import sys; before = set(sys.modules); import plait; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.split() if name.split(".")[0] == "plait"]
    assert loaded == ["plait", "plait.lazy"]
