"""The communication thread: several in this process, over real sockets; and what becomes of faults."""

import json
import os
import signal
import socket
import struct
import time

import pytest
import torch
import torch.distributed as dist

import plait.compress
from plait.compress.arena import Arena
from plait.compress.codec import Exact, Quantizer
from plait.compress.collectives import all_reduce
from plait.compress.communicator import shutdown
from plait.compress.exchange import Task
from plait.compress.layout import Layout, Piece
from plait.compress.link import ABORT, DATA, HELLO, Frame, Link
from plait.compress.mesh import Mesh
from plait.compress.scatter import Scatter
from plait.compress.settings import Settings
from plait.compress.thread import CommunicationThread, _undelivered
from plait.compress.topology import Topology
from plait.compress.verification import Verification
from plait.compress.workspace import Workspace
from plait.errors import UsageError, WorkerError
from plait.timeline import Timeline


@pytest.fixture
def party():
    """``party(world)``: a mesh and a thread for each of so many workers, all in this process."""
    threads, connections = [], []

    def make(world):
        hosts = tuple((worker,) for worker in range(world))
        meshes = [Mesh(tuple(10 + worker for worker in range(world)), i, hosts) for i in range(world)]
        for i in range(world):
            for j in range(i):
                one, other = socket.socketpair()
                connections.extend([one, other])
                meshes[i].links[j] = Link(one, rank=10 + j, position=j)
                meshes[j].links[i] = Link(other, rank=10 + i, position=i)
        made = [CommunicationThread() for _ in range(world)]
        threads.extend(made)
        return list(zip(meshes, made, strict=True))

    yield make
    for thread in threads:
        thread.close()
    for connection in connections:
        connection.close()


def scatter(mesh, tensor, *, codec=None, timeout_s=20.0, timeline=None, **fingerprint):
    codec = codec or Quantizer(bits=4)
    layout = Layout.balanced([Piece(name="w", count=len(tensor), codec=codec)], mesh.world, chunk_bytes=2000)
    task = Task(
        layout=layout,
        key=lambda phase, name: 1000 * phase + mesh.position,
        fingerprint={"operation": "all_reduce", "elements": len(tensor)} | fingerprint,
        timeout_s=timeout_s,
        timeline=timeline,
    )
    space = Workspace(count=len(tensor), home=tensor)
    return Scatter(mesh, space, task, topology=Topology.flat(mesh.world))


def errors(works):
    found = []
    for work in works:
        with pytest.raises(WorkerError) as caught:
            work.wait(20)
        found.append(str(caught.value))
    return found


def test_operations_run_in_order_and_overlap(party):
    workers = party(3)
    tensors = [[torch.full((5000,), float(i)) for i in range(10)] for _ in workers]
    works = [
        thread.submit(scatter(mesh, tensor))
        for (mesh, thread), own in zip(workers, tensors, strict=True)
        for tensor in own
    ]
    assert all(work.wait(20) for work in works)
    assert all((tensor == 3.0 * i).all() for own in tensors for i, tensor in enumerate(own))
    assert [thread.report.operations for _, thread in workers] == [10, 10, 10]
    assert [mesh.active for mesh, _ in workers] == [{}, {}, {}]


def test_buffers_are_used_again(party):
    """How many are in use at once is the threads' luck, but never more than an operation has: 28 pages."""
    workers = party(2)
    for _ in range(20):
        works = [thread.submit(scatter(mesh, torch.ones(50_000))) for mesh, thread in workers]
        assert all(work.wait(20) for work in works)
    assert all(0 < mesh.arena.bytes <= 28 * 4096 for mesh, _ in workers)


def test_what_is_done_when_stands_in_the_timeline(party):
    (mesh, thread), other = party(2)
    timeline = Timeline()
    thread.timeline = timeline
    works = [
        thread.submit(scatter(mesh, torch.ones(9000), timeline=timeline)),
        other[1].submit(scatter(other[0], torch.ones(9000))),
    ]
    assert all(work.wait(20) for work in works)
    assert timeline.tracks == ("compress",)
    spans = {span.name for span in timeline.spans}
    assert {"pack", "unpack"} <= spans <= {"pack", "unpack", "wire"}
    packed = sum(span.duration_ms for span in timeline.spans if span.name == "pack")
    assert packed == pytest.approx(1e3 * works[0].report.pack_s)


