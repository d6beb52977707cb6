"""Memory that processes share, in large pages where the system gives them.

What ``memfd_create`` makes is in pages of 4 KiB, unless an administrator has changed the system's setting for
shared memory (``transparent_hugepage/shmem_enabled``, "never" by default). Direct I/O then moves a block page
by page, which takes a disk up to twice as long, and every first touch of a page is a fault of its own.

A tmpfs may ask for large pages itself, whatever that setting says (``huge=within_size``: none reaches beyond
the file's end). So one is mounted for a single file without a name: nowhere in the tree, seen by nobody, and
gone with the last who has the file open. Nothing of the system is changed. It takes root or a user namespace,
in which a process of its own mounts it and passes the file on. Where neither is allowed, pages are small.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
"""System calls of Linux 5.2, the same on all processors but Alpha; glibc knows them from 2.36 on."""
_CLOEXEC = 1
_SET_STRING, _CREATE = 1, 6  # FSCONFIG_* of <linux/mount.h>
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8  # MOUNT_ATTR_*
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # CLONE_NEWUSER, CLONE_NEWNS
_SYS_ADMIN = 21
"""The capability that mounting takes."""
_LONGEST_S = 10.0
_PROBE_BYTES = 64 << 20


def create(name: str) -> int:
    """The descriptor of an empty file in memory, to be sized and mapped; one of small pages has the name."""
    way = _way()
    if way is not None:
        with suppress(OSError, subprocess.SubprocessError):
            return way()
    return os.memfd_create(name)


@cache
def _way() -> Callable[[], int] | None:
    """How large pages are had here; tried once."""
    for way in (_on_a_mount, _in_a_namespace):
        try:
            os.close(way())
        except (OSError, AttributeError, TypeError, subprocess.SubprocessError):  # not allowed, or not there
            continue
        return way
    return None


def page_bytes() -> int:
    """How large the pages of such a file are: what the first byte that is written takes."""
    fd = create("plait-probe")
    try:
        os.ftruncate(fd, _PROBE_BYTES)
        with mmap.mmap(fd, _PROBE_BYTES) as memory:
            memory[0] = 1
            return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


def _on_a_mount() -> int:
    """A file on a tmpfs of its own."""
    if not _may_mount():  # where system calls are filtered, one that is not allowed may end the process
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    system = _call(_FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        for key, value in ((b"huge", b"within_size"), (b"size", b"0")):  # 0: as large as memory is
            _call(_FSCONFIG, system, _SET_STRING, key, value, 0)
        _call(_FSCONFIG, system, _CREATE, None, None, 0)
        mount = _call(_FSMOUNT, system, _CLOEXEC, _NOSUID | _NODEV | _NOEXEC)
    finally:
        os.close(system)
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)
    finally:
        os.close(mount)


def _may_mount() -> bool:
    with open("/proc/self/status") as status:
        (held,) = (line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(held, 16) >> _SYS_ADMIN & 1)


def _in_a_namespace() -> int:
    """The same, made by a process that is root in a user namespace of its own."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_LONGEST_S)
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LONGEST_S,
            check=True,
        )
        _, found, _, _ = socket.recv_fds(ours, 1, 1)
    if not found:
        raise FileNotFoundError("no file came")
    os.set_inheritable(found[0], False)
    return found[0]


def _call(*arguments: int | bytes | None) -> int:
    """A system call, whose failure is an OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    done = libc.syscall(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(done)


def _main() -> None:
    """In that process: as somebody, since nobody may make a file."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)
    with socket.socket(fileno=int(sys.argv[1])) as theirs:
        socket.send_fds(theirs, [b"."], [_on_a_mount()])


if __name__ == "__main__":
    _main()
