"""A small GPT that learns English, character by character, from the help texts in every Python.

    plait profile examples/text.py
    python examples/text.py

Three jobs: a character model of our own, the same with dropout on a schedule, and an unmodified Hugging
Face GPT-2 (``pip install transformers``) that computes its own loss.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.english import LETTERS, english
from plait.factory import Factory
from plait.job import Evaluation, Job

CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.mix(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.join(seen.transpose(1, 2).reshape(rows, length, width)))
        return x + self.dropout(self.think(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.head(self.norm(self.blocks(self.letters(input_ids) + self.places(places))))


def gpt(*, width: int = 64, layers: int = 4, heads: int = 4, dropout: float = 0.0) -> GPT:
    return GPT(width, layers, heads, dropout)


def gpt2(*, width: int = 64, layers: int = 4, heads: int = 4) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": CONTEXT}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=LETTERS, bos_token_id=0, eos_token_id=0, **size))
    model.loss_type = "ForCausalLM"  # or Hugging Face warns that this is what it falls back to
    return model


job = Job(
    name="text",
    model=gpt,
    data=english,
    loss="plait.losses:next_token",
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    batch=16,
    steps=60,
    clip_norm=1.0,
    evaluation=Evaluation(data=partial(english, held_out=True), every=30),
)
dropout = Job(
    name="text-dropout",
    model=partial(gpt, dropout=0.1),
    data=english,
    loss="plait.losses:next_token",
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    schedule=Factory("torch.optim.lr_scheduler:CosineAnnealingLR", T_max=60),
    batch=16,
    accumulate=2,
    steps=60,
)
hugging_face = Job(
    name="text-gpt2",
    model=gpt2,
    data=english,
    loss="plait.losses:model_loss",
    weight="plait.losses:next_tokens",
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    batch=16,
    steps=60,
)
jobs = [job, dropout, hugging_face]


if __name__ == "__main__":
    from plait import reference

    result = reference.train(job, on_step=lambda step: print(f"step {step.step:3}  loss {step.loss:.3f}"))
    print(f"held-out loss {result.evaluations[-1].loss:.3f} after {result.seconds:.1f} s")
