"""PyTorch's private names, in one place, each with the reason it is needed (written for torch 2.13)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch._subclasses import FakeTensorMode

# Nested inputs and outputs, as torch.export itself takes them apart, the mode that sees every operation,
# and a dictionary of tensors that does not keep them: used far beyond torch, but undocumented or private.
__all__ = [
    "PATCHING",
    "TorchDispatchMode",
    "TreeSpec",
    "WeakIdKeyDictionary",
    "allocations",
    "batch_conditions",
    "exporting_unnoticed",
    "fake_parameters",
    "linear",
    "nesting",
    "no_custom_backward",
    "no_inference_mode",
    "replaced_truncated_normal",
    "storage_key",
    "swap",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unnesting",
]


PATCHING = threading.RLock()
"""Held while something that all threads see is replaced: two would restore each other's replacement."""


def storage_key(tensor: torch.Tensor) -> int:
    """What identifies a tensor's storage while it is alive.

    ``data_ptr`` would be public, but is 0 for every tensor on the meta device.
    """
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    with PATCHING:
        original = vars(owner)[name]
        setattr(owner, name, wrap(original))
        try:
            yield
        finally:
            setattr(owner, name, original)


@contextmanager
def replaced_truncated_normal(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Route every truncated normal initialisation through a wrapper while the context is open.

    It samples by rejection, so it cannot be recorded operation by operation, and other libraries keep
    references to the public function; this helper, which it calls by name, is where all of them meet.
    """
    with _wrapped(nn.init, "_no_grad_trunc_normal_", wrap):
        yield


@contextmanager
def no_custom_backward(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call ``refuse`` with what would change a gradient on its way back, while the context is open.

    `torch.export` records forward operations and would drop these without a word.
    """
    own = threading.get_ident()

    def wrap_apply(apply: Any) -> Any:
        def refusing(function: Any, *args: Any, **kwargs: Any) -> Any:
            recorded = function.__module__.startswith("torch._library")  # a custom operator's own backward
            if threading.get_ident() == own and not recorded:
                refuse(f"torch.autograd.Function {function.__name__!r}")
            return apply.__func__(function, *args, **kwargs)

        return classmethod(refusing)

    def wrap_hook(register: Any) -> Any:
        def refusing(tensor: torch.Tensor, hook: Any) -> Any:
            if threading.get_ident() == own:
                refuse("Tensor.register_hook")
            return register(tensor, hook)

        return refusing

    with (
        _wrapped(torch.autograd.Function, "apply", wrap_apply),
        _wrapped(torch.Tensor, "register_hook", wrap_hook),
    ):
        yield


@contextmanager
def no_inference_mode(refuse: Callable[[], None]) -> Iterator[None]:
    """Call ``refuse`` where inference mode is entered, while the context is open.

    `torch.export` records the operations under it as if gradients flowed through them.
    """
    own = threading.get_ident()

    def wrap(enter: Callable[[Any], None]) -> Callable[[Any], None]:
        def refusing(context: Any) -> None:
            if context.mode and threading.get_ident() == own:
                refuse()
            enter(context)

        return refusing

    with _wrapped(torch.inference_mode, "__enter__", wrap):
        yield


def nesting(target: Any) -> int:
    """How a graph's function changes the depth at which tensors stand for rows of others.

    `torch.export` records `torch.vmap` as what it calls: one that goes a level deeper (1), the operations on
    rows, and one that comes back (-1).
    """
    name = target.__name__ if getattr(target, "__module__", "") == "torch._functorch.predispatch" else ""
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def unnesting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that fails deeper than it began come back first: nothing else runs down there."""
    from torch._C import _functorch

    def guarded(*arguments: Any) -> Any:
        depth = _functorch.get_dynamic_layer_stack_depth()
        try:
            return run(*arguments)
        except BaseException:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            raise

    return guarded


@contextmanager
def exporting_unnoticed() -> Iterator[None]:
    """Let a model's code not see that it is being exported, while the context is open.

    Models ask, and then compute something else than they do in training: Hugging Face's make an explicit
    causal mask where they would have told the attention kernel that it is causal.
    """

    def wrap(asked: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            by_torch = sys._getframe(1).f_globals.get("__name__", "").split(".")[0] == "torch"
            return by_torch and asked()

        return answer

    with _wrapped(torch.compiler, "is_exporting", wrap):
        yield


@contextmanager
def batch_conditions(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` where something holds for some batch sizes only, while the context is open.

    `torch.export` takes a condition on the batch size for granted while it records and complains at the end,
    when the line of the model's code that asked is no longer known. This is where it notes the condition.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = [*range(2, 65), 2**20 + 1]

    def wrap(log: Callable[..., None]) -> Callable[..., None]:
        def noting(environment: Any, prefix: str, condition: Any, **options: Any) -> None:
            symbols = list(condition.free_symbols)
            is_batch = len(symbols) == 1 and str(symbols[0]).startswith("s")  # "u": not known until it runs
            if is_batch and False in (condition.subs(symbols[0], size) for size in sizes):
                note()
            log(environment, prefix, condition, **options)

        return noting

    with _wrapped(ShapeEnv, "_log_guard", wrap):
        yield


@contextmanager
def fake_parameters(model: nn.Module, device: torch.device) -> Iterator[FakeTensorMode]:
    """Let a model's parameters, and buffers on the meta device, be fake tensors while the context is open.

    Fake tensors have a device and no memory. A graph exported from a model on the meta device has
    ``device="meta"`` in its factory calls; one exported from fake tensors has the device it will run on,
    which is ``device`` for what is on the meta device now.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    originals = [(owner, name, tensor) for owner in model.modules()
                 for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]
                 if tensor is not None and (tensor.is_meta or isinstance(tensor, nn.Parameter))]  # fmt: skip
    fakes: dict[int, torch.Tensor] = {}
    with mode:
        for owner, name, tensor in originals:
            if id(tensor) not in fakes:
                where = device if tensor.is_meta else tensor.device
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                fakes[id(tensor)] = fake
            setattr(owner, name, fakes[id(tensor)])
    try:
        yield mode
    finally:
        for owner, name, tensor in originals:
            setattr(owner, name, tensor)


def linear(size: Any) -> tuple[int, int] | None:
    """A size in a graph as (factor, constant) of the batch symbol; None where it is not of that form."""
    if isinstance(size, int):
        return 0, size
    expression = getattr(getattr(size, "node", None), "expr", None)
    return None if expression is None else _linear(expression)


@lru_cache(maxsize=1024)
def _linear(expression: Any) -> tuple[int, int] | None:
    if any(not str(symbol).startswith("s") for symbol in expression.free_symbols):
        return None
    if not expression.free_symbols:
        return (0, int(expression)) if expression.is_Integer else None
    symbol, *others = expression.free_symbols
    factor = expression.diff(symbol)
    if others or not factor.is_Integer:
        return None
    constant = expression.subs(symbol, 0)
    return (int(factor), int(constant)) if constant.is_Integer else None


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two tensors hold, so that whoever refers to one now sees the other.

    Assigning ``.data`` would be the usual way, but it refuses a change of device, meta among them.
    """
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Torch's record of what was allocated (above zero) and freed (below), in bytes and in order.

    The list is filled when the context closes. The public profiler gives memory by operation only, which
    has no peak. Its core would log a line at each start, so its log level is raised before its first one.
    """
    changes: list[int] = []
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    recorder = torch.autograd.profiler.profile(profile_memory=True)
    with recorder:
        yield changes
    results: Any = recorder.kineto_results
    changes.extend(event.nbytes() for event in results.events() if event.name() == "[memory]")
