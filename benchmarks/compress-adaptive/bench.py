"""How many bytes bits chosen layer by layer save at equal error, on the gradients of real training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.bench import Bench
from plait.compress.adapt import Adaptation, Tuner
from plait.compress.allocation import Allocation, allocate
from plait.compress.codec import Exact, Quantizer
from plait.compress.kmeans import kmeans_allocate
from plait.compress.observation import WIDTHS, LayerError, measure
from plait.compress.rounding import stream_key
from plait.english import LETTERS, english

BUCKET = 1024
CONTEXT = 64
REFERENCE = 4
LAYERS = 300
Gradients = Mapping[str, Tensor]
Batches = Iterator[tuple[Tensor, Tensor]]


class GPT(nn.Module):
    """Reads characters and guesses the next one."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.letters(text) + self.places(torch.arange(length))
        return self.head(self.norm(self.blocks(states, mask=mask, is_causal=True))).transpose(1, 2)


def text(batch: int, seed: int) -> Batches:
    data, order = english(seed, context=CONTEXT + 1), torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(data), (batch,), generator=order).tolist()
        windows = torch.stack([data[row]["input_ids"] for row in rows])
        yield windows[:, :-1], windows[:, 1:]


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*stage(inside, outside, stride), nn.ReLU())
        self.second = nn.Sequential(*stage(outside, outside, 1))
        self.pass_on = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + self.pass_on(x))


def stage(inside: int, outside: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outside)]


