"""A small convolutional net with BatchNorm that learns to read digits, which are drawn on the fly.

    python examples/digits.py

The digits are those of a pocket calculator, shifted at random and covered with noise. Each sample depends
on the seed and its own number alone, as plait asks of every data set.
"""

from functools import partial

import torch
from torch import Tensor, nn

from plait import losses
from plait.determinism import derive
from plait.job import Evaluation, Job

# The bars of each digit: a top, b and c right, d bottom, e and f left, g middle.
BARS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcfgd"]
PLACES = {
    "a": (0, slice(0, 5)),
    "b": (slice(0, 5), 4),
    "c": (slice(4, 9), 4),
    "d": (8, slice(0, 5)),
    "e": (slice(4, 9), 0),
    "f": (slice(0, 5), 0),
    "g": (4, slice(0, 5)),
}


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, seed: int, count: int, noise: float) -> None:
        self.seed, self.count, self.noise = seed, count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        own = torch.Generator().manual_seed(derive(self.seed, "digit", index))
        digit = int(torch.randint(10, (), generator=own))
        top, left = torch.randint(0, 4, (2,), generator=own).tolist()
        image = torch.randn(1, 12, 12, generator=own) * self.noise
        for bar in BARS[digit]:
            image[0, top : top + 9, left : left + 5][PLACES[bar]] += 1.0
        return image, digit


def digits(seed: int, *, count: int = 2000, noise: float = 0.3, held_out: bool = False) -> Digits:
    return Digits(seed + 1 if held_out else seed, count, noise)


def convnet(*, width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 9, 10),
    )  # fmt: skip


job = Job(
    name="digits",
    model=convnet,
    data=digits,
    loss=losses.cross_entropy,
    optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    batch=32,
    epochs=1,
    evaluation=Evaluation(
        data=partial(digits, count=500, held_out=True), metrics={"accuracy": losses.accuracy}
    ),
)


if __name__ == "__main__":
    from plait import reference

    result = reference.train(job, on_step=lambda step: print(f"step {step.step:2}  loss {step.loss:.3f}"))
    print(f"accuracy {result.evaluations[-1].metrics['accuracy']:.3f} after {result.seconds:.1f} s")
