"""What is in evaluation while a pipeline evaluates, and what is not afterwards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

import plait
from plait.pipeline import ScheduleKFKB, stages
from plait.pipeline.mode import evaluation


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.drop(self.linear(x)))


def whole():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    model[0].norm.eval()  # which stays so in training, too
    return model


def hand_written(rank):
    return PipelineStage(whole()[rank], rank, 2, torch.device("cpu"))


def traced(rank):
    return stages(plait.Chain.trace(whole(), torch.randn(4, 6)), cuts=[1]).stage()


def replicated(rank):
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    submod = nn.parallel.DistributedDataParallel(traced(rank).submod, process_group=alone)
    return PipelineStage(submod, rank, 2, torch.device("cpu"))


def parts(stage):
    own = list(stage.submod.modules())
    return [part for each in own for part in (each, *getattr(each, "switched", ()))]


def evaluate(make):
    rank = dist.get_rank()
    stage, (x, y) = make(rank), torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
    modes = [part.training for part in parts(stage)]
    assert any(modes)
    state = {name: value.clone() for name, value in stage.submod.state_dict().items()}
    schedule, losses = ScheduleKFKB(stage, 4, nn.functional.mse_loss), []
    given = ([x], {}) if rank == 0 else ([], {"target": y, "losses": losses})
    output = schedule.eval(*given[0], **given[1])
    assert [part.training for part in parts(stage)] == modes
    assert all(torch.equal(value, state[name]) for name, value in stage.submod.state_dict().items())
    if rank:
        torch.testing.assert_close(output, whole().eval()(x))
        assert len(losses) == 4
        assert not losses[0].requires_grad
    schedule.step(*given[0], **given[1])
    assert any(parameter.grad is not None for parameter in stage.submod.parameters())


@pytest.mark.parametrize("make", [hand_written, traced, replicated])
def test_dropout_is_off_while_a_pipeline_evaluates_and_on_again(ranks, make):
    ranks(2, evaluate, make)


def cut_by_torch():
    rank, x = dist.get_rank(), torch.ones(8, 6)
    pipe = pipeline(whole(), (x[:2],), split_spec={"1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    modes = [part.training for part in stage.submod.modules()]
    output = ScheduleKFKB(stage, 4).eval(*([x] if rank == 0 else []))
    assert [part.training for part in stage.submod.modules()] == modes
    return output is not None


def test_stages_that_torch_has_cut_evaluate(ranks):
    assert ranks(2, cut_by_torch) == [False, True]


@pytest.mark.parametrize("training", [True, False])
def test_all_stages_of_a_traced_model_are_as_they_were(training):
    model = whole().train() if training else whole().eval()
    cut = stages(plait.Chain.trace(model, torch.randn(4, 6)), cuts=[1])
    assert [stage.training for stage in cut] == [training] * 2
    with evaluation(cut[0]):
        assert not any(part.training for part in cut.chain.model.modules())
        assert not cut.chain[0].training
    assert all(part.training is training for part in cut.chain.model.modules())
    assert [block.training for block in cut.chain] == [training] * 2
    assert cut[0].training is training
