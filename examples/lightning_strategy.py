"""Lightning with gradients in 4 bits: a character model learns English on two processes.

python examples/lightning_strategy.py
python examples/lightning_strategy.py --bits 32      # uncompressed, for comparison

All that plait adds is the strategy. ``pip install lightning`` brings Lightning.
"""

import argparse

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.compress.lightning import CompressedDDPStrategy
from plait.english import LETTERS, english

WIDTH = 128


class Letters(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, LETTERS)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        letters = batch["input_ids"]
        mixed, _ = self.mix(self.embed(letters[:, :-1]))
        loss = nn.functional.cross_entropy(self.head(mixed).flatten(0, 1), letters[:, 1:].flatten())
        self.log("bits", self.trainer.strategy.attachment.report().mean_bits)  # sent for a number, of 32
        if index % 10 == 0:
            self.print(f"step {index:2}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bits", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        # Within one machine no compression pays, and it would not be used; on a network, leave `decline` out.
        strategy=CompressedDDPStrategy(bits=options.bits, decline=False),
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Letters(), torch.utils.data.DataLoader(english(seed=0), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print(trainer.strategy.attachment)
        print(trainer.strategy.attachment.report(), flush=True)
    dist.destroy_process_group()  # or gloo's threads may stumble over the interpreter's end


if __name__ == "__main__":
    main()
