"""Buckets are cut alike on all ranks."""

import pytest
import torch

from plait.burst.sync import Bucket, Trained, _sent_bytes, buckets, check
from plait.collective import TorchCollective
from plait.compress.report import Report
from plait.compress.work import Work
from plait.errors import UsageError


def parameter(name, width, place, bytes=100, dtype=torch.float32):
    return Trained(name, bytes, dtype, width, place)


def test_buckets_follow_the_backward_pass():
    some = [
        parameter("a", 4, 0),
        parameter("b", 4, 1),
        parameter("c", 2, 2),
        parameter("d", 1, 3),
        parameter("e", 2, 4),
    ]
    assert buckets(some, bucket_bytes=1000) == [Bucket(2, ("e", "c"), 2), Bucket(4, ("b", "a"), 0)]


def test_a_full_bucket_is_closed_where_its_block_ends():
    some = [
        parameter("a", 2, 0, 60),
        parameter("b", 2, 1, 60),
        parameter("c", 2, 1, 60),
        parameter("d", 2, 2, 60),
    ]
    assert buckets(some, bucket_bytes=120) == [Bucket(2, ("d", "b", "c"), 1), Bucket(2, ("a",), 0)]


def test_kinds_of_numbers_are_not_mixed():
    some = [parameter("a", 2, 0), parameter("b", 2, 0, dtype=torch.float64)]
    assert [bucket.names for bucket in buckets(some)] == [("a",), ("b",)]


def test_what_does_not_add_up_is_refused():
    with pytest.raises(UsageError, match="the average"):
        check(TorchCollective(reduction="average"))
    with pytest.raises(UsageError, match="str"):
        check("ring")
    check(TorchCollective())


def test_what_was_sent_is_what_a_compressed_collective_counts_or_that_of_a_ring():
    piece = torch.zeros(300)
    assert _sent_bytes(object(), piece, 3) == 1600
    assert _sent_bytes(Work(Report(sent_bytes=70)), piece, 3) == 70
