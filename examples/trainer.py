"""The Trainer of Hugging Face with gradients in 4 bits: a small GPT-2 learns English, letter by letter.

torchrun --nproc-per-node 2 examples/trainer.py
torchrun --nproc-per-node 2 examples/trainer.py --bits 32      # uncompressed, for comparison

All that plait adds is one line, the callback. ``pip install transformers accelerate`` brings the Trainer.
"""

import argparse
import gc
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from plait.compress.huggingface import CompressCallback
from plait.english import LETTERS, english

CONTEXT = 64


def gpt2() -> GPT2LMHeadModel:
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": LETTERS}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    model.loss_type = "ForCausalLM"  # or Hugging Face warns that this is what it falls back to
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bits", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    # Within one machine no compression pays, and it would not be used; on a network, leave `decline` out.
    compress = CompressCallback(bits=options.bits, decline=False)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, use_cpu=True, ddp_backend="gloo", max_steps=options.steps,
            per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=10, save_strategy="no",
            report_to="none", disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Trainer(
            model=gpt2(), args=arguments, train_dataset=english(seed=0, context=CONTEXT), callbacks=[compress]
        )
        trainer.train()
    if trainer.is_world_process_zero() and compress.attachment is not None:
        print(compress.attachment)
        print(compress.attachment.report(), flush=True)
    del trainer, compress  # what holds the group goes first
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()  # or gloo's threads may stumble over the interpreter's end


if __name__ == "__main__":
    main()
