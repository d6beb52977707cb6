"""The Trainer of Hugging Face with the callback: compressed, logged, resumed to the bit, or refused."""

import hashlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.errors import UsageError
from plait.extras import install

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason=f"the Trainer is missing: {install('hf')}"
)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "PLAIT_COMPRESS": "off"}


class Text:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        import torch

        ids = (torch.arange(16) * (i % 3 + 1) + i) % 61
        return {"input_ids": ids, "labels": ids}


def trainer(directory, *callbacks, **more):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=62, eos_token_id=63,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    usual = {"max_steps": 8, "per_device_train_batch_size": 4, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=directory, use_cpu=True, ddp_backend="gloo", learning_rate=3e-3, logging_steps=1,
        report_to="none", disable_tqdm=True, **{**usual, **more},
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    return Trainer(model=model, args=arguments, train_dataset=Text(), callbacks=list(callbacks))


def losses(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def digest(trained):
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in trained.model.parameters())
    return hashlib.sha256(content).hexdigest()


def compressed(directory):
    from transformers import TrainerCallback

    from plait.compress.huggingface import CompressCallback

    class Sink(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_log(self, args, state, control, logs, **others):
            self.seen.append(dict(logs))

    plain = trainer(directory)
    plain.train()
    callback, before, after = CompressCallback(bits=4, decline=False), Sink(), Sink()
    ours = trainer(directory, before, callback)
    ours.add_callback(after)
    ours.train()
    facts = {
        "plain": losses(plain),
        "ours": losses(ours),
        "digests": (digest(plain), digest(ours)),
        "report": callback.attachment.report(),
        "log": list(ours.state.log_history),
        "seen": (list(before.seen), list(after.seen)),
    }
    attached = callback.attachment
    ours.callback_handler.callbacks.insert(0, ours.pop_callback(callback))
    before.seen.clear()
    ours.train()
    kept = callback.attachment is attached and attached.report().steps == 16
    return facts | {"kept": kept, "seen first": list(before.seen)}


def resumed(directory):
    """The digests of a whole run, of one that goes on from its middle, and of one that lacks our file."""
    import torch.distributed as dist

    from plait.compress.huggingface import STATE, CompressCallback

    def run(resume=None):
        callback = CompressCallback(bits=2, decline=False)
        one = trainer(directory, callback, save_strategy="steps", save_steps=4)
        one.train(resume_from_checkpoint=resume)
        return digest(one), callback.attachment.report().steps

    checkpoint = Path(directory) / "checkpoint-4"
    whole, again = run(), run(str(checkpoint))
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoint / STATE).unlink()
    dist.barrier()
    return whole, again, run(str(checkpoint))


def both(directory):
    """In the same processes, since most of the time goes into importing the Trainer."""
    return compressed(directory), resumed(directory)


def test_the_trainer_sends_fewer_bits_and_resumes_with_the_same(ranks, tmp_path):
    found = ranks(2, both, str(tmp_path), group=False, environment=TORCHRUN)
    check_compressed([facts for facts, _ in found])
    for _, (whole, again, forgetful) in found:
        assert again == whole == (whole[0], 8)
        assert forgetful[0] != whole[0], "error feedback of the first half made no difference"
        assert forgetful[1] == 4


def check_compressed(found):
    for facts in found:
        assert facts["ours"] == pytest.approx(facts["plain"], rel=0.02)
        assert facts["ours"][-1] < 0.9 * facts["ours"][0]
        total = facts["report"].total
        assert facts["report"].steps == 8
        assert 6 < total.plain_bytes / total.sent_bytes < 7.2
        entry = facts["log"][7]
        assert entry["compress_sent_bytes"] == total.sent_bytes
        assert entry["compress_plain_bytes"] == total.plain_bytes
        assert entry["compress_bits"] == pytest.approx(32 / total.ratio, abs=1e-3)
        assert [each["compress_sent_bytes"] for each in facts["log"]][:8] == [
            total.sent_bytes * step // 8 for step in range(1, 9)
        ]
        early, late = facts["seen"]
        assert not any("compress_bits" in logs for logs in early), "what comes before does not see it"
        assert all("compress_bits" in logs for logs in late)
        assert all("compress_bits" in logs for logs in facts["seen first"])
        assert facts["kept"], "another run of the Trainer goes on with what is attached"
    assert found[0]["digests"] == found[1]["digests"], "the ranks' parameters differ"
    plain, ours = found[0]["digests"]
    assert plain != ours, "nothing was rounded"


def a_step_of(workers):
    """What the Trainer tells a callback of a step in which no DistributedDataParallel runs."""
    from torch import nn
    from transformers import TrainerControl, TrainerState

    from plait.compress.huggingface import CompressCallback

    callback, model = CompressCallback(bits=4), nn.Linear(4, 4)
    given = SimpleNamespace(world_size=workers, output_dir="."), TrainerState(), TrainerControl()
    callback.on_train_begin(*given, model=model)
    model(model.weight)
    callback.on_step_end(*given)
    return callback


def test_a_process_that_is_alone_has_nothing_to_compress():
    assert a_step_of(1).attachment is None


def test_a_step_that_exchanges_nothing_is_refused():
    from torch.nn.modules import module as modules

    with pytest.raises(UsageError, match="2 workers have trained a step without DistributedDataParallel"):
        a_step_of(2)
    assert not modules._global_forward_pre_hooks, "it goes on waiting"


def sharded(directory):
    """What the Trainer tells callbacks of a model in FSDP2, for which it wants a GPU itself."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import TrainerControl, TrainerState

    from plait.compress.huggingface import CompressCallback

    first, folder = dist.get_rank() == 0, Path(directory) / "checkpoint-1"
    folder.mkdir(exist_ok=True)
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), mesh=mesh)
    arguments = SimpleNamespace(world_size=2, output_dir=directory, save_only_model=False, should_save=first)
    given = arguments, TrainerState(), TrainerControl()
    callback = CompressCallback(bits=4, decline=False)
    callback.on_train_begin(*given, model=model)
    model(torch.randn(8, 64)).square().mean().backward()
    given[1].global_step = 1
    callback.on_step_end(*given)
    logs = {"loss": 1.0}
    given[1].log_history.append({"loss": 1.0, "step": 1})
    callback.on_log(*given, logs=logs)
    callback.on_save(*given)
    dist.barrier()
    callback.attachment.detach()
    resumed = CompressCallback(bits=4, decline=False)
    resumed.on_train_begin(*given, model=model)
    return logs, given[1].log_history, callback.attachment.report().steps, resumed.attachment.report().steps


def test_a_sharded_model_is_attached_as_it_is(ranks, tmp_path):
    for logs, (logged,), steps, again in ranks(2, sharded, str(tmp_path)):
        assert logs["compress_sent_bytes"] < logs["compress_plain_bytes"] / 5
        assert logged == {**logs, "step": 1}
        assert steps == again == 1


def test_what_cannot_be_asked_for_is_refused_before_training():
    from plait.compress.huggingface import CompressCallback

    with pytest.raises(UsageError, match="9"):
        CompressCallback(bits=9)
    with pytest.raises(UsageError, match=r"no 'bit'.*works: bits"):
        CompressCallback(bit=4)
