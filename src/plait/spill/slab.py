"""Large blocks that a device frees are kept for its next tensors, as far as its budget has room for them.

Done by ``native/slab.cpp``, which a device's process loads before the C library. Where it was not built, or
where something else has been put in the C library's place, memory goes back to the system at once.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from plait import native

_LOADED = "LD_PRELOAD"


def environment() -> dict[str, str]:
    """What a new process must find in its environment to keep large blocks."""
    folder = native.folder()
    library = None if folder is None else folder / "_slab.so"
    if library is None or not library.exists() or os.environ.get(_LOADED):
        return {}
    return {_LOADED: str(library)}


def settle() -> None:
    """In a process that has loaded it: whatever this one starts need not."""
    if Path(os.environ.get(_LOADED, "")).name == "_slab.so":
        del os.environ[_LOADED]


def limit(nbytes: int) -> None:
    """Keep freed blocks from now on, as long as all large blocks together take no more than this."""
    if (call := getattr(ctypes.CDLL(None), "plait_slab_limit", None)) is not None:
        call(ctypes.c_size_t(max(0, nbytes)))


def leave(more_bytes: int) -> None:
    """Keep freed blocks as long as large blocks take no more than they do now and so much more, or less."""
    if (held := held_bytes()) is not None:
        limit(held + more_bytes)


def held_bytes() -> int | None:
    """What large blocks take, in use or kept; None where they are not kept."""
    call = getattr(ctypes.CDLL(None), "plait_slab_held", None)
    if call is None:
        return None
    call.restype = ctypes.c_size_t
    return int(call())
