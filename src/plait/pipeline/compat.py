"""Private names of `torch.distributed.pipelining`, in one place, each with the reason it is needed.

Written for torch 2.13. A stage of torch's computes micro-batches and keeps what backward needs, which is all
that plait asks of it: what is sent, when, and into which memory it is received is plait's own. The seam runs
through attributes without documentation, so another version is refused rather than tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from plait.compat import tree_map
from plait.errors import UsageError

_BORROWED = ("chunks", "args_recv_info", "grad_recv_info", "_runtime_validate")
TORCH = "2.13"
"""The versions whose private names these are."""


def check_version(found: str) -> None:
    """Refuse a version of torch whose private names may be others."""
    if re.match(r"\d+\.\d+", found) is None or re.match(r"\d+\.\d+", found)[0] != TORCH:  # type: ignore[index]
        raise UsageError(
            f"plait.pipeline drives stages of torch {TORCH}, and this is torch {found}",
            setting="torch",
            works=f"pip install 'torch=={TORCH}.*', or torch's own Schedule1F1B",
        )


def check_stage(stage: Any) -> None:
    """Refuse what is no stage, and stages that plait cannot drive."""
    check_version(torch.__version__)
    from torch.distributed.pipelining.stage import _PipelineStageBase

    if not isinstance(stage, _PipelineStageBase):
        raise UsageError(
            f"the stage is a {type(stage).__name__}",
            setting="stage",
            works="a torch.distributed.pipelining.PipelineStage, or pipe.build_stage(...)",
        )
    if stage.group_size != stage.num_stages:
        raise UsageError(
            f"{stage.num_stages} stages on {stage.group_size} ranks",
            setting="group",
            works=f"one stage a rank: a group of {stage.num_stages}",
        )
    backend = cpu_backend(stage.group)
    if backend != "gloo":
        raise UsageError(
            f"tensors cross between stages by gloo, and the group has {backend} for those in host memory",
            setting="backend",
            works='init_process_group("gloo"), or "cpu:gloo,cuda:nccl" with GPUs',
        )


def cpu_backend(group: Any) -> str:
    """The backend of a group for tensors in host memory; the public name is that of all devices together."""
    try:
        whole: Any = group or dist.group.WORLD
        name: str = whole._get_backend(torch.device("cpu")).name()
    except RuntimeError:
        return "none"
    return name


def sent_outputs(stage: Any, has_backward: bool) -> tuple[int, ...] | None:
    """Which outputs go to the stage after it, of a stage that `pipeline()` cut; None where all do.

    Only torch's own preparation knows, from the graph it has cut.
    """
    from torch.distributed.pipelining.stage import _PipelineStage

    if not isinstance(stage, _PipelineStage):
        return None
    stage.has_backward = has_backward
    received = stage._create_act_recv_info()  # type: ignore[no-untyped-call]
    sent = stage._create_act_send_info()  # type: ignore[no-untyped-call]
    own = stage.stage_index
    skipping = [info.source for info in received if not info.is_root_arg and info.source != own - 1]
    skipping += [place for places in sent.values() for place in places if place != own + 1]
    if skipping or (own > 0 and any(info.is_root_arg for info in received)):
        raise UsageError(
            f"stage {own} exchanges values with stage {skipping[0]}, which is not next to it"
            if skipping
            else f"stage {own} reads an input of the model",
            setting="stage",
            works="plait.pipeline.stages(chain, profile, n), which passes such values along",
        )
    return tuple(place for place in sorted(sent) if sent[place])


def declared(stage: Any) -> tuple[Any, Any]:
    """The tensors that a user said a `PipelineStage` takes and gives (``input_args``, ``output_args``)."""
    said = getattr(stage, "_user_meta", None)
    return (None, None) if said is None else (said.inputs, said.outputs)


@contextmanager
def borrowed(stage: Any, micro_batches: int, has_backward: bool) -> Iterator[None]:
    """Make a stage ready for a step, with no buffer allocated; then it is as before, for other schedules.

    torch would allocate all buffers at the first step, for one number and size of micro-batches. It is also
    told not to check tensors itself (it does where TORCH_DISTRIBUTED_DEBUG=DETAIL): the wire does.
    """
    before = {name: getattr(stage, name) for name in _BORROWED}
    inputs = stage._stage_meta.inputs
    stage.clear_runtime_states()
    stage.has_backward, stage.chunks, stage._runtime_validate = has_backward, micro_batches, False
    stage.args_recv_info, stage.grad_recv_info = {}, {}
    try:
        yield
    finally:
        stage.fwd_cache.clear()
        stage._stage_meta.inputs = inputs
        for name, value in before.items():
            setattr(stage, name, value)


def give_inputs(stage: Any, micro_batch: int, tensors: Sequence[torch.Tensor], grads: Sequence[bool]) -> None:
    """Let a stage find its received inputs; ``grads`` says which of them need a gradient."""
    from torch.distributed.pipelining._utils import _TensorMeta
    from torch.distributed.pipelining.stage import _RecvInfo

    metas = [
        _TensorMeta(shape=t.shape, stride=t.stride(), dtype=t.dtype, requires_grad=needs)
        for t, needs in zip(tensors, grads, strict=True)
    ]
    stage.args_recv_info[micro_batch] = tuple(
        _RecvInfo(f"input {place}", stage.stage_index - 1, tensor, meta)
        for place, (tensor, meta) in enumerate(zip(tensors, metas, strict=True))
    )
    stage._stage_meta.inputs = tuple(metas)


def take_no_inputs(stage: Any, count: int) -> None:
    """Tell the first stage, whose inputs are the user's, how many they are."""
    stage._stage_meta.inputs = (None,) * count


def give_gradients(stage: Any, micro_batch: int, gradients: Sequence[torch.Tensor | None]) -> None:
    """Let a stage find the gradients of its outputs; None where an output has none."""
    from torch.distributed.pipelining._utils import extract_tensor_meta
    from torch.distributed.pipelining.stage import _RecvInfo

    stage.grad_recv_info[micro_batch] = tuple(
        _RecvInfo(
            f"gradient {place}",
            stage.stage_index + 1,
            gradient,
            None if gradient is None else extract_tensor_meta(gradient),
        )
        for place, gradient in enumerate(gradients)
    )


def let_output_go(stage: Any, micro_batch: int) -> None:
    """Keep the last stage's output without its graph, which the loss alone keeps then.

    torch detaches it in place after backward, which takes tensors and tuples of them alone.
    """
    stage.fwd_cache[micro_batch] = ((), stage.fwd_cache[micro_batch][1])
    if stage.output_chunks:
        stage.output_chunks[-1] = tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, stage.output_chunks[-1]
        )


def forget(stage: Any, micro_batch: int) -> None:
    """Drop what was received for a micro-batch."""
    stage.args_recv_info.pop(micro_batch, None)
    stage.grad_recv_info.pop(micro_batch, None)
