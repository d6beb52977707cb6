"""What a process publishes of itself, and what others read."""

import os
import subprocess
import sys
import threading
import time

import pytest

from plait.burst.phases import Listener, Phase, Publisher, default_directory, publishing


@pytest.fixture
def publisher(tmp_path):
    made = Publisher(device=3, directory=tmp_path / "here")
    yield made
    made.close()


def test_steps_and_phases_arrive(publisher):
    listener = Listener(publisher.path)
    assert (listener.pid, listener.device, listener.step) == (os.getpid(), 3, None)
    publisher.begin_step(7)
    assert (listener.step, listener.phase, listener.has_phases) == (7, Phase.COMPUTE, False)
    publisher.phase(Phase.COLLECTIVE)
    assert (listener.phase, listener.has_phases) == (Phase.COLLECTIVE, True)
    publisher.phase(Phase.COLLECTIVE)  # no change
    publisher.begin_step(8)
    (step,) = listener.new_steps()
    assert step.number == 7
    assert step.milliseconds == (step.end_ns - step.begin_ns) / 1e6 >= 0
    assert [phase for _, phase in listener.new_phases()] == [Phase.COMPUTE, Phase.COLLECTIVE, Phase.COMPUTE]
    assert listener.new_steps() == []
    publisher.end_step()
    assert listener.step is None
    publisher.begin_step(9)
    publisher.begin_step(10)
    steps = listener.new_steps()
    assert [step.number for step in steps] == [8, 9]
    assert steps[0].end_ns < steps[1].begin_ns, "what lies between belongs to no step"
    assert listener.steps_ended == 3


def test_who_reads_late_gets_the_last_ones_only(publisher):
    listener = Listener(publisher.path)
    for number in range(1000):
        publisher.begin_step(number)
        publisher.phase(Phase.IDLE)
    assert [step.number for step in listener.new_steps()] == list(range(999 - 256, 999))
    assert len(listener.new_phases()) == 1024


def test_a_listener_sleeps_until_a_phase_changes(publisher):
    listener = Listener(publisher.path)
    publisher.begin_step(0)
    listener.expect(60)
    heard, woken = listener.bell, []
    thread = threading.Thread(target=lambda: (listener.wait(heard, 60), woken.append(listener.phase)))
    thread.start()
    time.sleep(0.05)
    publisher.phase(Phase.IDLE)
    thread.join(30)
    assert woken == [Phase.IDLE]
    assert listener.bell != heard
    listener.wait(heard, 60)  # it has rung since: no sleep


def test_many_threads_may_publish(publisher):
    listener = Listener(publisher.path)

    def publish():
        for number in range(50):
            publisher.begin_step(number)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listener.steps_ended == 199
    assert all(step.end_ns >= step.begin_ns for step in listener.new_steps())


def test_files_of_the_living_are_found_and_those_of_the_dead_removed(tmp_path, publisher):
    folder = publisher.path.parent
    other = Publisher(role="background", directory=folder)
    code = "import sys, os; from plait.burst.phases import Publisher\n"
    code += "Publisher(directory=sys.argv[1]); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    assert len(os.listdir(folder)) == 3
    assert list(publishing(folder, "foreground")) == [publisher.path]
    assert list(publishing(folder, "background")) == [other.path]
    assert len(os.listdir(folder)) == 2
    other.close()
    publisher.close()
    assert not folder.exists(), "the last one closes the door"
    assert list(publishing(folder, "foreground")) == []


def test_files_of_a_run_are_told_from_those_of_others(tmp_path, monkeypatch):
    made = {}
    for run in ("", "ab", "b"):
        monkeypatch.setenv("PLAIT_RUN", run)
        made[run] = Publisher(directory=tmp_path)
    for run in ("ab", "b"):
        assert list(publishing(tmp_path, "foreground", run=run)) == [made[run].path]
    for run in ("", None):
        assert len(list(publishing(tmp_path, "foreground", run=run))) == 3
    assert list(publishing(tmp_path, "foreground", run="c")) == []
    for each in made.values():
        each.close()


@pytest.mark.parametrize("moment", ["opens", "closes"])
def test_whoever_publishes_removes_the_files_of_the_dead(tmp_path, moment):
    """No multiplexer, who reads them, need ever run."""
    code = "import sys, os, signal; from plait.burst.phases import Publisher\n"
    code += "Publisher(directory=sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
    killed = [sys.executable, "-c", code, str(tmp_path / "here")]
    first = Publisher(directory=tmp_path / "here")
    assert subprocess.run(killed).returncode == -9
    assert len(os.listdir(tmp_path / "here")) == 2
    if moment == "opens":
        second = Publisher(directory=tmp_path / "here")
        assert sorted((tmp_path / "here").iterdir()) == sorted([first.path, second.path])
        second.close()
    first.close()
    assert not (tmp_path / "here").exists()


def test_files_of_another_pid_namespace_are_left_alone(publisher):
    """Their numbers mean nothing here, though a process may have the same one."""
    role, _, *rest = publisher.path.name.split("-")
    theirs = [publisher.path.with_name("-".join([role, "1", *end])) for end in (rest, ["1", "1", "0", "0"])]
    for path in theirs:
        path.write_bytes(publisher.path.read_bytes())
    assert list(publishing(publisher.path.parent, "foreground")) == [publisher.path]
    for path in theirs:
        path.unlink()


def test_the_file_has_no_holes(publisher):
    """Filling one when there is no room left would be the end of the training."""
    found = publisher.path.stat()
    assert found.st_blocks * 512 >= found.st_size


def test_a_process_that_ends_in_order_removes_its_file(tmp_path):
    code = (
        "import sys; from plait.burst.phases import Publisher; Publisher(directory=sys.argv[1]).begin_step(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True)
    assert not (tmp_path / "there").exists()


def test_a_child_does_not_close_its_parents_file(publisher):
    child = os.fork()
    if not child:
        publisher.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert publisher.path.exists()


def test_nowhere_to_write_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    publisher = Publisher(directory=tmp_path / "file")
    assert publisher.path is None
    publisher.begin_step(0)
    publisher.phase(Phase.IDLE)
    publisher.end_step()
    publisher.close()


def test_what_is_no_such_file_is_not_read(tmp_path):
    for content in (b"", b"x" * 100, bytes(os.path.getsize(Publisher(directory=tmp_path).path))):
        (tmp_path / "foreground-1-1").write_bytes(content)
        with pytest.raises(OSError, match="not a file of phases"):
            Listener(tmp_path / "foreground-1-1")


def test_the_folder_and_the_role_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_BURST_DIRECTORY", str(tmp_path / "mine"))
    monkeypatch.setenv("PLAIT_PUBLISH", "background")
    publisher = Publisher()
    assert default_directory() == tmp_path / "mine"
    assert list(publishing(tmp_path / "mine", "background")) == [publisher.path]
    publisher.close()
