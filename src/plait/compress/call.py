"""What the collectives have in common: what they check before anything starts, and how they start."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from plait.collective import Reduction
from plait.compress import communicator, workspace
from plait.compress.codec import Cast, Codec, Exact, Quantizer
from plait.compress.exchange import Exchange, Task
from plait.compress.feedback import Feedback
from plait.compress.layout import Layout, Piece
from plait.compress.mesh import Mesh
from plait.compress.price import price_ms
from plait.compress.ring import Ring
from plait.compress.rounding import stream_key
from plait.compress.scatter import Scatter
from plait.compress.settings import Settings
from plait.compress.topology import Topology
from plait.compress.verification import Verification
from plait.compress.work import Work
from plait.compress.workspace import Workspace
from plait.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_MOST_NAMED = 16
"""So many pieces are named one by one when workers compare what they do."""
_PLAIN_CHUNKS = 4
"""Chunks that travel as they are need hardly any work, so they are so many times larger."""
_log = logging.getLogger(__name__)


class Call:
    """One call of a collective, on one worker."""

    def __init__(self, name: str, tensors: Sequence[Tensor], group: Any, op: Any, settings: Settings) -> None:
        for tensor in tensors:
            _check(tensor)
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
            parts = [tuple(part) for part in pieces]
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
        number = self.mesh.submitted if step is None else step
        name = functools.partial(stream_key, seed=seed, step=number, rank=self.mesh.position)
        name()  # complains about what is no seed or step
        where = "ring" if topology is None else f"scatter over {topology.hosts}, lanes {topology.lanes}"
        fingerprint = {
            "operation": self.name,
            "elements": layout.count,
            "dtypes": self._dtypes,
            "reduction": "average" if self.average else "sum",
            "algorithm": where,
            "feedback": fields.get("feedback") is not None,
            "seed": seed,
            "step": number,
            "chunk_bytes": self.settings.chunk_bytes,
            "verify": self.settings.verify,
            **describe(layout.pieces),
        }

        @functools.cache
        def key(phase: int, parameter: str | int) -> int:
            return name(phase=phase, parameter=parameter)

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


def codec_of(bits: int) -> Codec:
    """The codec for so many bits a number."""
    if bits == 32:
        return Exact()
    return Cast("fp16") if bits == 16 else Quantizer(bits=bits)


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


def _check(tensor: Tensor) -> None:
    import torch

    known = (torch.float32, torch.float16, torch.bfloat16)
    if tensor.dtype not in known or tensor.layout != torch.strided:
        raise UsageError(
            f"a {str(tensor.layout).removeprefix('torch.')} tensor of {tensor.dtype} cannot be compressed",
            setting="tensor",
            works="a dense tensor of float32, float16 or bfloat16",
        )
