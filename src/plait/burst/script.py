"""A training script that knows nothing of plait, made to say its steps and phases, as in ``plait launch``.

A step is what lies between two updates of the optimizer that was first to make one. With
DistributedDataParallel, a process computes from the update (or the next forward pass) until its last gradient
is there, and then waits for the wire until the optimizer goes on; without, only steps are known. The script
pays some microseconds a step, and one for each parameter.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from plait.burst.phases import Phase, Publisher

_MARK = "_published_by_plait"


def install() -> None:
    """Publish what this process trains; once, however often it is called."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    original = DistributedDataParallel.__init__
    if hasattr(original, _MARK):
        return
    script = _Script()
    wrapped = functools.wraps(original)(script.around_init(original))
    setattr(wrapped, _MARK, script)
    DistributedDataParallel.__init__ = wrapped  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(script.before_update)
    register_optimizer_step_post_hook(script.after_update)


def leave_to(other: object) -> None:
    """Publish nothing as long as there is somebody in this process who says its steps better."""
    script = _installed()
    if script is not None:
        script.leave_to(other)


def take_back_from(other: object) -> None:
    """Publish again, unless there are others still."""
    script = _installed()
    if script is not None:
        script.others.discard(other)


def _installed() -> _Script | None:
    from torch.nn.parallel import DistributedDataParallel

    found: _Script | None = getattr(DistributedDataParallel.__init__, _MARK, None)
    return found


class _Script:
    """What is known of the script in this process."""

    def __init__(self) -> None:
        self._publisher: Publisher | None = None
        self._optimizer: weakref.ref[Any] | None = None
        """The one whose updates are the steps."""
        self._steps = 0
        self.others = weakref.WeakSet[object]()
        """Who else in this process publishes: one process is one foreground, not two."""

    def leave_to(self, other: object) -> None:
        """Publish nothing as long as this one lives."""
        self.others.add(other)
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The gradients are there: the wire has done its part."""
        if self._publisher is not None:
            self._publisher.phase(Phase.COMPUTE)

    def after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step ends and the next begins, if this optimizer is the one that counts."""
        if self.others:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        if self._publisher is None:
            rank = os.environ.get("RANK", "0")
            self._publisher = Publisher(device=int(rank) if rank.isdecimal() else 0)
        self._steps += 1
        self._publisher.begin_step(self._steps)

    def around_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Have a model say when its last gradient is there."""

        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            if ddp.process_group.size() > 1:
                _Gradients(self, ddp)

        return init

    def waits(self) -> None:
        """The last gradient of a backward pass is there."""
        if self._publisher is not None:
            self._publisher.phase(Phase.COLLECTIVE)

    def computes(self) -> None:
        """A forward pass begins."""
        if self._publisher is not None:
            self._publisher.phase(Phase.COMPUTE)


class _Gradients:
    """Counts the gradients of one model in a backward pass."""

    def __init__(self, script: _Script, ddp: Any) -> None:
        self._script, self._ddp = script, weakref.ref(ddp)
        trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._all, self._there = len(trained), 0
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)
        ddp.register_forward_pre_hook(self._forward)

    def _forward(self, module: Any, inputs: Any) -> None:
        self._there = 0
        self._script.computes()

    def _arrived(self, parameter: Any) -> None:
        self._there += 1
        if self._there == self._all:
            ddp = self._ddp()
            if ddp is not None and ddp.require_backward_grad_sync:
                self._script.waits()
