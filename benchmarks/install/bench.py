"""How large the wheel is, and how long installing and importing it takes."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from functools import partial
from pathlib import Path

from plait.bench import Bench

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
IMPORTS = {
    "import plait": "import plait",
    "import plait.compress": "import plait.compress",
    "plait.compress.attach": "from plait.compress import attach",
    "import torch": "import torch",
    "python -c pass": "pass",
}


def build(folder: Path) -> tuple[Path, float]:
    """The wheel of this source tree, and how long it took; kernels are compiled where they changed."""
    begun = time.perf_counter()
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*PIP, "wheel", *offline, "--wheel-dir", folder, ROOT], check=True)
    seconds = time.perf_counter() - begun
    (wheel,) = folder.glob("*.whl")
    return wheel, seconds


def install(wheel: Path, python: Path) -> None:
    options = ["--no-deps", "--no-index", "--force-reinstall"]
    subprocess.run([*PIP, "--python", python, "install", *options, wheel], check=True)


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)


def start(python: Path, code: str) -> None:
    subprocess.run([python, "-c", code], check=True)


def environment(folder: Path) -> Path:
    """A new environment that sees the packages of this one; not its plait, where that is editable."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def run(bench: Bench) -> None:
    repetitions, retries = bench.pick(quick=3, full=15), bench.pick(quick=0, full=2)
    with tempfile.TemporaryDirectory(prefix="plait-install-") as name:
        folder = Path(name)
        wheel, build_s = build(folder)
        bench.configure(wheel=wheel.name, build_s=round(build_s, 1))
        python = environment(folder / "environment")
        installed, unpacked = bench.interleave(
            {
                "install": partial(install, wheel, python),
                "unpack": partial(unpack, wheel, folder / "unpacked"),
            },
            repetitions=repetitions,
            retries=retries,
        )
        bench.case("wheel", wheel.stat().st_size / 1e3, unit="kB", better="lower", at_most=2000)
        files = [file for file in (folder / "unpacked").rglob("*") if file.is_file()]
        unpacked_kb = sum(file.stat().st_size for file in files) / 1e3
        bench.case("wheel, unpacked", unpacked_kb, unit="kB", better="lower")
        bench.case("install, without dependencies", installed, unit="s", limit=("unpacking it", unpacked))
        sides = {name: partial(start, python, code) for name, code in IMPORTS.items()}
        times = dict(
            zip(sides, bench.interleave(sides, repetitions=repetitions, retries=retries), strict=True)
        )
    limit = ("python -c pass", times["python -c pass"])
    peer = ("import torch", times["import torch"])
    bench.case("import plait", times["import plait"], unit="s", against=peer, limit=limit, at_most=0.5)
    bench.case("import plait.compress", times["import plait.compress"], unit="s", against=peer, limit=limit)
    bench.case("plait.compress.attach", times["plait.compress.attach"], unit="s", against=peer)
    bench.case("import torch", times["import torch"], unit="s", limit=limit)
