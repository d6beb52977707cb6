"""What the collectives have in common: what they check before anything starts, and how they start."""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from plait.collective import Reduction
from plait.compress import communicator, workspace
from plait.compress.codec import Cast, Codec, Exact, Quantizer
from plait.compress.compression import checked_codec
from plait.compress.exchange import Exchange, Task
from plait.compress.feedback import Feedback
from plait.compress.given import expect
from plait.compress.layout import Layout, Piece
from plait.compress.mesh import Mesh
from plait.compress.price import price_ms
from plait.compress.ring import Ring
from plait.compress.rounding import stream_key
from plait.compress.rules import EXACT, checked_width
from plait.compress.scatter import Scatter
from plait.compress.settings import Settings
from plait.compress.topology import Topology
from plait.compress.verification import Verification
from plait.compress.work import Work
from plait.compress.workspace import Workspace
from plait.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from plait.timeline import Timeline

_MOST_NAMED = 16
"""So many pieces are named one by one when workers compare what they do."""
_PLAIN_CHUNKS = 4
"""Chunks that travel as they are need hardly any work, so they are so many times larger."""
_log = logging.getLogger(__name__)


class Call:
    """One call of a collective, on one worker; the first tensor receives the result."""

    def __init__(self, name: str, tensors: Sequence[Tensor], group: Any, op: Any, settings: Settings) -> None:
        expect(settings, Settings, setting="settings", works="Settings()")
        for place, tensor in enumerate(tensors):
            _check(tensor, written=place == 0)
        _check_group(group)
        self.name = name
        self.settings = settings
        self.average = averages(op)
        self._dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        ranks = communicator.ranks_of(group)
        self.world = len(ranks)
        self.alone = self.world == 1
        """Nothing is to be sent, and there is no mesh."""
        if not self.alone:
            self._communicator = communicator.current()
            self.mesh: Mesh = self._communicator.mesh(group, ranks, settings)

    def check_count(self, count: int, tensor: Tensor, what: str) -> None:
        """Refuse sizes that do not fit each other."""
        if count != tensor.numel():
            raise UsageError(
                f"{self.name} over {self.world} workers has {tensor.numel()} elements where {count} belong",
                setting=what,
                works=f"{count} elements",
            )

    def check_feedback(self, feedback: Feedback, count: int) -> None:
        """Refuse memory for what is lost that does not lie as the numbers do."""
        expect(feedback, Feedback, setting="feedback", works=f"Feedback(kept=torch.zeros({count}))")
        kept = feedback.kept
        if not workspace.fits(kept) or kept.shape != (count,):
            raise UsageError(
                f"feedback of {kept.dtype}, shape {tuple(kept.shape)}, on {kept.device}",
                setting="feedback",
                works=f"torch.zeros({count})",
            )

    def declines(self, pieces: Sequence[Piece], plain: Piece, topology: Topology | None) -> bool:
        """Whether the pieces are better sent plain; the same answer on all workers."""
        codecs = [*(piece.codec for piece in pieces), plain.codec, Exact()]
        pace, speeds = self._communicator.measured(self.mesh, codecs, self.settings)
        hosts = self.world if topology is None else len(topology.hosts)
        size = self.settings.chunk_bytes
        packed, unpacked = (
            price_ms(each, hosts, pace, speeds, chunk_bytes=size) for each in (pieces, [plain])
        )
        if packed < unpacked:
            return False
        _log.info("left uncompressed: %.1f ms instead of %.1f for %d numbers", unpacked, packed, plain.count)
        return True

    def balanced(self, pieces: Sequence[Piece], topology: Topology | None) -> Layout:
        """The layout of an all-reduce."""
        owners = self.world if topology is None else len(topology.owners)
        return Layout.balanced(pieces, owners, chunk_bytes=self._chunk_bytes(pieces))

    def given(self, count: int, pieces: Sequence[Sequence[Piece]] | None, codec: Codec) -> Layout:
        """The layout of a collective in which each worker has a part of so many elements."""
        parts: list[tuple[Piece, ...]] = [
            (Piece(name=i, count=count, codec=codec),) for i in range(self.world)
        ]
        if pieces is not None:
            parts = [checked_pieces(part) for part in _listed(pieces)]
            counts = [sum(piece.count for piece in part) for part in parts]
            if counts != [count] * self.world:
                raise UsageError(
                    f"pieces make {len(parts)} parts of {counts} elements",
                    setting="pieces",
                    works=f"{self.world} parts of {count}",
                )
        return Layout.given(parts, chunk_bytes=self._chunk_bytes([piece for part in parts for piece in part]))

    def _chunk_bytes(self, pieces: Sequence[Piece]) -> int:
        plain = all(isinstance(piece.codec, Exact) for piece in pieces)
        return self.settings.chunk_bytes * (_PLAIN_CHUNKS if plain else 1)

    def task(
        self, layout: Layout, topology: Topology | None, seed: int, step: int | None, **fields: Any
    ) -> Task:
        """What is to be done; ``fields`` are those of the task that are not the same for all."""
        name = functools.partial(stream_key, seed=seed, rank=self.mesh.position)
        name(step=0 if step is None else step)  # complains about what is no seed or step
        where = "ring" if topology is None else f"scatter over {topology.hosts}, lanes {topology.lanes}"
        fingerprint = {
            "operation": self.name,
            "elements": layout.count,
            "dtypes": self._dtypes,
            "reduction": "average" if self.average else "sum",
            "algorithm": where,
            "feedback": fields.get("feedback") is not None,
            "seed": seed,
            "step": step,
            "chunk_bytes": self.settings.chunk_bytes,
            "verify": self.settings.verify,
            **describe(layout.pieces),
        }

        @functools.cache
        def key(phase: int, parameter: str | int) -> int:
            # The operation has its number only once it is handed in: other threads hand in others.
            operation = self._operation()
            assert operation is not None, "it is the operation that asks"
            number = operation.sequence if step is None else step
            return name(step=number, phase=phase, parameter=parameter)

        return Task(
            layout=layout,
            key=key,
            fingerprint=fingerprint,
            timeout_s=self.settings.timeout_s,
            divisor=self.world if self.average else 1,
            timeline=self._communicator.thread.timeline,
            **fields,
        )

    def run(
        self,
        task: Task,
        space: Workspace,
        topology: Topology | None,
        *,
        async_op: bool,
        declined: bool = False,
        verify: Tensor | None = None,
    ) -> Work | None:
        """Hand the operation in, and wait for it unless a handle is asked for."""
        operation: Exchange
        if topology is None:
            operation = Ring(self.mesh, space, task)
        else:
            inner = self.settings.inner_exact
            operation = Scatter(self.mesh, space, task, topology=topology, inner_exact=inner)
        operation.report.declined = int(declined)
        self._operation = weakref.ref(operation)  # which holds us, through the task
        work = self._communicator.thread.submit(operation)
        if verify is not None and self.settings.verify:
            check = Verification(self.mesh, verify, work, timeout_s=self.settings.timeout_s)
            work = self._communicator.thread.submit(check)
        if async_op:
            return work
        work.wait()
        return None


