"""Attaching compression to DDP: what it can be told, what it refuses, and that it can be taken off again."""

import pytest
import torch
import torch.distributed as dist
from ddp_features import model_of, steps_of
from torch import nn

import plait.compress
from plait.compress import Adaptation, LowRank, Rule, TopK
from plait.compress.hook import hand_over
from plait.errors import UsageError, WorkerError

# Rules, error feedback, attaching and detaching.


def with_rules():
    _, ddp, optimizer = model_of("plain")
    rules = [
        Rule(pattern="head", bits=32),
        Rule(module=nn.Embedding, bits=2),
        Rule(name="first.weight", bits=16),
    ]
    attachment = plait.compress.attach(ddp, bits=8, rules=rules, decline=False)
    gradients = list(steps_of(ddp, dist.get_rank(), optimizer))
    return attachment.bits, str(attachment), gradients[0], attachment.report().memory_bytes


def test_rules_decide_by_parameter(ranks):
    bits, text, _, memory = ranks(2, with_rules)[0]
    assert (bits["embed.weight"], bits["first.weight"], bits["head.weight"]) == (2, 16, 32)
    assert (bits["second.weight"], bits["second.bias"], bits["norm.weight"]) == (8, 32, 32)
    assert "with error feedback" in text  # since one has 2 bits
    assert memory > 0


def with_other_codecs():
    outcome = {}
    for codec in (TopK(keep=64), LowRank(rank=8, side=32)):
        _, ddp, optimizer = model_of("plain")
        attachment = plait.compress.attach(ddp, codec=codec, decline=False)
        gradients = list(steps_of(ddp, dist.get_rank(), optimizer))
        outcome[type(codec).__name__] = gradients[-1], attachment.report().total.ratio, str(attachment)
        del ddp
    return outcome


def test_other_codecs_stand_in_for_quantization(ranks):
    one, other = ranks(2, with_other_codecs)
    for name, (gradients, ratio, text) in one.items():
        assert torch.equal(gradients, other[name][0])
        assert ratio > 1.5
        assert "with error feedback" in text
        assert name in text


def attaching_and_detaching():
    rank = dist.get_rank()
    run, ddp, optimizer = model_of("plain")
    exact = run(ddp, rank, optimizer)
    del ddp
    run, ddp, optimizer = model_of("plain")
    attachment = plait.compress.attach(ddp, bits=2, decline=False)
    with pytest.raises(UsageError, match="already"):
        plait.compress.attach(ddp, bits=4)
    rough = next(steps_of(ddp, rank, optimizer))
    attachment.detach()
    fine = next(steps_of(ddp, rank, optimizer))
    again = plait.compress.attach(ddp, bits=1, decline=False)
    rougher = next(steps_of(ddp, rank, optimizer))
    seen = []

    def own_hook(state, bucket):
        seen.append(state)
        return torch.futures.Future.then(_ready(bucket.buffer()), lambda future: future.value())

    assert hand_over(ddp, "mine", own_hook)
    next(steps_of(ddp, rank, optimizer))
    again.detach()
    errors = [((found - exact[0]).norm() / exact[0].norm()).item() for found in (rough, fine, rougher)]
    return errors, len(seen)


