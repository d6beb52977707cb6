"""What the C library does with memory that is freed: keeps it for what comes next, or gives it back at once.

By itself it gives back much of what a training step frees at its end, and the next step pays with a page
fault for each page that it is given anew: two or three of a hundred milliseconds. Either choice holds for the
whole process. Where the C library is not glibc, nothing is changed.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""
_MOST_BYTES = 32 << 20
"""What is larger has a map of its own in any case: glibc takes no higher threshold."""


def keep_freed() -> None:
    """Keep what is freed, for processes whose steps are alike."""
    _set(mmap_bytes=_MOST_BYTES, trim_bytes=2**31 - 1)


def return_freed() -> None:
    """Give back what is freed, so that memory in use follows the tensors in use."""
    _set(mmap_bytes=1 << 20, trim_bytes=1 << 20)


def _set(*, mmap_bytes: int, trim_bytes: int) -> None:
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, mmap_bytes)
        library.mallopt(_TRIM_THRESHOLD, trim_bytes)
