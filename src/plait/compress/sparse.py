"""Sparsification: of each bucket only the largest numbers travel, with their places.

After "Sparsified SGD with memory" (S. Stich, J.-B. Cordonnier, M. Jaggi, NeurIPS 2018). What is dropped is
not random, so this needs error feedback, with which it is known to converge. A bucket of n numbers is
written as k = min(keep, n) numbers of fp32, then k places of 16 bits, all little-endian, the largest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.compress.codec import check_tensors
from plait.compress.estimate import Estimate, tail_share
from plait.errors import UsageError
from plait.units import parse_whole

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_BUCKET = 1 << 16
_ENTRY_BYTES = 6


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The largest numbers of each bucket; the others arrive as 0."""

    keep: int = 16
    """Numbers of a bucket that travel."""
    bucket: int = 1024
    """Elements, 65536 at most."""

    def __post_init__(self) -> None:
        parse_whole(self.keep, setting="keep")
        if parse_whole(self.bucket, setting="bucket") > _LARGEST_BUCKET:
            raise UsageError(f"a bucket of {self.bucket}", setting="bucket", works=f"1 to {_LARGEST_BUCKET}")
        if self.keep > self.bucket:
            raise UsageError(
                f"{self.keep} numbers of a bucket of {self.bucket}",
                setting="keep",
                works=f"1 to {self.bucket}",
            )

    @property
    def unbiased(self) -> bool:
        """What is dropped is not made up for on average."""
        return False

    def payload_bytes(self, count: int) -> int:
        """Bytes that ``count`` numbers take: 6 for each that travels."""
        whole, rest = divmod(parse_whole(count, setting="count", least=0), self.bucket)
        return _ENTRY_BYTES * (whole * min(self.keep, self.bucket) + min(self.keep, rest))

    def compress(
        self, source: Tensor, payload: Tensor, *, key: int = 0, first: int = 0, residual: Tensor | None = None
    ) -> None:
        """Write the largest numbers; nothing random. See :class:`~plait.compress.codec.Codec`."""
        import torch

        check_tensors(self, source, "source", payload, residual)
        flat = source.detach().view(-1).float()
        left = flat.clone()
        for numbers, rest, written in self._parts(flat, left, payload.view(-1)):
            # A NaN counts as the largest, so it travels.
            places = numbers.abs().topk(min(self.keep, numbers.shape[1]), dim=1).indices
            kept = written[:, : 4 * places.shape[1]], written[:, 4 * places.shape[1] :]
            kept[0].copy_(numbers.gather(1, places).view(torch.uint8))
            kept[1].copy_(places.to(torch.uint16).view(torch.uint8))
            rest.scatter_(1, places, 0.0)
        if residual is not None:
            residual.detach().view(-1).copy_(left.nan_to_num_(0.0, 0.0, 0.0))

    def extract(self, payload: Tensor, target: Tensor, *, add: bool = False) -> None:
        """Put the numbers in their places. See :class:`~plait.compress.codec.Codec`."""
        import torch

        check_tensors(self, target, "target", payload)
        flat = target.detach().view(-1)
        found = flat.float().clone() if add else torch.zeros(flat.numel(), device=flat.device)
        for numbers, _, written in self._parts(found, found, payload.view(-1)):
            count = written.shape[1] // _ENTRY_BYTES
            values = written[:, : 4 * count].flatten().clone().view(torch.float32).view(-1, count)
            places = written[:, 4 * count :].flatten().clone().view(torch.uint16).view(-1, count).long()
            if places.numel() and int(places.max()) >= numbers.shape[1]:
                raise UsageError(
                    f"a number at place {int(places.max())} of a bucket of {numbers.shape[1]}",
                    setting="payload",
                    works="what compress has written",
                )
            numbers.scatter_add_(1, places, values)
        flat.copy_(found)

    def estimate(self, count: int) -> Estimate:
        """Bytes, and the share of the squared norm that is dropped, for normal numbers."""
        size = self.payload_bytes(count)
        whole, rest = divmod(count, self.bucket)
        error = 0.0
        for elements, of in ((whole * self.bucket, self.bucket), (rest, rest)):
            if elements:
                error += tail_share(min(self.keep, of) / of) * elements / count
        return Estimate(payload_bytes=size, relative_squared_error=error)

    def _parts(self, flat: Tensor, beside: Tensor, payload: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Whole buckets as rows, and the last one if it is shorter, each with its bytes."""
        count = flat.numel()
        whole = count // self.bucket * self.bucket
        cut = self.payload_bytes(whole)
        parts = []
        for low, high, begin, end in ((0, whole, 0, cut), (whole, count, cut, payload.numel())):
            if low < high:
                rows = max(1, (high - low) // self.bucket)
                written = payload[begin:end].view(rows, -1)
                parts.append((flat[low:high].view(rows, -1), beside[low:high].view(rows, -1), written))
        return parts
