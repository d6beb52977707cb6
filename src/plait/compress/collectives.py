"""Compressed collectives: all_reduce, reduce_scatter and all_gather, called like those of torch.distributed.

    work = all_reduce(gradient, bits=4, op="average", async_op=True)
    ...
    work.wait()

All workers of a group call the same ones in the same order. They run on a thread of their own, and all
workers end with the same bits. Numbers are added in fp32; a worker's own part of what it adds up enters
exactly. An average is the sum, divided by the number of workers before it is compressed for the way back. In
a group of one nothing is compressed. Tensors are fp32, fp16 or bf16, of any shape; what is not
contiguous fp32 in host memory is copied there and back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plait.collective import Reduction
from plait.compress import workspace
from plait.compress.call import Call, averages, checked_pieces, codec_of, finished, plain_codec
from plait.compress.codec import Codec, Exact
from plait.compress.feedback import Feedback
from plait.compress.given import expect
from plait.compress.layout import Piece
from plait.compress.price import measure_speed, price_ms
from plait.compress.settings import Settings
from plait.compress.work import Work
from plait.compress.workspace import Workspace

if TYPE_CHECKING:
    from torch import Tensor

    from plait.collective import Link

_DEFAULT = Settings()


def all_reduce(
    tensor: Tensor,
    *,
    bits: int = 4,
    codec: Codec | None = None,
    pieces: Sequence[Piece] | None = None,
    group: Any = None,
    op: Any = "sum",
    async_op: bool = False,
    seed: int = 0,
    step: int | None = None,
    decline: bool = False,
    feedback: Feedback | None = None,
    settings: Settings = _DEFAULT,
) -> Work | None:
    """Add a tensor up over the workers of a group, in place.

    - ``bits``: 1 to 8; 16 is fp16, 32 uncompressed. ``codec`` instead gives any codec, and ``pieces`` one for
      each stretch of the tensor.
    - ``op``: ``"sum"`` or ``"average"``, or torch's ``ReduceOp.SUM`` and ``AVG``.
    - ``async_op``: return a handle at once; the tensor must rest until ``wait()`` has returned.
    - ``seed``, ``step``: of the rounding. A step of None counts the group's operations.
    - ``decline``: send it uncompressed where that is faster, by measurements that all workers share. The
      first such call of a group, and of a codec, takes the time to measure.
    - ``feedback``: what earlier rounding lost; is added, and receives what is lost now.
    """
    whole = codec_of(bits, codec)
    call = Call("all_reduce", [tensor], group, op, settings)
    count = tensor.numel()
    chosen = (Piece(name="", count=count, codec=whole),) if pieces is None else checked_pieces(pieces)
    call.check_count(sum(piece.count for piece in chosen), tensor, "pieces")
    if feedback is not None:
        call.check_feedback(feedback, count)
    if call.alone:
        return finished(async_op)
    topology = settings.topology(call.mesh.hosts)
    plain = Piece(name="", count=count, codec=plain_codec(tensor))
    declined = decline and call.declines(chosen, plain, topology)
    layout = call.balanced([plain] if declined else chosen, topology)
    task = call.task(layout, topology, seed, step, feedback=feedback)
    space = Workspace(count=count)
    if workspace.fits(tensor):
        space.home = workspace.flat(tensor)
    else:
        space.fill = functools.partial(workspace.read, tensor)
        space.result = functools.partial(workspace.write, tensor)
    return call.run(task, space, topology, async_op=async_op, declined=declined, verify=tensor)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    bits: int = 4,
    codec: Codec | None = None,
    pieces: Sequence[Sequence[Piece]] | None = None,
    group: Any = None,
    op: Any = "sum",
    async_op: bool = False,
    seed: int = 0,
    step: int | None = None,
    overwrite: bool = False,
    settings: Settings = _DEFAULT,
) -> Work | None:
    """Add the workers' inputs up, and give each worker its part of the sum, uncompressed.

    The input is the workers' parts one after the other, each as long as the output. ``pieces`` are given for
    each part. With ``overwrite`` the input is used as working memory, which saves a copy; its numbers are
    lost. The rest is as for :func:`all_reduce`.
    """
    whole = codec_of(bits, codec)
    call = Call("reduce_scatter", [output, input], group, op, settings)
    size = output.numel()
    call.check_count(call.world * size, input, "input")
    if call.alone:
        workspace.write(output, input.detach().reshape(-1).float())
        return finished(async_op)
    topology = settings.topology(call.mesh.hosts, everyone=True)
    layout = call.given(size, pieces, whole)
    task = call.task(layout, topology, seed, step, gather=False)
    begin = call.mesh.position * size
    space = Workspace(count=input.numel())
    if overwrite and workspace.fits(input):
        space.home = workspace.flat(input)
    else:
        space.fill = functools.partial(workspace.read, input)
    space.result = lambda numbers: workspace.write(output, numbers[begin : begin + size])
    return call.run(task, space, topology, async_op=async_op)


def all_gather(
    output: Tensor,
    input: Tensor,
    *,
    bits: int = 8,
    codec: Codec | None = None,
    pieces: Sequence[Sequence[Piece]] | None = None,
    group: Any = None,
    async_op: bool = False,
    seed: int = 0,
    step: int | None = None,
    settings: Settings = _DEFAULT,
) -> Work | None:
    """Put the workers' inputs one after the other into every worker's output.

    A worker's own part is compressed for it too, so that all have the same. ``pieces`` are given for each
    part. The rest is as for :func:`all_reduce`.
    """
    whole = codec_of(bits, codec)
    call = Call("all_gather", [output, input], group, "sum", settings)
    size = input.numel()
    call.check_count(call.world * size, output, "output")
    if call.alone:
        workspace.write(output, input.detach().reshape(-1).float())
        return finished(async_op)
    topology = settings.topology(call.mesh.hosts, everyone=True)
    layout = call.given(size, pieces, whole)
    task = call.task(layout, topology, seed, step, reduce=False)
    begin = call.mesh.position * size
    space = Workspace(count=output.numel())
    space.fill = lambda numbers: workspace.read(input, numbers[begin : begin + size])
    if workspace.fits(output):
        space.home = workspace.flat(output)
    else:
        space.result = functools.partial(workspace.write, output)
    return call.run(task, space, topology, async_op=async_op, verify=output)


@dataclass(frozen=True, kw_only=True)
class CompressedCollective:
    """Compressed all-reduce as a :class:`plait.collective.Collective`, for whoever takes any."""

    bits: int = 4
    codec: Codec | None = None
    """In place of ``bits``."""
    reduction: Reduction = "sum"
    seed: int = 0
    step: int | None = None
    """Of the rounding; None counts the group's operations, which begin anew in a run that is resumed."""
    part: str = ""
    """Tells calls in one step apart."""
    decline: bool = False
    settings: Settings = _DEFAULT

    def __post_init__(self) -> None:
        averages(self.reduction)
        codec_of(self.bits, self.codec)
        expect(self.decline, bool, setting="decline", works="True or False")
        expect(self.settings, Settings, setting="settings", works="Settings()")

    def all_reduce(self, tensor: Tensor, group: Any = None) -> Work:
        """Start reducing the tensor over the group (None: everyone), in place, on every rank of it."""
        work = all_reduce(
            tensor,
            pieces=[Piece(name=self.part, count=tensor.numel(), codec=codec_of(self.bits, self.codec))],
            group=group,
            op=self.reduction,
            async_op=True,
            seed=self.seed,
            step=self.step,
            decline=self.decline,
            settings=self.settings,
        )
        assert work is not None
        return work

    def at(self, step: int, part: str) -> CompressedCollective:
        """The same, with rounding that follows from the seed, a step and a part of it."""
        return replace(self, step=step, part=part)

    def estimate_ms(self, bytes: int, world: int, link: Link) -> float:
        """How long ``all_reduce`` of so many bytes of fp32 takes, with codecs as fast as they are here."""
        codecs = [codec_of(self.bits, self.codec), *([Exact()] if self.decline else [])]
        speeds = {codec: measure_speed(codec) for codec in codecs}
        choices = [[Piece(name="", count=-(-bytes // 4), codec=codec)] for codec in codecs]
        size = self.settings.chunk_bytes
        return min(price_ms(choice, world, link, speeds, chunk_bytes=size) for choice in choices)
