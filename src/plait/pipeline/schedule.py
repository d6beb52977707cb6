"""Runs any order on a stage of `torch.distributed.pipelining`, in the place of `Schedule1F1B`.

Why torch's own schedule is not enough: `Schedule1F1B` (torch 2.13) waits for a send and a receive before each
computation, so nothing overlaps; it allocates all buffers for one number and size of micro-batches; and it
divides gradients by the number of micro-batches, those accumulated before too, and where one is smaller.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from plait.compat import tree_map
from plait.errors import UsageError, WorkerError
from plait.pipeline import compat, validity
from plait.pipeline.batch import (
    Batch,
    check_loss,
    check_rows,
    cut_target,
    joined,
    mark,
    rows,
    signature,
    weights,
)
from plait.pipeline.mode import evaluation
from plait.pipeline.note import Note, hear, tell, tell_failure
from plait.pipeline.orders import Kind, Order, kfkb
from plait.pipeline.passes import Passes
from plait.pipeline.record import StepRecord
from plait.pipeline.tied import TiedGradients
from plait.pipeline.wire import wire_of
from plait.timeline import Timeline
from plait.units import parse_seconds, parse_whole

_LONGEST_S = 1e9
"""Beyond, clocks of the system overflow."""


class ScheduleKFKB(PipelineScheduleSingle):
    """A pipeline schedule that runs any of :mod:`plait.pipeline.orders`, by default kFkB.

    Constructed and called as torch's `Schedule1F1B`. Receives are posted ahead, sends are dropped when they
    are finished, and the order, k and the number of micro-batches may change between steps (:meth:`change`).

    >>> schedule = ScheduleKFKB(stage, n_microbatches=8, loss_fn=loss, k=2)
    >>> schedule.step(x)                                   # on the first rank
    >>> schedule.step(target=y, losses=losses)             # on the last
    >>> schedule.step()                                    # on the others
    """

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        *,
        k: int | None = None,
        order: Order | None = None,
        weight: Callable[[Any], float] | None = None,
        timeline: Timeline | None = None,
        timeout_s: float | str = 30.0,
    ) -> None:
        """The arguments up to ``scale_grads`` are torch's; ``k`` is 1 unless an ``order`` is given.

        With ``scale_grads`` the loss is a mean, and each micro-batch counts with its share of the batch:
        ``weight(target)`` is the denominator of its mean, by default its rows. Without, losses are summed.
        ``timeline`` gets a span for each forward and backward. A rank that shows no sign of life for
        ``timeout_s`` (seconds) ends the step on all ranks.
        """
        compat.check_stage(stage)
        super().__init__(
            stage,
            parse_whole(n_microbatches, setting="n_microbatches"),
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )
        for setting, given in (("loss_fn", loss_fn), ("weight", weight)):
            if given is not None and not callable(given):
                raise UsageError(f"{setting} is {given!r}", setting=setting, works="a function, or None")
        self._timeout_s = parse_seconds(timeout_s, setting="timeout_s")
        if not 0 < self._timeout_s < _LONGEST_S:
            raise UsageError(f"a timeout of {timeout_s} s", setting="timeout_s", works="30")
        self._weight = rows if weight is None else weight
        self.timeline = timeline
        self._wire = wire_of(stage, timeout_s=self._timeout_s)
        self._tied = TiedGradients(stage, self._wire)
        self._passes = Passes(stage, self._wire)
        self._order = self._chosen(self._n_microbatches, k, order)
        self.record = StepRecord()
        """Times of the last step."""

    # --- the order ----------------------------------------------------------------------------------

    @property
    def order(self) -> Order:
        """What the next step runs."""
        return self._order

    def change(
        self, *, k: int | None = None, order: Order | None = None, n_microbatches: int | None = None
    ) -> None:
        """Let the next step run another order, another k, or other micro-batches; on every rank alike.

        With ``n_microbatches`` alone, the order keeps its family and numbers.
        """
        if n_microbatches is None:
            n_microbatches = getattr(order, "micro_batches", self._n_microbatches)
        if k is None and order is None:
            n_microbatches = parse_whole(n_microbatches, setting="n_microbatches")
            order = Order.from_json({**self._order.to_json(), "micro_batches": n_microbatches})
        self._order = self._chosen(n_microbatches, k, order)
        self._n_microbatches = self._order.micro_batches

    def _chosen(self, micro_batches: int, k: int | None, order: Order | None) -> Order:
        stages = self._num_stages
        if order is not None and not isinstance(order, Order):
            works = f"orders.kfkb({stages}, {micro_batches}, k=1)"
            raise UsageError(f"the order is {order!r}", setting="order", works=works)
        if micro_batches < stages:
            raise UsageError(
                f"{micro_batches} micro-batches for {stages} stages",
                setting="n_microbatches",
                works=f"{stages} or more",
            )
        if order is None:
            return kfkb(stages, micro_batches, 1 if k is None else k)
        if k is not None and k != order.k:
            raise UsageError(f"k = {k} beside the order {order}", setting="k", works="one of the two")
        if order.family == "listed":
            validity.check(order)
        if (order.stages, order.micro_batches) != (stages, micro_batches):
            raise UsageError(
                f"the order is of {order}; the stages are {stages}, and the micro-batches {micro_batches}",
                setting="order",
                works=f"an order of {stages} stages and {micro_batches} micro-batches",
            )
        return order

    # --- a step -------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward and backward, as torch's schedules do.

        ``args`` are the model's inputs, on the first rank; ``kwargs`` go to this rank's stage. On the last
        rank, ``target`` is a tensor, or tensors nested in dicts and lists, and ``losses`` is filled with one
        loss a micro-batch; it returns the output unless ``return_outputs`` is False.
        """
        if self._has_backward and not torch.is_grad_enabled():
            raise UsageError("step() under torch.no_grad()", setting="step", works="eval()")
        try:
            self._wire.begin(self._timeout_s)
            self._run(args, kwargs, target, losses, return_outputs, loss_kwargs)
            self._wire.says(f"between steps {self._wire.step} and {self._wire.step + 1}")
            if self._stage.is_last and return_outputs:
                return self._merge_outputs(self._stage.output_chunks)
            return None
        except BaseException as error:
            self._wire.give_up(error)
            raise

    def eval(self, *args: Any, target: Any = None, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """Run one batch forward only, with the stage's module in evaluation; called as :meth:`step`.

        Dropout is off, and BatchNorm takes what it has learned and learns nothing. Afterwards every module is
        in the mode that it was in.
        """
        with torch.no_grad(), evaluation(self._stage.submod):
            return super().eval(*args, target=target, losses=losses, **kwargs)

    def _step_microbatches(self, *_: Any, **__: Any) -> None:
        # Abstract in torch's class, which calls it from the step() that is replaced above.
        raise NotImplementedError("the batch is cut by step(), once the ranks have agreed on the order")

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        stage, wire = self._stage, self._wire
        self.record = StepRecord()
        learning = mark(stage.submod)
        if stage.is_first:
            try:
                pieces, keywords = self._cut(args, kwargs)
                note = self._note(list(zip(pieces, keywords, strict=True)), rows((args, kwargs)))
            except BaseException as error:
                tell_failure(error, wire)
                raise
            tell(note, wire, learning)
        else:
            note = hear(wire, learning)
            self._heed(note)
            pieces, keywords = self._cut(args, kwargs)
        count = self._n_microbatches
        targets = None if target is None else cut_target(target, count, note.rows)
        batch = Batch(
            note,
            self.record,
            mark=learning,
            args=pieces,
            kwargs=keywords,
            targets=targets,
            weights=weights(targets, count, self._weight if self.scale_grads else None),
            loss_kwargs=loss_kwargs,
            keep_outputs=return_outputs,
        )
        if losses is not None and not isinstance(losses, list):
            raise UsageError(f"losses is a {type(losses).__name__}", setting="losses", works="a list")
        if stage.is_last and self._loss_fn is None and (target is not None or losses is not None):
            asked = "losses" if target is None else "a target"
            raise UsageError(
                f"the last rank has {asked} and its schedule no loss_fn: there is nothing to learn from",
                setting="loss_fn",
                works=f"{type(self).__name__}(..., loss_fn=...) on every rank, or eval() without either",
            )
        if stage.is_last and self._has_backward and targets is None:
            raise UsageError("the last rank has no target", setting="target", works="step(target=...)")
        training = self._has_backward
        with compat.borrowed(stage, count, training), self._tied.collecting(training):
            if self._has_backward:
                self._both_ways(batch)
            else:
                self._forward_only(batch)
            if note.reports:
                self._exchange_reports()
            wire.flush()
            if self._has_backward:
                stage.perform_reduce_grad(1)
        if losses is not None and stage.is_last:
            losses[:] = batch.losses
        self.record.end_ns = time.perf_counter_ns()

    def _both_ways(self, batch: Batch) -> None:
        stage, order, wire = self._stage.stage_index, self._order, self._wire
        forwards = backwards = 0
        batch.expect_inputs(wire, order.inputs_ahead(stage, 0))
        while choices := order.choices(stage, forwards, backwards):
            kind = self._whose_turn(choices, forwards, backwards)
            if kind == "F":
                self._forward(batch, forwards)
                forwards += 1
                batch.expect_gradients(wire, order.gradients_ahead(stage, forwards))
            else:
                self._backward(batch, backwards)
                backwards += 1
                batch.expect_inputs(wire, order.inputs_ahead(stage, backwards))

    def _forward_only(self, batch: Batch) -> None:
        for micro_batch in range(self._n_microbatches):
            batch.expect_inputs(self._wire, min(micro_batch + 2, self._n_microbatches))
            self._whose_turn(("F",), micro_batch, 0)
            self._forward(batch, micro_batch)

    def _whose_turn(self, choices: Sequence[Kind], forwards: int, backwards: int) -> Kind:
        """The first kind whose input is there; waits for any of them."""
        before, after = self._wire.before, self._wire.after

        def ready() -> Kind | None:
            for kind in choices:
                if kind == "F" and (before is None or before.inbox.has("activation", forwards)):
                    return "F"
                if kind == "B" and (after is None or after.inbox.has("gradient", backwards)):
                    return "B"
            return None

        awaited = {
            "F": f"the activation of micro-batch {forwards}",
            "B": f"the gradient of micro-batch {backwards}",
        }
        return self._wire.wait(ready, " or ".join(awaited[kind] for kind in choices))

    # --- one micro-batch ----------------------------------------------------------------------------

    def _forward(self, batch: Batch, number: int) -> None:
        self._passes.forward(batch, number, self._compute_forward)
        self._draw_last()

    def _compute_forward(self, batch: Batch, number: int) -> None:
        stage = self._stage
        output = stage.forward_one_chunk(
            number, batch.args[number], batch.kwargs[number], save_forward_output=batch.keep_outputs
        )
        if stage.is_last and batch.targets is not None and self._loss_fn is not None:
            loss = self._loss_fn(output, batch.targets[number], **(batch.loss_kwargs or {}))
            if batch.training:
                check_loss(loss, output)
            batch.losses.append(loss)

    def _backward(self, batch: Batch, number: int) -> None:
        self._passes.backward(batch, number)
        self._draw_last()

    def _draw_last(self) -> None:
        """Give the timeline, if there is one, what was computed last."""
        if self.timeline is not None:
            last = self.record.computations[-1]
            track, name = f"stage{self._stage.stage_index}", f"{last.kind}{last.micro_batch}"
            self.timeline.record(track, name, last.start_ns, last.end_ns, step=self._wire.step)

    # --- what the ranks tell each other -------------------------------------------------------------

    def _note(self, pieces: Sequence[Any], batch_rows: int) -> Note:
        """On the first rank: what this step is."""
        whole = self._args_chunk_spec is None and self._kwargs_chunk_spec is None
        return Note(
            name=self._wire.name or uuid.uuid4().hex,
            rows=batch_rows if whole else None,
            training=self._has_backward,
            order=self._order,
            signatures=tuple(signature(piece, self._has_backward) for piece in pieces),
        )

    def _heed(self, note: Note) -> None:
        """On the other ranks: what becomes of the note; here, it must be what this rank has."""
        if note.training != self._has_backward:
            calls = {True: "step() with a loss_fn", False: "eval(), or step() without a loss_fn"}
            raise WorkerError(
                f"rank {self._wire.rank} called {calls[self._has_backward]}, "
                f"and the first rank {calls[note.training]}",
                setting="step",
                works="the same call on every rank",
            )
        self._follow(note)

    def _follow(self, note: Note) -> None:
        if note.order.digest != self._order.digest:
            raise WorkerError(
                f"rank {self._wire.rank} has the order {self._order}, and the first rank {note.order}",
                setting="order",
                works="the same order, k and n_microbatches on every rank",
            )

    def _exchange_reports(self) -> None:
        """At the end of a step whose note asks for reports."""

    # --- the batch ----------------------------------------------------------------------------------

    def _cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        count = self._n_microbatches
        if self._args_chunk_spec is None and self._kwargs_chunk_spec is None:
            check_rows((args, kwargs), count, stages=self._num_stages)
        pieces, keywords = self._split_inputs(args, kwargs)
        if len(pieces) != count or len(keywords) != count:
            raise UsageError(
                f"the inputs give {len(pieces)} micro-batches, not {count}",
                setting="n_microbatches",
                works=f"{len(pieces)}, or a larger batch",
            )
        return list(pieces), list(keywords)

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """Join rows; what has none is stacked, an entry a micro-batch; what is no tensor is the first's."""
        if self._output_merge_spec is not None:
            return super()._merge_outputs(output_chunks)
        return tree_map(joined, *output_chunks)
