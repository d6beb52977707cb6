"""A shard's part of a step: forward, backward, both with the loss between them, and evaluation.

Follows :mod:`plait.reference` line by line; what differs is where tensors are. A value keeps its layout on
its way through a segment, a random generator its state from one shard to the next.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from plait.determinism import generator_state, set_generator_state
from plait.errors import UsageError
from plait.spill.adopted import Adopted, Kept
from plait.spill.casts import CastWatch, copy_of, edge, take
from plait.spill.homes import CAST, PARAMETER
from plait.spill.saving import CASTS, CHEAP, Saving, nothing_kept, restore, store
from plait.spill.units import Head, Report, State, Unit, cast_before, evaluation_parts, last_backward
from plait.spill.update import total_norm
from plait.spill.views import Views, name_of, type_of
from plait.visit import Boundary, Visit


class ShardPass:
    """One unit of one shard, while its segments are in memory."""

    def __init__(self, adopted: Adopted, views: Views, unit: Unit, head: Head) -> None:
        self.adopted, self.views, self.unit, self.head = adopted, views, unit, head
        self.homes, self.s = adopted.homes, unit.shard
        self.block = adopted.chain[unit.shard]
        self.layouts: dict[str, State] = {}
        self.generators: dict[str, str] = {}
        self.references: dict[str, None] = {}
        self.casts: dict[str, None] = {}
        self._tied = frozenset(self.homes.tied_in(self.s))

    # --- the units ----------------------------------------------------------------------------------------

    def forward(self) -> Report:
        """Run every micro-batch forward, and keep what its backward will need, as the plan has it."""
        parts, total = self.adopted.micro_batches(self.unit.step)
        if total == 0:  # nothing counts: the mean is undefined
            return Report(weight=0.0)
        self.block.train()
        mode = self.adopted.plan.shards[self.s].activations
        keeps = self.homes.returns(self.s) and mode != "recompute"
        shared: dict[str, torch.Tensor] = {}
        self.adopted.leaves[self.s] = []
        for m in range(len(parts)):
            self._seed(m)
            leaves = self._leaves(shared)
            state = {**self._buffers(), **leaves}
            if self.homes.returns(self.s) and mode == "recompute":
                self._keep_buffers(m, state)
            values = self._values(m)
            changed = [state[buffer.name] for buffer in self.homes.changed[self.s]]
            saving = Saving(self.views, again=self._again(mode), fleeting=changed)
            with saving.forward() if keeps else nothing_kept(), self.adopted.autocast():
                kept = self._visit(values, state)
            self._note_generator(m)
            self._write(kept.visit.writes, m, saving if keeps else None)
            if keeps:
                if mode == "spill":
                    key = f"{self.unit.job}/saved/{self.s}/{m}"
                    saving.spill(key, self._saved_room(m))
                self.references.update(dict.fromkeys(saving.close()))
                kept.visit.let_go()
                self.adopted.graphs[self.s, m] = kept
                self.adopted.leaves[self.s].append(leaves)
        return self._report(weight=total)

    def turn(self) -> Report:
        """The last shard: forward, loss and backward, one micro-batch after the other."""
        parts, total = self.adopted.micro_batches(self.unit.step)
        if total == 0:
            return Report(weight=0.0)
        self.block.train()
        objective, chain = self.adopted.objective, self.adopted.chain
        mode = self.adopted.plan.shards[self.s].activations
        shared: dict[str, torch.Tensor] = {}
        loss = 0.0
        for m, (batch, weight) in enumerate(parts):
            self._seed(m)
            leaves = self._leaves(shared)
            state = {**self._buffers(), **leaves}
            values = self._values(m)
            changed = [state[buffer.name] for buffer in self.homes.changed[self.s]]
            saving = Saving(self.views, again=self._again(mode), fleeting=changed)
            end = Boundary()
            with self.adopted.autocast():
                with saving.forward():
                    kept = self._visit(values, state)
                given = {**values, **kept.visit.writes}
                output = chain.finish({n: end.enter(n, given[n]) for n in self.adopted.output_names()})
                part, value = objective.share(output, batch, weight=weight, total=total)
            saving.close()
            del given, output
            part.backward()  # type: ignore[no-untyped-call]
            loss += value
            gradients = end.gradients
            self._return(kept, gradients, m)
            self._give_back(gradients, leaves, m)
        return self._gradients(shared, loss=loss, weight=total)

    def backward(self) -> Report:
        """Take the gradients of what was written, give those of what was read, and keep the parameters'."""
        parts, _ = self.adopted.micro_batches(self.unit.step)
        again = self.adopted.plan.shards[self.s].activations == "recompute"
        shared: dict[str, torch.Tensor] = {}
        for m in range(len(parts)):
            gradients = self._incoming(m)
            if again:
                self.block.train()
                self._seed(m)
                leaves = self._leaves(shared)
                state = {**self._buffers(before=m), **leaves}
                values = self._values(m)
                with self.adopted.autocast():
                    kept = self._visit(values, state)
            else:
                leaves = self.adopted.leaves[self.s][m]
                shared = {n: leaf for n, leaf in leaves.items() if self._is_home(n)}
                kept = self.adopted.graphs.pop((self.s, m))
            self._return(kept, gradients, m)
            self._give_back(gradients, leaves, m)
        self.adopted.leaves.pop(self.s, None)
        return self._gradients(shared)

    def evaluate(self) -> Report:
        """Some batches of the evaluation data, and with the last shard the loss and metrics of them."""
        evaluator, batches = self.adopted.evaluation()
        part = evaluation_parts(self.adopted.description, self.adopted.plan)[self.unit.part]
        self.block.eval()
        sums = list(self.head.sums)
        with torch.no_grad():
            state = {**self._buffers(), **{n: leaf.detach() for n, leaf in self._leaves({}).items()}}
            for rows in part:
                inputs = (
                    self.adopted.inputs(batches.fetch(rows, device=self.adopted.device))
                    if self._reads_inputs
                    else {}
                )
                values = {**inputs, **self._read_values(f"e{rows.start}")}
                with self.adopted.autocast():
                    written = self.block.call([values[name] for name in self.block.reads], state)
                values.update(zip(self.block.writes, written, strict=True))
                if self.s + 1 < len(self.adopted.chain):
                    self._write({name: values[name] for name in self.block.writes}, f"e{rows.start}", None)
                    continue
                output = self.adopted.chain.finish(values)
                del values, written
                added = evaluator.tally(
                    lambda *_, given=output, **__: given, rows, device=self.adopted.device
                )
                sums = [a + b for a, b in zip(sums or [0.0] * len(added), added, strict=True)]
        last = rows.stop == evaluator.rows and self.s + 1 == len(self.adopted.chain)
        evaluated = asdict(evaluator.result(self.unit.step, sums)) if last else None
        return Report(layouts=self.layouts, sums=tuple(sums), evaluated=evaluated)

    # --- there and back ---------------------------------------------------------------------------------

    def _visit(self, values: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Kept:
        """Run the shard forward; under autocast, note the copies that it makes of tied parameters."""
        tied = {name: state[name] for name in self._tied} if self.adopted.objective.bf16 else {}
        with CastWatch(tied) if tied else nullcontext() as watch:
            visit = Visit(self.block, values, shared=self._tied, state=state)
        copies = {}
        for name in watch.cast if watch is not None else ():
            node = copy_of(tied[name])
            if node is not None:
                copies[name] = node
        self.casts.update(dict.fromkeys(copies))
        return Kept(visit, copies)

    def _return(self, kept: Kept, gradients: dict[str, torch.Tensor], m: int) -> None:
        """Go back through the shard, with the gradients of copies handed from one shard to the one before."""
        inside, taken = [], {}  # type: list[tuple[Any, torch.Tensor]], dict[str, torch.Tensor]
        before = cast_before(self.homes, self.head, self.s)
        for name, node in kept.copies.items():
            key = self._gradient_key(CAST + name, m)
            if key in self.head.layouts:
                inside.append((edge(node), self._load(key)))
            if name in before:
                take(node, taken, name)
        kept.visit.backward(gradients, inside)
        for name, gradient in taken.items():
            self._store(self._gradient_key(CAST + name, m), gradient)

    def _gradient_key(self, name: str, m: int) -> str:
        return f"{self.unit.job}/gradient/{name}/{m}"

    # --- what goes in -------------------------------------------------------------------------------------

    @property
    def _reads_inputs(self) -> bool:
        chain = self.adopted.chain
        reads = set(self.block.reads)
        if self.s + 1 == len(chain):
            reads |= set(self.adopted.output_names())
        return not reads.isdisjoint(chain.inputs)

    def _again(self, mode: str) -> Any:
        """The operations whose outputs are made again."""
        if mode in ("thrift", "spill"):
            return CHEAP
        return CASTS if self.adopted.objective.bf16 else ()

    def _is_home(self, name: str) -> bool:
        return name not in self._tied or self.homes.tied[name][0] == self.s

    def _leaves(self, shared: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The shard's parameters; those that it updates are the same for all micro-batches."""
        leaves = {}
        for parameter in self.homes.by_shard[self.s]:
            name = parameter.name
            if name not in shared:
                home = self.homes.parameters[name]
                leaf = self.views.entry(home.key, home.entry, parameter.stride)
                leaf.requires_grad_(parameter.trained)
                if not self._is_home(name):
                    leaves[name] = leaf
                    continue
                shared[name] = leaf
            leaves[name] = shared[name]
        return leaves

    def _buffers(self, before: int | None = None) -> dict[str, torch.Tensor]:
        """The shard's buffers and constants; with ``before``, as they were before a micro-batch's forward."""
        state = {}
        changed = {buffer.name for buffer in self.homes.changed[self.s]}
        earlier = {}
        if before is not None and changed:
            segment = self.homes.before_segment(self.s, before)
            earlier = {entry.name: (segment.key, entry) for entry in segment.entries}
        buffers = {buffer.name: buffer for buffer in self.adopted.description.buffers}
        for name in self.block.state_names:
            if name in earlier:
                state[name] = self.views.entry(*earlier[name], buffers[name].stride).clone()
            elif name in buffers:
                home = self.homes.buffers[name]
                state[name] = self.views.entry(home.key, home.entry, buffers[name].stride)
            elif name not in self.homes.parameters:
                state[name] = self.block.state(name).to(self.adopted.device)
        return state

    def _keep_buffers(self, m: int, state: Mapping[str, torch.Tensor]) -> None:
        if self.homes.changed[self.s]:
            segment = self.homes.before_segment(self.s, m)
            for buffer, entry in zip(self.homes.changed[self.s], segment.entries, strict=True):
                self.views.entry(segment.key, entry, buffer.stride).copy_(state[buffer.name])

    def _values(self, m: int) -> dict[str, Any]:
        """All values that the shard, or with the last one the loss, reads of a micro-batch."""
        inputs = {}
        if self._reads_inputs:
            inputs = self.adopted.inputs(self.adopted.micro_batches(self.unit.step)[0][m][0])
        return {**inputs, **self._read_values(str(m))}

    def _read_values(self, which: str) -> dict[str, torch.Tensor]:
        found = {}
        for passing in self.homes.reads[self.s]:
            key = f"{self.unit.job}/value/{passing.name}/{which}"
            found[passing.name] = self._load(key)
        return found

    def _load(self, key: str) -> torch.Tensor:
        shape, stride, dtype, wanted = self.head.layouts[key]
        tensor = restore(self.views, key, shape, stride, type_of(dtype))
        return tensor.requires_grad_(wanted)

    def _incoming(self, m: int) -> dict[str, torch.Tensor]:
        """The gradients that later shards have given so far, for what this one wrote, reads, or shares."""
        names = [p.name for p in (*self.homes.writes[self.s], *self.homes.reads[self.s])]
        names += [PARAMETER + name for name in self._tied]
        keys = {name: self._gradient_key(name, m) for name in names}
        return {name: self._load(key) for name, key in keys.items() if key in self.head.layouts}

    # --- what comes out -----------------------------------------------------------------------------------

    def _write(self, written: Mapping[str, Any], m: int | str, saving: Saving | None) -> None:
        for passing in self.homes.writes[self.s]:
            value = written[passing.name]
            assert passing.differentiable or not value.requires_grad, (
                f"no gradient is expected for {passing.name}"
            )
            key = f"{self.unit.job}/value/{passing.name}/{m}"
            place = self._store(key, value)
            if saving is not None and place is not None:
                saving.written(value, place)

    def _store(self, key: str, tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided:
            raise UsageError(
                f"{key!r} is {tensor.layout}: only dense tensors pass between shards",
                setting="model",
                works="dense",
            )
        self.layouts[key] = (
            tuple(tensor.shape),
            tensor.stride(),
            name_of(tensor.dtype),
            tensor.requires_grad,
        )
        return store(self.views, key, tensor.detach())

    def _give_back(
        self, gradients: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor], m: int
    ) -> None:
        """Leave the gradients of a micro-batch for earlier shards."""
        for passing in self.homes.reads[self.s]:
            if passing.differentiable and passing.name in gradients:
                self._store(self._gradient_key(passing.name, m), gradients[passing.name])
        for name in self._tied:
            leaf = leaves[name]
            if not self._is_home(name) and leaf.grad is not None:
                self._store(self._gradient_key(PARAMETER + name, m), _dense(name, leaf.grad))
                leaf.grad = None

    def _gradients(self, leaves: Mapping[str, torch.Tensor], **known: Any) -> Report:
        """Keep the parameters' gradients for the update, or leave them in a segment until all are there."""
        found = {}
        for parameter in self.homes.at_home[self.s]:
            gradient = leaves[parameter.name].grad if parameter.name in leaves else None
            if gradient is not None:
                found[parameter.name] = _dense(parameter.name, gradient)
        if not self.adopted.description.clips:
            self.adopted.gradients[self.s] = found
            return self._report(**known)
        norms = {name: float(torch.linalg.vector_norm(gradient, 2.0)) for name, gradient in found.items()}
        if self.homes.at_home[self.s]:
            segment = self.homes.gradient_segment(self.s)
            for parameter, entry in zip(self.homes.at_home[self.s], segment.entries, strict=True):
                if parameter.name in found:
                    self.views.entry(segment.key, entry, parameter.stride).copy_(found[parameter.name])
        if self.s == last_backward(self.adopted.description, self.adopted.plan):
            known["norm"] = float(global_norm(self.adopted, {**self.head.norms, **norms}))
        return self._report(norms=norms, **known)

    def _report(self, **known: Any) -> Report:
        return Report(
            layouts=self.layouts,
            generators=self.generators,
            references=tuple(self.references),
            casts=tuple(self.casts),
            **known,
        )

    def _saved_room(self, m: int) -> int:
        shard, description = self.adopted.plan.shards[self.s], self.adopted.description
        nbytes = -(-shard.saved_bytes * description.micro_batches[m] // description.rows)
        return self.homes.saved_segment(self.s, m, nbytes).nbytes

    # --- random numbers -----------------------------------------------------------------------------------

    def _seed(self, m: int) -> None:
        """Bring the generator to where it is at the shard's start in a micro-batch."""
        texts = (self.head.generators.get(f"{s}/{m}") for s in range(self.s, -1, -1))
        text = next((text for text in texts if text is not None), None)
        if text is None:
            self._generator = self.adopted.seeded(self.unit.step, m)
        else:
            self._generator = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        set_generator_state(self.adopted.device, self._generator)

    def _note_generator(self, m: int) -> None:
        """Note where the generator is for the next shard, if it has moved."""
        now = generator_state(self.adopted.device)
        if not torch.equal(now, self._generator):
            text = base64.b64encode(now.numpy().tobytes()).decode()
            self.generators[f"{self.s + 1}/{m}"] = text


def global_norm(adopted: Adopted, norms: Mapping[str, float]) -> torch.Tensor:
    """The norm of all gradients, from that of each, in the model's order."""
    known = {p.name: type_of(p.dtype) for p in adopted.description.parameters}
    return total_norm([(norms[name], dtype) for name, dtype in known.items() if name in norms])


def _dense(name: str, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout != torch.strided:
        raise UsageError(
            f"the gradient of {name!r} is {gradient.layout}, and only dense ones can be stored",
            setting="model",
            works="nn.Embedding(..., sparse=False)",
        )
    return gradient
