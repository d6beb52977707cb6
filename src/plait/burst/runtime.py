"""Trains a chain under a plan in which every block is as wide as it pays.

    parallel = BurstParallel(chain, plan, loss=plait.losses.cross_entropy)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for batch in batches:                      # the whole batch, on every rank
        loss = parallel.step(batch)
        optimizer.step()
        optimizer.zero_grad()

A block of width w runs on ranks 0 to w - 1, each with its share of the rows. Rows move where widths differ
(:mod:`plait.burst.reshard`), gradients are added up over the ranks of a block while the backward pass goes on
(:mod:`plait.burst.sync`). Every rank's part of the loss is weighed by its own rows, so gradients are those of
one device, whatever the plan: sum(w*l)/sum(w).

What differs, as it does in data parallelism: ranks draw their own dropout masks, and BatchNorm normalises by
each rank's own rows and keeps rank 0's statistics, unless ``batch_norm="synchronized"``.
"""

from __future__ import annotations

import math
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn

from plait import losses
from plait.burst import terms
from plait.burst.burst_plan import BurstPlan
from plait.burst.crew import Crew
from plait.burst.diary import Diary, Doing, StepRecord
from plait.burst.figures import Figures
from plait.burst.holding import Holding
from plait.burst.norm import SynchronizedNorm
from plait.burst.reshard import Post
from plait.burst.state import Spread, spread_optimizer
from plait.burst.step_batch import StepBatch
from plait.burst.sweep import Route, Sweep
from plait.burst.sync import GradientSync, buckets, check
from plait.chain import Chain
from plait.collective import Collective, TorchCollective
from plait.errors import UsageError, WorkerError
from plait.objective import Objective, inputs_without_labels
from plait.timeline import Timeline

BatchNorm = Literal["local", "synchronized"]


