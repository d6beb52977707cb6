"""Runs on hosts of a lab, of which one is cut off: noticed over the wire, and gone on without it."""

import json
import threading
import time

import pytest
from engine_jobs import SMALL, slow

import plait
from plait import reference
from plait.cluster import Cluster
from plait.engine import Limits
from plait.engine.lab_launcher import LabLauncher
from plait.errors import LabError
from plait.lab import Lab
from plait.lab.network import missing
from reference_jobs import job

pytestmark = pytest.mark.skipif(missing() is not None, reason="the lab needs root and iproute2")
CLUSTER = Cluster.uniform(hosts=2, memory="1GiB", bandwidth="1gbit", latency="50us")
NAMES = [device.name for device in CLUSTER.devices]


@pytest.mark.parametrize("returns", [True, False])
def test_a_host_that_is_cut_off_is_noticed_by_its_silence(tmp_path, returns):
    steps = 12
    task = slow(0.05, steps=steps, strategy="pipeline")  # two stages, so both hosts
    gone, directory = set(), tmp_path / "run"
    with Lab(hosts=2, rate="1gbit") as lab:
        launcher = LabLauncher(lab, NAMES, gone=lambda: frozenset(gone))

        def cut():
            while not (directory / "metrics.jsonl").exists() or not (directory / "metrics.jsonl").read_text():
                time.sleep(0.02)
            gone.add(NAMES[1])
            lab.cut(1)
            if returns:
                while not any(
                    "not been heard" in line for line in (directory / "events.jsonl").read_text().splitlines()
                ):
                    time.sleep(0.05)
                lab.restore(1)
                gone.clear()

        cutting = threading.Thread(target=cut, daemon=True)
        cutting.start()
        done = plait.run(
            task,
            CLUSTER,
            launcher,
            directory=directory,
            profiles=tmp_path / "profiles",
            limits=Limits(silence_s=3.0, backoff_s=0.1, missing_s=0.5),
            save_every=2,
            show=False,
        )
        cutting.join(20)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    texts = [event["text"] for event in events]
    assert any("not been heard" in text for text in texts)
    assert done["small"].finished
    plain = reference.train(job(SMALL, steps=steps)).losses
    assert done["small"].losses == pytest.approx(plain, rel=1e-10)
    assert any("goes on with 1 of 2 devices" in text for text in texts) != returns


def test_devices_are_named_by_host():
    with Lab(hosts=1) as lab, pytest.raises(LabError, match="2 devices for a lab of 1 hosts"):
        LabLauncher(lab, NAMES)
