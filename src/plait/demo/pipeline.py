"""The fourth act: a GPT-2 in two stages, on a network that somebody else begins to use.

Run as a module it is the worker on each host, under the torchrun contract.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.demo.chain import CONTEXT, gpt2

if TYPE_CHECKING:
    from torch import Tensor, nn

RATES = {"alone": "1gbit", "shared": "50mbit"}
STEPS, UNCOUNTED = 6, 2
ROWS, MICRO_BATCHES = 16, 8
MARK, NOW = "plait demo:", "plait demo, from now on:"
SETTLES_S = 1.0
"""Within which a new rate is in force."""


def act(directory: Path) -> None:
    """Train in a lab under both rates, and compare."""
    from plait.cli.console import console, status
    from plait.errors import LabError
    from plait.lab import Lab
    from plait.pipeline import grid
    from plait.timeline import Timeline

    show, lines = console(), list[str]()

    def listen(line: str) -> None:
        lines.append(line)
        if NOW in line and not lab.loopback:
            lab.set_rate(RATES[line.split(NOW, 1)[1].strip()])

    # Connections are made at the lower rate: the size of their packets follows from it.
    with Lab(hosts=2, rate=RATES["shared"]) as lab, status("two stages train, with three schedules"):
        outcome = lab.run(
            [sys.executable, "-m", __name__, str(directory.resolve())], show=listen, timeout_seconds=300
        )
        wires = {name: "an unshaped loopback" if lab.loopback else rate for name, rate in RATES.items()}
    found = [line.split(MARK, 1)[1] for line in lines if MARK in line]
    if outcome.exit_code or not found:
        raise LabError("the workers failed:\n" + "\n".join(lines[-20:]))
    result = json.loads(found[-1])
    show.print(f"GPT-2 with {result['parameters']:,} parameters in two stages on two hosts, ms a step:")
    for phase, wire in wires.items():
        times = "   ".join(f"{side} {ms:.0f}" for side, ms in result[phase].items())
        show.print(f"  {phase:6} {wire:>7}   {times}")
    for text in result["decisions"][-2:]:
        show.print(f"  chosen late: {text}")
    show.print(f"its gradients are those of 1F1B, but for a relative {result['apart']:.0e} of rounding")
    stages = [Timeline.load(directory / f"pipeline-{rank}.json") for rank in range(2)]
    panels = {"predicted": Timeline.load(directory / "pipeline-predicted.json")}
    panels["measured"] = grid.of_step(Timeline.merge(stages), result["step"])
    grid.save(directory / "pipeline.html", panels)
    show.print(f"the last step, predicted above measured: {directory / 'pipeline.html'}")


def work(directory: Path) -> None:
    """One host's worker: each schedule under each rate; the first tells what came of them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B

    import plait
    from plait.pipeline import AdaptiveSchedule, ScheduleKFKB, stages

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, timeline, ids = dist.get_rank(), plait.Timeline(), _batch()
    model = _logits(gpt2(width=256, layers=2)).eval()  # no dropout, so that gradients can be compared
    chain = plait.Chain.trace(model, ids[:2])
    stage = stages(chain, cuts=[len(chain) // 2]).stage()
    counts = (MICRO_BATCHES, 2 * MICRO_BATCHES)
    adaptive = AdaptiveSchedule(stage, ROWS, loss_fn=_loss, micro_batches=counts, timeline=timeline)
    sides = {
        "torch's 1F1B": Schedule1F1B(stage, MICRO_BATCHES, _loss),
        "1F1B posted ahead": ScheduleKFKB(stage, MICRO_BATCHES, _loss),
        "adaptive": adaptive,
    }
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    gradients: dict[str, Tensor] = {}
    for phase in RATES:
        dist.barrier()
        if rank == 0:
            print(NOW, phase, flush=True)
        time.sleep(SETTLES_S)
        result[phase] = {}
        for side, schedule in sides.items():
            result[phase][side] = _time(schedule, stage, ids)
            found = [p.grad for p in stage.submod.parameters() if p.grad is not None]
            gradients[side] = torch.cat([gradient.flatten() for gradient in found])
    predicted = adaptive.prediction
    _step(adaptive, stage, ids)  # one more, which was just predicted
    apart = gradients["adaptive"] - gradients["1F1B posted ahead"]
    result["apart"] = (apart.norm() / gradients["adaptive"].norm()).item()
    directory.mkdir(parents=True, exist_ok=True)
    timeline.save(directory / f"pipeline-{rank}.json")
    dist.barrier()
    if rank == 0 and predicted is not None:
        result["decisions"] = [f"{each.candidate} ({each.reason})" for each in adaptive.decisions]
        result["step"] = max(int(str(span.info.get("step", 0))) for span in timeline.spans)
        predicted.timeline.save(directory / "pipeline-predicted.json")
        print(MARK, json.dumps(result), flush=True)
    dist.destroy_process_group()


def _time(schedule: Any, stage: Any, ids: Tensor) -> float:
    """Milliseconds of a step: the median."""
    import torch.distributed as dist

    taken = []
    for _ in range(STEPS):
        stage.submod.zero_grad()
        dist.barrier()
        begun = time.perf_counter()
        _step(schedule, stage, ids)
        taken.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(taken[UNCOUNTED:])


def _step(schedule: Any, stage: Any, ids: Tensor) -> None:
    schedule.step(*([ids] if stage.is_first else []), **({"target": ids} if stage.is_last else {}))


def _batch() -> Tensor:
    import torch

    from plait.english import english

    data = english(0, context=CONTEXT)
    return torch.stack([data[i]["input_ids"] for i in range(ROWS)])


def _logits(model: Any) -> nn.Module:
    """A Hugging Face model whose output is a tensor, as torch's own schedule needs it."""
    from torch import nn

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Any:
            return self.model(ids, use_cache=False).logits

    return Logits()


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


if __name__ == "__main__":
    work(Path(sys.argv[1]))
