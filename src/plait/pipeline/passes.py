"""One micro-batch on one stage, forward and backward: what comes from a neighbour, and what goes to one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.errors import UsageError
from plait.pipeline import compat
from plait.pipeline.batch import Batch, check_declared
from plait.pipeline.inbox import Parcel
from plait.pipeline.spec import Spec, Specs
from plait.pipeline.wire import Wire


class Passes:
    """Takes micro-batches through a stage, once their inputs and gradients have arrived."""

    def __init__(self, stage: Any, wire: Wire) -> None:
        self._stage, self._wire = stage, wire
        self._sent_places: dict[bool, tuple[int, ...] | None] = {}

    def forward(self, batch: Batch, number: int, compute: Callable[[Batch, int], None]) -> None:
        """Take an input, ``compute``, and send the output on."""
        stage, wire = self._stage, self._wire
        if wire.before is not None:
            parcel = wire.before.inbox.take("activation", number)
            assert parcel.specs is not None, "it has arrived"
            batch.record.heard(wire.before.inbox.peer, parcel)
            check_declared(compat.declared(stage)[0], parcel.specs, f"stage {stage.stage_index} takes")
            batch.inputs[number] = parcel.specs
            tensors = [tensor.to(stage.device) for tensor in parcel.tensors]
            compat.give_inputs(stage, number, tensors, [each.requires_grad for each in parcel.specs])
        else:
            compat.take_no_inputs(stage, len(batch.args[number]))
        wire.says(f"computing the forward of micro-batch {number} in step {wire.step}")
        begun_ns = time.perf_counter_ns()
        compute(batch, number)
        batch.record.computed("F", number, begun_ns, time.perf_counter_ns())
        if wire.after is not None:
            self._send_outputs(batch, number)
        else:
            compat.let_output_go(stage, number)
        if not batch.training:
            stage.fwd_cache.pop(number)
            compat.forget(stage, number)

    def backward(self, batch: Batch, number: int) -> None:
        """Take a gradient (the last stage: the loss), compute, and send that of the input back."""
        stage, wire = self._stage, self._wire
        loss = None
        if wire.after is not None:
            parcel = wire.after.inbox.take("gradient", number)
            batch.record.heard(wire.after.inbox.peer, parcel)
            self._give_gradients(batch.outputs.pop(number), number, parcel)
        else:
            loss = batch.losses[number] * batch.weights[number]
            batch.losses[number] = batch.losses[number].detach()
        wire.says(f"computing the backward of micro-batch {number} in step {wire.step}")
        begun_ns = time.perf_counter_ns()
        stage.backward_one_chunk(number, loss=loss, last_backward=number == len(batch.signatures) - 1)
        batch.record.computed("B", number, begun_ns, time.perf_counter_ns())
        gradients = stage.bwd_cache.pop(number)
        compat.forget(stage, number)
        if wire.before is not None:
            wanted = [
                (gradient, each)
                for gradient, each in zip(gradients, batch.inputs.pop(number), strict=True)
                if each.requires_grad
            ]
            # An input that the loss does not depend on has no gradient; the stage before waits for one.
            sent = [torch.zeros(s.shape, dtype=s.dtype) if g is None else g for g, s in wanted]
            wire.before.outbox.send("gradient", wire.step, number, sent)

    def crossing(self, outputs: Sequence[Any], training: bool) -> list[Any]:
        """Those of a stage's outputs that go to the stage after."""
        return [outputs[place] for place in self._places(len(outputs), training)]

    def _places(self, outputs: int, training: bool) -> Sequence[int]:
        if training not in self._sent_places:
            self._sent_places[training] = compat.sent_outputs(self._stage, training)
        found = self._sent_places[training]
        return range(outputs) if found is None else found

    def _send_outputs(self, batch: Batch, number: int) -> None:
        stage = self._stage
        outputs = stage.fwd_cache[number][0]
        places, sent = self._places(len(outputs), batch.training), self.crossing(outputs, batch.training)
        for place, output in zip(places, sent, strict=True):
            plain = type(output) in (torch.Tensor, torch.nn.Parameter)
            if not plain or output.layout != torch.strided:
                found = f"{output.layout} tensor" if plain else type(output).__name__
                raise UsageError(
                    f"stage {stage.stage_index} gives a {found} as output {place}",
                    setting="stage",
                    works="a tensor, or a tuple of tensors (plain ones: no DTensor, none that is sparse)",
                )
        specs = tuple(Spec(tuple(t.shape), t.dtype, t.requires_grad and batch.training) for t in sent)
        check_declared(compat.declared(stage)[1], specs, f"stage {stage.stage_index} gives")
        batch.outputs[number] = specs
        self._wire.after.outbox.send(  # type: ignore[union-attr]
            "activation", self._wire.step, number, sent, specs=specs, signature=batch.sent_signatures[number]
        )

    def _give_gradients(self, specs: Specs, number: int, parcel: Parcel) -> None:
        stage = self._stage
        outputs = stage.fwd_cache[number][0]
        gradients: list[torch.Tensor | None] = [None] * len(outputs)
        arrived = iter(parcel.tensors)
        for place, each in zip(self._places(len(outputs), training=True), specs, strict=True):
            if each.requires_grad:
                gradients[place] = next(arrived).to(stage.device)
        compat.give_gradients(stage, number, gradients)
