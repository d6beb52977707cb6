"""How to install what is missing: by packages, wherever plait came from."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import plait
from plait import extras

ROOT = Path(plait.__file__).parent
NAMED = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("extra", ["hf", "ray", "gpu", "tune", "lightning"])
def test_an_extra_is_its_packages(extra):
    found = [re.sub(r"\s", "", requirement) for requirement in extras.requirements(extra)]
    assert found == NAMED["optional-dependencies"][extra]
    quoted = " ".join(f"'{each}'" for each in found)
    assert extras.install(extra) == f"pip install {quoted}"


def test_without_an_extra_they_are_plaits_own():
    names = {re.split(r"[<>=]", each)[0] for each in NAMED["dependencies"]}
    assert {re.split(r"[<>=]", each)[0] for each in extras.requirements()} == names


def test_run_from_its_sources_plait_says_so(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert extras.install("hf") == "pip install '.[hf]', in a clone of plait's sources"


def test_nothing_else_says_how_to_install_plait_or_its_extras():
    """A registry need not have plait, and a wheel has no sources beside it."""
    wrong = re.compile(r"pip install (plait|'plait|'?\.|(ray|optuna|lightning|transformers)\b)")
    found = [
        file for file in ROOT.rglob("*.py") if file.name != "extras.py" and wrong.search(file.read_text())
    ]
    assert not found
