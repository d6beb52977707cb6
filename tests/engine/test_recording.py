"""What workers did, as they record it: bounded, by the time of day; and in a real run, from end to end."""

import time
from types import SimpleNamespace

import pytest
from engine_jobs import SMALL
from made_runs import job as made_job
from typer.testing import CliRunner

import plait
from plait.cli.app import app
from plait.cluster import Cluster
from plait.engine import recording as engine_recording
from plait.engine.reading import Reading
from plait.engine.record import Record
from plait.engine.recording import Recorded, Recording
from plait.engine.task import Task
from plait.errors import UsageError
from plait.job import Evaluation
from plait.timeline import Timeline
from reference_jobs import job, points

JUDGED = made_job(steps=6, evaluation=Evaluation(data="texts:english", every=4))


def task(**settings):
    return Task(
        **{
            "name": "gpt",
            "kind": "train",
            "strategy": "data",
            "jobs": (JUDGED.to_json(),),
            "devices": ("a/0", "a/1"),
            "save_every": 3,
            **settings,
        }
    )


def take(recording, steps, *, stops_after=None, told=None):
    """Steps as a trainer takes them."""
    asked, on_step = recording.follow(JUDGED, lambda done: done == stops_after, told)
    for step in steps:
        time.sleep(0.002)
        stopped = asked(step + 1)
        time.sleep(0.001)
        on_step(SimpleNamespace(step=step, seconds=0.002))
        if stopped:
            return


def left(folder):
    ((file, attempt, rank),) = Recorded.files(folder)
    return Recorded(task="gpt", attempt=attempt, rank=rank, timeline=Timeline.load(file))


def test_steps_and_what_is_between_them_by_the_time_of_day(tmp_path):
    before_ms, heard = 1e3 * time.time(), []
    recording = Recording(task(), tmp_path, attempt=2, rank=1)
    take(recording, range(6), told=heard.append)
    recording.save()
    found = left(tmp_path)
    assert (found.attempt, found.rank) == (2, 1)
    assert [step.step for step in heard] == list(range(6))
    assert [(span.name, span.info.get("step")) for span in found.timeline.spans] == [
        ("start", None),
        ("gpt", 0),
        ("gpt", 1),
        ("gpt", 2),
        ("checkpoint", None),
        ("gpt", 3),
        ("evaluation", None),
        ("gpt", 4),
        ("gpt", 5),
        ("evaluation and checkpoint", None),
    ]
    assert found.timeline.tracks == ("a/1", "a/1: start")
    assert found.timeline.spans[0].track == "a/1: start"
    assert all(span.info["attempt"] == 2 for span in found.timeline.spans)
    assert before_ms - 50 < found.timeline.start_ms < found.timeline.end_ms < 1e3 * time.time() + 50
    for one, other in zip(found.timeline.spans, found.timeline.spans[1:], strict=False):
        assert one.end_ms <= other.start_ms + 1e-3  # one after another


def test_a_run_that_is_stopped_ends_with_a_checkpoint(tmp_path):
    recording = Recording(task(), tmp_path, attempt=0, rank=0)
    take(recording, range(6), stops_after=1)
    recording.save()
    assert [span.name for span in left(tmp_path).timeline.spans] == ["start", "gpt", "checkpoint"]


def test_tracks_say_whose_details_they_are(tmp_path):
    behind = Recording(task(priority="background"), tmp_path / "a", attempt=0, rank=0)
    turns = Recording(task(name="turns", kind="spill"), tmp_path / "b", attempt=0, rank=0)
    for recording, folder in ((behind, "a"), (turns, "b")):
        (tmp_path / folder).mkdir()
        recording.details.record("disk read", "x", 1, 2, bytes=7)
    take(behind, range(1))
    for recording in (behind, turns):
        recording.save()
    assert left(tmp_path / "a").timeline.tracks == (
        "a/0 (background)",
        "a/0 (background): start",
        "a/0: disk read",
    )
    (span,) = left(tmp_path / "b").timeline.spans
    assert (span.track, span.info) == ("turns: disk read", {"bytes": 7})


def test_a_long_run_is_recorded_in_bounded_space(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_recording, "_STEPS", 80)
    monkeypatch.setattr(engine_recording, "KEPT", 40)
    recording = Recording(task(save_every=None), tmp_path, attempt=0, rank=0)
    asked, told = recording.follow(made_job(steps=1_000), lambda done: False, None)
    for step in range(100):
        asked(step + 1)
        told(SimpleNamespace(step=step, seconds=0.0))
        recording.details.record("stage0", "F0", step, step)
    recording.save()
    found = left(tmp_path).timeline
    assert len(found.spans) == 80 + 40
    assert found.dropped == 1 + 2 * 100 - 120
    assert 99 in {span.info.get("step") for span in found.spans}


