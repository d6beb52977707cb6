"""torch's CSV: what we write torch reads, what torch writes we read."""

import pytest

from plait.errors import FileError, UsageError
from plait.pipeline import torchcsv
from plait.pipeline.orders import kfkb, one_f_one_b, per_link_depth, work_conserving


@pytest.mark.parametrize("order", [one_f_one_b(3, 5), kfkb(4, 7, 3), per_link_depth(3, 6, [2, 1])], ids=str)
def test_there_and_back(order, tmp_path):
    torchcsv.save(order, tmp_path / "order.csv")
    again = torchcsv.load(tmp_path / "order.csv")
    assert (again.family, again.steps) == ("listed", order.steps)


def test_the_file_looks_as_torch_has_it():
    assert torchcsv.dumps(one_f_one_b(2, 2)).splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


def test_torch_reads_what_we_write_and_we_read_what_torch_writes(tmp_path):
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    torchcsv.save(kfkb(3, 5, 2), tmp_path / "ours.csv")
    schedule = object.__new__(PipelineScheduleMulti)  # its files need no process group, its constructor does
    schedule.pipeline_order, schedule._stages = {}, []
    schedule.pp_group_size, schedule._num_stages, schedule._n_microbatches = 3, 3, 5
    schedule._load_csv(tmp_path / "ours.csv")
    schedule.pipeline_order[0].insert(5, None)  # torch writes a moment of waiting as an empty cell
    schedule._dump_csv(tmp_path / "theirs.csv")
    assert torchcsv.load(tmp_path / "theirs.csv").steps == kfkb(3, 5, 2).steps


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0W0\n", "row 1: cell '0W0' is no forward or backward"),
        ("0F0,0B0\n0F0,0B0\n", "row 2: cell '0F0' is of stage 0, but a rank has one stage"),
        ("0F0,0F1,0B1,0B0\n", "cell '0B1' comes where micro-batch 0 is due"),
        ("0F0\n", "stage 0 has the list 'F'"),
        ("", "no stage"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "wait for each other"),
    ],
)
def test_what_cannot_be_is_refused(text, says):
    with pytest.raises(FileError, match=f"some.csv: .*{says}"):
        torchcsv.loads(text, source="some.csv")


def test_a_rule_has_no_csv():
    with pytest.raises(UsageError, match="has no list for a CSV"):
        torchcsv.dumps(work_conserving(2, 4, 2))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileError, match="cannot be read"):
        torchcsv.load(tmp_path / "none.csv")
