"""What ``import torch`` runs of plait: in fresh processes, as users have it."""

import contextlib
import importlib.metadata
import io
import os
import subprocess
import sys

import pytest

import plait_autoload

LOADED = "print(*sorted(name for name in sys.modules if name.split('.')[0].startswith('plait')))"


def python(code, **environment):
    ours = ("PLAIT_COMPRESS", "PLAIT_PUBLISH")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env={**kept, **environment}, timeout=120,
    )  # fmt: skip


def test_torch_finds_the_entry_point():
    (point,) = importlib.metadata.entry_points(group="torch.backends", name="plait")
    assert point.load() is plait_autoload.autoload


def test_unasked_nothing_else_is_imported_and_nothing_is_changed():
    code = f"""
import sys, torch
{LOADED}
print(hasattr(torch.nn.parallel.DistributedDataParallel.__init__, "__wrapped__"))
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["plait_autoload", "False"]


@pytest.mark.parametrize("value", ["", " Off ", "0", "none", "FALSE", "no"])
def test_off_is_off(value, monkeypatch):
    monkeypatch.setenv("PLAIT_COMPRESS", value)
    monkeypatch.setitem(sys.modules, "plait.compress.script", None)  # an import would fail, and be said
    with contextlib.redirect_stderr(io.StringIO()) as said:
        plait_autoload.autoload()
    assert said.getvalue() == ""


def test_on_torch_is_changed_and_little_is_imported():
    """Even if the value is mistyped: that is said where a model is made, and breaks no import."""
    code = f"""
import sys, torch
{LOADED}
print(torch.nn.parallel.DistributedDataParallel.__init__.__wrapped__.__qualname__)
print("torch.distributed.fsdp" in sys.modules, "torch._dynamo" in sys.modules)
from torch.distributed._composable.fsdp import fully_shard
import torch.distributed.fsdp
print(fully_shard is torch.distributed.fsdp.fully_shard, fully_shard.__wrapped__.__module__)
print(callable(fully_shard.state))
"""
    done = python(code, PLAIT_COMPRESS="no such thing")
    assert (done.returncode, done.stderr) == (0, "")
    modules, wrapped, imported, sharded, state = done.stdout.splitlines()
    assert "plait.compress.hook" not in modules.split()
    assert wrapped == "DistributedDataParallel.__init__"
    assert imported == "False False"
    assert sharded.startswith("True torch.distributed.fsdp")
    assert state == "True", "torch keeps its state of a module behind this name"


def test_plait_may_be_imported_first():
    """``import plait...`` imports torch, which runs the entry point, which imports plait."""
    code = """
import plait.compress.hook
from torch.nn.parallel import DistributedDataParallel
print(DistributedDataParallel.__init__.__wrapped__)
"""
    done = python(code, PLAIT_COMPRESS="4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "DistributedDataParallel" in done.stdout


def test_an_error_at_autoload_is_one_line_and_never_breaks_the_import():
    code = """
import sys
sys.modules["plait.compress.script"] = None  # as where the installation is broken
import torch
print(torch.ones(1).item())
"""
    done = python(code, PLAIT_COMPRESS="4")
    assert (done.returncode, done.stdout) == (0, "1.0\n")
    assert done.stderr.startswith("plait: gradients are NOT compressed, PLAIT_COMPRESS could not be heeded: ")
    assert len(done.stderr.splitlines()) == 1


def test_steps_are_published_where_that_is_asked_for():
    code = f"""
import sys, torch
{LOADED}
print(torch.nn.parallel.DistributedDataParallel.__init__.__wrapped__.__qualname__)
"""
    done = python(code, PLAIT_PUBLISH="foreground")
    assert (done.returncode, done.stderr) == (0, "")
    modules, wrapped = done.stdout.splitlines()
    assert "plait.burst.script" in modules.split()
    assert "plait.compress.script" not in modules.split()
    assert wrapped == "DistributedDataParallel.__init__"
    broken = python(
        code.replace(
            "import sys, torch", "import sys; sys.modules['plait.burst.script'] = None; import torch"
        ),
        PLAIT_PUBLISH="1",
    )
    assert broken.stderr.startswith("plait: background work is not told of steps")
