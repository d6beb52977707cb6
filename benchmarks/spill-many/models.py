"""Small GPT-2 models of Hugging Face, and the English that they read."""

from __future__ import annotations

from torch import nn


def gpt2(*, width: int, layers: int, context: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=128,
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        n_positions=context,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)
