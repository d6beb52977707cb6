"""A search over real jobs: trials are pruned, the best is plain training's, and a killed search goes on."""

import dataclasses
import time

import pytest
import torch
from safetensors.torch import load_file
from search_trials import RATES, search_trials, selection

from plait import reference
from plait.errors import FileError, UsageError
from plait.spill import search
from plait.spill.outcome import Outcome


def test_a_search_prunes_and_its_best_is_what_plain_training_gives(tmp_path):
    chosen = selection()
    outcomes = search(chosen, memory="1200MiB", directory=tmp_path, devices=1, show=False)
    assert len(outcomes) == len(RATES)
    ends = {outcome.name: outcome.end for outcome in outcomes}
    assert set(ends.values()) == {"finished", "stopped"}
    assert chosen.done
    best = outcomes[chosen.best.job.name]
    assert best.end == "finished"
    whole = reference.train(chosen.best.job)
    assert best.losses == whole.losses
    assert all(torch.equal(t, whole.model.state_dict()[name]) for name, t in load_file(best.weights).items())
    for outcome in outcomes:  # a trial that was paused and went on is trained as if it had not been
        assert outcome.losses == whole_losses(chosen.trials[outcome.name].job)[: outcome.steps]
    left = {path.name for path in tmp_path.iterdir()}
    finished = [name for name, end in ends.items() if end == "finished"]
    written = {f"{name}.{kind}" for name in finished for kind in ("json", "safetensors")}
    assert left == {*written, "selection.jsonl"}
    assert_gives_its_outcomes_again(tmp_path, chosen, outcomes)


def assert_gives_its_outcomes_again(directory, chosen, outcomes):
    again = selection()
    found = search(again, memory="1200MiB", directory=directory, resume=True, show=False)
    assert again.best.values == chosen.best.values
    assert sorted(found, key=lambda one: one.name) == sorted(outcomes, key=lambda one: one.name)
    with pytest.raises(FileError, match="holds a search of an earlier run"):
        search(selection(), memory="1200MiB", directory=directory, show=False)
    (directory / "selection.jsonl").unlink()
    with pytest.raises(FileError, match=r"trial-\d.json is of a trial that .*selection.jsonl does not know"):
        search(selection(), memory="1200MiB", directory=directory, resume=True, show=False)


def whole_losses(job):
    return reference.train(job).losses


def test_a_search_that_is_killed_goes_on(tmp_path, forkserver):
    process = forkserver.Process(target=search_trials, args=(tmp_path,), daemon=True)
    process.start()
    log = tmp_path / "selection.jsonl"
    while process.is_alive() and not (log.exists() and log.read_text().count("report") >= 9):
        time.sleep(0.005)
    process.kill()
    process.join()
    begun = log.read_text().count("report")
    assert 9 <= begun < 40
    chosen = selection()
    search(chosen, memory="1200MiB", directory=tmp_path, resume=True, commit_every=1, show=False)
    name = chosen.best.job.name
    rate = RATES[int(name.removeprefix("trial-"))]
    best = Outcome.load(tmp_path / f"{name}.json")
    assert best.losses == whole_losses(trial(rate, name))
    assert not (tmp_path / "state").exists()


def trial(rate, name):
    return dataclasses.replace(selection(rates=[rate]).next(), name=name)


def test_what_cannot_be_searched_is_refused(tmp_path):
    with pytest.raises(UsageError, match="trials report no 'accuracy'"):
        search(selection(), metric="accuracy", memory="1200MiB", directory=tmp_path, show=False)
    with pytest.raises(UsageError, match="at_once is 0"):
        search(selection(), at_once=0, memory="1200MiB", directory=tmp_path, show=False)
    (tmp_path / "selection.jsonl").write_text('["next", "other-0"]\n')
    with pytest.raises(
        FileError, match="is of another selection: trial 'other-0' was next, now 'trial-0' is"
    ):
        search(selection(), memory="1200MiB", directory=tmp_path, resume=True, show=False)
