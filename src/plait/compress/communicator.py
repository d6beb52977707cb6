"""What a process keeps between collectives: the communication thread, and the links of each group."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from plait.compress.codec import Codec
from plait.compress.mesh import Mesh, connect
from plait.compress.price import Pace, Speed
from plait.compress.probe import Probe
from plait.compress.report import Report
from plait.compress.settings import Settings
from plait.compress.thread import CommunicationThread
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.timeline import Timeline


class Communicator:
    """Belongs to one life of torch's process group."""

    def __init__(self, world: Any) -> None:
        self.world = weakref.ref(world)
        self.thread = CommunicationThread()
        self._meshes: dict[tuple[tuple[int, ...], bool], Mesh] = {}
        self._meeting: dict[tuple[tuple[int, ...], bool], threading.Lock] = {}
        self._paces: dict[Mesh, Pace] = {}
        self._speeds: dict[Mesh, dict[Codec, Speed]] = {}

    def mesh(self, group: Any, ranks: tuple[int, ...], settings: Settings) -> Mesh:
        """The links of a group; made at its first collective, by all its workers together."""
        key = ranks, settings.shared_memory
        with self._meeting.setdefault(key, threading.Lock()):
            if key not in self._meshes:
                shared, timeout_s = settings.shared_memory, settings.timeout_s
                self._meshes[key] = connect(group, shared_memory=shared, timeout_s=timeout_s)
            return self._meshes[key]

    @property
    def memory_bytes(self) -> int:
        """What the buffers of messages have come to."""
        return sum(mesh.arena.bytes for mesh in list(self._meshes.values()))

    def measured(
        self, mesh: Mesh, codecs: Iterable[Codec], settings: Settings
    ) -> tuple[Pace, dict[Codec, Speed]]:
        """The wire's and the codecs' figures, the same on all workers; measured when first asked for."""
        speeds = self._speeds.setdefault(mesh, {})
        missing = [codec for codec in dict.fromkeys(codecs) if codec not in speeds]
        if missing:
            probe = Probe(mesh, missing, timeout_s=settings.timeout_s)
            self.thread.submit(probe).wait()
            speeds.update(probe.speeds)
            self._paces.setdefault(mesh, probe.pace)
        return self._paces[mesh], speeds

    def forsake(self) -> None:
        """In a forked child: let go of the connections, or they would outlive the parent, if that dies."""
        self.thread.forsake()
        for mesh in self._meshes.values():
            for link in mesh.links.values():
                link.connection.close()


_lock = threading.Lock()
_current: Communicator | None = None
_watching = False
"""Whether we are told of forks."""
_inherited: weakref.ref[Any] | None = None
"""The process group of the worker that this process was forked from."""


def current() -> Communicator:
    """This process's communicator; a new one where torch's process group is new."""
    import torch.distributed as dist

    global _current, _watching
    with _lock:
        world = dist.group.WORLD
        if _inherited is not None and _inherited() is world:
            raise UsageError(
                f"process {os.getpid()} was forked from rank {dist.get_rank()}, and is no worker itself",
                setting="group",
                works="the collective in the process that called init_process_group",
            )
        if not _watching:
            os.register_at_fork(after_in_child=_forked)
            _watching = True
        if _current is None or _current.world() is not world:
            if _current is None:
                atexit.register(shutdown)
            else:
                _current.thread.close()
            _current = Communicator(world)
        return _current


def _forked() -> None:
    """In a forked child, a data loader's worker perhaps."""
    import torch.distributed as dist

    global _current, _inherited, _lock
    _lock = threading.Lock()  # a thread of the parent may have held it
    left, _current = _current, None
    if dist.group.WORLD is not None:
        _inherited = weakref.ref(dist.group.WORLD)
    if left is not None:
        left.forsake()


def prepare(group: Any = None, settings: Settings | None = None) -> Mesh:
    """Meet the other workers of a group (None: everyone) now, rather than at its first collective."""
    ranks = ranks_of(group)
    return current().mesh(group, ranks, settings or Settings())


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a group (None: everyone), this worker's among them."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "there is no process group",
            setting="group",
            works="torch.distributed.init_process_group() first, under torchrun",
        )
    members = group is not dist.GroupMember.NON_GROUP_MEMBER
    ranks: Sequence[int] = dist.get_process_group_ranks(group or dist.group.WORLD) if members else ()
    if dist.get_rank() not in ranks:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the group", setting="group", works="a group with this rank"
        )
    return tuple(ranks)


def shutdown() -> None:
    """End the communication thread and hang up; the next collective starts afresh, on all workers.

    After an error, collectives work again once every worker has called this.
    """
    global _current
    with _lock:
        closed, _current = _current, None
    if closed is not None:
        atexit.unregister(shutdown)
        closed.thread.close()


def report() -> Report:
    """What the collectives of this process took so far, as a copy."""
    copy, here = Report(), _current
    if here is not None:
        copy.add(here.thread.report)
    return copy


def memory_bytes() -> int:
    """What message buffers have come to: a few chunks for each link, and copies of tensors that need one."""
    here = _current
    return 0 if here is None else here.memory_bytes


def record(timeline: Timeline | None) -> None:
    """Record from now on, on the track ``compress``, what is packed, awaited and unpacked when."""
    current().thread.timeline = timeline
