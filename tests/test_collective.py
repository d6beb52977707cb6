from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from plait.collective import Collective, TorchCollective, Work, ring_bytes, ring_ms
from plait.errors import UsageError


@dataclass(frozen=True)
class Wire:
    bandwidth_bytes_per_s: float
    latency_ms: float


def reduce_all(reduction, dtype):
    tensor = torch.arange(7, dtype=dtype) * (dist.get_rank() + 1)
    work = TorchCollective(reduction=reduction).all_reduce(tensor)
    assert isinstance(work, Work)
    work.wait()
    return tensor


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_every_rank_has_the_sum(ranks, world, dtype):
    wanted = torch.arange(7, dtype=dtype) * (world * (world + 1) // 2)
    assert all(torch.equal(got, wanted) for got in ranks(world, reduce_all, "sum", dtype))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_or_the_average(ranks, world):
    wanted = torch.arange(7, dtype=torch.float64) * (world + 1) / 2
    for got in ranks(world, reduce_all, "average", torch.float64):
        torch.testing.assert_close(got, wanted, rtol=1e-15, atol=0)


def reduce_in_pairs():
    group = dist.new_group([0, 2])
    tensor = torch.tensor([2.0 ** dist.get_rank()])
    if dist.get_rank() == 1:
        try:
            TorchCollective().all_reduce(tensor, group)
        except UsageError as error:
            return str(error)
        return "no error"
    TorchCollective().all_reduce(tensor, group).wait()
    return tensor.item()


@pytest.mark.filterwarnings("ignore:Running all_reduce")
def test_a_group_reduces_among_its_own(ranks):
    zero, one, two = ranks(3, reduce_in_pairs)
    assert zero == two == 5.0
    assert "rank 1 is not in the group" in one


def many_at_once():
    tensors = [torch.full((100,), float(i * (dist.get_rank() + 1))) for i in range(20)]
    works = [TorchCollective().all_reduce(tensor) for tensor in tensors]
    for work in works:
        work.wait()
    return [tensor[0].item() for tensor in tensors]


def test_several_may_be_under_way(ranks):
    assert ranks(2, many_at_once) == [[3.0 * i for i in range(20)]] * 2


def test_it_is_what_the_protocol_asks_for():
    assert isinstance(TorchCollective(), Collective)
    assert not isinstance(object(), Collective)


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(UsageError, match="there is no process group") as caught:
        TorchCollective().all_reduce(torch.ones(1))
    assert "init_process_group" in caught.value.works


def test_an_unknown_reduction_is_refused():
    with pytest.raises(UsageError, match="there is no reduction 'max'"):
        TorchCollective(reduction="max")


def test_the_estimate_is_the_wires():
    gigabit = Wire(125e6, 0.0)
    assert TorchCollective().estimate_ms(64 * 2**20, 2, gigabit) == pytest.approx(536.87, abs=0.01)
    assert TorchCollective().estimate_ms(64 * 2**20, 4, gigabit) == pytest.approx(805.31, abs=0.01)
    assert TorchCollective().estimate_ms(0, 3, Wire(125e6, 0.5)) == 2.0


wires = st.builds(Wire, st.floats(1e3, 1e12), st.floats(0, 100))


@given(st.integers(0, 10**12), st.integers(1, 1000), wires)
def test_an_estimate_grows_with_bytes_workers_and_latency_and_falls_with_bandwidth(count, world, wire):
    cost = ring_ms(count, world, wire)
    assert cost >= 0
    assert ring_ms(count, 1, wire) == 0
    assert ring_ms(count + 1000, world, wire) >= cost
    assert ring_ms(count, world + 1, wire) >= cost
    assert ring_ms(count, world, Wire(wire.bandwidth_bytes_per_s, wire.latency_ms + 1)) >= cost
    assert ring_ms(count, world, Wire(wire.bandwidth_bytes_per_s * 2, wire.latency_ms)) <= cost
    # however many workers there are, each sends and receives less than twice the tensor
    assert cost <= 2 * count / wire.bandwidth_bytes_per_s * 1e3 + 2 * world * wire.latency_ms + 1e-6


@pytest.mark.parametrize(
    ("count", "world", "wire", "setting"),
    [
        (1, 0, Wire(1.0, 0.0), "world"),
        (-1, 2, Wire(1.0, 0.0), "bytes"),
        (1, 2, Wire(0.0, 0.0), "link"),
        (1, 2, Wire(1.0, -1.0), "link"),
    ],
)
def test_an_estimate_of_nonsense_is_refused(count, world, wire, setting):
    with pytest.raises(UsageError) as caught:
        TorchCollective().estimate_ms(count, world, wire)
    assert caught.value.setting == setting


def test_what_each_worker_of_a_ring_sends():
    assert [ring_bytes(1200, world) for world in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
