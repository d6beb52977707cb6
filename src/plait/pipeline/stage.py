"""The stages of a pipeline from any model: a traced chain, cut where the profile says that stages balance.

Each stage takes all values that are alive at the cut before it and gives all that are alive at the cut after
it, so what skips stages (a mask, labels, a U-Net's skip) is passed along, gradient and all. Weights that
several stages use are held by each of them, and their gradients summed (:mod:`plait.pipeline.tied`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from plait.chain import Chain
from plait.cluster import Cluster
from plait.errors import UsageError, WorkerError
from plait.pipeline.balance import balance
from plait.pipeline.network import Network
from plait.pipeline.placement import Size
from plait.pipeline.tied import Shared
from plait.profile import Profile


class StageModule(nn.Module):
    """One stage of a chain: the first takes the model's inputs, the last gives its output."""

    def __init__(self, chain: Chain, place: int, shared: Sequence[Shared]) -> None:
        super().__init__()
        self._chain, self._place = chain, place
        self._reads, self._writes = chain[place].reads, chain[place].writes
        # The block's parameters under the block's names, which are the model's: a state_dict fits both.
        self._parameters, self._buffers = chain[place]._parameters, chain[place]._buffers
        self._modules = chain[place]._modules
        self.shared = tuple(shared)
        """What several stages hold, of the whole model; the schedule sums their gradients."""
        self.training = chain[place].training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage's part of the model."""
        if self._place == 0:
            values = self._chain.start(*args, **kwargs)
            args = tuple(values[name] for name in self._reads)
        given = self._chain[self._place](*args)
        if self._place == len(self._chain) - 1:
            return self._chain.finish(dict(zip(self._writes, given, strict=True)))
        return given

    def train(self, mode: bool = True) -> StageModule:
        """Switch to training or evaluation, as the chain does: what is frozen in the model stays so."""
        self._chain.train(mode)
        self.training = mode
        return self

    @property
    def switched(self) -> list[nn.Module]:
        """All modules that :meth:`train` may switch: those of the whole model."""
        return [part for whole in (self._chain.model, *self._chain) for part in whole.modules()]


class Stages(Sequence[StageModule]):
    """All stages of a model; a process runs one of them."""

    def __init__(self, chain: Chain, cuts: Sequence[int]) -> None:
        self.cuts = tuple(cuts)
        """The blocks of the chain that begin a new stage."""
        try:
            self.chain = chain.cut(list(cuts), carry=True)
        except UsageError as error:
            if error.setting == "at":  # as the chain calls them
                raise UsageError(error.what, setting="cuts", works=f"cuts={error.works}") from None
            raise
        """Its blocks are the stages; ``chain.create(place, seed=...)`` makes the weights of one alone."""
        users: dict[tuple[int, ...], list[str]] = {}
        for name, places in self.chain.tied.items():
            users.setdefault(places, []).append(name)
        shared = [Shared(places, tuple(sorted(names))) for places, names in sorted(users.items())]
        self._modules = tuple(StageModule(self.chain, place, shared) for place in range(len(self.chain)))
        self._blocks = [range(a, b) for a, b in pairwise([0, *cuts, len(chain)])]

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, place: Any) -> Any:
        return self._modules[place]

    def __iter__(self) -> Iterator[StageModule]:
        return iter(self._modules)

    def blocks(self, place: int) -> range:
        """Which blocks of the chain a stage runs."""
        return self._blocks[place]

    def stage(
        self, place: int | None = None, *, device: torch.device | str = "cpu", group: Any = None
    ) -> PipelineStage:
        """This process's stage, for any schedule of torch's or plait's; by default that of its rank.

        All ranks of the group call it, and learn whether they have cut alike.
        """
        world = dist.get_world_size(group)
        if world != len(self):
            raise UsageError(
                f"{len(self)} stages for {world} ranks", setting="n", works=f"{world}, one stage a rank"
            )
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, self.cuts, group=group)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise WorkerError(
                    f"rank {rank} has cut before blocks {theirs}, and rank 0 before {everyone[0]}",
                    setting="profile",
                    works="one profile, saved and loaded by all ranks, or the same cuts=[...]",
                )
        place = dist.get_rank(group) if place is None else place
        return PipelineStage(self[place], place, len(self), torch.device(device), group=group)


def stages(
    chain: Chain,
    profile: Profile | None = None,
    n: int | None = None,
    *,
    cuts: Sequence[int] | None = None,
    rows: int = 1,
    micro_batches: int | None = None,
    speeds: Sequence[float] | None = None,
    memory_bytes: Size | Sequence[Size] | None = None,
    network: Network | None = None,
    cluster: Cluster | None = None,
) -> Stages:
    """Cut a chain into ``n`` stages where its profile says that they balance, or where ``cuts`` say.

    What follows ``cuts`` is as for :func:`plait.pipeline.balance.balance`: the rows of a micro-batch, and
    what is unequal among devices and links. Every rank must cut alike, so read one profile on all.
    """
    if not isinstance(chain, Chain):
        what = f"the model is a {type(chain).__name__}, not yet a chain"
        raise UsageError(what, setting="chain", works="plait.Chain.trace(model, example_inputs)")
    if cuts is None:
        if profile is None or n is None:
            raise UsageError(
                "neither a profile and a number of stages nor cuts", setting="profile, n", works="cuts=[4, 8]"
            )
        if len(profile.blocks) != len(chain):
            raise UsageError(
                f"the profile has {len(profile.blocks)} blocks and the chain {len(chain)}",
                setting="profile",
                works="Profile.measure(chain), of the same chain",
            )
        cuts = balance(
            profile,
            n,
            rows=rows,
            micro_batches=micro_batches,
            speeds=speeds,
            memory_bytes=memory_bytes,
            network=network,
            cluster=cluster,
        ).cuts
    elif isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise UsageError(f"cuts is {cuts!r}", setting="cuts", works="a list of blocks: [4, 8]")
    elif n is not None and n != len(cuts) + 1:
        what = f"cuts before blocks {list(cuts)} make {len(cuts) + 1} stages, not {n}"
        raise UsageError(what, setting="n", works=f"{len(cuts) + 1}, or none")
    return Stages(chain, cuts)
