"""Rows move between widths: every rank gets its rows, gradients go back the same way, nothing else moves."""

import random

import pytest
import torch
import torch.distributed as dist

from plait.burst.crew import Crew
from plait.burst.form import Form
from plait.burst.reshard import Passage, Post, landed
from plait.burst.rows import begin
from plait.errors import UsageError
from plait.value import Value

CUT = "the cut from 'a' to 'b'"


def batch(rows, seed):
    """Values at a cut: two layouts, a batch that is not first, numbers, a shared one."""
    draw = torch.Generator().manual_seed(seed)
    values = {
        "plain": torch.randn(rows, 3, 2, generator=draw, dtype=torch.float64),
        "channels": torch.randn(rows, 3, 4, 2, generator=draw).to(memory_format=torch.channels_last),
        "second": torch.randn(5, rows, 2, generator=draw),
        "numbers": torch.arange(rows),
        "shared": torch.randn(4, 2, generator=draw),
    }
    known = {
        "plain": Value("plain", "float64", 8, ((1, 0), (0, 3), (0, 2)), True),
        "channels": Value("channels", "float32", 4, ((1, 0), (0, 3), (0, 4), (0, 2)), True),
        "second": Value("second", "float32", 4, ((0, 5), (1, 0), (0, 2)), True),
        "numbers": Value("numbers", "int64", 8, ((1, 0),), False),
        "shared": Value("shared", "float32", 4, ((0, 4), (0, 2)), True),
    }
    return values, known


def rows_of(name, tensor, known, rows, width, rank):
    """What a rank has of a value at a width."""
    place = known[name].batch_dimension
    if place is None:
        return tensor
    size = known[name].dimensions[place][0]
    start, end = size * begin(rows, width, rank), size * begin(rows, width, rank + 1)
    return tensor.narrow(place, start, end - start)


def passages(cases):
    """Forward and back for every case; how much was wrong."""
    crew = Crew(device=torch.device("cpu"), timeout_s=20)
    crew.meet({})
    post, rank, wrong = Post(crew), dist.get_rank(), []
    for number, (rows, before, after, ahead) in enumerate(cases):
        whole, known = batch(rows, number)
        forms = [
            Form.of(n, rows_of(n, v, known, rows, before, 0), begin(rows, before, 1), known[n], cut=CUT)
            for n, v in whole.items()
        ]
        there = Passage(post, forms, rows=rows, before=before, after=after, gradients=False, what="values")
        back = Passage(post, forms, rows=rows, before=after, after=before, gradients=True, what="gradients")
        if ahead:
            there.expect()
        mine = {n: rows_of(n, v, known, rows, before, rank) for n, v in whole.items() if rank < before}
        there.depart(mine)
        if ahead:
            back.expect()
        came = {n: landed(post, v, "values") for n, v in there.arrive().items()}
        wanted = {n: rows_of(n, v, known, rows, after, rank) for n, v in whole.items() if rank < after}
        wrong += [(number, n, "there") for n in wanted if not torch.equal(wanted[n], came[n])]
        wrong += [(number, n, "too much") for n in came if n not in wanted]
        wrong += [(number, "layout")] * (
            "channels" in came and not came["channels"].is_contiguous(memory_format=torch.channels_last)
        )
        # A gradient of its own on every rank; that of the shared value comes back in parts that add up.
        gradients = {n: v * 2 for n, v in came.items() if v.is_floating_point()}
        back.depart(gradients)
        for n, v in back.arrive().items():
            found = landed(post, v, "gradients")
            if n != "shared":
                mine = rows_of(n, whole[n], known, rows, before, rank)
                expected = mine * (2 if mine.is_floating_point() else 0)  # one that is missing is zero
                wrong += [(number, n, "back")] * (not torch.equal(found, expected))
            elif rank == 0:
                parts = 1 + max(0, after - before)
                wrong += [(number, n, "sum")] * (not torch.allclose(found, whole[n] * 2 * parts))
    crew.close()
    return wrong


def test_every_rank_gets_its_rows_and_gradients_go_back(ranks):
    draw = random.Random(1)
    cases = [(7, 1, 4, True), (7, 4, 1, True), (32, 2, 3, False), (4, 4, 3, True), (5, 3, 3, False)]
    for _ in range(15):
        rows = draw.randint(4, 20)
        cases.append((rows, draw.randint(1, 4), draw.randint(1, 4), draw.random() < 0.5))
    assert ranks(4, passages, cases) == [[]] * 4


def test_values_that_have_no_rows_are_refused():
    square = torch.zeros(3, 3)
    with pytest.raises(UsageError, match=r"'s' of \(1b \+ 0\) x \(1b \+ 0\) for b rows cannot be cut"):
        Form.of("s", square, 3, Value("s", "float32", 4, ((1, 0), (1, 0)), True), cut=CUT)
    with pytest.raises(UsageError, match="'n' is a int, and only tensors can move"):
        Form.of("n", 3, 3, None, cut=CUT)
    with pytest.raises(UsageError, match="not by 2 rows"):
        Form.of("s", square, 2, None, cut=CUT)
    # Several entries for each row: whether those of one row lie together cannot be told from the size.
    pairs = torch.zeros(4, 3)
    with pytest.raises(UsageError, match=r"'p' of \(2b \+ 0\) x 3 for b rows cannot be cut"):
        Form.of("p", pairs, 2, Value("p", "float32", 4, ((2, 0), (0, 3)), True), cut=CUT)
    with pytest.raises(UsageError, match="not by 2 rows"):
        Form.of("p", pairs, 2, None, cut=CUT)


def test_a_tensor_of_another_shape_is_refused():
    form = Form.of("x", torch.zeros(2, 3), 2, None, cut=CUT)
    assert Form.from_json(form.to_json()) == form
    with pytest.raises(UsageError, match=r"shape \(2, 4\) of torch.float32 on this rank, where rank 0"):
        form.pack(torch.zeros(2, 4), 2)
