"""What plait adds to ``import torch`` in a script that does not ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from plait.bench import Bench

IMPORT = [sys.executable, "-c", "import torch"]
WITHIN = """
import os, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from importlib.metadata import entry_points
start = time.perf_counter()
found = [point for point in entry_points(group="torch.backends") if point.name == "plait"]
searched = time.perf_counter()
for point in found:
    point.load()()
loaded = time.perf_counter()
assert found, "plait is not installed"
print(searched - start, loaded - searched)
"""


def environment(**given: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if k not in ("PLAIT_COMPRESS", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    }
    return {**kept, **given}


def start(given: dict[str, str]) -> float:
    """Processor seconds of a fresh process that imports torch; other jobs hardly change them."""
    process = subprocess.Popen(IMPORT, env=environment(**given))
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, "import torch failed"
    return used.ru_utime + used.ru_stime


def within() -> tuple[float, float]:
    """Seconds that torch's search for entry points takes, and ours when it is found."""
    done = subprocess.run(
        [sys.executable, "-c", WITHIN], check=True, env=environment(), capture_output=True, text=True
    )
    search, ours = map(float, done.stdout.split())
    return search, ours


def run(bench: Bench) -> None:
    retries = bench.pick(quick=0, full=2)
    sides = {
        "off": partial(start, {}),
        "without entry points": partial(start, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        "on": partial(start, {"PLAIT_COMPRESS": "4"}),
    }
    off, without, on = bench.interleave(
        sides, repetitions=bench.pick(quick=3, full=30), retries=retries, better="lower"
    )
    peer = ("import torch without entry points", without)
    bench.case("import torch, plait off", off, unit="s", against=peer, at_least=0.98)
    bench.case("import torch, plait on", on, unit="s", against=peer)
    ours, search = bench.interleave(
        {"ours": lambda: within()[1], "search": lambda: within()[0]},
        repetitions=bench.pick(quick=2, full=10),
        better="lower",
    )
    bench.case("plait's own part, off", ours.scaled(1e3), unit="ms", at_most=5)
    bench.case("torch's search for entry points", search.scaled(1e3), unit="ms")
