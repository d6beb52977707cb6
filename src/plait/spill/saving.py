"""What a shard's forward leaves for its backward, so that it survives until then.

Between the two the shard's weights leave memory and come back elsewhere, so the graph that autograd keeps
must not point at them. Every tensor that autograd saves is replaced by a :class:`Kept`, which says where to
find it again:

- what lies in a segment (parameters, values read, values written) by its place in that segment;
- under *thrift*, what cheap operations made, by the operation and what went into it, if that is kept anyway:
  an activation function's output is made again from its input, a weight that autocast has cast is cast again,
  and of dropout's mask, which has two values, a byte an element is kept;
- everything else by itself; ``spill`` moves that into a segment.

Made again means the same kernel on the same bits, so the bits stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch

from plait.compat import TorchDispatchMode, storage_key, tree_leaves, tree_map
from plait.spill.segment import ALIGNMENT_BYTES, padded
from plait.spill.views import Place, Views, flat, span

_SMALL_BYTES = 16384
"""Below this, making a tensor again costs more than it frees."""

_DEPTH = 12
"""Operations in a row that are run again at most."""

_aten = torch.ops.aten
CASTS = frozenset({_aten._to_copy.default})
"""Of weights, by autocast: a copy of every weight for every micro-batch, if it were kept."""
CHEAP = CASTS | {
    _aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.rsub.Scalar, _aten.mul.Tensor,
    _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.neg.default, _aten.pow.Tensor_Scalar,
    _aten.relu.default, _aten.gelu.default, _aten.silu.default, _aten.tanh.default, _aten.sigmoid.default,
    _aten.leaky_relu.default, _aten.elu.default, _aten.hardtanh.default, _aten.hardswish.default,
    _aten.clone.default, _aten.native_layer_norm.default,
    _aten.where.self, _aten.masked_fill.Scalar, _aten.exp.default, _aten.rsqrt.default,
}  # fmt: skip
_VIEWS = {
    _aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.t.default,
    _aten.transpose.int, _aten.permute.default, _aten.expand.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.slice.Tensor, _aten.select.int, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.alias.default, _aten.detach.default,
}  # fmt: skip


_DRAWS = _aten.bernoulli_.float
_SCALES = _aten.div_.Scalar
"""How dropout makes its mask: drawn, then scaled."""


class Kept:
    """A tensor of the forward, and how to have it again in the backward."""

    __slots__ = ("args", "depth", "function", "index", "kwargs", "made", "nbytes", "place", "tensor", "uses")

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.tensor: torch.Tensor | None = None
        self.place: Place | None = None
        self.function: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.index: int | None = None
        self.depth = 0
        """How many operations lead to it from what is kept."""
        self.uses = 0
        """How often it will still be asked for, where it is made again."""
        self.made: torch.Tensor | None = None

    @property
    def inputs(self) -> list[Kept]:
        """What goes into the operation that makes it."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Kept)]

    def available(self) -> bool:
        """Whether it can be had without keeping anything more."""
        if self.tensor is not None or self.place is not None:
            return True
        return self.function is not None and all(each.available() for each in self.inputs)

    def claim(self) -> None:
        """Someone will ask for it once (more)."""
        self.uses += 1
        if self.uses == 1 and self.tensor is None and self.place is None:
            for each in self.inputs:
                each.claim()

    def fetch(self, views: Views) -> torch.Tensor:
        """The tensor, wherever it is now."""
        if self.tensor is not None:
            return self.tensor
        if self.place is not None:
            return views.tensor(self.place)
        found = self.made
        if found is None:
            args, kwargs = tree_map(
                lambda leaf: leaf.fetch(views) if isinstance(leaf, Kept) else leaf, (self.args, self.kwargs)
            )
            found = self.function(*args, **kwargs)
            if self.index is not None:
                found = found[self.index]
        self.uses -= 1
        self.made = found if self.uses > 0 else None
        return found