@functools.lru_cache(maxsize=256)
def describe(pieces: tuple[Piece, ...]) -> dict[str, object]:
    """Pieces as workers compare them: the first ones by name, all of them by a digest."""
    texts = [
        f"{piece.name!r}: {piece.count} elements from {piece.first} in {piece.codec}" for piece in pieces
    ]
    named = {f"piece {i}": text for i, text in enumerate(texts[:_MOST_NAMED])}
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
    return {"pieces": len(pieces), **named, "digest": digest}


def finished(async_op: bool) -> Work | None:
    """What a collective returns that had nothing to do."""
    work = Work()
    work.end()
    return work if async_op else None


def codec_of(bits: int, codec: Codec | None = None) -> Codec:
    """The codec for so many bits a number, or the one that is given in their place."""
    if codec is not None:
        return checked_codec(codec)
    if checked_width(bits) == EXACT:
        return Exact()
    return Cast("fp16") if bits == 16 else Quantizer(bits=bits)


def checked_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The pieces, if that is what they are."""
    found = tuple(_listed(pieces))
    for piece in found:
        expect(piece, Piece, setting="pieces", works="Piece(name=..., count=..., codec=...)")
    return found


def _listed(pieces: Iterable[Any]) -> Iterable[Any]:
    expect(pieces, Iterable, setting="pieces", works="[Piece(name=..., count=..., codec=...)]")
    return pieces


def stop_recording(timeline: Timeline | None) -> None:
    """Record no more there, if that is where it is recorded."""
    import torch.distributed as dist

    if timeline is not None and dist.is_initialized():
        thread = communicator.current().thread
        if thread.timeline is timeline:
            thread.timeline = None


def plain_codec(tensor: Tensor) -> Codec:
    """What sends numbers as they are; of those with 16 bits the sum is rounded, as the result has to be."""
    name = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(str(tensor.dtype))
    return Exact() if name is None else Cast(name)  # type: ignore[arg-type]


def averages(op: Any) -> bool:
    """Whether a reduction, ours by name or torch's, is the average rather than the sum."""
    import torch.distributed as dist

    for name, same in (("sum", dist.ReduceOp.SUM), ("average", dist.ReduceOp.AVG)):
        if op == name or (not isinstance(op, str) and op == same):
            return name == "average"
    raise UsageError(f"there is no reduction {op!r}", setting="op", works=", ".join(get_args(Reduction)))


def _check(tensor: Tensor, *, written: bool) -> None:
    import torch

    known = (torch.float32, torch.float16, torch.bfloat16)
    expect(tensor, torch.Tensor, setting="tensor", works="a dense tensor of float32, float16 or bfloat16")
    if tensor.dtype not in known or tensor.layout != torch.strided:
        raise UsageError(
            f"a {str(tensor.layout).removeprefix('torch.')} tensor of {tensor.dtype} cannot be compressed",
            setting="tensor",
            works="a dense tensor of float32, float16 or bfloat16",
        )
    if tensor.is_meta:
        raise UsageError(
            "a tensor on the meta device has no numbers", setting="tensor", works="one on the CPU"
        )
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    if written and any(size > 1 and stride == 0 for size, stride in layout):
        raise UsageError(
            f"elements of an expanded tensor of shape {tuple(tensor.shape)} share their memory, and cannot "
            "receive a result",
            setting="tensor",
            works="tensor.clone()",
        )


def _check_group(group: Any) -> None:
    import torch.distributed as dist

    if group is not None and dist.is_available() and group is not dist.GroupMember.NON_GROUP_MEMBER:
        expect(group, dist.ProcessGroup, setting="group", works="None, or torch.distributed.new_group(...)")
