import pytest
import torch
import torch.distributed as dist

from plait.compress.adapt import Adaptation
from plait.compress.compression import Compression
from plait.compress.watch import Watch
from plait.errors import UsageError


def watching(least_bits):
    adaptation = Adaptation(warmup_steps=1, every_steps=2, observe_steps=1, least_bits=least_bits)
    watch = Watch(
        Compression(bits="auto", adaptation=adaptation), {"a": "auto", "b": "auto", "c": 8, "d": 32}, None
    )
    widths, before = watch.widths, dict(watch.bits)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        if watch.observes(step):
            watch.see("a", 0.001 * torch.randn(40_000, generator=generator), step)
            watch.see("b", 10 * torch.randn(2000, generator=generator), step)
            watch.see("c", torch.randn(100, generator=generator), step)
            watch.see("d", torch.randn(100, generator=generator), step)
            watch.exchange(step)
        watch.decided(step)
    return widths, before, watch.bits, watch.errors, [d.step for d in watch.log.decisions]


def test_ranks_that_see_different_gradients_decide_alike(ranks):
    both = ranks(2, watching, 3)
    widths, before, bits, errors, steps = both[0]
    assert both[1][2] == bits
    assert both[1][3] != errors  # which are each rank's own
    assert widths == (3, 4, 5, 6, 7, 8)
    assert before == {"a": 4, "b": 4, "c": 8, "d": 32}
    assert (bits["c"], bits["d"]) == (8, 32)
    assert bits["a"] == 3 < 4 < bits["b"]  # many small numbers may be coarse where few large ones are fine
    assert set(errors) == {"a", "b", "c"}
    assert steps == [1, 3]


def test_no_layer_has_fewer_than_the_least(ranks):
    assert ranks(2, watching, 1)[0][2]["a"] < 3
    assert ranks(2, watching, 4)[0][2]["a"] == 4


def repeating():
    adaptation = Adaptation(warmup_steps=0, every_steps=1, observe_steps=1)
    asked = {"a": "auto", "b": "auto", "c": 8}
    watch = Watch(Compression(bits="auto", adaptation=adaptation), asked, None)
    watch.see("a", torch.randn(2000), 0)
    watch.see("b", torch.randn(2000), 0)
    watch.see("c", torch.randn(2000), 0)
    watch.exchange(0)
    before = watch.errors
    assert watch.decided(0) in (True, False)
    before.clear()
    assert set(watch.errors) == {"a", "b", "c"}  # what one asks for is one's own
    log = watch.log
    assert len(log.decisions) == 1
    Watch(Compression(bits="auto", replay=log), asked, None)
    found = []
    for compression, names in (
        (Compression(bits="auto", replay=log), {"a": "auto", "b": 4}),
        (Compression(bits="auto", replay=log), {"a": "auto", "b": "auto", "d": "auto"}),
        (Compression(bits=4, replay=log), {"a": 4, "b": 4}),
        (Compression(bits=4, gather_bits=8), {"a": 4}),
    ):
        with pytest.raises(UsageError) as caught:
            Watch(compression, names, None)
        found.append(str(caught.value))
    return found


def test_what_would_be_ignored_is_refused(ranks):
    for of_few, of_more, fixed_bits, weights in ranks(2, repeating):
        assert "it has bits for 'b', the model has none (setting: replay)" in of_few
        assert "the model has bits for 'd', it has none (setting: replay)" in of_more
        assert 'setting: replay); works: bits="auto"' in fixed_bits
        assert "(setting: gather_bits); works: gather_bits=None" in weights


def fixed():
    watch = Watch(Compression(bits=4), {"a": 4, "b": 32}, None)
    return watch.widths, watch.log, watch.decided(3)


def test_where_bits_are_fixed_there_is_nothing_to_decide(ranks):
    assert ranks(2, fixed)[0] == ((4,), None, False)
