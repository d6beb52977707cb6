import pickle

import pytest

from plait import errors
from plait.errors import FileError, LabError, NonfiniteError, PlaitError, TraceError, UsageError, WorkerError

ALL = [UsageError, FileError, TraceError, LabError, WorkerError, NonfiniteError]


def test_every_error_is_known_to_this_test():
    defined = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert set(defined) == {PlaitError, *ALL}


def test_one_line_holds_what_happened_the_setting_and_what_works():
    error = PlaitError("a batch of 0 rows", setting="batch", works="1 or more")
    assert str(error) == "a batch of 0 rows (setting: batch); works: 1 or more"
    assert str(PlaitError("a batch of 0 rows")) == "a batch of 0 rows"
    assert str(PlaitError("no room", works="2GiB")) == "no room; works: 2GiB"


@pytest.mark.parametrize("kind", ALL)
def test_the_parts_survive_the_way_from_another_process(kind):
    error = pickle.loads(pickle.dumps(kind("3 of 4 ranks", setting="RANK", works="0 to 2")))
    assert type(error) is kind
    assert (error.what, error.setting, error.works) == ("3 of 4 ranks", "RANK", "0 to 2")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (UsageError, ValueError),
        (FileError, ValueError),
        (TraceError, RuntimeError),
        (LabError, RuntimeError),
        (WorkerError, RuntimeError),
        (NonfiniteError, ArithmeticError),
    ],
)
def test_a_caller_that_knows_only_python_catches_them(kind, builtin):
    with pytest.raises(builtin, match="stop"):
        raise kind("stop")
