import time

import torch.distributed as dist

from plait.compress.codec import Exact, Quantizer
from plait.compress.communicator import current, ranks_of
from plait.compress.probe import Probe
from plait.compress.settings import Settings

CODECS = (Quantizer(bits=4), Exact())


def measured_twice():
    settings = Settings(shared_memory=False)
    communicator = current()
    mesh = communicator.mesh(dist.group.WORLD, ranks_of(None), settings)
    pace, speeds = communicator.measured(mesh, CODECS, settings)
    before = mesh.submitted
    again = communicator.measured(mesh, CODECS[:1], settings)
    assert mesh.submitted == before, "what is known is not measured again"
    more, _ = communicator.measured(mesh, [Quantizer(bits=2)], settings)
    assert more == again[0] == pace
    return pace, {codec: speeds[codec] for codec in CODECS}


def test_all_workers_come_to_the_same_figures(ranks):
    first, *others = ranks(3, measured_twice)
    assert all(other == first for other in others)
    pace, speeds = first
    assert pace.bandwidth_bytes_per_s > 1e6
    assert 0 < pace.latency_ms < 1e4
    assert 0 < pace.busy_s_per_byte < 1e-5
    assert set(speeds) == set(CODECS)
    assert all(0 < speed.pack_s_per_byte < 1e-5 for speed in speeds.values())


def measured_beside_a_slow_worker():
    if dist.get_rank() == 2:
        arrived = Probe.arrived

        def late(self, label, buffer):
            time.sleep(0.02)
            arrived(self, label, buffer)

        Probe.arrived = late
    return measured_twice()[0]


def test_a_stream_that_is_there_before_all_answers_is_no_trouble(ranks):
    first, *others = ranks(3, measured_beside_a_slow_worker)
    assert all(other == first for other in others)