def test_results_that_differ_are_found(party):
    workers = party(2)
    results = [torch.ones(10), torch.ones(10)]
    works = [thread.submit(scatter(mesh, torch.zeros(10))) for mesh, thread in workers]
    results[1][3] = 2.0
    works = [
        thread.submit(Verification(mesh, result, work, timeout_s=20))
        for (mesh, thread), result, work in zip(workers, results, works, strict=True)
    ]
    for text in errors(works):
        assert "the result of operation 0 is not the same on ranks" in text


def test_workers_that_disagree_are_told_the_first_difference(party):
    (one, first), (two, second) = party(2)
    works = [
        first.submit(scatter(one, torch.ones(100), codec=Exact(), bits=4, seed=1)),
        second.submit(scatter(two, torch.ones(100), codec=Exact(), bits=8, seed=2)),
    ]
    texts = errors(works)
    # Whoever finds it first tells the other; both sides may find it at the same time.
    for text in texts:
        assert "operation 0 has bits" in text
        assert "on rank 10" in text
        assert "on rank 11" in text
    with pytest.raises(WorkerError, match="communication has ended: operation 0 has bits") as caught:
        first.submit(scatter(one, torch.ones(100)))
    assert "plait.compress.shutdown()" in caught.value.works
    assert plait.compress.shutdown is shutdown


def test_one_that_has_not_come_is_named(party):
    (one, first), _, (three, third) = party(3)
    works = [
        first.submit(scatter(one, torch.ones(100), timeout_s=0.5)),
        third.submit(scatter(three, torch.ones(100), timeout_s=0.5)),
    ]
    for text in errors(works):
        assert "nothing came from rank 11 for" in text
        assert "in operation 0 (all_reduce of 100 elements)" in text


def greeted(party):
    """A worker, an operation of its that has been greeted, and the bare socket of its peer."""
    (one, first), (two, _) = party(2)
    bare = two.links[0].connection
    bare.setblocking(True)
    work = first.submit(scatter(one, torch.ones(3000), timeout_s=20))
    text = json.dumps({"operation": "all_reduce", "elements": 3000}).encode()
    bare.sendall(Frame(HELLO, 0, 0, 0, 0, len(text)).pack() + text)
    return work, bare


def test_a_chunk_that_nobody_awaits(party):
    work, bare = greeted(party)
    bare.sendall(Frame(DATA, 1, 0, 99, 0, 5).pack() + b"abcde")
    assert "rank 11 sent chunk (1, 0, 99) in operation 0" in errors([work])[0]


def test_a_chunk_of_the_wrong_length(party):
    work, bare = greeted(party)
    bare.sendall(Frame(DATA, 1, 0, 0, 0, 5).pack() + b"abcde")
    assert "rank 11 sent 5 bytes for chunk (1, 0, 0)" in errors([work])[0]
    assert "instead of 1524" in errors([work])[0]


@pytest.mark.parametrize("text", [b"[1,2]", b"\xff\xfe{{{", b"null", b"", b"[" * 100_000])
def test_a_greeting_that_is_none(party, text):
    (one, first), (two, _) = party(2)
    bare = two.links[0].connection
    bare.setblocking(True)
    work = first.submit(scatter(one, torch.ones(3000)))
    bare.sendall(Frame(HELLO, 0, 0, 0, 0, len(text)).pack() + text)
    assert (
        f"rank 11 opened operation 0 (all_reduce of 3000 elements) with {text[:40]!r}, which is no greeting"
        in errors([work])[0]
    )


def test_a_farewell_that_is_no_text(party):
    work, bare = greeted(party)
    bare.sendall(Frame(ABORT, 0, 0, 0, 0, 4).pack() + b"\xff\xfe\xff\xff")
    text = errors([work])[0]
    assert "rank 11 was lost in operation 0" in text
    assert r"it gave up, and said b'\xff\xfe\xff\xff'" in text


def test_a_chunk_that_is_cut_short(party):
    work, bare = greeted(party)
    bare.sendall(Frame(DATA, 1, 0, 0, 0, 1524).pack() + b"abcde")
    bare.close()
    assert "rank 11 was lost in operation 0" in errors([work])[0]