def test_nothing_to_write_and_nowhere_to_write_it(tmp_path, capsys):
    Recording(task(), tmp_path, attempt=0, rank=0).save()
    assert list(tmp_path.iterdir()) == []
    recording = Recording(task(), tmp_path / "gone", attempt=0, rank=0)
    take(recording, range(1))
    recording.save()  # a job that is done stays so
    assert "no timeline is left" in capsys.readouterr().err


# --- a real run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run: a pipeline of two stages."""
    place = tmp_path_factory.mktemp("run")
    here = Cluster.uniform(devices_per_host=2, memory="1GiB", bandwidth="10gbit", latency="20us")
    staged = job(SMALL, name="staged", strategy="pipeline", evaluation=Evaluation(data=points, every=3))
    done = plait.run(staged, here, directory=place / "run", profiles=place / "profiles", show=False)
    assert done.finished
    return done.directory


def test_workers_of_a_real_run_tell_what_they_did_on_one_clock(trained):
    found = Timeline.load(trained / "timeline.json")
    devices = [f"node0/{rank}{what}" for rank in (0, 1) for what in ("", f": stage{rank}", ": start")]
    assert found.tracks == ("events", *devices)
    steps = {
        track: [span for span in found.spans if span.track == track and span.name == "staged"]
        for track in ("node0/0", "node0/1")
    }
    for device, stage in (("node0/0", "node0/0: stage0"), ("node0/1", "node0/1: stage1")):
        assert [span.info["step"] for span in steps[device]] == list(range(6))
        details = [span for span in found.spans if span.track == stage]
        within = [
            span
            for span in details
            if any(step.start_ms <= span.start_ms <= span.end_ms <= step.end_ms for step in steps[device])
        ]
        assert {span.name[0] for span in within} == {"F", "B"}
        assert len(within) > len(details) / 2  # the others are evaluations
        names = [span.name for span in found.spans if span.track == device and span.name != "staged"]
        assert names == ["evaluation", "evaluation and checkpoint"]
    for one, other in zip(*steps.values(), strict=True):  # the stages of a step wait for each other
        assert max(one.start_ms, other.start_ms) < min(one.end_ms, other.end_ms)
    (started,) = (span for span in found.spans if span.name == "started" and span.info["job"] == "staged")
    (finished,) = (span for span in found.spans if span.name == "finished" and span.info["job"] == "staged")
    assert started.start_ms < steps["node0/0"][0].start_ms < steps["node0/1"][-1].end_ms < finished.start_ms


def test_the_report_of_a_real_run(trained):
    assert Reading.of(Record.read(trained)).problems == []
    page = (trained / "report.html").read_text()
    assert "<caption>Evaluations</caption>" in page
    assert page.index(">planned: ") < page.index(">measured: ")


def test_the_last_steps_of_a_run_on_the_tracks_of_a_simulation(trained):
    run = Reading.of(Record.read(trained))
    found = run.last_steps("staged", 2)
    assert found.tracks == ("stage0", "stage1")
    assert len({span.info["step"] for span in found.spans}) == 2
    for stage in found.tracks:
        names = [span.name for span in found.spans if span.track == stage]
        assert len(names) == 2 * len(set(names))
    assert run.last_steps(None, 2) == found
    with pytest.raises(UsageError, match=r"no recorded steps of job 'other'.*staged"):
        run.last_steps("other", 2)


def test_a_simulation_above_the_last_steps_of_a_run(trained, tmp_path):
    kept = (trained.parent / "profiles").iterdir()
    (profile,) = (file for file in kept if '"plait.profile/1"' in file.read_text())
    words = ["sim", profile, "--strategy", "pipeline", "--devices", "2", "--batch", "8", "--steps", "2"]
    words += ["--measured", trained, "--timeline", tmp_path / "both.svg", "--html", tmp_path / "both.html"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None
    assert "spans in both" in done.stdout
    for name, title in (("both.svg", "predicted"), ("both.html", "simulated")):
        drawn = (tmp_path / name).read_text()
        assert drawn.index(f">{title}: ") < drawn.index(">measured: ")
        assert drawn.count(">stage1<") == 2


def test_steps_of_which_workers_recorded_nothing_but_their_length(tmp_path):
    record = Record.create(tmp_path / "run", config={}, plan={}, jobs=[JUDGED])
    folders = [record.task_folder(name) for name in ("gpt", "other")]
    record.close()
    with pytest.raises(UsageError, match=r"has no recorded steps \(.*workers have ended"):
        Reading.of(Record.read(tmp_path / "run")).last_steps(None, 2)
    for folder in folders:
        task(name=folder.name).save(folder)
        recording = Recording(task(), folder, attempt=0, rank=0)
        take(recording, range(2))
        recording.save()
    run = Reading.of(Record.read(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"recorded steps of 2 jobs.*gpt, other"):
        run.last_steps(None, 2)
    with pytest.raises(UsageError, match="recorded nothing within their steps"):
        run.last_steps("gpt", 2)
