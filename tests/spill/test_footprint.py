"""Footprints: what processes hold, as the kernel counts it."""

import mmap
import os
import subprocess
import sys
import time

from plait.spill.footprint import Footprint, private_bytes, shared_bytes

SIZE = 64 << 20


def test_private_and_shared_memory_are_told_apart():
    before = private_bytes(), shared_bytes()
    own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, SIZE, flags=own) as private, mmap.mmap(-1, SIZE) as shared:
        private.write(b"x" * SIZE)
        shared.write(b"x" * SIZE)
        assert private_bytes() - before[0] >= SIZE
        assert SIZE <= shared_bytes() - before[1] < 2 * SIZE
    assert private_bytes(2**22 + 1) == 0  # no such process


def test_a_peak_counts_others_and_stays():
    code = f"import time; x = bytearray(b'x') * {SIZE}; print('there', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        with Footprint(lambda: [other.pid], lambda: SIZE) as footprint:
            other.stdout.readline()
            while footprint.peak_bytes < 2 * SIZE:
                time.sleep(0.01)
            other.kill()
            other.wait()
        assert footprint.look() < footprint.peak_bytes
        assert footprint.peak_bytes >= 2 * SIZE + private_bytes(os.getpid()) // 2
