"""Rows of a batch move between ranks where widths differ, values forward and gradients back.

A passage takes the values that are alive at a cut from one width to another: only rows that change their rank
are sent, each from the one rank that has it to the one that needs it (:func:`plait.burst.rows.moves`). The
gradients' passage is the same with the widths exchanged, so the two are each other's transpose, and autograd
across the cut is exact:

    forward    y = P x      P puts every row where the next block wants it
    backward   g_x = P' g_y

A value that all rows share (a mask, a table of positions) goes from rank 0 to ranks that join; each rank then
has a part of its gradient, and ranks that leave on the way back hand theirs to rank 0, which adds them up.

Nothing waits longer than it must: sends are left to themselves, receives are posted before they are needed
where sizes are known, and a value is waited for when a block first reads it, so those that are read later
arrive while blocks compute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from plait.burst.crew import Crew
from plait.burst.form import Form
from plait.burst.lane import Errand
from plait.burst.rows import begin, moves


class Post:
    """Sends and receives rows; messages of one tag between two ranks match by their order."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.rank, self.device = crew.rank, crew.device
        self.early = crew.device.type == "cpu"
        """Whether receives may be posted ahead: NCCL would hold up what is sent after them."""
        self.tag = 0
        """Messages are only received by who has the same."""
        self.free = threading.Event()
        """Set while no rows are on their way from this rank."""
        self.free.set()
        self._out = 0
        crew.open("rows", crew.world)
        self._sending, self._receiving = crew.lane("send"), crew.lane("receive")

    def exchange(
        self, out: Sequence[tuple[torch.Tensor, int]], into: Sequence[tuple[torch.Tensor, int]], what: str
    ) -> list[Errand]:
        """Start sending tensors and receiving into others; what is received when which errand is done."""
        if not (out or into):
            return []
        group = self.crew.group("rows", self.crew.world)
        self.crew.count(sum(tensor.nbytes for tensor, _ in out))
        if not self.early:
            ops = [dist.P2POp(dist.irecv, tensor, peer, group) for tensor, peer in into]
            ops += [dist.P2POp(dist.isend, tensor, peer, group) for tensor, peer in out]
            works = dist.batch_isend_irecv(ops)
            errand = self._receiving.do(lambda: [work.wait() for work in works], f"exchanging rows of {what}")
            return [errand] * len(into)
        errands = []
        for tensor, peer in into:
            doing = f"receiving rows of {what} from rank {peer}"
            work: Any = self._post(dist.irecv, tensor, peer, group, doing)
            errands.append(self._receiving.do(work.wait, doing, peer=peer))
        for tensor, peer in out:
            doing = f"sending rows of {what} to rank {peer}"
            work = self._post(dist.isend, tensor, peer, group, doing)
            self._sending.do(self._leave(tensor, work), doing, peer=peer)
        return errands

    def _post(
        self, start: Callable[..., Any], tensor: torch.Tensor, peer: int, group: Any, doing: str
    ) -> Any:
        try:
            return start(tensor, peer, group=group, tag=self.tag)
        except RuntimeError as error:  # gloo takes no message to a peer that is gone
            self.crew.lost(Errand(None, doing, peer), error)
            self.crew.check()
            raise

    def _leave(self, tensor: torch.Tensor, work: Any) -> Callable[[], None]:
        """Waits until a tensor, which must stay until then, has left."""
        with self.crew.changed:
            self._out += 1
            self.free.clear()

        def wait(tensor: torch.Tensor = tensor) -> None:
            work.wait()
            with self.crew.changed:
                self._out -= 1
                if not self._out:
                    self.free.set()

        return wait


@dataclass
class Arriving:
    """A value on its way to this rank, some of it maybe here already."""

    form: Form
    tensor: torch.Tensor
    """Packed."""
    adds: list[torch.Tensor] = field(default_factory=list)
    """Parts of a gradient, to be added up."""
    errands: list[Errand] = field(default_factory=list)


