"""Compression in a script that knows nothing of it: models are attached as the script makes them.

- **DDP**: a model is attached as soon as it is wrapped, which all workers do together. A communication hook
  of the script's own wins, whether torch registers it while wrapping or the script does afterwards.
- **FSDP2**: ``fully_shard`` is called for part after part, and none of the calls is known to be the last. So
  the outermost sharded module is attached when the first forward pass of any of its parts begins.
- ``torch.distributed.fsdp`` takes most of a second to import, so it is changed when the script imports it.

What PLAIT_COMPRESS says is read when a model is made: a value that cannot be used ends the script there,
rather than let it train uncompressed for a day, and with a line in place of a traceback, since the script has
made no mistake. Rank 0 says in a line what is done, and at the end what it saved.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from plait.compress.environment import asked_for
from plait.compress.rules import EXACT
from plait.errors import FileError, UsageError
from plait.units import format_bytes
from plait_autoload import VARIABLE

if TYPE_CHECKING:
    from torch import nn

    from plait.compress.attachment import Attachment
    from plait.compress.report import Report, Summary
    from plait.compress.rules import Bits

_FSDP = "torch.distributed.fsdp"
_MARK = "_wrapped_by_plait"
_SHARDED_AUTO = 4
"""The bits that "auto" means for a sharded model: they are not chosen there."""
_EXIT_USAGE = 2
_FIRST_S = 5.0
"""How long a host's other workers leave it to its first to say what is wrong."""


