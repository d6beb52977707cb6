"""A tape of the tensor operations that build a model, instead of the tensors themselves.

While a tape is the active mode, every tensor made is on the meta device, and the operations that lead to
it are recorded. `Tape.create` replays just those that lead to one tensor. A tensor is identified by its
storage; views need no replay, because every argument is rebuilt from its storage with size, stride and
offset.

Every random draw is seeded by the name of the first tensor that depends on it, and its place among the
operations that lead there. So a tensor has the same bits whatever else is created, and a copy of another
tensor (a teacher that starts as its student) equals it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from plait.compat import TorchDispatchMode, replaced_truncated_normal, storage_key, tree_flatten, tree_map
from plait.determinism import derive
from plait.errors import TraceError

_OVERWRITES = {
    torch.ops.aten.fill_,
    torch.ops.aten.normal_,
    torch.ops.aten.uniform_,
    torch.ops.aten.zero_,
}


@dataclass(frozen=True)
class _Deferred:
    """A tensor argument that does not exist yet: where it lies in which storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Given:
    """A tensor argument that existed when it was recorded, and its version then."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class _Call:
    """One recorded operation; ``creates`` lists (place among the flat outputs, storage, stride)."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    creates: tuple[tuple[int, int, tuple[int, ...]], ...]
    reads: frozenset[int]


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what leads to each storage while it is the active mode, and replays it on demand."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._alive: list[torch.Tensor] = []  # a storage's key is only unique while the storage lives
        self._sources: set[int] = set()  # storages that others were computed from
        self._labels: dict[int, str] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was created under this tape."""
        return storage_key(tensor) in self._writers

    def adopt(self, tensor: torch.Tensor) -> None:
        """Take over a tensor that was created on the meta device before recording began."""
        if not self.knows(tensor):
            size, stride = tensor.untyped_storage().nbytes() // tensor.element_size(), (1,)
            create = torch.ops.aten.empty_strided.default
            kwargs = {"dtype": tensor.dtype}
            self._append(create, ((size,), stride), kwargs, [tensor], frozenset(), strides=[stride])

    def whole(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an in-place initialiser so that it is recorded as one operation, loops and all."""

        def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.knows(tensor):
                return operation(tensor, *args, **kwargs)
            reads = frozenset([storage_key(tensor)])
            self._append(operation, (self._recorded(tensor), *args), kwargs, [tensor], reads)
            self._wrote(tensor, overwrites=True)
            return tensor

        return recorded

    def initialised(self, tensor: torch.Tensor) -> bool:
        """Whether anything wrote to the tensor's storage after its creation."""
        calls = [self._calls[i] for i in self._writers[storage_key(tensor)]]
        return len(calls) > 1 or "empty" not in str(calls[0].operation)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if not tensors and not any(argument.name == "device" for argument in func._schema.arguments):
            return func(*args, **kwargs)
        if tensors and not any(self.knows(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        if any(not self.knows(tensor) for tensor in _mutated(func, args, kwargs)):
            return self._run_now(func, args, kwargs)
        placed = {name: value for name, value in kwargs.items() if name != "device"}
        try:
            outputs = func(*tree_map(_on_meta, args), **tree_map(_on_meta, placed), **_device(func, "meta"))
        except (NotImplementedError, RuntimeError):  # the values are asked for: `.item()`, `nonzero`
            return self._run_now(func, args, kwargs)
        flat = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
        if not tensors and not any(output.numel() for output in flat):
            # Nothing to defer; loading a file begins so, and then sets a storage.
            return func(*args, **kwargs)
        mutated = _mutated(func, args, kwargs)
        if not mutated and all(self.knows(output) for output in flat):
            return outputs  # a view: every argument is rebuilt from its storage, so it needs no replay
        reads = frozenset(storage_key(tensor) for tensor in tensors if self.knows(tensor))
        self._append(func, tree_map(self._recorded, args), tree_map(self._recorded, placed), flat, reads)
        for tensor in mutated:
            self._wrote(tensor, overwrites=func.overloadpacket in _OVERWRITES)
        self._sources.update(reads - {storage_key(tensor) for tensor in mutated})
        return outputs

    def _wrote(self, tensor: torch.Tensor, *, overwrites: bool) -> None:
        """Note that the last call wrote to a tensor; draws that it overwrites need no replay."""
        key, last = storage_key(tensor), len(self._calls) - 1
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if overwrites and whole and key not in self._sources:
            self._writers[key] = self._writers[key][:1]
        self._writers[key].append(last)

    def _append(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
        reads: frozenset[int],
        strides: list[tuple[int, ...]] | None = None,
    ) -> None:
        creates = []
        for place, output in enumerate(outputs):
            key = storage_key(output)
            if key not in self._writers:
                creates.append((place, key, strides[place] if strides else tuple(output.stride())))
                self._alive.append(output)
        self._calls.append(_Call(operation, args, kwargs, tuple(creates), reads))
        for _, key, _ in creates:
            self._writers[key].append(len(self._calls) - 1)

    def _recorded(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not self.knows(leaf):
            return _Given(leaf, leaf._version)
        size, stride = tuple(leaf.size()), tuple(leaf.stride())
        return _Deferred(storage_key(leaf), leaf.dtype, size, stride, int(leaf.storage_offset()))

    def _run_now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that needs values, such as ``.item()``, on tensors created for it."""

        def real(leaf: Any) -> Any:
            known = isinstance(leaf, torch.Tensor) and self.knows(leaf)
            return self.create(leaf, seed=0) if known else leaf

        outputs = func(*tree_map(real, args), **tree_map(real, kwargs))
        if any(self.knows(tensor) for tensor in _mutated(func, args, kwargs)):
            raise TraceError(
                f"the model's constructor writes to a parameter with {func}, which needs its values",
                setting="model factory",
                works="initialise with torch.nn.init, or build the model whole",
            )
        return outputs

    def create(self, tensor: torch.Tensor, *, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Replay what leads to a recorded tensor and return it on a device, random draws from ``seed``."""
        wanted = self._recorded(tensor)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for index in self._leading_to(wanted.storage):
                key = derive(seed, self._labels.get(index, str(index)))
                _replay(self._calls[index], storages, device, key)
        return _rebuild(wanted, storages, device)

    def label(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Name the draws after the tensors that they lead to; the first to need a draw gives it its name."""
        for name, tensor in tensors.items():
            for ordinal, index in enumerate(self._leading_to(storage_key(tensor))):
                self._labels.setdefault(index, f"{name}/{ordinal}")

    def _leading_to(self, storage: int) -> list[int]:
        """The recorded calls that make what a storage holds, in order."""
        picked: set[int] = set()
        stack, seen = [storage], set()
        while stack:
            key = stack.pop()
            if key not in seen:
                seen.add(key)
                picked.update(self._writers[key])
                for index in self._writers[key]:
                    stack.extend(self._calls[index].reads)
        return sorted(picked)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is done; what torch draws by rejection, in a loop over values, is recorded whole."""
        with _NotMeta(self), self, replaced_truncated_normal(self.whole):
            yield


class _NotMeta(TorchFunctionMode):
    """Answers ``is_meta`` with no for recorded tensors: torch's initialisers skip the meta device."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A getter is a new object each time that it is asked for: compare, do not identify.
        if result is True and func == _IS_META and self._tape.knows(args[0]):
            return False
        return result


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    values: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.is_meta else leaf.to("meta")
    return leaf


def _device(func: Any, device: torch.device | str) -> dict[str, Any]:
    has = isinstance(func, torch._ops.OpOverload) and any(a.name == "device" for a in func._schema.arguments)
    return {"device": device} if has else {}


def _drawing(operation: Any, seed: int, device: torch.device | str) -> tuple[Any, dict[str, Any]]:
    """An operation that draws from a generator of its own, with the argument for it.

    The default generator is shared by all threads: one that trains must not notice one that creates.
    """
    if isinstance(operation, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return operation, {}
        if not any(argument.name == "generator" for argument in operation._schema.arguments):
            name = operation._overloadname
            twin = "generator" if name == "default" else f"{name}_generator"
            if twin not in operation.overloadpacket.overloads():
                raise TraceError(
                    f"the model's constructor draws with {operation}, which takes no generator",
                    setting="model factory",
                    works="draw with torch.nn.init, torch.randn or torch.rand",
                )
            operation = getattr(operation.overloadpacket, twin)
    return operation, {"generator": torch.Generator(device).manual_seed(seed)}


def _replay(
    call: _Call, storages: dict[int, torch.UntypedStorage], device: torch.device | str, seed: int
) -> None:
    def real(leaf: Any) -> Any:
        if isinstance(leaf, _Deferred):
            return _rebuild(leaf, storages, device)
        if isinstance(leaf, _Given):
            if leaf.tensor._version != leaf.version:
                raise TraceError(
                    f"a tensor of shape {tuple(leaf.tensor.shape)} that the model's constructor used was "
                    "changed in place afterwards, so its parameters cannot be created from it",
                    setting="model factory",
                    works="copy the tensor before changing it",
                )
            return leaf.tensor.to(device)
        return leaf

    operation, generator = _drawing(call.operation, seed, device)
    kwargs = {**tree_map(real, call.kwargs), **_device(call.operation, device), **generator}
    outputs = operation(*tree_map(real, call.args), **kwargs)
    flat = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
    for place, key, stride in call.creates:
        assert tuple(flat[place].stride()) == stride, (call.operation, flat[place].stride(), stride)
        storages[key] = flat[place].untyped_storage()


def _rebuild(
    wanted: _Deferred, storages: dict[int, torch.UntypedStorage], device: torch.device | str
) -> torch.Tensor:
    empty = torch.empty(0, dtype=wanted.dtype, device=device)
    return empty.set_(storages[wanted.storage], wanted.offset, wanted.size, wanted.stride)
