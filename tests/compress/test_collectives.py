"""Collectives among real processes: what comes out, and that it is the same everywhere."""

import itertools

import pytest
import torch
import torch.distributed as dist

from plait import native
from plait.compress import mesh
from plait.compress.codec import Cast, Exact, Quantizer
from plait.compress.collectives import all_gather, all_reduce, reduce_scatter
from plait.compress.communicator import report
from plait.compress.exchange import PARTIAL, TOTAL
from plait.compress.feedback import Feedback
from plait.compress.layout import Layout, Piece
from plait.compress.rounding import stream_key
from plait.compress.settings import Settings

SIZES = (0, 1, 7, 1023, 1024, 1025, 100_003)


def numbers(size, rank, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def checksums(results):
    return {name: native.checksum(result.contiguous()) for name, result in results.items()}


def same(outcomes):
    """Whether all ranks have the same bits under every name."""
    return all(outcome == outcomes[0] for outcome in outcomes)


def on_hosts(*sizes):
    """Pretend that the ranks are on hosts of these sizes; everything else stays real."""
    host = next(i for i, end in enumerate(itertools.accumulate(sizes)) if dist.get_rank() < end)
    mesh.host_identity = lambda: f"host{host}"


# The identity ramp of CGX's tests, with its bound.


def ramp(algorithm, shared_memory):
    world, results = dist.get_world_size(), {}
    settings = Settings(algorithm=algorithm, shared_memory=shared_memory, chunk_bytes=4096)
    for size, bits in itertools.product(SIZES, (1, 2, 4, 8)):
        tensor = torch.arange(size, dtype=torch.float32)
        all_reduce(tensor, bits=bits, settings=settings)
        error = (tensor - world * torch.arange(size)).abs().max().item() if size else 0.0
        bound = 2 * min(1024, size) / (2**bits - 1) * world * (world + 1)
        # A world of one is exact; a single element always is.
        assert error == 0.0 if world == 1 or size <= 1 else error < bound, (size, bits, error, bound)
        results[size, bits] = tensor
    return checksums(results)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("algorithm", ["scatter", "ring"])
def test_the_error_is_bounded_and_all_have_the_same_bits(ranks, world, algorithm):
    assert same(ranks(world, ramp, algorithm, True))


@pytest.mark.parametrize("algorithm", ["scatter", "ring"])
def test_and_over_tcp(ranks, algorithm):
    assert same(ranks(3, ramp, algorithm, False))


# The algorithm, step by step, in one process: the collective must agree to the last bit.


def expected_sum(parts, pieces, *, divisor=1, seed=0, step=0):
    """Scatter-reduce-allgather as it is described."""
    world = len(parts)
    layout = Layout.balanced(pieces, world, chunk_bytes=2**40)
    total = torch.zeros_like(parts[0])

    def through(codec, values, rank, phase, name, first):
        payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8)
        key = stream_key(seed=seed, step=step, rank=rank, phase=phase, parameter=name)
        codec.compress(values, payload, key=key, first=first)
        decoded = torch.empty_like(values)
        codec.extract(payload, decoded)
        return decoded

    for owner, chunks in enumerate(layout.shares):
        for segment in (segment for chunk in chunks for segment in chunk.segments):
            where = slice(segment.start, segment.start + segment.count)
            codec, name, first = segment.piece.codec, segment.piece.name, segment.first
            added = parts[owner][where].clone()
            for rank in range(world):
                if rank != owner:
                    added += through(codec, parts[rank][where], rank, PARTIAL, name, first)
            added /= divisor
            total[where] = through(codec, added, owner, TOTAL, name, first)
    return total


MIXED = (
    Piece(name="weight", count=5000, codec=Quantizer(bits=4)),
    Piece(name="bias", count=37, codec=Exact()),
    Piece(name="empty", count=0, codec=Quantizer(bits=2)),
    Piece(name="head", count=2500, codec=Quantizer(bits=2, bucket=64, stochastic=False)),
    Piece(name="norm", count=11, codec=Cast("bf16")),
    Piece(name="big bucket", count=3000, codec=Quantizer(bits=8, bucket=4096)),
)


