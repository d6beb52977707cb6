"""A model as a chain of blocks: what every strand of plait reads.

A block takes named values and gives named values; run in order, the blocks do what the model does, bit
for bit, forward and backward. Values may skip blocks (a residual across a cut, a mask, labels), so what
crosses the cut before a block is all that is alive there: ``chain.live(i)``. The chain shares its
parameters with the model it came from, under the model's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait import deferred
from plait.block import Block, Layout
from plait.doing import say
from plait.errors import FileError, TraceError, UsageError
from plait.tracing.export import at_batch, batch_of
from plait.tracing.graph import first_names
from plait.tracing.model import of_model
from plait.tracing.modules import is_plain, of_blocks, of_sequential
from plait.units import parse_whole

if TYPE_CHECKING:
    from plait.data import Batches
    from plait.job import Job


class Chain:
    """A model cut into blocks. Made by ``Chain.trace`` or ``Chain.of``."""

    def __init__(self, layout: Layout) -> None:
        if not layout.blocks:
            raise UsageError(
                "a chain needs at least one block", setting="blocks", works="Chain.of([nn.Linear(4, 4)])"
            )
        self.model = layout.model
        self.blocks = layout.blocks
        self.inputs = layout.inputs
        """Names of the values that the model's inputs become."""
        self.outputs = layout.outputs
        """Names of the values that make up the model's output; None stands for a constant."""
        self.values = layout.values
        """What is known of each value that crosses a cut; empty for ``Chain.of`` without example inputs."""
        self._layout = layout
        self._live = [self._alive_before(place) for place in range(len(self) + 1)]

    # --- making one ---------------------------------------------------------------------------------

    @classmethod
    def trace(
        cls, model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None
    ) -> Chain:
        """Turn any model into a chain.

        ``example_inputs`` is a tensor, a tuple of positional inputs, or a dict of keyword inputs, with
        the batch in the first dimension; ``example_kwargs`` are keyword inputs beside positional ones.
        `nn.Sequential` is taken apart directly; everything else is recorded by `torch.export` in training
        and in evaluation mode.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"the model is a {type(model).__name__}, not an nn.Module",
                setting="model",
                works="an nn.Module whose forward does the work",
            )
        args, kwargs = _example(example_inputs, example_kwargs)
        batch_of(args, kwargs)
        layout = None
        with _outside_inference():
            if is_plain(model) and not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
                layout = of_sequential(model, args)
            return cls(layout or of_model(model, args, kwargs)).train(model.training)

    @classmethod
    def of(cls, blocks: Iterable[nn.Module], example_inputs: Any = None) -> Chain:
        """A chain of the blocks as they are, each called with what the one before returned.

        A block that takes or returns several tensors, and sizes in bytes, need ``example_inputs``.
        Names of parameters are those of ``nn.Sequential(*blocks)``.
        """
        modules = list(blocks)
        for place, module in enumerate(modules):
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"block {place} is a {type(module).__name__}, not an nn.Module",
                    setting="blocks",
                    works="nn.ReLU()",
                )
        if not modules:
            raise UsageError(
                "a chain needs at least one block", setting="blocks", works="Chain.of([nn.Linear(4, 4)])"
            )
        args, kwargs = (None, {}) if example_inputs is None else _example(example_inputs, None)
        if kwargs:
            raise UsageError(
                f"a list of blocks takes no keyword inputs, and the example has {sorted(kwargs)}",
                setting="example_inputs",
                works="a tensor, or a tuple of tensors",
            )
        with _outside_inference():
            layout = of_blocks(modules, args)
        return cls(layout).train(layout.model.training)

    @classmethod
    def of_job(cls, job: Job, *, model: nn.Module | None = None, batches: Batches | None = None) -> Chain:
        """The chain of a job's model, traced with rows of its own data.

        Without ``model`` the parameters are on the meta device: a job whose model is larger than memory can
        be cut before it exists, and ``create`` makes its blocks one at a time.
        """
        if model is None:
            say("building the model")
            model = deferred.construct(job.make_model, seed=job.seed)
            model = (model.double() if job.precision == "fp64" else model).train()
        batches = job.build_batches() if batches is None else batches
        args, kwargs = job.build_objective().model_inputs(batches.fetch(range(min(2, len(batches.dataset)))))
        say("tracing the model")
        return cls.trace(model, args, kwargs)

    def cut(self, at: Sequence[int], *, carry: bool = False) -> Chain:
        """A chain of fewer blocks: the present ones joined between the cuts.

        ``at`` lists the blocks that begin a new one (without block 0). With ``carry`` each block takes all
        that is alive before it and gives all that is alive after it, so that one's output is exactly the
        next one's input, as the stages of a pipeline need.
        """
        works = str([len(self) // 2] if len(self) > 1 else [])
        given = list(at) if isinstance(at, Iterable) else [None]
        if not all(_is_whole(place) for place in given):
            raise UsageError(f"cuts {at!r} are no list of whole numbers", setting="at", works=works)
        places = sorted(set(given))
        if given != places or (places and (places[0] < 1 or places[-1] >= len(self))):
            raise UsageError(f"cuts {given} do not rise from 1 to {len(self) - 1}", setting="at", works=works)
        edges = [0, *places, len(self)]
        joined = tuple(self._join(first, end, carry) for first, end in pairwise(edges))
        return Chain(replace(self._layout, blocks=joined))

    def _join(self, first: int, end: int, carry: bool) -> Block:
        parts = self.blocks[first:end]
        steps = [step for part in parts for step in part.steps]
        alive = self.live(end)
        if carry:
            reads, writes = list(self.live(first)), list(alive)
        else:
            reads, writes = [], []
            for step in steps:
                reads += [name for name in step.reads if name not in reads and name not in writes]
                writes += step.writes
            writes = [name for name in writes if name in alive]
        name = parts[0].name if len(parts) == 1 else f"{parts[0].name}..{parts[-1].name}"
        block = Block(name, steps, reads, writes, self._layout.state)
        block.train(parts[0].training)
        return block

    # --- reading it ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def __getitem__(self, place: int) -> Block:
        return self.blocks[place]

    def live(self, place: int) -> tuple[str, ...]:
        """Names of the values that cross the cut before block ``place``: made before it, needed from it on.

        ``live(0)`` are the inputs that are used, ``live(len(chain))`` the outputs.
        """
        if not _is_whole(place) or not 0 <= place <= len(self):
            raise UsageError(
                f"there is no cut before block {place!r} in a chain of {len(self)} blocks",
                setting="place",
                works=f"0 to {len(self)}",
            )
        return self._live[place]

    def _alive_before(self, place: int) -> tuple[str, ...]:
        needed = {name for name in self.outputs if name is not None}
        for block in reversed(self.blocks[place:]):
            needed = (needed - set(block.writes)) | set(block.reads)
        made = [*self.inputs, *(name for block in self.blocks[:place] for name in block.writes)]
        return tuple(name for name in dict.fromkeys(made) if name in needed)

    def cut_bytes(self, batch: int) -> tuple[int, ...]:
        """Bytes that cross each inner cut at a batch size: entry i lies before block i + 1."""
        _check_batch(batch)
        if not self.values:
            raise UsageError(
                "sizes are not known without example inputs",
                setting="example_inputs",
                works="Chain.of(blocks, x)",
            )
        return tuple(sum(self.values[n].nbytes(batch) for n in self.live(i)) for i in range(1, len(self)))

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several blocks use, by name, with the places of those blocks."""
        users: dict[str, list[int]] = {}
        for place, block in enumerate(self.blocks):
            for name in block.state_names:
                if isinstance(block.state(name), nn.Parameter):
                    users.setdefault(name, []).append(place)
        return {name: tuple(places) for name, places in users.items() if len(places) > 1}

    def example(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example inputs at a batch size, positional and keyword."""
        _check_batch(batch)
        if self._layout.example is None:
            raise UsageError(
                "this chain has no example inputs", setting="example_inputs", works="Chain.of(blocks, x)"
            )
        return at_batch(*self._layout.example, batch)

    # --- running it ---------------------------------------------------------------------------------

    def start(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The values that the inputs become."""
        return dict(zip(self.inputs, self._layout.unpack(args, kwargs), strict=True))

    def finish(self, values: Mapping[str, Any]) -> Any:
        """The model's output, in its own structure, from the values of the last blocks."""
        return self._layout.pack([None if name is None else values[name] for name in self.outputs])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks; the same as calling the model."""
        values = self.start(*args, **kwargs)
        for place, block in enumerate(self.blocks):
            given = block(*(values[name] for name in block.reads))
            values.update(zip(block.writes, given, strict=True))
            values = {name: values[name] for name in self.live(place + 1)}
        return self.finish(values)

    # --- parameters and modes, as on a module -------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters, each once."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters by name, tied ones by their first name."""
        return self.model.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The model's own state."""
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the model, or of another chain of it."""
        self.model.load_state_dict(state)

    def train(self, mode: bool = True) -> Chain:
        """Switch dropout, BatchNorm and the like to training, or to evaluation.

        Modules that were in evaluation when a training model was traced stay there.
        """
        self.model.train(mode)
        for module in self._layout.frozen:
            module.training = False
        for block in self.blocks:
            block.train(mode)
        return self

    def eval(self) -> Chain:
        """Switch to evaluation."""
        return self.train(False)

    # --- a model that does not exist yet ------------------------------------------------------------

    def create(self, place: int, *, seed: int, device: torch.device | str = "cpu") -> None:
        """Create the parameters of one block that are on the meta device, from (seed, their names).

        A tied weight then exists for every block that uses it.
        """
        block, seed = self._block(place), parse_whole(seed, setting="seed", least=0)
        names = [n for n in block.state_names if block.state(n).is_meta]
        made = deferred.create(self.model, names, seed=seed, device=device) if names else {}
        self._layout.state.fill(block.state_names, made, device)

    def load(self, place: int, path: str | Path, *, device: torch.device | str = "cpu") -> None:
        """Read the parameters and buffers of one block from a safetensors file, or a folder with an index."""
        from plait.weights import read

        aliases: dict[str, list[str]] = {}
        for name, first in first_names(self.model).items():
            aliases.setdefault(first, []).append(name)
        state, wanted = self._layout.state, self._block(place).state_names
        found = read(path, [n for n in wanted if state.is_saved(n)], aliases=aliases, device=str(device))
        for name, tensor in found.items():
            if tensor.shape != state[name].shape:
                raise FileError(
                    f"{path} has {name!r} with shape {tuple(tensor.shape)}, and the model wants "
                    f"{tuple(state[name].shape)}",
                    setting="weights",
                    works="weights of the same configuration",
                )
        state.fill(wanted, found, device)
        lost = next((name for name in wanted if state[name].is_meta), None)
        if lost is not None:
            raise TraceError(
                f"buffer {lost!r} was lost when the model was built on the meta device, and no file has it",
                setting="model",
                works="build it with plait.deferred.construct(factory), which keeps buffers",
            )

    def release(self, place: int) -> None:
        """Put the parameters of one block back on the meta device, for every block that uses them."""
        self._layout.state.release(self._block(place).state_names)

    def _block(self, place: int) -> Block:
        if not _is_whole(place) or not 0 <= place < len(self):
            raise UsageError(
                f"there is no block {place!r} in a chain of {len(self)} blocks",
                setting="place",
                works=f"0 to {len(self) - 1}",
            )
        return self[place]


def _outside_inference() -> AbstractContextManager[Any]:
    """What is recorded holds for training too; inference mode left, gradients are on."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_batch(batch: int) -> None:
    if not _is_whole(batch) or batch < 1:
        raise UsageError(f"a batch of {batch!r} is no whole number of 1 or more", setting="batch", works="1")


def _example(inputs: Any, keywords: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(keywords or {})}
    positional = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return positional, dict(keywords or {})
