"""An unmodified GPT-2 of Hugging Face, from a configuration, and one text for it to learn."""

from __future__ import annotations

from torch import Tensor, nn

from plait.english import English


def gpt2(*, width: int, layers: int, context: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=width // 128, n_positions=context, use_cache=False
    )
    return GPT2LMHeadModel(config)


class One:
    """The first text of the English, again and again: what is learnt of it must show within three steps."""

    def __init__(self, context: int) -> None:
        self._text = English(context=context, held_out=False)[0]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self._text


def one_text(seed: int, *, context: int) -> One:
    return One(context)