def reduce_mixed(chunk_bytes, op, step):
    tensor = numbers(sum(piece.count for piece in MIXED), dist.get_rank())
    settings = Settings(chunk_bytes=chunk_bytes, verify=True)
    all_reduce(tensor, pieces=MIXED, op=op, seed=5, step=step, settings=settings)
    return tensor


@pytest.mark.parametrize("world", [2, 3])
def test_mixed_codecs_agree_with_the_description_to_the_last_bit_however_they_are_cut(ranks, world):
    count = sum(piece.count for piece in MIXED)
    wanted = expected_sum([numbers(count, rank) for rank in range(world)], MIXED, seed=5, step=3)
    for chunk_bytes in (500, 1 << 20):
        for got in ranks(world, reduce_mixed, chunk_bytes, "sum", 3):
            assert torch.equal(got, wanted)
    average = expected_sum(
        [numbers(count, rank) for rank in range(world)], MIXED, divisor=world, seed=5, step=3
    )
    for got in ranks(world, reduce_mixed, 3000, "average", 3):
        assert torch.equal(got, average)


def reduce_in_turn():
    results, dense = {}, {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        plain = numbers(3001, dist.get_rank(), dtype)
        dense[dtype] = plain.clone()
        all_reduce(dense[dtype], bits=32, op=dist.ReduceOp.AVG)
        for name, tensor in (("as it is", plain.clone()), ("strided", plain.repeat(2, 1).t()[:, 0])):
            all_reduce(tensor, bits=8, op="average", step=9)
            results[dtype, name] = tensor
            assert tensor.dtype == dtype
            assert (tensor - dense[dtype]).abs().max() < 0.06
        assert torch.equal(results[dtype, "as it is"], results[dtype, "strided"])
    matrix = numbers(3001 * 2, dist.get_rank()).view(2, 3001)
    matrix.requires_grad_()
    all_reduce(matrix, bits=32)
    results["matrix"] = matrix.detach()
    return checksums(results)


def test_dtypes_shapes_and_strides(ranks):
    outcomes = ranks(3, reduce_in_turn)
    assert same(outcomes)
    exact = [Piece(name="", count=6002, codec=Exact())]
    wanted = expected_sum([numbers(6002, rank) for rank in range(3)], exact)
    assert outcomes[0]["matrix"] == native.checksum(wanted)


def non_finite():
    results = {}
    for value in (float("inf"), float("nan")):
        tensor = numbers(5000, dist.get_rank())
        if dist.get_rank() == 1:
            tensor[2500] = value
        all_reduce(tensor, bits=4)
        results[value] = tensor
        assert not tensor[2048:3072].isfinite().any()
        assert tensor[:2048].isfinite().all()
        assert tensor[3072:].isfinite().all()
    return True


def test_what_is_not_finite_reaches_everyone(ranks):
    assert ranks(3, non_finite) == [True] * 3


# Hosts.


def reduce_on_hosts(sizes, leaders, inner_exact, shared_memory):
    on_hosts(*sizes)
    algorithm = "auto" if inner_exact else "hierarchical"
    settings = Settings(
        algorithm=algorithm,
        leaders=leaders,
        inner_exact=inner_exact,
        shared_memory=shared_memory,
        chunk_bytes=3000,
        verify=True,
    )
    results = {}
    exact = numbers(60_001, dist.get_rank())
    dist.all_reduce(exact)
    for bits in (4, 8, 32):
        tensor = numbers(60_001, dist.get_rank())
        all_reduce(tensor, bits=bits, settings=settings)
        relative = ((tensor - exact).norm() / exact.norm()).item()
        assert relative < {4: 0.3, 8: 0.03, 32: 1e-6}[bits], (bits, relative)
        results[bits] = tensor
    work = all_reduce(numbers(100, dist.get_rank()), bits=32, async_op=True, settings=settings)
    work.wait()
    return checksums(results), report().sent_bytes


@pytest.mark.parametrize(
    ("sizes", "leaders", "inner_exact", "shared_memory"),
    [
        ((2, 2), False, True, True),
        ((2, 2), True, True, True),
        ((3, 2), False, True, True),
        ((1, 3), False, False, True),
        ((2, 2), False, True, False),
        ((4,), False, True, True),
    ],
)
def test_two_levels(ranks, sizes, leaders, inner_exact, shared_memory):
    outcomes = ranks(sum(sizes), reduce_on_hosts, sizes, leaders, inner_exact, shared_memory)
    assert same([outcome[0] for outcome in outcomes])


# Reduce-scatter and all-gather.


def scatter_and_gather(algorithm, sizes):
    on_hosts(*sizes)
    world, rank = dist.get_world_size(), dist.get_rank()
    settings = Settings(algorithm=algorithm, chunk_bytes=2000, verify=True)
    whole = numbers(world * 5001, rank)
    kept = whole.clone()
    part = torch.empty(5001)
    reduce_scatter(part, whole, bits=8, op="average", settings=settings)
    assert torch.equal(whole, kept), "the input is as it was"
    exact = whole.clone()
    dist.all_reduce(exact)
    mine = exact.view(world, -1)[rank] / world
    assert (part - mine).norm() / mine.norm() < 0.03

    half, overwritten = torch.empty(5001, dtype=torch.bfloat16), whole.clone()
    reduce_scatter(half, overwritten, bits=32, op="average", overwrite=True, settings=settings)
    torch.testing.assert_close(half.float(), mine, rtol=0.01, atol=1e-3)

    gathered = torch.full((world * 5001,), float("nan"))
    all_gather(gathered, part, bits=8, settings=settings)
    assert (gathered * world - exact).norm() / exact.norm() < 0.05
    plain = torch.empty(world, 5001, dtype=torch.float16)
    all_gather(plain, half, bits=32, settings=settings)
    assert torch.equal(plain[rank], half.to(torch.float16))
    return checksums({"gathered": gathered, "plain": plain})


@pytest.mark.parametrize(
    ("algorithm", "sizes"),
    [("scatter", (3,)), ("ring", (3,)), ("auto", (2, 2)), ("auto", (1, 2)), ("auto", (1,))],
)
def test_reduce_scatter_and_all_gather(ranks, algorithm, sizes):
    assert same(ranks(sum(sizes), scatter_and_gather, algorithm, sizes))


# Error feedback.


def fed_back(algorithm):
    gradient = numbers(4000, dist.get_rank())
    exact = gradient.clone()
    dist.all_reduce(exact)
    feedback = Feedback(kept=torch.zeros(4000))
    totals = {}
    for name, kept in (("with", feedback), ("without", None)):
        totals[name] = torch.zeros(4000)
        for step in range(80):
            tensor = gradient.clone()
            all_reduce(tensor, bits=2, step=step, feedback=kept, settings=Settings(algorithm=algorithm))
            totals[name] += tensor / 80
    errors = {name: ((total - exact).norm() / exact.norm()).item() for name, total in totals.items()}
    return errors, feedback.kept.isfinite().all().item(), native.checksum(totals["with"])


@pytest.mark.parametrize("algorithm", ["scatter", "ring"])
def test_feedback_makes_the_mean_converge_faster(ranks, algorithm):
    outcomes = ranks(3, fed_back, algorithm)
    errors, finite, _ = outcomes[0]
    # What rounding loses in 80 steps averages out as 1/sqrt(80), with feedback as 1/80.
    assert errors["with"] < 0.5 * errors["without"]
    assert finite
    assert len({checksum for _, _, checksum in outcomes}) == 1
