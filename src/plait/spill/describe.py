"""A job's chain, its weights still to come, and the description of it that planners and schedulers read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from plait import deferred
from plait.block import Block
from plait.chain import Chain
from plait.compat import TorchDispatchMode, fake_parameters, storage_key, tree_leaves, tree_map
from plait.data import Batches, share
from plait.errors import UsageError
from plait.factory import Factory
from plait.job import Job
from plait.spill.description import BlockShape, Buffer, Description, Evaluations, Parameter
from plait.spill.update import learn_state
from plait.spill.views import name_of, span, type_of
from plait.tracing.graph import first_names
from plait.value import Value

_ROWS = 2
"""Of a batch on which a block is tried."""
_TRACKING = {torch.ops.aten.native_batch_norm.default: 5, torch.ops.aten.cudnn_batch_norm.default: 5}
"""Operations that change running statistics (arguments 3 and 4) without saying so, if this one is set."""


@dataclass(frozen=True)
class Traced:
    """A model without its weights, as a chain."""

    chain: Chain
    seed: int
    """Of what was drawn at random already: buffers and constants."""
    signature: str
    """Equal for jobs whose chains are equal but for what is drawn at random."""
    changes: dict[str, list[int]]
    """The blocks that change each buffer in training."""

    def fits(self, job: Job, signature: str) -> bool:
        """Whether another job can use this chain."""
        return self.signature == signature and (self.seed == job.seed or not self._has_constants)

    @property
    def _has_constants(self) -> bool:
        model = self.chain.model
        known = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        return any(name not in known for block in self.chain for name in block.state_names)


def signature(job: Job, batches: Batches) -> str:
    """What a chain depends on: the model's factory, the precision, and what the model is called with."""
    args, kwargs = job.build_objective().model_inputs(batches.fetch(range(min(2, len(batches.dataset)))))

    def described(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return f"tensor {name_of(leaf.dtype)} {tuple(leaf.shape)}"
        return repr(leaf)

    plain = cast(Factory, job.model).plain()
    return json.dumps([plain, job.precision, repr(tree_map(described, (args, kwargs)))], sort_keys=True)


def trace(job: Job, batches: Batches) -> Traced:
    """The chain of a job; parameters are on the meta device, buffers are there."""
    model = construct(job)
    with job.build_objective().autocast():
        chain = Chain.of_job(job, model=model)
    return Traced(chain, job.seed, signature(job, batches), _changed(chain))


def construct(job: Job) -> nn.Module:
    """The job's model without its weights, in the job's precision."""
    model = deferred.construct(job.make_model, seed=job.seed)
    return (model.double() if job.precision == "fp64" else model).train()


def describe(job: Job, traced: Traced, batches: Batches) -> Description:
    """What planning and scheduling must know of a job."""
    chain = traced.chain
    users: dict[str, list[int]] = {}
    for place, block in enumerate(chain):
        for name in block.state_names:
            users.setdefault(name, []).append(place)
    trained = [(name, p) for name, p in chain.named_parameters() if p.requires_grad]
    state = learn_state(job, trained)
    parts = min(job.accumulate, job.batch)
    plain = cast(Factory, job.model).plain()
    base = json.dumps([plain, job.precision, job.seed], sort_keys=True)
    return Description(
        job=job.name,
        digest=job.digest,
        base=hashlib.sha256(base.encode()).hexdigest(),
        blocks=tuple(
            BlockShape(
                name=block.name,
                reads=_made(block.reads, chain),
                writes=block.writes,
                kind=_kind(block, chain),
            )
            for block in chain
        ),
        parameters=tuple(
            Parameter(
                name=name,
                shape=tuple(p.shape),
                stride=_dense(name, p),
                dtype=name_of(p.dtype),
                trained=p.requires_grad,
                blocks=tuple(users.get(name, ())),
                state=state.entries.get(name, ()),
            )
            for name, p in chain.named_parameters()
        ),
        buffers=_buffers(traced, users),
        values=tuple(chain.values.values()),
        inputs=chain.inputs,
        outputs=tuple(name for name in chain.outputs if name is not None),
        micro_batches=tuple(len(share(job.batch, part, parts)) for part in range(parts)),
        steps=job.total_steps(batches.steps_per_epoch),
        clips=job.clip_norm is not None,
        skips=job.nonfinite == "skip",
        evaluation=_evaluations(job),
        aliases=_aliases(chain),
        eager=state.eager,
    )


def _aliases(chain: Chain) -> tuple[tuple[str, str], ...]:
    saved = set(chain.model.state_dict(keep_vars=True))
    return tuple((n, first) for n, first in first_names(chain.model).items() if n != first and n in saved)


def _made(names: Iterable[str], chain: Chain) -> tuple[str, ...]:
    """Without the model's inputs, which come from the data wherever they are needed."""
    return tuple(name for name in names if name not in chain.inputs)


def _dense(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, of a tensor without gaps."""
    if span(tensor.shape, tensor.stride()) != tensor.numel():
        raise UsageError(
            f"{name!r} of shape {tuple(tensor.shape)} has gaps: its strides are {tensor.stride()}",
            setting="model",
            works="tensor.contiguous()",
        )
    return tensor.stride()


def _evaluations(job: Job) -> Evaluations | None:
    if job.evaluation is None:
        return None
    batches = job.build_evaluation()
    return Evaluations(every=job.evaluation.every, rows=len(batches.dataset), batch=batches.batch)


def _buffers(traced: Traced, users: dict[str, list[int]]) -> tuple[Buffer, ...]:
    chain = traced.chain
    named = dict(chain.model.named_buffers())
    saved = set(chain.model.state_dict(keep_vars=True))
    aliases = {id(b): [] for b in named.values()}  # type: dict[int, list[str]]
    for name, buffer in chain.model.named_buffers(remove_duplicate=False):
        aliases[id(buffer)].append(name)
    return tuple(
        Buffer(
            name=name,
            shape=tuple(buffer.shape),
            stride=_dense(name, buffer),
            dtype=name_of(buffer.dtype),
            saved=any(alias in saved for alias in aliases[id(buffer)]),
            blocks=tuple(users.get(name, ())),
            changes=tuple(traced.changes.get(name, ())),
        )
        for name, buffer in named.items()
    )


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operations change."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                self._note(given)
        if args[_TRACKING[func]] if func in _TRACKING else False:
            self._note(args[3:5])
        return func(*args, **kwargs)

    def _note(self, given: Any) -> None:
        for leaf in tree_leaves(given):
            if isinstance(leaf, torch.Tensor):
                self.storages.add(storage_key(leaf))


def _changed(chain: Chain) -> dict[str, list[int]]:
    """The blocks that change each buffer in training, seen by running them on tensors without memory."""
    buffers = {name for name, _ in chain.model.named_buffers()}
    users = [(place, block) for place, block in enumerate(chain) if buffers.intersection(block.state_names)]
    found: dict[str, list[int]] = {}
    if not users:
        return found
    args, kwargs = chain.example(_ROWS)
    inputs = chain.start(*args, **kwargs)
    with fake_parameters(chain.model, torch.device("cpu")) as mode, torch.random.fork_rng(devices=[]):

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        for place, block in users:
            own = [name for name in block.state_names if name in buffers]
            try:
                state = {name: fake(block.state(name)) for name in block.state_names}
                with mode:
                    values = [
                        fake(inputs[name]) if name in inputs else _empty(chain.values[name])
                        for name in block.reads
                    ]
                    with _Writes() as writes:
                        block.train().call(values, state)
                own = [name for name in own if storage_key(state[name]) in writes.storages]
            except Exception:  # what cannot run without memory may change anything
                pass
            for name in own:
                found.setdefault(name, []).append(place)
    return found


def _empty(value: Value) -> torch.Tensor:
    return torch.empty(value.shape(_ROWS), dtype=type_of(value.dtype))


def _kind(block: Block, chain: Chain) -> str:
    """A hash of a block's program and the shapes of all that goes in."""
    tensors = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in map(block.state, block.state_names)]
    values = [chain.values[name] for name in block.reads if name in chain.values]
    shapes = [(v.dimensions, v.dtype, v.differentiable) for v in values]
    programs = [_program(step.training.run) for step in block.steps]
    unique = block.name if None in programs else ""
    return hashlib.sha256(repr((tensors, shapes, programs, unique)).encode()).hexdigest()[:16]


def _program(run: Any) -> str | None:
    """What a program does, whatever its names; None where that cannot be told."""
    graph = getattr(run, "graph", None)
    if graph is not None:
        order = {node: place for place, node in enumerate(graph.nodes)}

        def named(node: torch.fx.Node) -> str:
            return f"%{order[node]}"

        lines = []
        for node in graph.nodes:
            target = "" if node.op == "placeholder" else str(node.target)
            args = torch.fx.node.map_arg((node.args, node.kwargs), named)
            lines.append(f"{node.op} {target} {args}")
        return "\n".join(lines)
    modules = getattr(run, "modules", None)
    return None if modules is None else repr([(type(module), repr(module)) for module in modules])