class Passage:
    """The values at one cut, from one width to another, as one rank sees it."""

    def __init__(
        self,
        post: Post,
        forms: Sequence[Form],
        *,
        rows: int,
        before: int,
        after: int,
        gradients: bool,
        what: str,
    ) -> None:
        """``rows`` are those of the whole batch; ``what`` says in words what passes."""
        self._post, self._forms, self._what = post, tuple(forms), what
        self._before, self._after, self._gradients = before, after, gradients
        self._moves = moves(rows, before, after)
        rank = post.rank
        self._held = range(begin(rows, before, rank), begin(rows, before, rank + 1))
        self._wanted = range(begin(rows, after, rank), begin(rows, after, rank + 1))
        self._arriving: dict[str, Arriving] | None = None
        self._into: list[tuple[torch.Tensor, int]] = []

    def expect(self) -> None:
        """Post the receives ahead of ``depart``, where the backend lets that happen."""
        if self._post.early and self._arriving is None:
            self._make_room()
            self._receive(self._post.exchange([], self._into, self._what))

    def depart(self, values: Mapping[str, torch.Tensor]) -> None:
        """Send what others need of this rank's values, and keep what stays here; a missing one is zero."""
        if self._arriving is None:
            self._make_room()
        posted = self._post.early and not self._into
        out = [parcel for form in self._forms for parcel in self._give(form, values)]
        errands = self._post.exchange(out, [] if posted else self._into, self._what)
        if not posted:
            self._receive(errands)

    def arrive(self) -> dict[str, Arriving]:
        """What this rank gets, each to be finished when it is needed."""
        assert self._arriving is not None, "depart comes first"
        return self._arriving

    # --- receiving ----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Buffers for what comes, in the order in which all ranks send."""
        self._arriving = {}
        self._into = []
        self._owners: list[Arriving] = []
        rank = self._post.rank
        for form in self._forms:
            if rank < self._after and form.batched and self._wanted != self._held:
                arriving = Arriving(form, form.empty(len(self._wanted), self._post.device))
                self._arriving[form.name] = arriving
                for move in self._moves:
                    if move.target == rank:
                        place = slice(move.start - self._wanted.start, move.end - self._wanted.start)
                        self._ask(arriving, arriving.tensor[place], move.source)
            elif not form.batched and not self._gradients and self._before <= rank < self._after:
                self._arriving[form.name] = arriving = Arriving(form, form.empty(0, self._post.device))
                self._ask(arriving, arriving.tensor, 0)
            elif not form.batched and self._gradients and rank == 0:
                self._arriving[form.name] = arriving = Arriving(form, form.empty(0, self._post.device))
                for other in range(self._after, self._before):
                    arriving.adds.append(form.empty(0, self._post.device))
                    self._ask(arriving, arriving.adds[-1], other)

    def _ask(self, arriving: Arriving, room: torch.Tensor, peer: int) -> None:
        self._into.append((room, peer))
        self._owners.append(arriving)

    def _receive(self, errands: Sequence[Errand]) -> None:
        for arriving, errand in zip(self._owners, errands, strict=True):
            arriving.errands.append(errand)
        self._into, self._owners = [], []

    # --- sending ------------------------------------------------------------------------------------

    def _give(self, form: Form, values: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        rank = self._post.rank
        assert self._arriving is not None, "there is room"
        if rank >= self._before:
            return []
        value = values.get(form.name)
        if value is None:
            packed = form.empty(len(self._held), self._post.device).zero_()
        else:
            packed = form.pack(value, len(self._held))
        if not form.batched:
            return self._give_shared(form, packed)
        out = []
        for move in self._moves:
            if move.source == rank:
                begins, ends = move.start - self._held.start, move.end - self._held.start
                out.append((packed[begins:ends], move.target))
        if rank < self._after and self._wanted == self._held:
            self._arriving[form.name] = Arriving(form, packed)
        elif rank < self._after:
            self._keep(form, packed)
        return out

    def _keep(self, form: Form, packed: torch.Tensor) -> None:
        """Copy the rows that stay on this rank to their new places."""
        assert self._arriving is not None, "there is room"
        stays = range(max(self._held.start, self._wanted.start), min(self._held.stop, self._wanted.stop))
        if stays:
            to = slice(stays.start - self._wanted.start, stays.stop - self._wanted.start)
            of = slice(stays.start - self._held.start, stays.stop - self._held.start)
            self._arriving[form.name].tensor[to].copy_(packed[of])

    def _give_shared(self, form: Form, packed: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        rank = self._post.rank
        assert self._arriving is not None, "there is room"
        if self._gradients and rank == 0:
            self._arriving[form.name].tensor.copy_(packed)
        elif rank < self._after:
            self._arriving[form.name] = Arriving(form, packed)
        if self._gradients:
            return [(packed, 0)] if rank >= self._after else []
        return [(packed, other) for other in range(self._before, self._after)] if rank == 0 else []


def landed(post: Post, arriving: Arriving, what: str) -> torch.Tensor:
    """The tensor of a value, waited for."""
    if arriving.errands:
        post.crew.finish(arriving.errands, f"{arriving.form.name!r} of {what}")
        arriving.errands = []
    for part in arriving.adds:
        arriving.tensor += part
    arriving.adds = []
    return arriving.form.unpack(arriving.tensor)
