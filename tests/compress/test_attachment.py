"""Checkpoints, adaptive bits and reports of an attachment, in real processes."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plait.compress
from plait import Timeline
from plait.compress import Adaptation, Log, Rule
from plait.errors import FileError, UsageError

QUICK = Adaptation(warmup_steps=2, every_steps=3, observe_steps=2)
GONE = object()


def make(bits, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 64))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    options = {"adaptation": QUICK, "decline": False, **options}
    attachment = plait.compress.attach(ddp, bits=bits, **options)
    return ddp, torch.optim.Adam(model.parameters(), lr=0.01), attachment


def train(ddp, optimizer, first, last, scale=1.0):
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(8, 64, generator=generator)
        loss = scale * nn.functional.mse_loss(ddp(x), x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resuming(bits, options, everyone):
    ddp, optimizer, attachment = make(bits, **options)
    whole = train(ddp, optimizer, 0, 12)
    weights = [p.detach().clone() for p in ddp.parameters()]
    del ddp, attachment
    ddp, optimizer, attachment = make(bits, **options)
    train(ddp, optimizer, 0, 7)
    states = {
        "model": ddp.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "attachment": attachment.state_dict(everyone=everyone),
    }
    bits_then = attachment.bits
    del ddp, attachment
    ddp, optimizer, attachment = make(bits, **options)
    ddp.module.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    attachment.load_state_dict(states["attachment"])
    assert attachment.bits == bits_then
    rest = train(ddp, optimizer, 7, 12)
    same = all(torch.equal(one, other) for one, other in zip(weights, ddp.parameters(), strict=True))
    return whole[7:] == rest, same, attachment.bits


@pytest.mark.parametrize(
    ("bits", "options", "everyone"),
    [
        (4, {}, False),
        (2, {}, False),
        (2, {"feedback_bits": 8}, True),
        ("auto", {}, True),
    ],
    ids=["4 bits", "2 bits", "2 bits, feedback in 8", "auto"],
)
@pytest.mark.parametrize("world", [2, 3])
def test_a_resumed_run_has_the_same_bits(ranks, world, bits, options, everyone):
    outcomes = ranks(world, resuming, bits, options, everyone)
    assert all(losses and weights for losses, weights, _ in outcomes)
    assert len({str(bits) for _, _, bits in outcomes}) == 1


def saving():
    ddp, optimizer, attachment = make(2)
    train(ddp, optimizer, 0, 4)
    everyone, of_second = attachment.state_dict(everyone=True), attachment.state_dict(everyone=True, to=1)
    assert str(of_second) == str(everyone if dist.get_rank() == 1 else {})
    return everyone, attachment.state_dict(), ddp.module.state_dict()


def restoring(everyone, of_first, weights):
    ddp, optimizer, attachment = make(2)
    with pytest.raises(UsageError, match="everyone=True"):
        attachment.load_state_dict(of_first)
    with pytest.raises(FileError, match="format"):
        attachment.load_state_dict({"format": "other"})
    ddp.module.load_state_dict(weights)
    attachment.load_state_dict(everyone)
    losses = train(ddp, optimizer, 4, 8)
    return losses[-1], attachment.report().steps


def test_a_world_of_another_size_goes_on(ranks):
    everyone, of_first, weights = ranks(3, saving)[0]
    for loss, steps in ranks(2, restoring, everyone, of_first, weights):
        assert loss < 2.0
        assert steps == 8


def damaging():
    ddp, optimizer, attachment = make(2, rules=[Rule(name="4.weight", bits="auto")])
    train(ddp, optimizer, 0, 5)
    good, everyone = attachment.state_dict(), attachment.state_dict(everyone=True)
    before = str(good)
    found = {}

    def load(name, /, *path, **changes):
        state = copy.deepcopy(everyone if path[:1] == ("everyone",) else good)
        inner = functools.reduce(lambda part, key: part[key], path, state)
        for key, value in changes.items():
            if value is GONE:
                del inner[key]
            else:
                inner[key] = value
        with pytest.raises((FileError, UsageError)) as caught:
            attachment.load_state_dict(state)
        found[name] = str(caught.value)
        assert str(attachment.state_dict()) == before, name  # nothing is half loaded

    for field in ("rank", "world", "step", "declined", "watch", "feedback"):
        load(f"no {field}", **{field: GONE})
        load(f"{field} of a word", **{field: "x"})
    load("step before the first", step=-7)
    load("a rank beyond the world", rank=2)
    load("99 bits declined", declined=[99])
    load("nobody", everyone=[])
    load("one of two", everyone=everyone["everyone"][:1])
    load("one twice", everyone=[good, good])
    load("damage of another", "everyone", 1, "feedback", 0, held=[torch.zeros(5)])
    load("99 bits", "watch", "bits", **{"0.weight": 99})
    load("a parameter too few", "watch", "bits", **{"0.weight": GONE})
    load("errors of words", "watch", "errors", **{"0.weight": "x"})
    load("a tuner of words", "watch", tuner={"log": 5, "seen": []})
    load("an observation of another", "watch", "tuner", "seen", 0, 0, name="0.weight")
    load(
        "too few widths",
        "watch",
        "tuner",
        "seen",
        0,
        0,
        widths=(4,),
        squared_error=(1.0,),
        payload_bytes=(1,),
    )
    load("a decision on another", "watch", "tuner", "log", "decisions", 0, "plan", bits={"0.weight": 4})
    load("too few bits", "watch", "tuner", "log", "decisions", 0, "plan", bits={"4.weight": 1})
    load("junk", feedback=[{"counts": {}, "owned": [], "held": []}])
    load("short feedback", "feedback", 0, held=[torch.zeros(5)])
    for state in (None, 5, []):
        with pytest.raises(FileError, match="a state of format"):
            attachment.load_state_dict(state)
    attachment.load_state_dict(good)
    other = DistributedDataParallel(nn.Sequential(nn.Linear(64, 90), nn.Tanh(), nn.Linear(90, 64)))
    for state in (good, everyone):
        with pytest.raises(UsageError, match=r"another model: it has bits for '4\.weight'"):
            plait.compress.attach(other, bits=2, decline=False).load_state_dict(state)
        plait.compress.attachment_of(other).detach()
    smaller = nn.Sequential(nn.Linear(64, 90), nn.Tanh(), nn.Linear(90, 96), nn.Tanh(), nn.Linear(96, 64))
    third = plait.compress.attach(DistributedDataParallel(smaller), bits=2, decline=False)
    with pytest.raises(UsageError, match=r"9216 elements of '2\.weight', and the model has 8640"):
        third.load_state_dict(everyone)
    train(ddp, optimizer, 5, 6)
    return found


def test_a_state_that_is_damaged_or_of_another_model_changes_nothing(ranks):
    for rank, found in enumerate(ranks(2, damaging)):
        assert len(found) == 29
        assert "step -7" in found["step before the first"]
        assert f"{rank} of 2, {rank} of 2" in found["one twice"]
        assert "99 bits for '0.weight'" in found["99 bits"]
        assert "1 bits for '4.weight'" in found["too few bits"]


def asking_otherwise():
    ddp, optimizer, attachment = make(2)
    train(ddp, optimizer, 0, 2)
    state = {**attachment.state_dict(), "declined": [8]}
    attachment.detach()
    again = plait.compress.attach(ddp, bits=8, decline=False)
    again.load_state_dict(state)
    bits, steps = again.bits, again.report().steps
    again.detach()
    chosen = plait.compress.attach(ddp, bits="auto", decline=False)
    chosen.load_state_dict(state)  # in which nobody chose
    return set(bits.values()), steps, set(chosen.bits.values())


def test_what_is_asked_for_wins_over_a_state(ranks):
    assert ranks(2, asking_otherwise) == [({8, 32}, 2, {4, 32})] * 2


def adapting(options):
    ddp, optimizer, attachment = make("auto", **options)
    seen = []  # the bits in force in every step
    for step in range(12):
        # The gradients of the last layer grow a hundred times in between: bits must follow.
        with torch.no_grad():
            ddp.module[4].weight *= 30.0 if step == 5 else 1.0
        train(ddp, optimizer, step, step + 1)
        seen.append(dict(attachment.bits))
    weights = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
    return seen, attachment.log, attachment.report(), weights


def test_bits_follow_the_gradients_alike_on_all_ranks_and_can_be_replayed(ranks, tmp_path):
    outcomes = ranks(2, adapting, {})
    seen, log, report, weights = outcomes[0]
    assert outcomes[1][0] == seen
    assert torch.equal(outcomes[1][3], weights)
    assert all(bits == 4 for name, bits in seen[0].items() if name.endswith("weight"))
    assert [decision.step for decision in log.decisions] == [2, 5, 8]
    assert len({tuple(sorted(bits.items())) for bits in seen}) > 2
    changes = [index for index, (a, b) in enumerate(itertools.pairwise(seen)) if a != b]
    assert set(changes) <= {2, 5, 8}
    assert set(report.errors) == {"0.weight", "2.weight", "4.weight"}
    assert all(0 < error < 10 for error in report.errors.values())
    file = tmp_path / "bits.json"
    log.save(file)
    assert Log.load(file) == log
    for replayed in ranks(2, adapting, {"replay": str(file)}):
        assert replayed[0] == seen
        assert torch.equal(replayed[3], weights)


def test_the_exposed_time_can_be_minimised_instead(ranks):
    adaptation = Adaptation(warmup_steps=2, every_steps=3, observe_steps=2, cost="exposed")
    outcomes = ranks(2, adapting, {"adaptation": adaptation})
    assert outcomes[0][0] == outcomes[1][0]
    assert all(decision.plan.exposed_ms is not None for decision in outcomes[0][1].decisions)


def reporting():
    timeline = Timeline()
    ddp, optimizer, attachment = make(4, timeline=timeline)
    train(ddp, optimizer, 0, 5)
    names = {span.name for span in timeline.spans}
    attachment.detach()
    ended = len(timeline.spans)
    second = Timeline()
    first = plait.compress.attach(ddp, bits=4, decline=False)
    train(ddp, optimizer, 5, 6)
    assert len(timeline.spans) == ended  # there is no more to record
    first.detach()
    plait.compress.attach(ddp, bits=4, decline=False, timeline=second)
    attachment.detach()
    train(ddp, optimizer, 6, 7)
    assert len(second.spans) > 0  # which was not the first one's to end
    return attachment.report(), str(attachment.report()), attachment.report().to_json(), names


def test_the_report_and_the_timeline(ranks):
    for report, text, plain, names in ranks(2, reporting):
        assert report.steps == plain["steps"] == 5
        elements = sum(n * m + m for n, m in ((64, 96), (96, 96), (96, 64)))
        assert report.total.plain_bytes == 5 * 4 * elements  # with two workers each sends as much as there is
        assert 6 < report.total.ratio < 8
        assert report.mean_bits == pytest.approx(32 / report.total.ratio)
        assert report.exposed_s > 0
        assert report.total.pack_s > 0
        assert report.total.unpack_s > 0
        assert "bits a number" in text
        assert {"pack", "unpack", "exposed"} <= names