def install() -> None:
    """Change what scripts make distributed models with; once, however often it is called."""
    from torch.nn.parallel import DistributedDataParallel

    models = _DataParallel()
    _wrap(DistributedDataParallel, "__init__", models.around_init)
    _wrap(DistributedDataParallel, "register_comm_hook", models.around_register)
    if _FSDP in sys.modules:
        _change_fsdp(sys.modules[_FSDP])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(around(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


class _DataParallel:
    """What is put around the methods of DistributedDataParallel."""

    def __init__(self) -> None:
        self._attached: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models with a communication hook, ours or another."""

    def around_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Attach a model when it is complete."""

        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            with _mistakes_in_a_line():
                compression = asked_for()
            original(ddp, *args, **kwargs)
            if compression is None or ddp.process_group.size() < 2:
                return
            if ddp in self._hooked:  # mixed_precision=, or an optimizer that runs in the backward pass
                _say("DistributedDataParallel has a communication hook of its own: NOT compressed")
                return
            from plait.compress.hook import attach_ddp

            with _mistakes_in_a_line():
                attachment = attach_ddp(ddp, compression)
            self._attached.add(ddp)
            _say(_described(attachment.report(), compression.bits))
            current = [attachment]

            def taken_over(by: Attachment) -> None:
                current[0] = by
                _say(f"the script's own attach takes over: {by}")

            attachment.automatic = taken_over
            if _is_first():  # the attachment does not hold the model, so this ends with either
                weakref.finalize(ddp, lambda: _say_saved(current[0].report().total))

        return init

    def around_register(self, original: Callable[..., None]) -> Callable[..., None]:
        """Let the script's own hook replace ours, where torch would allow but one."""

        def register_comm_hook(ddp: Any, state: object, hook: Callable[..., Any]) -> None:
            if ddp in self._attached:
                from plait.compress.hook import hand_over

                hand_over(ddp, state, hook)
                self._attached.discard(ddp)
                _say(f"the script's own communication hook {hook.__qualname__} takes over: NOT compressed")
            else:
                original(ddp, state, hook)
                self._hooked.add(ddp)

        return register_comm_hook


class _AfterImport(MetaPathFinder):
    """Changes ``torch.distributed.fsdp`` as soon as somebody has imported it."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as others find it, with a change after its code has run."""
        if fullname != _FSDP or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _change_fsdp(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change_fsdp(module: Any) -> None:
    _wrap(module, "fully_shard", _FullyShard().around)
    _wrap(module.FullyShardedDataParallel, "__init__", _around_first_fsdp)


class _FullyShard:
    """What is put around ``fully_shard``."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        """Sharded modules, with the handle of what waits for their first forward pass."""

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Have sharded modules attached at the first forward pass."""

        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            with _mistakes_in_a_line():
                compression = asked_for()
            sharded = original(module, *args, **kwargs)
            if compression is not None:
                import torch

                # Not for a compiler to trace: it runs once, and communicates.
                first = torch.compiler.disable(self._first_forward)  # type: ignore[no-untyped-call]
                for each in module if isinstance(module, (list, tuple)) else (module,):
                    self._waiting[each] = each.register_forward_pre_hook(first, prepend=True)
            return sharded

        return fully_shard

    def _first_forward(self, module: nn.Module, inputs: object) -> None:
        holders = [other for other in self._waiting if any(part is module for part in other.modules())]
        # Each of them holds the next, so the outermost has the most parts.
        outermost = max(holders, key=lambda holder: sum(1 for _ in holder.modules()))
        for part in outermost.modules():
            handle = self._waiting.pop(part, None)
            if handle is not None:
                handle.remove()
        _attach_sharded(outermost)


def _attach_sharded(module: nn.Module) -> None:
    import torch.distributed as dist

    from plait.compress.shard_group import is_compressed
    from plait.compress.sharded import attach_fsdp

    with _mistakes_in_a_line():
        compression = asked_for()
    if compression is None or dist.get_world_size() < 2 or is_compressed(module):
        return
    if compression.bits == "auto":
        compression = replace(compression, bits=_SHARDED_AUTO)
    with _mistakes_in_a_line():
        attachment = attach_fsdp(module, compression)
    _say(_described(attachment.report(), compression.bits))
    if _is_first():
        # Held by the module, which it holds itself: both can still be freed together.
        module._plait_attachment = attachment  # type: ignore[assignment]
        atexit.register(_say_saved_by, weakref.ref(module))


def _say_saved_by(module: weakref.ref[nn.Module]) -> None:
    alive: Any = module()
    if alive is not None:
        _say_saved(alive._plait_attachment.report().total)


def _around_first_fsdp(original: Callable[..., None]) -> Callable[..., None]:
    """FSDP's first version offers no way to compress: whoever asked for it should know."""

    @functools.cache
    def say() -> None:
        _say("FullyShardedDataParallel (FSDP1) is NOT compressed; models made with fully_shard (FSDP2) are")

    def init(fsdp: Any, *args: Any, **kwargs: Any) -> None:
        with _mistakes_in_a_line():
            asked = asked_for()
        if asked is not None:
            say()
        original(fsdp, *args, **kwargs)

    return init


@contextmanager
def _mistakes_in_a_line() -> Iterator[None]:
    """End the process with a line where what the variable asks for cannot be had."""
    try:
        yield
    except (UsageError, FileError) as error:
        if threading.current_thread() is not threading.main_thread():
            raise  # there, an exit would end the thread alone, and silently
        # A launcher ends all workers as soon as one has ended, so the first must not come too late to speak.
        # The first of the host, since variables are a host's: rank 0 may have another value, and none to say.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_FIRST_S)
        _say_line(str(error))
        raise SystemExit(_EXIT_USAGE) from None


def _described(report: Summary, asked: Bits) -> str:
    """What is compressed, in one line."""
    widths = sorted({width for width in report.bits.values() if width != EXACT})
    exact = sum(width == EXACT for width in report.bits.values())
    off = f"{VARIABLE}=off switches this off"
    if not widths:
        stay = f"gradients of all {exact} parameters stay uncompressed"
        if report.left or report.declined:
            anyway = f"{VARIABLE}=bits={asked},decline=false compresses all the same"
            return f"{stay}: that is faster on this network; {anyway}"
        return f"{stay}: none is large enough ({off})"
    shown = " and ".join(map(str, widths)) + " bits" + (" until others are chosen" if asked == "auto" else "")
    return f"gradients of {len(report.bits) - exact} parameters in {shown}, of {exact} exact ({off})"


def _say_saved(total: Report) -> None:
    if total.sent_bytes < total.plain_bytes:
        _say_line(
            f"rank 0 sent {format_bytes(total.sent_bytes)} in place of {format_bytes(total.plain_bytes)}, "
            f"{total.ratio:.1f} times fewer"
        )


def _is_first() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == 0


def _say(what: str) -> None:
    """One line, from one worker."""
    if _is_first():
        _say_line(what)


def _say_line(what: str) -> None:
    sys.stderr.write(f"plait: {what}\n")  # in one piece, or other workers' words may come between
    sys.stderr.flush()