Identity = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def _identity(tensor: torch.Tensor) -> Identity:
    return storage_key(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operation made which tensor, as far as it matters for making it again."""

    def __init__(self, saving: Saving) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saving = saving

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._saving.note(func, args, kwargs, result)
        return result


class Saving:
    """The saved tensors of one micro-batch's forward of one shard."""

    def __init__(
        self, views: Views, *, again: Collection[Any] = (), fleeting: Iterable[torch.Tensor] = ()
    ) -> None:
        """``again`` are the operations to run again rather than to keep what they gave.

        ``fleeting`` are tensors in segments that will be something else by the time of backward.
        """
        self._views, self._again = views, again
        self._fleeting = [(t.data_ptr(), t.data_ptr() + flat(t).nbytes) for t in fleeting if t.numel()]
        self._known: dict[Identity, Kept] = {}
        self._identities: dict[int, set[Identity]] = {}
        self._kept: list[Kept] = []
        self._masks: set[int] = set()
        """Storages that hold zeros and one other number."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within it, what autograd saves is kept in this way."""
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            if self._again:
                stack.enter_context(_Recorder(self))
            yield

    # --- forward ------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Kept:
        kept = self._known.get(_identity(tensor))
        if kept is None:
            kept = self._learn(tensor, Kept(tensor.numel() * tensor.element_size()))
        if kept.uses == 0:
            if kept.place is None:
                self._settle(kept, tensor)
            self._kept.append(kept)
        kept.claim()
        return kept

    def _settle(self, kept: Kept, tensor: torch.Tensor) -> None:
        """Decide how a tensor is kept: in its segment, by what makes it, or by itself."""
        if self._is_fleeting(tensor):
            kept.tensor = tensor.detach().clone()
        elif (place := self._views.locate(tensor)) is not None:
            kept.place = place
        elif storage_key(tensor) in self._masks and kept.nbytes >= _SMALL_BYTES:
            self._keep_mask(kept, tensor)
        elif kept.function is None or kept.nbytes < _SMALL_BYTES or not kept.available():
            kept.tensor = tensor.detach()

    def _keep_mask(self, kept: Kept, tensor: torch.Tensor) -> None:
        """Keep which elements are not zero, and what they are."""
        mask = Kept()
        mask.tensor = tensor.detach() != 0
        self._kept.append(mask)
        kept.function, kept.args = _unmasked, (mask, float(tensor.detach().max()), tensor.dtype)

    def _learn(self, tensor: torch.Tensor, kept: Kept) -> Kept:
        identity = _identity(tensor)
        self._known[identity] = kept
        self._identities.setdefault(identity[0], set()).add(identity)
        return kept

    def _node(self, leaf: Any) -> Any:
        """What stands for a tensor that goes into an operation."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kept = self._known.get(_identity(leaf))
        if kept is None:
            kept = self._learn(leaf, Kept(leaf.numel() * leaf.element_size()))
            kept.place = self._place(leaf)
        return kept

    def _is_fleeting(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self._fleeting)

    def _place(self, tensor: torch.Tensor) -> Place | None:
        return None if self._is_fleeting(tensor) else self._views.locate(tensor)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run."""
        again, depth = func in self._again or func in _VIEWS, 0
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        if again:
            inputs = tree_map(self._node, (args, kwargs))
            depth = 1 + max((n.depth for n in tree_leaves(inputs) if isinstance(n, Kept)), default=0)
        outputs = list(enumerate(result)) if isinstance(result, (tuple, list)) else [(None, result)]
        fresh = func not in _VIEWS
        for index, output in outputs:
            if not isinstance(output, torch.Tensor):
                continue
            self._note_mask(func, output)
            if fresh:  # a new storage, or one that was written to: what was known of it is no longer so
                for identity in self._identities.pop(storage_key(output), ()):
                    self._known.pop(identity, None)
            elif _identity(output) in self._known:  # a view that is the tensor itself
                continue
            kept = Kept(output.numel() * output.element_size())
            kept.place = self._place(output)
            if again and depth <= _DEPTH and kept.place is None:
                kept.function, kept.index, kept.depth = func, index, depth
                kept.args, kept.kwargs = inputs
            self._learn(output, kept)

    def _note_mask(self, func: Any, output: torch.Tensor) -> None:
        if func is _DRAWS and self._again is CHEAP:
            self._masks.add(storage_key(output))
        elif func is not _SCALES and func not in _VIEWS:
            self._masks.discard(storage_key(output))

    # --- between ------------------------------------------------------------------------------------------

    def written(self, tensor: torch.Tensor, place: Place) -> None:
        """A value that the shard wrote lies in a segment now, element by element as it lay in memory."""
        start = int(tensor.storage_offset())
        count, width = span(tensor.shape, tensor.stride()), tensor.element_size()
        for kept in self._kept:
            held = kept.tensor
            if held is None or storage_key(held) != storage_key(tensor) or held.dtype != tensor.dtype:
                continue
            first = int(held.storage_offset()) - start
            if first >= 0 and first + span(held.shape, held.stride()) <= count:
                offset = place.offset + first * width
                kept.place = Place(place.key, offset, tuple(held.shape), held.stride(), held.dtype)
                kept.tensor = None

    def spill(self, key: str, room: int) -> None:
        """Move what is kept by itself into a segment, each storage once, as far as there is room."""
        groups: dict[int, list[Kept]] = {}
        for kept in self._kept:
            if kept.tensor is not None and kept.tensor.numel():
                groups.setdefault(storage_key(kept.tensor), []).append(kept)
        at = 0
        for group in groups.values():
            tensors = [kept.tensor for kept in group if kept.tensor is not None]
            width = tensors[0].element_size()
            starts = [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
            ends = [
                s + span(t.shape, t.stride()) * t.element_size() for s, t in zip(starts, tensors, strict=True)
            ]
            low, high = min(starts), max(ends)
            if any(tensor.element_size() != width for tensor in tensors) or at + high - low > room:
                continue
            source = tensors[0].as_strided(((high - low) // width,), (1,), low // width)
            place = Place(key, at, tuple(source.shape), (1,), source.dtype)
            self._views.tensor(place).copy_(source)
            for kept, tensor, start in zip(group, tensors, starts, strict=True):
                kept.place = Place(key, at + start - low, tuple(tensor.shape), tensor.stride(), tensor.dtype)
                kept.tensor = None
            at = padded(at + high - low, ALIGNMENT_BYTES)

    def close(self) -> tuple[str, ...]:
        """Forward is over: the graph alone holds what is kept now. The segments that it refers to."""
        found: dict[str, None] = {}
        seen: set[int] = set()

        def visit(kept: Kept) -> None:
            if id(kept) in seen:
                return
            seen.add(id(kept))
            if kept.place is not None:
                found[kept.place.key] = None
            elif kept.tensor is None:
                for each in kept.inputs:
                    visit(each)

        for kept in self._kept:
            visit(kept)
        self._kept.clear()
        self._known.clear()
        self._identities.clear()
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept by themselves, each storage once; to be asked before ``close``."""
        storages: dict[int, int] = {}
        for kept in self._kept:
            if kept.tensor is not None:
                storage = kept.tensor.untyped_storage()
                storages[storage_key(kept.tensor)] = storage.nbytes()
        return sum(storages.values())

    # --- backward -----------------------------------------------------------------------------------------

    def _unpack(self, kept: Kept) -> torch.Tensor:
        with torch.no_grad():
            return kept.fetch(self._views)


def _unmasked(mask: torch.Tensor, value: float, dtype: torch.dtype) -> torch.Tensor:
    return mask.to(dtype).mul_(value)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Record the graph and keep nothing for it: a forward that will run again.

    Without a graph some operations would take other paths, with other bits.
    """

    def refuse(_: None) -> torch.Tensor:
        raise AssertionError("there is no way back through a forward that kept nothing")

    drop: Callable[[torch.Tensor], None] = lambda tensor: None  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(drop, refuse):
        yield


def store(views: Views, key: str, tensor: torch.Tensor) -> Place | None:
    """Copy a tensor into a segment, element by element as it lies in memory, gaps and all.

    One whose gaps make it larger than it would be without them lies there densely: ``restore`` gives it its
    layout back, and None says so.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    if not _fits(shape, stride):
        views.tensor(_densely(key, shape, tensor.dtype)).copy_(tensor)
        return None
    if tensor.numel():
        lying = flat(tensor)
        views.tensor(Place(key, 0, tuple(lying.shape), (1,), tensor.dtype)).copy_(lying)
    return Place(key, 0, shape, stride, tensor.dtype)


def restore(
    views: Views, key: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """What ``store`` put into a segment, in the layout it had."""
    if _fits(shape, stride):
        return views.tensor(Place(key, 0, shape, stride, dtype))
    made = torch.empty_strided(shape, stride, dtype=dtype, device=views.device)
    return made.copy_(views.tensor(_densely(key, shape, dtype)))


def _fits(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return span(shape, stride) <= prod(shape)


def _densely(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Place:
    return Place(key, 0, shape, torch.empty(shape, device="meta").stride(), dtype)