def test_one_that_takes_nothing_is_named_though_all_has_come_from_it(party):
    (one, first), (two, _) = party(2)
    count, codec = 1 << 20, Exact()
    layout = Layout.balanced([Piece(name="w", count=count, codec=codec)], 2, chunk_bytes=1 << 30)
    said = {"operation": "reduce_scatter"}
    task = Task(layout=layout, key=lambda phase, name: 0, fingerprint=said, timeout_s=0.5, gather=False)
    space = Workspace(count=count, home=torch.ones(count))
    operation = Scatter(one, space, task, topology=Topology.flat(2))
    work = first.submit(operation)
    bare = two.links[0].connection
    bare.setblocking(True)
    text = json.dumps(said).encode()
    bare.sendall(Frame(HELLO, 0, 0, 0, 0, len(text)).pack() + text)
    for chunk in layout.shares[0]:
        bare.sendall(Frame(DATA, 1, 0, chunk.number, 0, chunk.bytes).pack() + bytes(chunk.bytes))
    assert "nothing came from rank 11 for" in errors([work])[0]
    assert operation.waiting_for() == set()


def test_a_message_of_another_time(party):
    work, bare = greeted(party)
    bare.sendall(Frame(DATA, 1, 0, 0, 7, 5).pack() + b"abcde")
    time.sleep(0.05)
    assert not work.is_completed(), "one of an operation to come waits"
    bare.close()
    assert "rank 11 was lost" in errors([work])[0]


def test_an_error_of_our_own_reaches_everyone(party):
    class Broken(Exact):
        bucket = 64

        def compress(self, source, payload, **rest):
            raise UsageError("the codec is out of order")

    (one, first), (two, second) = party(2)
    layout_like = {"codec": Quantizer(bits=4)}
    broken = scatter(one, torch.ones(3000), **layout_like)
    broken.pack = lambda phase, chunk, shared: Broken().compress(None, None)
    works = [first.submit(broken), second.submit(scatter(two, torch.ones(3000), **layout_like))]
    with pytest.raises(UsageError, match="out of order"):
        works[0].wait(20)
    assert "rank 10: the codec is out of order (as rank 10 says)" in errors(works[1:])[0]


def test_shutting_down_ends_what_is_under_way(party):
    (one, first), _ = party(2)
    work = first.submit(scatter(one, torch.ones(100)))
    first.close()
    assert "communication was shut down" in errors([work])[0]
    with pytest.raises(WorkerError, match="communication has ended"):
        first.submit(scatter(one, torch.ones(100)))


def test_what_a_reset_connection_has_not_delivered_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    link = Link(connection, rank=1, position=1)
    buffer = Arena(shared=False).take(32 << 20)
    link.send(Frame(DATA, 0, 0, 0, 0, 32 << 20), buffer)
    assert _undelivered(link)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    link.flush()
    assert link.lost is None
    assert not _undelivered(link)
    link.lose("done")


# Real deaths, in real processes. The victim is a child of its rank, which itself must live to report.


def with_a_victim(victim, fate, over, algorithm):
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    child = os.fork() if rank == victim else 0
    if child:
        while not os.path.exists(over):
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    dist.init_process_group("gloo")
    stalls = fate == signal.SIGSTOP
    settings = Settings(timeout_s=3.0 if stalls else 60.0, algorithm=algorithm, shared_memory=not stalls)
    all_reduce(torch.ones(100_000), settings=settings)
    if rank == victim:
        all_reduce(torch.ones(1_000_000), async_op=True, settings=settings)
        os.kill(os.getpid(), fate)
        time.sleep(60)
    begun, found = time.monotonic(), []
    for _ in range(2):
        try:
            for _ in range(1000):
                all_reduce(torch.ones(1_000_000), settings=settings)
        except WorkerError as error:
            found.append(str(error))
    shutdown()
    with open(over + str(rank), "w"):
        pass
    if all(os.path.exists(over + str(other)) for other in range(dist.get_world_size()) if other != victim):
        os.replace(over + str(rank), over)
    return found, time.monotonic() - begun


@pytest.mark.parametrize("algorithm", ["scatter", "ring"])
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stalls_ends_all_others(ranks, tmp_path, fate, algorithm):
    over = str(tmp_path / "over")
    outcomes = ranks(3, with_a_victim, 1, fate, over, algorithm, group=False)
    for rank in (0, 2):
        (first, second), seconds = outcomes[rank]
        assert "rank 1 " in first
        assert "in operation" in first
        assert second.startswith("communication has ended")
        assert seconds < 50
