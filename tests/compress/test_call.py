"""Collectives as they are called: groups, handles, declining, reports, and what is refused."""

import functools

import pytest
import torch
import torch.distributed as dist

from plait.collective import Collective, Keyed, TorchCollective, Work
from plait.compress.codec import Exact, Quantizer
from plait.compress.collectives import CompressedCollective, all_gather, all_reduce, reduce_scatter
from plait.compress.communicator import report, shutdown
from plait.compress.feedback import Feedback
from plait.compress.layout import Piece
from plait.compress.sparse import TopK
from plait.errors import UsageError


def numbers(size, rank):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


# Groups, handles, order.


def in_groups():
    pairs = [dist.new_group([0, 2]), dist.new_group([2, 1])]
    results = {}
    for name, group in zip(("zero and two", "two and one"), pairs, strict=True):
        tensor = torch.full((3000,), 2.0 ** dist.get_rank())
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            with pytest.raises(UsageError, match="is not in the group"):
                all_reduce(tensor, bits=4, group=group)
        else:
            all_reduce(tensor, bits=4, group=group)
        results[name] = tensor[0].item()
    tensor = torch.full((10,), 2.0 ** dist.get_rank())
    all_reduce(tensor, bits=1)
    return results, tensor[0].item()


@pytest.mark.filterwarnings("ignore:Running")
def test_groups_reduce_among_their_own(ranks):
    zero, one, two = ranks(3, in_groups)
    assert zero == ({"zero and two": 5.0, "two and one": 1.0}, 7.0)
    assert one == ({"zero and two": 2.0, "two and one": 6.0}, 7.0)
    assert two == ({"zero and two": 5.0, "two and one": 6.0}, 7.0)


def many_at_once():
    tensors = [torch.full((1000 + 777 * i,), float(i * (dist.get_rank() + 1))) for i in range(30)]
    works = [all_reduce(tensor, bits=1 + i % 8, async_op=True) for i, tensor in enumerate(tensors)]
    assert all(isinstance(work, Work) for work in works)
    told = []
    works[-1].then(told.append)
    for work in reversed(works):
        assert work.wait()
    works[0].then(told.append)
    assert all(work.is_completed() and work.exception() is None for work in works)
    assert told == [works[-1], works[0]]
    return [sorted(set(tensor.tolist())) for tensor in tensors]


def test_several_may_be_under_way(ranks):
    assert ranks(3, many_at_once) == [[[6.0 * i] for i in range(30)]] * 3


def afresh():
    tensor = numbers(100, dist.get_rank())
    all_reduce(tensor, bits=4)
    shutdown()
    shutdown()
    again = numbers(100, dist.get_rank())
    all_reduce(again, bits=4)
    return torch.equal(tensor, again), report().operations


def test_it_starts_afresh_after_a_shutdown(ranks):
    assert ranks(2, afresh) == [(True, 1)] * 2


# Declining, reporting.