def _ready(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def test_it_can_be_detached_attached_again_and_handed_over(ranks):
    for errors, seen in ranks(2, attaching_and_detaching):
        assert errors[0] > 0.05
        assert errors[1] == 0.0
        assert errors[2] > errors[0]
        assert seen > 1


def alone():
    run, ddp, optimizer = model_of("plain")
    exact = run(ddp, 0, optimizer)
    del ddp
    run, ddp, optimizer = model_of("plain")
    plait.compress.attach(ddp, bits=1)
    return exact, run(ddp, 0, optimizer)


def test_a_world_of_one_is_exact(ranks):
    ((exact, ours),) = ranks(1, alone)
    assert all(torch.equal(one, other) for one, other in zip(exact, ours, strict=True))


def declining():
    _, ddp, optimizer = model_of("plain")
    attachment = plait.compress.attach(ddp, bits="auto")
    list(steps_of(ddp, dist.get_rank(), optimizer))
    report = attachment.report()
    assert report.nothing_pays or report.compared is None
    return sorted(attachment.declined), attachment.left, attachment.bits, report.compared


def compared(packed_ms, plain_ms, ours_s, theirs_s):
    """What is found where these are the prices, and this is how the race ends."""
    from plait.compress import attachment as module

    module.price_ms = lambda pieces, *_, **__: (
        plain_ms if isinstance(pieces[0].codec, plait.compress.Exact) else packed_ms
    )
    module.race = lambda *_: (ours_s, theirs_s)
    attachment = plait.compress.attach(model_of("plain")[1], bits=4)
    before = str(attachment.report())
    attachment.load_state_dict(attachment.state_dict())
    return before, str(attachment.report())


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ((5.0, 2.0, 0.004, 0.003), "1048576 numbers take 2 ms, compressed 5 ms"),
        ((5.0, 2.0, 0.003, 0.004), "1048576 numbers take 2 ms, compressed 5 ms"),
        ((2.0, 5.0, 0.004, 0.003), " numbers take 3 ms, compressed 4 ms"),
        ((2.0, 5.0, 0.003, 0.004), None),
    ],
)
def test_who_declines_knows_why(ranks, figures, found):
    for before, after in ranks(2, compared, *figures):
        assert ("declined: uncompressed is faster here" in before) == (found is not None)
        assert found is None or f"{found}); decline=False compresses all the same" in before
        assert "numbers take" not in after, "the decision of another run has other figures"


def test_all_decline_alike(ranks):
    both = ranks(2, declining)
    assert both[0] == both[1]
    declined, left, bits, compared = both[0]
    assert compared is None or compared.plain_s <= compared.compressed_s
    assert not set(bits.values()) & set(declined)
    assert not left or set(bits.values()) == {32}


# What goes wrong.


def mistakes():
    settings = []
    for call in (
        lambda: plait.compress.attach(None),
        lambda: plait.compress.attach(nn.Linear(2, 2), bits=4),
        lambda: plait.compress.attach(model_of("plain")[1], compression="4"),
        lambda: plait.compress.attach(model_of("plain")[1], bits=4, codec=TopK()),
        lambda: plait.compress.attach(hooked(), bits=4),
        lambda: plait.compress.attach(model_of("plain")[1], bits=0),
        lambda: plait.compress.attach(model_of("plain")[1], bitz=4),
        lambda: plait.compress.attach(model_of("plain")[1], bits=4, rules=[Rule(name="nothing", bits=4)]),
        lambda: plait.compress.attach(model_of("plain")[1], bits=4, compression=plait.compress.Compression()),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        settings.append(caught.value.setting)
    return settings


def hooked():
    ddp = model_of("plain")[1]
    ddp.register_comm_hook(None, lambda state, bucket: _ready(bucket.buffer()))
    return ddp


def test_mistakes(ranks):
    assert ranks(2, mistakes)[0] == [
        *("model", "model", "compression", "codec", "model", "bits", "bitz", "rules", "compression")
    ]


def disagreeing(what):
    rank = dist.get_rank()
    options = {
        "bits": {"bits": 4 + rank},
        "rules": {"bits": 4, "rules": [Rule(pattern="head", bits=8)] if rank else []},
        "adaptation": {"bits": "auto", "adaptation": Adaptation(alpha=1.0 + rank)},
    }
    with pytest.raises(WorkerError) as caught:
        plait.compress.attach(model_of("plain")[1], **options[what])
    return str(caught.value), caught.value.setting


@pytest.mark.parametrize("what", ["bits", "rules", "adaptation"])
def test_ranks_that_disagree_are_told_so_at_once(ranks, what):
    for text, setting in ranks(2, disagreeing, what):
        assert setting == what
        assert "rank 1" in text


def left_to_ddp():
    _, ddp, optimizer = model_of("plain")
    attachment = plait.compress.attach(ddp, bits=4, decline=False)
    attachment.left = True
    list(steps_of(ddp, dist.get_rank(), optimizer))
    assert plait.compress.attachment_of(ddp) is attachment
    report = attachment.report()
    return set(attachment.bits.values()), str(attachment), str(report), report.total.operations


def test_everything_can_be_left_to_ddp(ranks):
    bits, text, report, operations = ranks(2, left_to_ddp)[0]
    assert report.endswith("declined: uncompressed is faster here; decline=False compresses all the same")
    assert bits == {32}
    assert "faster on this network" in text
    assert operations == 0
