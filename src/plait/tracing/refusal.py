"""Why a model cannot be recorded: the reason in one sentence, the line of its code, and what helps."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from plait.errors import TraceError

_OWN_BLOCKS = "give the blocks yourself with Chain.of([block, ...])"
_NOT_OF_THE_MODEL = {"torch", "sympy", "functools", "contextlib"}
_ONE_TYPE = {
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.einsum.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.mm.default,
}
"""Operations that want one type for all their tensors, which torch does not check while it records."""


def untraceable(model: nn.Module, error: Exception, batch_line: str | None) -> TraceError | None:
    """What torch could not record of a model that may well run; None where the model itself may be at fault.

    ``batch_line`` is the line of the model's code that first asked for certain batch sizes.
    """
    reason = str(error)
    if "specialized it to be a constant" in reason:
        works = f"x.shape[0] there, not len(x), a number or a torch.jit.script function; or {_OWN_BLOCKS}"
        return _refused(model, "it fixes the batch size", works, batch_line)
    if "Not all values of batch" in reason:
        works = f"take the branch on the batch size out of forward, or {_OWN_BLOCKS}"
        return _refused(model, "it does something else at other batch sizes", works, batch_line)
    if "data-dependent" in reason:
        works = f"take the Python branch on data out of forward (torch.where instead of if), or {_OWN_BLOCKS}"
        return _refused(model, _sentence(reason), works, _line_of(error))
    return None


def unrecorded(model: nn.Module, error: Exception) -> TraceError:
    """Torch failed, and the model by itself does not."""
    reason = _sentence(str(error) or type(error).__name__)
    return _refused(model, reason, _OWN_BLOCKS, _line_of(error))


def unfit(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> TraceError:
    """The model fails on the example inputs by itself."""
    works = "inputs that the model runs with when it is called"
    if not kwargs and len(args) == 2 and isinstance(args[0], (tuple, list)) and isinstance(args[1], Mapping):
        works = "positional and keyword inputs apart: Chain.trace(model, (x,), {'name': y})"
    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return _unfit(model, reason, works, _line_of(error))


def changed_buffer(model: nn.Module, name: str, old: torch.Tensor, new: torch.Tensor | None) -> TraceError:
    """The model assigns a buffer another shape or type than it had."""
    was, now = (None if t is None else f"{tuple(t.shape)} {t.dtype}" for t in (old, new))
    works = f"a buffer that keeps its shape and type, or {_OWN_BLOCKS}"
    return _refused(model, f"buffer {name!r} changes from {was} to {now}", works)


def carried_attribute(model: nn.Module, name: str) -> TraceError:
    """The model computes with what an earlier call left in what is no buffer, or was an empty one."""
    attribute = name.rpartition(".")[2]
    works = f"self.register_buffer({attribute!r}, tensor) in that module's __init__, or {_OWN_BLOCKS}"
    reason = f"a call computes with what an earlier one left in {name!r}, which is no buffer from the start"
    return _refused(model, reason, works)


def own_object(model: nn.Module, thing: object) -> TraceError:
    """The model computes with an object that a recording cannot hold."""
    reason = f"it computes with an object of its own that is no tensor, a {type(thing).__name__}"
    works = f"tensors, registered as buffers, or {_OWN_BLOCKS}"
    if isinstance(thing, torch.Generator):
        works = f"draws from torch's own generator (torch.manual_seed), or {_OWN_BLOCKS}"
    return _refused(model, reason, works)


def refuse_inference_mode() -> None:
    """Refuse inference mode, which is not recorded: gradients would flow through what ran under it."""
    at = line_of_model()
    raise TraceError(
        f"the model enters torch.inference_mode(), which a recording would lose{f' ({at})' if at else ''}",
        setting="model",
        works=f"torch.no_grad() in its place, or {_OWN_BLOCKS}",
    )


def refuse_backward(what: str) -> None:
    """Refuse what changes gradients on their way back: only the forward operations are recorded."""
    raise TraceError(
        f"the model changes gradients in backward ({what}), which a recording of its forward would lose",
        setting="model",
        works=f"write it with tensor operations, or {_OWN_BLOCKS}",
    )


def refuse_modules(model: nn.Module) -> None:
    """Refuse modules that torch cannot record, whatever they do."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            works = f"the Python module from which it was compiled, or {_OWN_BLOCKS}"
            raise _refused(model, f"{repr(name) if name else 'it'} is compiled by torch.jit", works)
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            works = "call the model once, so that its lazy modules know their sizes"
            raise _refused(model, f"{name!r} is an uninitialized parameter", works)


def refuse_mixed_types(model: nn.Module, graph: fx.Graph, *, autocast: bool) -> None:
    """Refuse products of tensors of different types, which would fail only when the chain is run.

    With ``autocast`` all floating types are one: it casts where the operation runs.
    """
    for node in graph.nodes:
        if node.target in _ONE_TYPE:
            values = (argument.meta.get("val") for argument in node.all_input_nodes)
            kinds = list(dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor)))
            if len({kind.is_floating_point if autocast else kind for kind in kinds}) > 1:
                stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
                module = stack[-1].partition(".")[2] if stack else ""
                reason = f"it multiplies {' with '.join(str(kind) for kind in kinds)}"
                works = "inputs of the type of the weights: x.to(next(model.parameters()).dtype)"
                raise _unfit(model, reason + (f" in {module!r}" if module else ""), works)


def line_of_model() -> str | None:
    """The line of the model's code that is running now, as FILE:LINE."""
    return _line(traceback.walk_stack(None))


def _line_of(error: Exception) -> str | None:
    """The line of the model's code that raised an error."""
    return _line(reversed(list(traceback.walk_tb(error.__traceback__))))


def _line(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """The innermost line that is the model's own; ``frames`` come innermost first."""
    for frame, line in frames:
        name = frame.f_globals.get("__name__", "")
        if name == "plait.tracing.export":  # which called the model
            return None
        ours = name == "plait.compat" or name.startswith("plait.tracing.")
        if not ours and name.partition(".")[0] not in _NOT_OF_THE_MODEL:
            return f"{frame.f_code.co_filename}:{line}"
    return None


def _refused(model: nn.Module, reason: str, works: str, line: str | None = None) -> TraceError:
    what = f"{type(model).__name__} cannot be traced: {reason}"
    return TraceError(what + (f" ({line})" if line else ""), setting="model", works=works)


def _unfit(model: nn.Module, reason: str, works: str, line: str | None = None) -> TraceError:
    what = f"{type(model).__name__} does not take these example inputs: {reason}"
    return TraceError(what + (f" ({line})" if line else ""), setting="example_inputs", works=works)


def _sentence(reason: str) -> str:
    """The first sentence of what torch says, which often comes in a list."""
    lines = [text.strip() for text in reason.splitlines() if text.strip()]
    line = next((text.removeprefix("- ") for text in lines if text.startswith("- ")), lines[0])
    return re.split(r"(?<=[.!])\s", line)[0]
