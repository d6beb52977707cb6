"""A Hugging Face BERT learns to fill in hidden letters of English, with the loss that it computes itself.

python examples/huggingface.py
torchrun --nproc-per-node 2 examples/huggingface.py                # half of the rows on each
torchrun --nproc-per-node 2 examples/huggingface.py --pipeline     # half of the layers on each

The model's loss is the mean over the hidden letters, of which every row has another number. The job says so
with its weight: however a batch is cut, the parts then add up to the loss of the whole. The model begins with
random weights, so there is nothing to download; ``pip install transformers`` brings its code.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait import losses, reference
from plait.determinism import derive
from plait.english import LETTERS, english
from plait.job import Evaluation, Job
from plait.worker import Place

CONTEXT, MASK = 64, LETTERS  # the letter after the last stands for a hidden one


class Hidden(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of English with some letters hidden; which, follows from the seed and the window's number."""

    def __init__(self, seed: int, share: float, held_out: bool) -> None:
        self.text = english(seed, context=CONTEXT, held_out=held_out)
        self.seed, self.share = seed, share

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        letters = self.text[index]["input_ids"]
        own = torch.Generator().manual_seed(derive(self.seed, "hidden", index))
        hidden = torch.rand(CONTEXT, generator=own) < self.share
        return {
            "input_ids": letters.masked_fill(hidden, MASK),
            "labels": letters.masked_fill(~hidden, losses.IGNORED),  # only the hidden ones are asked for
        }


def hidden_letters(seed: int, *, share: float = 0.15, held_out: bool = False) -> Hidden:
    return Hidden(seed, share, held_out)


def bert(*, width: int = 64, layers: int = 2, heads: int = 4) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        vocab_size=LETTERS + 1, intermediate_size=4 * width, max_position_embeddings=CONTEXT, **size, **still
    )
    return BertForMaskedLM(config)


job = Job(
    name="bert",
    model=bert,
    data=hidden_letters,
    loss=losses.model_loss,  # the model's own
    weight=losses.targets,  # labels that are not -100: what that loss is the mean over
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    batch=16,
    steps=40,
    clip_norm=1.0,
    evaluation=Evaluation(
        data=partial(hidden_letters, held_out=True), batch=64, metrics={"accuracy": losses.accuracy}
    ),
)


def in_stages(job: Job, show: Callable[[reference.Step], None]) -> reference.Result:
    """Cut where the stages balance, as the first rank has measured, and train in a pipeline."""
    from plait.pipeline import train
    from plait.pipeline.planning import plan

    dist.init_process_group("gloo")
    chosen = [None]
    if dist.get_rank() == 0:
        profile = plait.Profile.measure(plait.Chain.of_job(job), batch_sizes=(4,), repetitions=3, threads=1)
        chosen = [plan(profile, dist.get_world_size(), global_batch=job.batch)]
        print("stages of", [stage.end - stage.first for stage in chosen[0].stages], "blocks", flush=True)
    dist.broadcast_object_list(chosen)
    result = train(job, chosen[0], on_step=show)
    dist.destroy_process_group()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=job.steps)
    parser.add_argument("--pipeline", action="store_true", help="a part of the model on each rank")
    options = parser.parse_args()
    chosen = dataclasses.replace(job, steps=options.steps)
    first = Place.from_environment().rank == 0

    def show(step: reference.Step) -> None:
        if first and (step.step % 10 == 0 or step.step == options.steps - 1):
            print(f"step {step.step:2}  loss {step.loss:.3f}", flush=True)

    if options.pipeline:
        result = in_stages(chosen, show)
    else:
        result = reference.train(chosen, on_step=show)
    if first:
        found = result.evaluations[-1]
        print(f"held out: loss {found.loss:.3f}, {found.metrics['accuracy']:.0%} of hidden letters found")


if __name__ == "__main__":
    main()
