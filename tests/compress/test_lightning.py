"""Lightning with the strategy: compressed, resumed to the bit, and refused where it cannot be."""

import hashlib
import importlib.util
from pathlib import Path

import pytest

from plait.errors import UsageError
from plait.extras import install

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason=f"Lightning is missing: {install('lightning')}"
)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "PLAIT_COMPRESS": "off"}


def network():
    import lightning
    import torch
    from torch import nn

    class Network(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
            self.spare = nn.Linear(64, 64)  # which no step uses
            self.losses = []

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

        def digest(self):
            content = b"".join(parameter.detach().numpy().tobytes() for parameter in self.parameters())
            return hashlib.sha256(content).hexdigest()

    lightning.seed_everything(0, verbose=False)
    return Network()


def fit(strategy, *, epochs=1, callbacks=(), resume=None):
    import lightning
    import torch

    model = network()
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :8].argmax(1))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, callbacks=list(callbacks),
        logger=False, enable_checkpointing=bool(callbacks), enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    trainer.fit(model, loader, ckpt_path=resume)
    return model, trainer


def compressed():
    from lightning.pytorch.strategies import DDPStrategy

    from plait.compress.lightning import CompressedDDPStrategy

    plain, _ = fit(DDPStrategy(find_unused_parameters=True))
    strategy = CompressedDDPStrategy(bits=4, decline=False, find_unused_parameters=True)
    ours, _ = fit(strategy)
    return (plain.losses, plain.digest()), (ours.losses, ours.digest()), strategy.attachment.report()


def check_compressed(found):
    for (plainly, _), (losses, _), report in found:
        assert losses == pytest.approx(plainly, rel=0.05)
        assert losses[-1] < 0.95 * losses[0]
        assert report.steps == len(losses) == 8
        assert 5.5 < report.total.plain_bytes / report.total.sent_bytes < 7.2
        assert sorted(set(report.bits.values())) == [4, 32]
    (_, plain), (_, ours), _ = found[0]
    assert [ours, plain] == [found[1][1][1], found[1][0][1]], "the ranks' parameters differ"
    assert ours != plain, "nothing was rounded"


def resumed(directory):
    """The digests of two epochs, of the second one resumed, and of one that lacks our part of the state."""
    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import ModelCheckpoint

    from plait.compress.lightning import STATE, CompressedDDPStrategy

    def run(name, resume=None):
        strategy = CompressedDDPStrategy(bits=2, decline=False, find_unused_parameters=True)
        saver = ModelCheckpoint(Path(directory) / name, filename="{epoch}", save_top_k=-1)
        model, trainer = fit(strategy, epochs=2, callbacks=[saver], resume=resume)
        trainer.save_checkpoint(Path(directory) / name / "weights.ckpt", weights_only=True)
        return model.digest(), strategy.attachment.report().steps

    whole = run("whole")
    first = Path(directory) / "whole" / "epoch=0.ckpt"
    again = run("again", first)
    cut = Path(directory) / "cut.ckpt"
    if dist.get_rank() == 0:
        state = torch.load(first, weights_only=True)
        del state[STATE]
        torch.save(state, cut)
    dist.barrier()
    weights = torch.load(Path(directory) / "whole" / "weights.ckpt", weights_only=True)
    return whole, again, run("cut", cut), STATE in weights


def both(directory):
    """In the same processes, since most of the time goes into importing Lightning."""
    return compressed(), resumed(directory)


def test_lightning_sends_fewer_bits_and_resumes_with_the_same(ranks, tmp_path):
    found = ranks(2, both, str(tmp_path), group=False, environment=TORCHRUN)
    check_compressed([outcome for outcome, _ in found])
    for _, (whole, again, forgetful, in_weights) in found:
        assert again == whole == (whole[0], 16)
        assert forgetful[0] != whole[0], "error feedback of the first epoch made no difference"
        assert forgetful[1] == 8
        assert not in_weights, "a checkpoint of weights alone has nothing to resume"


def test_what_cannot_be_asked_for_is_refused_before_training():
    from plait.compress.lightning import CompressedDDPStrategy

    with pytest.raises(UsageError, match="9"):
        CompressedDDPStrategy(bits=9)
    with pytest.raises(UsageError, match=r"no 'find_unused'.*works:"):
        CompressedDDPStrategy(bits=4, find_unused=True)
    with pytest.raises(UsageError, match="ddp_comm_hook"):
        CompressedDDPStrategy(bits=4, ddp_comm_hook=print)