def decide():
    tensors = [torch.ones(200_000), torch.ones(50)]
    works = [all_reduce(tensor, bits=4, decline=True, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return [work.report.declined for work in works], [tensor[0].item() for tensor in tensors]


def test_all_decide_alike_whether_to_compress(ranks):
    outcomes = ranks(2, decide)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == [2.0, 2.0]


def account():
    tensor = numbers(1 << 20, dist.get_rank())
    work = all_reduce(tensor, bits=4, async_op=True)
    work.wait()
    return work.report, report()


def test_bytes_and_times_are_accounted(ranks):
    for one, all_of_them in ranks(2, account):
        assert one == all_of_them
        assert one.operations == 1
        assert one.elements == 1 << 20
        # Half of the buffer to the other, and half of the sum.
        assert one.sent_bytes == Quantizer(bits=4).payload_bytes(1 << 20)
        assert one.ratio == pytest.approx(4 * 1024 / 520)
        assert min(one.pack_s, one.unpack_s) > 0
        assert one.pack_s + one.unpack_s + one.wire_s <= one.elapsed_s


# What the protocol of collectives asks for, and bad input.


def through_the_protocol():
    collective = CompressedCollective(bits=8, reduction="average")
    tensor = torch.full((5000,), float(dist.get_rank()))
    collective.all_reduce(tensor).wait()
    return tensor.tolist() == [0.5] * 5000


def test_it_is_a_collective(ranks):
    assert isinstance(CompressedCollective(), Collective)
    assert ranks(2, through_the_protocol) == [True] * 2


def rounding():
    """Sums of the same numbers, the same calls in another order, and calls that are told apart by nothing."""
    collective = CompressedCollective(bits=2)

    def add(call):
        tensor = torch.randn(5000, generator=torch.Generator().manual_seed(dist.get_rank()))
        call.all_reduce(tensor).wait()
        return tensor

    places = [(7, "head 0"), (7, "head 1"), (8, "head 0")]
    first = [add(collective.at(*place)) for place in places]
    again = [add(collective.at(*place)) for place in reversed(places)][::-1]
    counted = [add(collective), add(collective)]
    same = all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    return same, len({tuple(tensor.tolist()) for tensor in [*first, *counted]})


def test_rounding_follows_from_the_place_of_a_call_where_it_has_one(ranks):
    assert isinstance(CompressedCollective(), Keyed)
    assert not isinstance(TorchCollective(), Keyed)
    assert ranks(2, rounding) == [(True, 5)] * 2


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(UsageError, match="there is no process group") as caught:
        all_reduce(torch.ones(3))
    assert "init_process_group" in caught.value.works


def complaints():
    four = torch.ones(4)
    calls = {
        "bits": lambda: all_reduce(four, bits=9),
        "op": lambda: all_reduce(four, op="max"),
        "tensor": lambda: all_reduce(four.double()),
        "pieces": lambda: all_reduce(four, pieces=[Piece(name="w", count=5, codec=Exact())]),
        "feedback": lambda: all_reduce(four, feedback=Feedback(kept=four.half())),
        "output": lambda: all_gather(torch.ones(5), four),
        "input": lambda: reduce_scatter(torch.ones(3), four),
        "step": lambda: all_reduce(torch.ones(4), step=-1),
    }
    calls |= {
        f"{setting}, {case}": functools.partial(all_reduce, **{"tensor": four, setting: value})
        for setting, case, value in (
            ("bits", "auto", "auto"),
            ("bits", "none", 0),
            ("codec", "a word", "topk"),
            ("codec", "a class", TopK),
            ("settings", "none", None),
            ("settings", "a dictionary", {}),
            ("group", "a word", "world"),
            ("pieces", "a number", 4),
            ("pieces", "numbers", [4]),
            ("feedback", "a tensor", four),
            ("tensor", "a list", [1, 2]),
            ("tensor", "none", None),
            ("tensor", "an array", four.numpy()),
            ("tensor", "on meta", four.to("meta")),
            ("tensor", "expanded", torch.ones(1).expand(4)),
        )
    }
    calls |= {
        "pieces, of no parts": lambda: reduce_scatter(torch.ones(2), four, pieces=[4]),
        "pieces, of numbers": lambda: reduce_scatter(torch.ones(2), four, pieces=[[2], [2]]),
        "codec, of scatter": lambda: reduce_scatter(torch.ones(2), four, codec="topk"),
        "tensor, part expanded": lambda: reduce_scatter(torch.ones(1).expand(2), four),
        "tensor, whole expanded": lambda: all_gather(torch.ones(1).expand(8), four),
        "tensor, no whole": lambda: all_gather(None, four),
        "settings, of the protocol": lambda: CompressedCollective(settings=None),
        "codec, of the protocol": lambda: CompressedCollective(codec=TopK),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except UsageError as error:
            found[name] = (error.setting, str(error))
    # None of them has done harm; what is read only may be expanded.
    gathered = torch.zeros(8)
    all_gather(gathered, torch.ones(1).expand(4), bits=32)
    assert gathered.tolist() == [1.0] * 8
    assert set(found) == set(calls)
    return found


def test_bad_input_is_refused_before_anything_is_sent(ranks):
    for found in ranks(2, complaints):
        for name, (setting, _) in found.items():
            assert setting == name.split(", ")[0]
        assert "works: 1 to 8, 16, 32" in found["bits, auto"][1]
        assert "works: 1 to 8, 16, 32" in found["bits, none"][1]
        assert "works: TopK()" in found["codec, a class"][1]
        assert "float64" in found["tensor"][1]
        assert "has 5 elements where 8 belong" in found["output"][1]
