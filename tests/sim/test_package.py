"""What plait.sim offers, and that it is light."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import plait.sim


def test_every_public_name_is_there_documented_and_no_modules_name():
    modules = {module.name for module in pkgutil.iter_modules(plait.sim.__path__)}
    assert plait.sim.__all__ == sorted(plait.sim.__all__)
    for name in plait.sim.__all__:
        value = getattr(plait.sim, name)
        assert name not in modules
        assert inspect.getdoc(value), f"plait.sim.{name} has no docstring"
        assert getattr(importlib.import_module(value.__module__), name) is value


def test_no_torch_is_needed():
    code = "import sys, plait.sim\nfor name in plait.sim.__all__:\n  getattr(plait.sim, name)\n"
    code += "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
