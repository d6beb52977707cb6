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
import os
import socket
import subprocess
import sys
from contextlib import suppress

_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 1, 1
_SET_STRING, _CREATE = 1, 6  # FSCONFIG_* of <linux/mount.h>
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8  # MOUNT_ATTR_*
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # CLONE_NEWUSER, CLONE_NEWNS
_LONGEST_S = 10.0


def create(name: str) -> int:
    """The descriptor of an empty file in memory, to be sized and mapped; one of small pages has the name."""
    for made in (_on_a_mount, _in_a_namespace):
        with suppress(OSError, AttributeError, subprocess.SubprocessError):  # not allowed, or not there
            return made()
    return os.memfd_create(name)


def _on_a_mount() -> int:
    """A file on a tmpfs of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    system = _checked(libc.fsopen(b"tmpfs", _FSOPEN_CLOEXEC))
    try:
        for key, value in ((b"huge", b"within_size"), (b"size", b"0")):  # 0: as large as memory is
            _checked(libc.fsconfig(system, _SET_STRING, key, value, 0))
        _checked(libc.fsconfig(system, _CREATE, None, None, 0))
        mount = _checked(libc.fsmount(system, _FSMOUNT_CLOEXEC, _NOSUID | _NODEV | _NOEXEC))
    finally:
        os.close(system)
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)
    finally:
        os.close(mount)


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
    return found[0]


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _main() -> None:
    """In that process: as somebody, since nobody may make a file."""
    user, group = os.getuid(), os.getgid()
    _checked(ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_MOUNTS))
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)
    with socket.socket(fileno=int(sys.argv[1])) as theirs:
        socket.send_fds(theirs, [b"."], [_on_a_mount()])


if __name__ == "__main__":
    _main()
