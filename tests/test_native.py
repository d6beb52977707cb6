"""The kernels: every implementation that this machine can run gives the same bytes."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait import native
from plait.errors import UsageError

every_isa = pytest.mark.parametrize("isa", native.isas())

# Around each boundary of a kernel: words, vectors, the stretches of the checksum, the pure one's pieces.
SIZES = sorted(
    {
        max(0, edge + off)
        for edge in (0, 4, 8, 32, 64, 128, 256, 3 * 256, 3 * 8192, 1 << 20)
        for off in (-9, -1, 0, 1, 7)
    }
)


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def bitwise_crc32c(data: bytes) -> int:
    """The definition, one bit at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@every_isa
def test_checksum_is_crc32c(isa: str) -> None:
    # The check value of CRC-32C, and the four patterns of RFC 3720, B.4.
    assert native.checksum(b"123456789", isa=isa) == 0xE3069283
    assert native.checksum(bytes(32), isa=isa) == 0x8A9136AA
    assert native.checksum(b"\xff" * 32, isa=isa) == 0x62A8AB43
    assert native.checksum(bytes(range(32)), isa=isa) == 0x46DD794E
    assert native.checksum(bytes(reversed(range(32))), isa=isa) == 0x113FDB5C


@every_isa
@given(data=st.binary(max_size=2000))
def test_checksum_follows_the_definition(isa: str, data: bytes) -> None:
    assert native.checksum(data, isa=isa) == bitwise_crc32c(data)


@every_isa
@given(first=st.binary(max_size=5000), second=st.binary(max_size=5000))
def test_checksum_continues(isa: str, first: bytes, second: bytes) -> None:
    joined = native.checksum(first + second, isa=isa)
    assert joined == native.checksum(second, start=native.checksum(first, isa=isa), isa=isa)


@pytest.mark.parametrize("size", SIZES)
def test_implementations_agree_at_every_alignment(size: int) -> None:
    memory = noise(size + 64, seed=size)
    for offset in (0, 1, 3, 8, 31):
        data = memory[offset : offset + size]
        assert len({native.checksum(data, isa=isa) for isa in native.isas()}) == 1
        assert len({native.read(data, isa=isa) for isa in native.isas()}) == 1


@every_isa
@given(size=st.integers(0, 1000), at=st.integers(0, 70), origin=st.integers(0, 70))
def test_copy_moves_exactly_its_bytes(isa: str, size: int, at: int, origin: int) -> None:
    source, target = noise(size + 70), noise(size + 140, seed=1)
    expected = target.copy()
    expected[at : at + size] = source[origin : origin + size]
    native.copy(target[at : at + size], source[origin : origin + size], isa=isa)
    np.testing.assert_array_equal(target, expected)


@every_isa
def test_read_sees_every_byte(isa: str) -> None:
    data = np.zeros(517, np.uint8)
    for i in range(data.size):
        data[i] = 0xA5
        assert native.read(data, isa=isa) == 0xA5 << 8 * (i % 8)
        data[i] = 0


@every_isa
def test_a_changed_bit_changes_the_checksum(isa: str) -> None:
    data = noise(100_000)
    before = native.checksum(data, isa=isa)
    for at in (0, 8191, 8192, 24_576, 99_999):
        data[at] ^= 1
        assert native.checksum(data, isa=isa) != before
        data[at] ^= 1
    assert native.checksum(data, isa=isa) == before


@every_isa
def test_buffers_of_every_kind(isa: str) -> None:
    raw = noise(4096).tobytes()
    expected = native.checksum(raw, isa="python")
    with mmap.mmap(-1, 4096) as mapped:
        mapped[:] = raw
        assert native.checksum(mapped, isa=isa) == expected
    for buffer in (bytearray(raw), memoryview(raw), np.frombuffer(raw, np.float32).reshape(32, 32)):
        assert native.checksum(buffer, isa=isa) == expected
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).reshape(64, 32)
    assert native.checksum(tensor, isa=isa) == expected
    assert native.checksum(torch.nn.Parameter(tensor), isa=isa) == expected
    target = torch.empty_like(tensor)
    native.copy(target, tensor, isa=isa)
    assert target.view(torch.uint8).equal(tensor.view(torch.uint8))
    assert native.checksum(torch.empty(0), isa=isa) == native.checksum(b"", isa=isa) == 0


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@given(
    layers=st.integers(1, 5), places=st.integers(1, 4), searches=st.integers(1, 130), seed=st.integers(0, 999)
)
def test_paths_are_the_shortest_to_the_last_bit(
    dtype: str, layers: int, places: int, searches: int, seed: int
) -> None:
    source = np.random.default_rng(seed)
    given_values = source.random((layers, places, searches)).astype(dtype)
    given_values[source.random(given_values.shape) < 0.1] = np.inf
    moving = source.random((2, layers, places, places)).astype(dtype)
    weights = source.random((2, searches)).astype(dtype)
    wanted = given_values.copy()
    for layer in range(1, layers):
        for to in range(places):
            every = [
                (moving[1, layer, a, to] * weights[1] + moving[0, layer, a, to] * weights[0])
                + wanted[layer - 1, a]
                for a in range(places)
            ]
            wanted[layer, to] += np.min(every, axis=0)
    for isa in native.isas():
        values = given_values.copy()
        native.paths(values, moving, weights, isa=isa)
        assert np.array_equal(values, wanted), isa