class BurstParallel:
    """A chain in training, on one rank of several; all ranks make the same calls in the same order."""

    def __init__(
        self,
        chain: Chain,
        plan: BurstPlan,
        *,
        loss: Callable[[Any, Any], Any],
        weight: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        bf16: bool = False,
        collective: Collective | None = None,
        batch_norm: BatchNorm = "local",
        seed: int | None = None,
        device: torch.device | str | None = None,
        timeline: Timeline | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Meet the other ranks, take the blocks that this one runs, and free the others.

        - ``loss``, ``weight``, ``inputs``: as in a :class:`plait.Job`: ``loss(output, batch)``, and so on.
        - ``bf16``: forward and loss run under autocast.
        - ``collective``: adds gradients up; torch's own unless given, or plait.compress's.
        - ``seed``: creates the weights of a chain on the meta device. All begin with rank 0's weights.
        - ``timeline``: gets a span for every block and every wait.
        - ``timeout_s``: how long a rank may show no sign of life.
        """
        self.chain = chain
        """Whole on rank 0; on the others, blocks that run elsewhere are on the meta device."""
        self.batch_norm = batch_norm
        self._crew = Crew(device=_device(chain, device), timeout_s=timeout_s)
        weakref.finalize(self, self._crew.close)
        with self._crew.told("at the start"):
            self._collective = TorchCollective() if collective is None else collective
            check(self._collective)
            if batch_norm not in get_args(BatchNorm):
                raise UsageError(
                    f"there is no batch_norm {batch_norm!r}",
                    setting="batch_norm",
                    works="local, synchronized",
                )
            terms.check_plan(plan, chain, self._crew.world)
            self._objective = Objective(
                loss=loss,
                weight=getattr(loss, "weight", losses.rows) if weight is None else weight,
                inputs=inputs_without_labels if inputs is None else inputs,
                bf16=bf16,
            )
            self.gaps: tuple[float, ...] = (0.0,) * self._crew.world
            """By rank, the milliseconds in which it had nothing to do in the step before the last."""
            self._diary = Diary(self._crew.rank, timeline)
            weakref.finalize(self, self._diary.close)
            self._crew.waiting = self._diary.waiting
            self._holding = Holding(chain, self._crew.device, seed)
            self._agree(self._crew.meet, plan, {"batch_norm": batch_norm, "bf16": bf16})
            self._plans = 0
            self._sync: GradientSync | None = None
            self._post = Post(self._crew)
            self._spread = Spread(self._crew)
            self._figures = Figures(self._crew)
            self._adopt(plan)
            self._share_weights(self._holding.widths(plan.widths), range(len(chain)))

    # --- what it holds ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This one."""
        return self._crew.rank

    @property
    def plan(self) -> BurstPlan:
        """The plan in force."""
        return self._plan

    @property
    def record(self) -> StepRecord | None:
        """The last step, as this rank saw it."""
        return self._diary.last

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the blocks that this rank runs, by the model's names; on rank 0, all.

        A rank that trains none has an empty one, too, so that an optimizer can be made everywhere.
        """
        return iter(self._holding.named())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the blocks that this rank runs, to make an optimizer from."""
        return (parameter for _, parameter in self.named_parameters())

    # --- training -----------------------------------------------------------------------------------

    def step(
        self,
        *batch: Any,
        micro_batches: int = 1,
        before_each: Callable[[int], object] | None = None,
        number: int | None = None,
    ) -> float:
        """Find the loss of a batch and add its gradients to the parameters'; the same loss on every rank.

        All ranks are given the whole batch, of which each takes its own rows: of every tensor with as many as
        the first. With ``micro_batches`` it passes in so many parts, one after the other, and gradients
        are added up once; ``before_each`` is called with the number of each, from 0, before its forward pass.
        ``number`` is that of the step in its training, by which a collective draws random numbers: with it,
        training that is resumed draws the same. None counts the steps of this object.
        """
        self._crew.enter()
        whole = batch[0] if len(batch) == 1 else batch
        here = self._diary.begin()
        self._crew.says(f"in step {here}")
        with self._crew.told(f"in step {here}"):
            training = self.chain.model.training
            given = StepBatch(whole, micro_batches, self._plan, step=here, training=training)
            self._holding.check()
            self._crew.alike(given.alike)
            self._post.tag = given.tag
            known = here if number is None else number
            loss = self._train(given, before_each or (lambda number: None), known)
        self._diary.end(self._crew.sent_bytes)
        self._crew.says(f"between steps {here} and {here + 1}")
        return loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients down so that their norm over the whole model is at most this; returns the norm.

        To be called on all ranks, after ``step``.
        """
        self._crew.enter()
        gradients = [p.grad for p in self._holding.parameters.values() if p.grad is not None]
        whole = float(nn.utils.get_total_norm(gradients)) if self.rank == 0 else 0.0
        (norm,) = self._figures.total([whole])
        total = torch.tensor(norm, dtype=self._holding.dtype, device=self._crew.device)
        nn.utils.clip_grads_with_norm_(list(self._holding.parameters.values()), max_norm, total)
        return total

    def _train(self, given: StepBatch, before_each: Callable[[int], object], step: int) -> float:
        assert self._sync is not None
        weights = given.weights(self._objective)
        total = math.fsum(weight for some in weights for weight in some)
        if total == 0:  # nothing counts, on any rank: the mean is undefined
            return math.nan
        self._sync.begin(step)
        loss = 0.0
        signature = f"{self._plans}/{given.signature}"
        for number, ((part, rows), some) in enumerate(zip(given.parts, weights, strict=True)):
            before_each(number)
            sweep = Sweep(self._route, part, rows, signature)
            loss += sweep.forward(some, total)
            final = number == len(given.parts) - 1
            sweep.backward(self._ended if final else lambda place: None)
        return self._finish(loss, given)

    def _finish(self, loss: float, given: StepBatch) -> float:
        """Wait for the gradients; what all ranks must know goes around meanwhile."""
        assert self._sync is not None
        world = self._crew.world
        gaps, tags = [0.0] * world, [0.0] * world
        gaps[self.rank] = 0.0 if self.record is None else self.record.total_ms("idle")
        tags[self.rank] = float(given.tag)
        self._diary.idle = self.rank >= self._plan.widths[0]
        pending = self._figures.start([loss, *gaps, *tags, *self._sync.flags])
        reduced = self._sync.finish()
        whole = pending()
        for label, errand in reduced:
            self._diary.note("sync", label, errand.start_ns, errand.end_ns)
        if len(set(whole[1 + world : 1 + 2 * world])) > 1:  # as all ranks see, which now find out why
            self._crew.agree(given.alike)
        self._sync.deliver(whole[1 + 2 * world :])
        self._diary.idle = False
        self.gaps = tuple(whole[1 : 1 + world])
        return whole[0]

    def _ended(self, place: int) -> None:
        assert self._sync is not None
        self._sync.ready(place, self.chain[place].name)

    # --- other plans, saving and loading ------------------------------------------------------------

    def change(self, plan: BurstPlan, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Go on under another plan, between two steps: weights, and the optimizer's state, move.

        All ranks call it. The optimizer is changed in place: its groups hold the parameters that this rank
        has now. Gradients are dropped.
        """
        self._crew.enter()
        with self._crew.told("changing the plan"):
            terms.check_plan(plan, self.chain, self._crew.world)
            self._agree(self._crew.agree, plan, {})
        old = self._holding.widths(self._plan.widths)
        before = self._plan.widths
        for parameter in self._holding.parameters.values():
            parameter.grad = None
        self._adopt(plan)
        new = self._holding.widths(plan.widths)
        moved = {name for name in new if new[name] > old[name]}
        grown = [place for place in range(len(self.chain)) if plan.widths[place] > before[place]]
        self._share_weights({name: new[name] for name in new if name in moved}, grown)
        if optimizer is not None:
            self._spread_optimizer(optimizer, moved)

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 the state of the whole model, as the model itself has it; empty on the others."""
        return self.chain.state_dict() if self.rank == 0 else {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load the state of the whole model, which rank 0 has; all ranks call it, others may give None."""
        self._crew.enter()
        if self.rank == 0:
            with self._crew.told("loading weights"):
                if state is None:
                    raise UsageError("rank 0 has no state to load", setting="state", works="state_dict()")
                self.chain.load_state_dict(state)
        self._share_weights(self._holding.widths(self._plan.widths), range(len(self.chain)))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """On rank 0 the state of the whole optimizer, as one device would have it; empty on the others."""
        return optimizer.state_dict() if self.rank == 0 else {}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None) -> None:
        """Load the state of the whole optimizer, which rank 0 has, under whatever plan; all ranks call it."""
        self._crew.enter()
        if self.rank == 0:
            with self._crew.told("loading the optimizer's state"):
                if state is None:
                    raise UsageError(
                        "rank 0 has no state to load", setting="state", works="optimizer_state()"
                    )
                optimizer.load_state_dict(dict(state))
        self._spread_optimizer(optimizer, set(self._holding.widths(self._plan.widths)))

    def align(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every rank's optimizer rank 0's groups: needed where they go by a parameter's place among all.

        All ranks call it, right after they have made theirs.
        """
        self._crew.enter()
        self._spread_optimizer(optimizer, set())

    def tell(self, content: Any) -> Any:
        """What rank 0 was given here, on every rank: anything that can be pickled."""
        self._crew.enter()
        with self._crew.told("telling the others"):
            return pickle.loads(self._spread.object(_pickled(content) if self.rank == 0 else b"", "word"))

    def telling(self, doing: str) -> AbstractContextManager[None]:
        """Around what may fail on this rank alone: the others then raise, too, rather than wait for it."""
        return self._crew.told(doing)

    def close(self) -> None:
        """End the threads and publish no more; the weights stay."""
        self._diary.close()
        self._crew.close()

    def _spread_optimizer(self, optimizer: torch.optim.Optimizer, moved: set[str]) -> None:
        with self._crew.told("sharing the optimizer's state"):
            spread_optimizer(
                optimizer,
                self._spread,
                self._crew,
                held=self._holding.parameters,
                names={id(parameter): name for name, parameter in self._holding.parameters.items()},
                widths=self._holding.widths(self._plan.widths),
                moved=moved,
            )

    def _agree(
        self, meet: Callable[[dict[str, Any]], None], plan: BurstPlan, more: Mapping[str, Any]
    ) -> None:
        """Make sure of what all ranks need alike, so that each reduces the same gradients in the same way."""
        collective = type(self._collective).__name__
        try:
            facts = {**terms.facts(plan), **more, "collective": collective}
            meet({**facts, **self._holding.facts(plan.widths)})
        except WorkerError as error:
            if error.setting == "model":  # as it is on all ranks, which now find out where they differ
                self._crew.agree(terms.parameters(self._holding.trained(plan.widths)))
            raise

    def _adopt(self, plan: BurstPlan) -> None:
        """Hold what a plan gives this rank."""
        for width in sorted(set(plan.widths)):
            self._crew.open("sync", width)
            if self.batch_norm == "synchronized":
                self._crew.open("norm", width)
        with self._crew.told("taking its blocks"):
            self._holding.take(plan.widths, self.rank)
        if self._sync is not None:
            self._sync.close()
        order = buckets(self._holding.trained(plan.widths))
        parameters = self._holding.parameters
        self._sync = GradientSync(self._crew, self._collective, order, parameters, free=self._post.free)
        self._plan = plan
        self._plans += 1
        self._route = Route(
            chain=self.chain,
            widths=plan.widths,
            objective=self._objective,
            post=self._post,
            state=self._holding.state,
            entering=self._entering,
            idling=self._diary.idling,
            known={},
        )

    def _share_weights(self, widths: Mapping[str, int], places: Iterable[int]) -> None:
        """Everyone who holds these takes them from rank 0."""
        for name, width in widths.items():
            if name in self._holding.parameters:
                self._spread.tensors([self._holding.parameters[name]], width, f"{name!r}")
        for place in places:
            width, name = self._plan.widths[place], self.chain[place].name
            self._spread.tensors(self._holding.buffers(place), width, f"the statistics of {name!r}")

    # --- small things -------------------------------------------------------------------------------

    @contextmanager
    def _entering(self, what: Doing, place: int) -> Iterator[None]:
        """Around a block's forward, the loss, or a block's backward."""
        width = self._plan.widths[place]
        with ExitStack() as stack:
            if what == "forward" and self.batch_norm == "synchronized" and width > 1:
                stack.enter_context(SynchronizedNorm(lambda tensor: self._figures.gather(tensor, width)))
            stack.enter_context(self._diary.doing(what, self.chain[place].name))
            yield


def _device(chain: Chain, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return next((p.device for p in chain.parameters() if not p.is_meta), torch.device("cpu"))


def _pickled(content: Any) -> bytes:
    try:
        return pickle.dumps(content)
    except Exception as error:  # pickle raises several kinds
        raise UsageError(
            f"a {type(content).__name__} cannot be pickled: {error}",
            setting="content",
            works="numbers, lists",
        ) from error
