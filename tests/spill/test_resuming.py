"""What dies, is damaged or interrupted goes on: from the last commit, with the bits of plain training."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fit_jobs import MEMORY, SMALL_JOBS, STEP_S, assert_equal_to_plain, files, fit_pair, job, pair, part

from plait.spill import Fitting, fit
from plait.spill.outcome import Outcome


def test_what_is_damaged_keeps_no_other_job_from_going_on(tmp_path, monkeypatch):
    jobs = [
        job(name, steps=50, loss=part("slow_loss", seconds=0.01), seed=seed)
        for seed, name in enumerate("abcd")
    ]
    with Fitting(memory=MEMORY, directory=tmp_path, show=False, commit_every=1) as fitting:
        fitting.add(jobs)
        while len(steps := fitting.steps()) < 4 or not all(steps.values()):
            for name, done in steps.items():
                if done:
                    fitting.pause(name)
            time.sleep(0.01)
        assert max(steps.values()) < 50
        fitting.interrupt()
        with pytest.raises(KeyboardInterrupt):
            fitting.wait()
    state = tmp_path / "state"
    (state / "a.manifest").write_text("{}")
    os.truncate(state / "b.segments", 4096)
    # As if the files that are there left no room to measure the disk again.
    monkeypatch.setattr("plait.spill.installation.probe_disk", lambda *path, **most: None)
    outcomes = fit(jobs[:3], memory=MEMORY, directory=tmp_path, resume=True, show=False)
    for name, what in (("a", "is not a manifest"), ("b", "was cut short")):
        assert outcomes[name].end == "failed"
        again = f"delete {state / name}.manifest, and '{name}' alone begins again"
        assert what in outcomes[name].error
        assert again in outcomes[name].error
    assert_equal_to_plain(outcomes["c"], jobs[2])
    # Of what can go on another time, nothing is lost.
    assert files(state) == [f"{name}.{kind}" for name in "abd" for kind in ("manifest", "segments")]
    (state / "a.manifest").unlink()
    (state / "b.manifest").unlink()
    again = fit([jobs[0], jobs[3]], memory=MEMORY, directory=tmp_path, resume=True, show=False)
    assert_equal_to_plain(again["a"], jobs[0])
    assert_equal_to_plain(again["d"], jobs[3])
    assert not state.exists()


def started(forkserver, steps, directory):
    """A process that trains the pair; it is forked, since importing torch would take most of its time."""
    told, say = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=fit_pair, args=(steps, directory, say), daemon=True)
    process.start()
    say.close()
    return process, told


@pytest.mark.parametrize(
    "rounds", [pytest.param(5, id="few"), pytest.param(100, id="many", marks=pytest.mark.soak)]
)
def test_runs_that_are_killed_end_with_the_same_bits(rounds, tmp_path, forkserver):
    steps, chance = 40 * rounds, random.Random(rounds)
    most_s = 40 * STEP_S  # so that, however fast the machine, steps are left for the last
    for _ in range(rounds):
        process, told = started(forkserver, steps, tmp_path)
        while not told.recv().startswith("all of it about"):
            pass
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        time.sleep(chance.random() * most_s)
        process.kill()
        process.join()
        for child in children:
            wait_until_gone(int(child))
    process, _ = started(forkserver, steps, tmp_path)
    process.join(240)
    assert process.exitcode == 0
    for of in pair(steps):
        assert_equal_to_plain(Outcome.load(tmp_path / f"{of.name}.json"), of)
    assert files(tmp_path) == ["one.json", "one.safetensors", "two.json", "two.safetensors"]


def wait_until_gone(pid):
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, pid
        time.sleep(0.01)


SCRIPT = """
import sys
sys.path.append({here!r})
from fit_jobs import MEMORY, pair
from plait.spill import fit

if __name__ == "__main__":
    fit(pair(60), memory=MEMORY, directory=sys.argv[1], commit_every=2, resume=True,
        show=lambda line: print(line, flush=True))
"""


def test_an_interrupt_commits_and_says_how_to_go_on(tmp_path):
    file, directory = tmp_path / "script.py", tmp_path / "run"
    file.write_text(SCRIPT.format(here=str(SMALL_JOBS.parent)))
    command = [sys.executable, str(file), str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not list(directory.glob("state/*.manifest")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert "resume=True" in text
    assert process.returncode == -signal.SIGINT or "KeyboardInterrupt" in text
    assert files(directory)  # committed
    outcomes = fit(pair(60), memory=MEMORY, directory=directory, resume=True, show=False)
    for of in pair(60):
        assert_equal_to_plain(outcomes[of.name], of)