def test_compiled_kernels_release_the_interpreter() -> None:
    if native.missing():
        pytest.skip(str(native.missing()))
    data = np.zeros(512 << 20, np.uint8)  # never written, so it takes no memory
    done = threading.Event()

    def work() -> None:
        native.checksum(data, isa="scalar")
        done.set()

    thread = threading.Thread(target=work)
    turns = 0
    switch = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # longer than the kernel: only a release lets this thread run meanwhile
    try:
        thread.start()
        while not done.is_set():
            turns += 1
            done.wait(0.0005)
    finally:
        sys.setswitchinterval(switch)
    thread.join()
    assert turns > 1


@pytest.mark.parametrize(
    ("buffer", "says"),
    [
        (3, "int does not offer contiguous bytes"),
        (np.zeros((4, 4))[:, 1], "contiguous"),
        (torch.zeros(4, 4).t(), "strides"),
        (torch.zeros(4, device="meta"), "not in host memory"),
    ],
)
def test_what_is_no_buffer_is_refused(buffer: object, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        native.checksum(buffer)
    assert caught.value.setting == "buffer"
    assert caught.value.works


def test_copies_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(UsageError, match="read-only"):
        native.copy(b"1234", b"abcd")
    with pytest.raises(UsageError, match="4 bytes does not fit 5 bytes"):
        native.copy(bytearray(5), b"abcd")
    data = bytearray(8)
    with pytest.raises(UsageError, match="overlap"):
        native.copy(memoryview(data)[:4], memoryview(data)[2:6])


def test_wrong_start_and_implementation_are_refused() -> None:
    with pytest.raises(UsageError, match="-1 is not a 32-bit"):
        native.checksum(b"", start=-1)
    with pytest.raises(UsageError, match=r"'neon' is not .* python") as caught:
        native.read(b"", isa="neon")
    assert caught.value.works in native.isas()


def ask(setting: str | None, expression: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PLAIT_NATIVE"}
    if setting is not None:
        environment["PLAIT_NATIVE"] = setting
    code = f"from plait import native\ntry: print({expression})\nexcept Exception as error: print(error)"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, text=True, capture_output=True
    )
    return result.stdout.strip()


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_NATIVE", raising=False)
    report = "(native.isa(), native.isas(), native.missing(), native.checksum(b'plait'))"
    off = ask("0", report)
    assert off.startswith("('python', ('python',), 'PLAIT_NATIVE=0 turns")
    assert off.endswith(f"{native.checksum(b'plait')})")
    for isa in native.isas():
        assert ask(isa, "native.isa()") == isa
    assert ask(None, "native.isa()") == native.isas()[-1]
    assert "'vax' is not an implementation" in ask("vax", "native.isa()")
    assert "PLAIT_NATIVE" in ask("vax", "native.checksum(b'')")


def test_the_compiled_module_links_to_no_torch() -> None:
    if native.missing():
        pytest.skip(str(native.missing()))
    code = "import sys; from plait import native; native.checksum(b'1'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="the build tools are not installed")
    pytest.importorskip("nanobind", reason="the build tools are not installed")
    tree = Path(__file__).parents[1]
    for name in ("native", "src"):
        shutil.copytree(tree / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(tree / name, tmp_path)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    environment = os.environ | {"CXX": "/bin/false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, "."], cwd=tmp_path, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "plait/native.py" in names
    assert not [name for name in names if "_native" in name]
