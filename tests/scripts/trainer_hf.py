"""A training script as people write them: the Trainer of Hugging Face, and nothing of plait."""

import atexit
import hashlib
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = (torch.arange(16) * (i % 3 + 1) + i) % 61
        return {"input_ids": ids, "labels": ids}


set_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=62, eos_token_id=63,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
)  # fmt: skip
arguments = TrainingArguments(
    output_dir=sys.argv[1], use_cpu=True, ddp_backend="gloo", max_steps=12, per_device_train_batch_size=4,
    learning_rate=3e-3, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Text())
trainer.train()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()))
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"result {arguments.process_index} {losses[-1]:.6f} {digest.hexdigest()}\n", end="", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
if multiprocessing.parent_process() is None:
    # All that the end of a script does, but the interpreter is not taken apart: threads of gloo's that are
    # still there may abort it then, whoever trains (pytorch/pytorch#179291).
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)
