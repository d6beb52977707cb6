"""A parameter group of FSDP2: which parameters it sends together, how they lie in its buffers, with whom.

``fully_shard`` makes one such group of each module it is given. The group cuts every parameter into as many
equal parts as there are workers, along its first dimension (or another, if told to), the last parts filled
up with zeros. Its buffers for communication are, for three parameters a, b, c and two workers::

    all-gather output, reduce-scatter input   | a[0] | b[0] | c[0] | a[1] | b[1] | c[1] |
    all-gather input, reduce-scatter output   | a[i] | b[i] | c[i] |        on worker i

The reduce-scatter leaves out parameters that have no gradient, so which ones it holds is read anew in each
backward pass.

Torch has public ways to replace a group's all-gather and reduce-scatter, and none to ask for the rest: this
file uses private names of ``torch.distributed.fsdp``, as they are in torch 2.13.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from plait.compress.agreement import agree
from plait.compress.codec import Codec
from plait.compress.layout import Piece
from plait.compress.rules import Parameter, plain_name
from plait.errors import UsageError, WorkerError

Exchange = Literal["scatter", "gather", "reduce"]
"""The reduce-scatter of gradients, the all-gather of weights, the all-reduce among replicas."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What can be compressed."""


class Waiting(Protocol):
    """A handle on what is under way."""

    def wait(self) -> object:
        """Return when it is done."""


Scatter = Callable[[Tensor, Tensor, dist.ProcessGroup, Any], Waiting]
"""Starts a reduce-scatter: output, input, workers, and torch's reduction."""
Gather = Callable[[Tensor, Tensor, dist.ProcessGroup], Waiting]
"""Starts an all-gather: output, input, workers."""
Reduce = Callable[[Tensor, Any], Waiting]
"""Starts an all-reduce among replicas: what is added up in place, and torch's reduction."""


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter of a group."""

    parameter: Parameter
    """As rules see it, in its whole shape."""
    trainable: bool
    count: int
    """Elements of each worker's part, filled up."""
    handle: Any
    """Torch's own record of it."""

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self.parameter.name


class ShardGroup:
    """One group, and the replacement of what it communicates with."""

    def __init__(self, name: str, module: FSDPModule, group: Any, names: dict[int, str]) -> None:
        self.name = name
        """The path of its module in the model."""
        self.parameters = tuple(_parameters(group, names))
        info = group.mesh_info
        self.sharers: dist.ProcessGroup | None = getattr(info, "shard_process_group", None)
        """The workers that each hold a part; None where all have everything."""
        self.replicas: dist.ProcessGroup | None = getattr(info, "replicate_process_group", None)
        """In hybrid sharding, the workers that hold the same part as this one."""
        self.scatter: Any = group._reduce_scatter_comm
        """The reduce-scatter that was found."""
        self.gather: Any = group._all_gather_comm
        """The all-gather that was found."""
        self.reduced: tuple[ShardedParameter, ...] = ()
        """The parameters in the reduce-scatter that comes next, or is under way."""
        self._module, self._group, self._info = module, group, info
        self._check()

    def _check(self) -> None:
        where = self.name or "the model"
        hybrid = isinstance(self.replicas, _Reducing)
        if hybrid or isinstance(self.scatter, _Comm) or isinstance(self.gather, _Comm):
            raise UsageError(f"{where} is compressed already", setting="model", works="detach() it first")
        if self.reduce_dtype not in DTYPES:
            raise UsageError(
                f"gradients of {where} are sent in {self.reduce_dtype}",
                setting="MixedPrecisionPolicy.reduce_dtype",
                works="torch.float32, torch.float16 or torch.bfloat16",
            )

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which gradients are sent."""
        policy = self._group.mp_policy
        own = [each.handle.sharded_param.dtype for each in self.parameters if each.trainable]
        return policy.reduce_dtype or policy.param_dtype or (own[0] if own else torch.float32)

    @property
    def parts(self) -> int:
        """Into how many parts parameters are cut."""
        return 1 if self.sharers is None else self.sharers.size()

    def pieces(
        self, exchange: Exchange, sent: Sequence[ShardedParameter], codecs: Sequence[Codec]
    ) -> tuple[tuple[Piece, ...], ...]:
        """What lies in each part of a buffer; replicas exchange the one part that they hold."""
        if exchange == "reduce":
            held = 0 if self.sharers is None else self.sharers.rank()
            names = [f"[{held}] among replicas"]
        else:
            # Replicas round gradients independently, so that errors average out, and weights alike.
            replica = 0 if self.replicas is None or exchange == "gather" else self.replicas.rank()
            names = [f"[{part}] of replica {replica}" for part in range(self.parts)]
        return tuple(
            tuple(
                Piece(name=f"{each.name}{name}", count=each.count, codec=codec)
                for each, codec in zip(sent, codecs, strict=True)
            )
            for name in names
        )

    def replace(
        self, *, scatter: Scatter | None = None, gather: Gather | None = None, reduce: Reduce | None = None
    ) -> None:
        """Communicate by these from now on; where None is given, by what was found."""
        comms: list[Any] = [_Comm(scatter, self.scatter) if scatter else self.scatter]
        comms += [_Comm(gather, self.gather) if gather else self.gather]
        self._module.set_custom_reduce_scatter(comms[0])
        self._module.set_custom_all_gather(comms[1])
        # The hook that torch offers for the all-reduce of hybrid sharding runs after its own, so its own
        # is given a process group that does it otherwise. The copy is the group's alone.
        self._group.mesh_info = self._info
        if reduce is not None and self.replicas is not None:
            self._group.mesh_info = copy.copy(self._info)
            self._group.mesh_info.replicate_process_group = _Reducing(self.replicas, reduce)
        vars(self._group).pop("post_backward", None)
        if scatter is not None or reduce is not None:
            self._watch()

    def _watch(self) -> None:
        """Note, before gradients are sent, of which parameters there are any."""
        original = self._group.post_backward

        def post_backward(*args: Any) -> None:
            unused = self._group.reduce_scatter_unused_params
            self.reduced = tuple(each for each in self.parameters if _has_gradient(each.handle, unused))
            original(*args)

        self._group.post_backward = post_backward


@dataclass(frozen=True)
class _Comm:
    """A collective as torch takes it."""

    run: Any
    stock: Any
    """What it stands in for, and what goes on to find the memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for input or output."""
        # The communication thread writes there, and is not in a mode of the caller's.
        with torch.inference_mode(False):
            memory: Tensor = self.stock.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Communicate; only a reduce-scatter has an ``op``."""
        ops = () if op is None else (op,)
        work = _Handle(self.run(output_tensor, input_tensor, group, *ops))
        if async_op:
            return work
        work.wait()
        return None


