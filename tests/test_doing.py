"""What is done before the first step is heard by whoever listens, and by nobody else."""

import pytest

from plait import Chain, reference
from plait.doing import heard_by, say
from reference_jobs import BASE, job


def test_it_is_heard_within_the_block_alone():
    heard, inner = [], []
    say("before")
    with heard_by(heard.append):
        say("one")
        with heard_by(inner.append):
            say("two")
        say("three")
    say("after")
    assert (heard, inner) == (["one", "three"], ["two"])
    with pytest.raises(RuntimeError), heard_by(heard.append):
        raise RuntimeError
    say("later")
    assert heard == ["one", "three"]


def test_what_a_job_goes_through(tmp_path):
    heard, one = [], job(BASE, steps=3)
    with heard_by(heard.append):
        reference.train(one, directory=tmp_path, stop_after=2)
    assert heard == ["building the model", "taking step 1"]
    heard.clear()
    with heard_by(heard.append):
        reference.train(one, directory=tmp_path, resume=True)
    assert heard == [
        "building the model", "reading the checkpoint", "restoring the checkpoint at step 2", "taking step 3",
    ]  # fmt: skip
    heard.clear()
    with heard_by(heard.append):
        Chain.of_job(one)
    assert heard == ["building the model", "tracing the model"]