def convnet(width: int) -> nn.Module:
    """A residual net with two blocks at each of three widths."""
    blocks: list[nn.Module] = [*stage(1, width, 1), nn.ReLU()]
    inside = width
    for outside in (width, 2 * width, 4 * width):
        blocks += [Residual(inside, outside, outside // inside), Residual(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


def digits(batch: int, seed: int) -> Batches:
    from sklearn.datasets import load_digits

    data, order = load_digits(), torch.Generator().manual_seed(seed)
    images, labels = torch.tensor(data.images).float()[:, None] / 16, torch.tensor(data.target)
    while True:
        rows = torch.randint(len(images), (batch,), generator=order)
        yield images[rows], labels[rows]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model's training."""

    model: nn.Module
    batches: Batches
    optimizer: torch.optim.Optimizer


def gpt_run(seed: int) -> Run:
    model = GPT(width=256, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model=model, batches=text(16, seed), optimizer=optimizer)


def convnet_run(seed: int) -> Run:
    model = convnet(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Run(model=model, batches=digits(64, seed), optimizer=optimizer)


def training(run: Run, steps: int) -> Iterator[tuple[int, Gradients]]:
    """Every step's gradients that are worth compressing: those of matrices, not of norms and biases."""
    for step in range(steps):
        inputs, targets = next(run.batches)
        run.optimizer.zero_grad()
        functional.cross_entropy(run.model(inputs), targets).backward()
        yield (
            step,
            {
                name: parameter.grad
                for name, parameter in run.model.named_parameters()
                if parameter.grad is not None and parameter.ndim > 1 and parameter.numel() > BUCKET
            },
        )
        run.optimizer.step()


def observe(gradients: Gradients) -> list[LayerError]:
    return [measure(gradient, name=name, bucket=BUCKET) for name, gradient in gradients.items()]


class Sent(NamedTuple):
    """What the codec really makes of gradients."""

    count_bytes: int
    squared_error: float


def send(gradients: Gradients, bits: Mapping[str, int | None], step: int) -> Sent:
    count_bytes, squared_error = 0, 0.0
    for name, gradient in gradients.items():
        width = bits[name]
        codec = Exact() if width is None else Quantizer(bits=width, bucket=BUCKET)
        payload = torch.empty(codec.payload_bytes(gradient.numel()), dtype=torch.uint8)
        lost = torch.empty(gradient.numel())
        key = stream_key(step=step, parameter=name)
        codec.compress(gradient.contiguous(), payload, key=key, residual=lost)
        count_bytes += payload.numel()
        squared_error += float(lost.double().square().sum())
    return Sent(count_bytes, squared_error)


Choose = Callable[[Sequence[LayerError], float], Allocation]


def matched(
    gradients: Gradients, layers: Sequence[LayerError], choose: Choose, step: int, most: float
) -> Sent:
    """What ``choose`` sends where it is held to an error of ``most``, as measured and not as predicted."""
    alpha = 1.0
    while True:
        sent = send(gradients, choose(layers, alpha).bits, step)
        if sent.squared_error <= most:
            return sent
        alpha *= 0.999 * most / sent.squared_error


def compare(bench: Bench, name: str, run: Run) -> None:
    """Train, and at every few steps send the gradients in each of the ways."""
    steps = bench.pick(quick=48, full=200)
    tuner = Tuner(Adaptation(warmup_steps=8, every_steps=8, observe_steps=3))
    bench.configure(steps=steps, tuner=asdict(tuner.config))
    sides: dict[str, list[Sent]] = {}
    for step, gradients in training(run, steps):
        in_force = tuner.plan
        if tuner.observes(step):
            tuner.observe(observe(gradients))
        tuner.decide(step)
        if in_force is None or step % 5:
            continue
        layers = observe(gradients)
        for bits in (3, REFERENCE, 5):
            uniform = send(gradients, dict.fromkeys(gradients, bits), step)
            best = partial(allocate, reference_bits=bits)
            auto = matched(gradients, layers, best, step, uniform.squared_error)
            sides.setdefault(f"uniform {bits}", []).append(uniform)
            sides.setdefault(f"auto {bits}", []).append(auto)
        most = sides[f"uniform {REFERENCE}"][-1].squared_error
        sides.setdefault("k-means", []).append(matched(gradients, layers, kmeans_allocate, step, most))
        sides.setdefault("run", []).append(send(gradients, in_force.bits, step))
    report(bench, name, {side: Sent(*map(sum, zip(*sent, strict=True))) for side, sent in sides.items()})
    changes = sum(decision.changed for decision in tuner.log.decisions)
    bench.case(f"{name}: changes of bits in the run", changes, unit="times", better="higher")


def report(bench: Bench, name: str, total: Mapping[str, Sent]) -> None:
    uniform, auto, run = total[f"uniform {REFERENCE}"], total[f"auto {REFERENCE}"], total["run"]
    against = (f"{REFERENCE} bits everywhere", uniform.count_bytes / 1e6)
    size, unit = auto.count_bytes / 1e6, "MB"
    bench.case(f"{name}, bytes", size, against=against, at_least=1.15, unit=unit, better="lower")
    peer = ("k-means", total["k-means"].count_bytes / 1e6)
    bench.case(f"{name}, against k-means", size, against=peer, at_least=1.0, unit=unit, better="lower")
    for bits in (3, 5):
        other = (f"{bits} bits everywhere", total[f"uniform {bits}"].count_bytes / 1e6)
        size = total[f"auto {bits}"].count_bytes / 1e6
        bench.case(f"{name}, against {bits} bits", size, against=other, unit=unit, better="lower")
    size = run.count_bytes / 1e6
    bench.case(f"{name}, as a run decides", size, against=against, at_least=1.15, unit=unit, better="lower")
    errors = (against[0], uniform.squared_error)
    for side, sent in (("", auto), (", as a run decides", run)):
        error = sent.squared_error
        bench.case(
            f"{name}, error{side}", error, against=errors, at_least=1.0, unit="squares", better="lower"
        )


def choosing(bench: Bench) -> None:
    """How long choosing takes, on hundreds of layers of many sizes and magnitudes."""
    rng = np.random.default_rng(bench.seed)
    sizes = (2 ** rng.integers(6, 12, LAYERS) * 2 ** rng.integers(6, 10, LAYERS)).tolist()
    scales = np.exp(rng.normal(0, 1.5, LAYERS)).tolist()
    layers = [
        LayerError(
            name=str(place),
            count=size,
            widths=WIDTHS,
            squared_error=tuple(size * scale / (2**bits - 1) ** 2 for bits in WIDTHS),
            payload_bytes=tuple(Quantizer(bits=bits).payload_bytes(size) for bits in WIDTHS),
            exact_bytes=Exact().payload_bytes(size),
            squared_norm=size * scale,
        )
        for place, (size, scale) in enumerate(zip(sizes, scales, strict=True))
    ]
    gradient = torch.randn(2**20, generator=torch.Generator().manual_seed(bench.seed))
    chosen, measured = bench.interleave(
        {"choose": lambda: allocate(layers), "measure": lambda: measure(gradient, name="layer")},
        repetitions=bench.pick(quick=5, full=21),
        retries=2,
    )
    bench.case(f"choosing for {LAYERS} layers", chosen.scaled(1e3), at_most=100, unit="ms")
    gap = allocate(layers).gap
    bench.case("cost above the optimum, at most", 100 * (gap or 0.0), at_most=0.1, unit="%", better="lower")
    bench.case("measuring a layer of 1 Mi elements", measured.scaled(1e3), unit="ms")


def run(bench: Bench) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(bench.seed)
    bench.configure(bucket=BUCKET, reference_bits=REFERENCE, alpha=1.0, layers=LAYERS, threads=1)
    choosing(bench)
    compare(bench, "GPT", gpt_run(bench.seed))
    try:
        import sklearn  # noqa: F401
    except ImportError:
        bench.skip("convnet", "scikit-learn, which has the digits, is not installed")
    else:
        compare(bench, "convnet", convnet_run(bench.seed))