class _Handle(dist.Work):
    """Our handle as torch knows one. FSDP ignores what is not of this class, and calls nothing but wait."""

    def __init__(self, work: Waiting) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """Return when the result is there, or raise what went wrong."""
        self._work.wait()
        return True


class _Reducing(dist.ProcessGroup):
    """A process group that can reduce, and does it by a function."""

    def __init__(self, group: dist.ProcessGroup, reduce: Reduce) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._reduce = reduce

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        """As torch.distributed.all_reduce calls it."""
        (tensor,) = tensors
        return _Handle(self._reduce(tensor, options.reduceOp))


def groups_of(model: nn.Module) -> tuple[ShardGroup, ...]:
    """The groups of all modules in the model to which ``fully_shard`` was applied, in the model's order."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    found: dict[int, ShardGroup] = {}
    sharded = False
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        sharded = True
        groups = module._get_fsdp_state()._fsdp_param_groups
        if len(groups) > 1:
            raise UsageError(
                f"{path or 'the model'} has parameters on {len(groups)} meshes in one module",
                setting="shard_placement_fn",
                works="fully_shard() of each part on its own mesh",
            )
        for group in groups:
            if id(group) not in found:
                found[id(group)] = ShardGroup(plain_name(path), module, group, names)
    if not sharded:
        raise UsageError(
            f"no module of the {type(model).__name__} is sharded",
            setting="model",
            works="torch.distributed.fsdp.fully_shard(model) first",
        )
    return tuple(found.values())


def is_compressed(model: nn.Module) -> bool:
    """Whether something is attached to a part of the model."""
    groups = (
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    )
    return any(
        isinstance(group._reduce_scatter_comm, _Comm)
        or isinstance(group._all_gather_comm, _Comm)
        or isinstance(getattr(group.mesh_info, "replicate_process_group", None), _Reducing)
        for group in groups
    )


def agree_all(groups: Sequence[ShardGroup], settings: Mapping[str, str], timeout_s: float) -> None:
    """Raise on every worker where they were not all told the same, before anything is sent."""
    facts = dict(settings)
    for group in groups:
        for each in group.parameters:
            state = "" if each.trainable else ", frozen"
            what = f"{each.parameter.shape} sent in {group.reduce_dtype} with {group.name!r}{state}"
            facts[f"parameter {each.name}"] = what
    # Whoever agrees with its sharers and with its replicas agrees with all of them. All are asked, even after
    # a difference, so that nobody is left waiting.
    problem: WorkerError | None = None
    meshes = {id(workers): workers for group in groups for workers in (group.sharers, group.replicas)}
    for place, workers in enumerate(meshes.values(), start=1):
        if workers is not None and workers.size() > 1:
            try:
                # Longer from mesh to mesh: who waits for one that waits itself must not blame that one.
                agree({**facts, "others": str(problem or "agree")}, workers, timeout_s=place * timeout_s)
            except WorkerError as error:
                problem = problem or error
    if problem is not None:
        raise problem


def _parameters(group: Any, names: dict[int, str]) -> Iterator[ShardedParameter]:
    for handle in group.fsdp_params:
        info = handle._module_info
        # What is registered at this moment, be it the part or, after a forward pass, the whole.
        name = names.get(id(getattr(info.module, info.param_name)))
        if name is None:
            raise UsageError(
                f"{info.param_name!r} of a {type(info.module).__name__} is sharded together with parameters "
                "of the model, and is not in the model",
                setting="model",
                works="the model that holds both",
            )
        kinds = (kind.__name__ for kind in type(info.module).__mro__ if kind not in (object, nn.Module))
        shape = tuple(handle.sharded_param.shape)
        yield ShardedParameter(
            parameter=Parameter(name=name, shape=shape, kinds=tuple(kinds)),
            trainable=handle.sharded_param.requires_grad,
            count=handle.padded_sharded_param_size.numel(),
            handle=handle,
        )


def _has_gradient(handle: Any, unused: bool) -> bool:
    if not hasattr(handle, "_unsharded_param"):
        return False
    whole = handle.unsharded_param
    return (
        handle.unsharded_accumulated_grad is not None
        or whole.grad is not None
        or (unused and bool(whole.requires_grad))
    )
