"""The codec for GPUs: its bytes in Triton's interpreter, and what it compiles to. Needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (the extra gpu brings it)"
)


def run(*command: str, **variables: str) -> str:
    """Triton reads its mode when it is imported, hence a fresh process for each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_bytes_are_those_of_the_plain_codec() -> None:
    cases = Path(__file__).with_name("triton_interpreted.py")
    run("-m", "pytest", "-q", str(cases), TRITON_INTERPRET="1")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from plait.compress import triton_kernels as kernels

def show(kernel, types, constants):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": False}
    print(triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"])

sizes = dict.fromkeys(["count", "bucket", "record_bytes"], "i32")
keys = dict.fromkeys(["key_low", "key_high", "first_bucket"], "i64")
show(
    kernels._encode,
    {"source": "*bf16", "payload": "*u8", "residual": "*fp32", **sizes, **keys},
    {"BITS": 7, "RANDOM": True, "KEEP": True, "ELEMENTS": 1024},
)
show(
    kernels._decode,
    {"payload": "*u8", "target": "*bf16", **sizes},
    {"BITS": 7, "ADD": True, "ELEMENTS": 1024},
)
"""


def test_they_compile_for_a_gpu_with_exact_arithmetic() -> None:
    assembly = run("-c", COMPILE)
    assert re.search(r"div\.rn\.f32", assembly)
    # No approximate division, no fused multiply-add, no flushing of denormals.
    assert not re.search(r"div\.(full|approx)|fma\.\w+\.f32|\.ftz", assembly)
