"""Clipping by the norm over all stages, against torch's on the model in one piece."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait import deferred
from plait.errors import UsageError
from plait.pipeline import ScheduleKFKB, clip_grad_norm_, stages


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=12,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def of_gpt2():
    """How far norm and clipped gradients are from those of the whole model."""
    ids = torch.randint(0, 50, (6, 12), generator=torch.Generator().manual_seed(6))
    example = {"input_ids": ids[:2], "labels": ids[:2]}
    chain = plait.Chain.trace(deferred.build(gpt2, seed=5).double(), example)
    stage = stages(chain, cuts=[len(chain) // 2]).stage()
    schedule = ScheduleKFKB(stage, 3, lambda output, target: output.loss)
    model, found = deferred.build(gpt2, seed=5).double(), []
    whole = dict(model.named_parameters())
    for pipeline, most in ((schedule, 0.1), (stage, 100.0)):  # either will do, and steps go on after it
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), most)
        assert 0.1 < norm < 100
        stage.submod.zero_grad()
        schedule.step(**({"input_ids": ids, "labels": ids} if stage.is_first else {"target": ids}))
        total = clip_grad_norm_(pipeline, most)
        assert (total.shape, total.dtype) == (norm.shape, torch.float64)
        found.append(float(total - norm))
        own = dict(stage.submod.named_parameters())
        assert "transformer.wte.weight" in own
        found += [float((p.grad - whole[name].grad).abs().max()) for name, p in own.items()]
    return max(map(abs, found))


def test_a_tied_embedding_counts_once(ranks):
    assert max(ranks(2, of_gpt2)) < 1e-12


def nothing_to_clip():
    chain = plait.Chain.of([nn.Linear(4, 4) for _ in range(2)])
    stage = stages(chain, cuts=[1]).stage()
    before = clip_grad_norm_(stage, 1.0)
    if dist.get_rank():
        stage.submod.requires_grad_(False)
    schedule = ScheduleKFKB(stage, 2, lambda output, target: (output - target).square().mean())
    x = torch.ones(4, 4)
    schedule.step(*([x] if stage.is_first else []), **({} if stage.is_first else {"target": x}))
    after = clip_grad_norm_(schedule, 1e-3)
    norm = None if dist.get_rank() else nn.utils.get_total_norm([p.grad for p in stage.submod.parameters()])
    wrong = []
    for pipeline, most in ((chain, 1.0), (stage, 0), (stage, float("nan")), (stage, True), (stage, "1")):
        with pytest.raises(UsageError) as caught:
            clip_grad_norm_(pipeline, most)
        wrong.append(caught.value.setting)
    return float(before), float(after), norm and float(norm), wrong


def test_stages_without_gradients_and_what_cannot_be(ranks):
    first, last = ranks(2, nothing_to_clip)
    assert first[0] == last[0] == 0
    assert first[1] == last[1] > 1e-3
    assert first[2] == pytest.approx(1e-3, rel=1e-2)  # torch's adds 1e-6 to the norm
    assert first[3] == ["stage", *["max_norm"] * 4]
