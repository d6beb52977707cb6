"""Profiles of jobs: measured once, and kept by what they depend on."""

from dataclasses import replace

import pytest
from chains import CODECS, chain, cluster

from plait.errors import FileError, UsageError
from plait.factory import Factory
from plait.profile import Profile
from plait.strategy import measuring, plan
from plait.strategy.measuring import batch_sizes, check_threads, digest, profile_of, steps_of
from reference_jobs import BASE


@pytest.mark.parametrize(
    ("batch", "devices", "accumulate", "sizes"),
    [
        (8, 1, 1, (1, 2, 4, 8)),
        (20, 4, 1, (1, 2, 4, 8, 16, 20)),
        (1024, 4, 1, (32, 64, 128, 256, 512, 1024)),
        (64, 1, 4, (8, 16)),
        (1, 8, 1, (1,)),
    ],
)
def test_every_share_that_a_plan_may_use_is_covered(batch, devices, accumulate, sizes):
    assert batch_sizes(batch, devices, accumulate) == sizes


def test_more_threads_than_any_machine_has_cores_for_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"'small' has 10000 threads, and this machine \d+ cores") as caught:
        profile_of(replace(BASE, threads=10_000), devices=1, directory=tmp_path)
    assert caught.value.setting == "threads"
    check_threads(replace(BASE, threads=128))  # as it may be for a larger machine


def test_a_profile_is_measured_once(tmp_path, monkeypatch):
    first = profile_of(BASE, devices=2, directory=tmp_path, repetitions=1)
    assert first.batch_sizes == (1, 2, 4, 8)
    assert first.threads == BASE.threads

    def never(*_):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(measuring, "_measure", never)
    told = []
    assert profile_of(BASE, devices=2, directory=tmp_path, progress=told.append) == first
    (file,) = tmp_path.iterdir()
    assert told == [f"small: as measured before, from {file}"]
    assert digest(replace(BASE, loss="plait.losses:mean_squared_error"), (1, 2)) != digest(BASE, (1, 2))
    longer = replace(BASE, steps=1000, seed=5, priority="background", memory="2GiB")
    assert profile_of(longer, devices=2, directory=tmp_path) == first
    made = plan(replace(BASE, steps=12), cluster(2), directory=tmp_path, codecs=CODECS)
    assert made.comparisons["small"].demand.profile == first
    assert made.comparisons["small"].demand.steps == 12
    for other in (replace(BASE, threads=2), replace(BASE, batch=16), replace(BASE, precision="fp64")):
        with pytest.raises(AssertionError, match="again"):
            profile_of(other, devices=2, directory=tmp_path)


def sgd(**settings):
    return replace(BASE, optimizer=Factory("torch.optim:SGD", **{"lr": 0.1, **settings}))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (sgd(lr=0.1), sgd(lr=0.2), True),
        (sgd(momentum=0.8), sgd(momentum=0.9), True),
        (sgd(momentum=0.0), sgd(momentum=0.9), False),
        (sgd(fused=True), sgd(fused=False), False),
        (sgd(), replace(BASE, optimizer="torch.optim:Adam"), False),
    ],
)
def test_of_an_optimizer_counts_what_changes_its_work(one, other, alike):
    assert (digest(one, (1, 2)) == digest(other, (1, 2))) is alike


def test_jobs_that_are_alike_share_a_profile_whatever_they_are_called(tmp_path, monkeypatch):
    known = chain()
    monkeypatch.setattr(measuring, "_measure", lambda *_: known)
    profile_of(sgd(), devices=2, directory=tmp_path)
    monkeypatch.setattr(measuring, "_measure", lambda *_: 1 / 0)
    assert profile_of(replace(sgd(lr=0.5), name="other"), devices=2, directory=tmp_path) == known
    assert [file.name.partition("-")[0] for file in tmp_path.iterdir()] == ["small"]
    with pytest.raises(ZeroDivisionError):
        profile_of(sgd(momentum=0.9), devices=2, directory=tmp_path)


def test_a_file_that_is_not_whole_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_measure", lambda *_: chain())
    profile_of(BASE, devices=2, directory=tmp_path)
    (kept,) = tmp_path.glob("small-*.json")
    kept.write_text("{")
    assert profile_of(BASE, devices=2, directory=tmp_path) == chain()
    assert Profile.load(kept) == chain()


def test_the_digest_follows_the_code(tmp_path, monkeypatch):
    module = tmp_path / "made_here.py"
    module.write_text("def model():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = replace(BASE, model="made_here:model")
    before = digest(job, (1, 2))
    assert digest(job, (1, 2)) == before
    assert digest(job, (1, 4)) != before
    module.write_text("def model():\n    return None\n")
    assert digest(job, (1, 2)) != before
    job = replace(BASE, optimizer="made_here:model")
    before = digest(job, (1, 2))
    module.write_text("def model():\n    return 1\n")
    assert digest(job, (1, 2)) != before


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measuring.cache_folder() == tmp_path / "plait" / "profiles"
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="file"):
        profile_of(BASE, devices=1, directory=tmp_path / "file" / "profiles")


def test_epochs_are_counted_in_the_data():
    assert steps_of(BASE) == 7
    assert steps_of(replace(BASE, steps=None, epochs=3)) == 3 * (40 // 8)


def test_the_digest_follows_the_code_of_a_jobs_file(tmp_path):
    file = tmp_path / "jobs.py"
    text = "def net():\n    return 1\n"
    file.write_text(text)
    job = replace(BASE, model=f"{file}:net")
    before = digest(job, (1, 2))
    file.write_text(text.replace("1", "2"))
    assert digest(job, (1, 2)) != before
