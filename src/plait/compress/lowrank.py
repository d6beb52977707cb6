"""Low rank: a square tile of numbers travels as the product of two thin matrices.

After PowerSGD (T. Vogels, S. P. Karimireddy, M. Jaggi, NeurIPS 2019): one step of the power method finds the
directions that matter. PowerSGD takes a whole weight at once and reduces the factors by two all-reduces;
here a tile stands for itself, so that it is a codec like any other, which can be cut, sent and added up.
What is dropped is not random: this needs error feedback.

For a tile M and a random start S (of the stream's key):  P = an orthonormal basis of M S,  Q = M' P,  and
P Q' arrives. A tile is written as P, then Q, in fp32; what does not fill a tile is written as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.compress.codec import check_tensors
from plait.compress.estimate import Estimate
from plait.compress.rounding import checked_key
from plait.errors import UsageError
from plait.units import parse_whole

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Tiles of ``side`` x ``side`` numbers, of rank ``rank`` at most."""

    rank: int = 2
    side: int = 64

    def __post_init__(self) -> None:
        parse_whole(self.side, setting="side")
        if parse_whole(self.rank, setting="rank") > self.side:
            raise UsageError(f"a rank of {self.rank}", setting="rank", works=f"1 to {self.side}")

    @property
    def bucket(self) -> int:
        """Elements of a tile."""
        return self.side * self.side

    @property
    def unbiased(self) -> bool:
        """What is dropped is not made up for on average."""
        return False

    @property
    def _tile_bytes(self) -> int:
        return 8 * self.side * self.rank

    def payload_bytes(self, count: int) -> int:
        """Bytes that ``count`` numbers take."""
        tiles, rest = divmod(parse_whole(count, setting="count", least=0), self.bucket)
        return tiles * self._tile_bytes + 4 * rest

    def compress(
        self, source: Tensor, payload: Tensor, *, key: int = 0, first: int = 0, residual: Tensor | None = None
    ) -> None:
        """Write the factors. See :class:`~plait.compress.codec.Codec`."""
        import torch

        check_tensors(self, source, "source", payload, residual)
        flat, out = source.detach().view(-1).float(), payload.view(-1)
        whole = flat.numel() // self.bucket * self.bucket
        tiles = flat[:whole].view(-1, self.side, self.side)
        generator = torch.Generator().manual_seed(checked_key(key) >> 1)
        start = torch.randn(self.side, self.rank, generator=generator).to(flat.device)
        # A tile that is not finite arrives as NaN; the others do not notice.
        finite = torch.isfinite(tiles).all(dim=2).all(dim=1)
        clean = torch.where(finite[:, None, None], tiles, torch.zeros(()))
        left = torch.linalg.qr(clean @ start).Q
        right = clean.mT @ left
        left = torch.where(finite[:, None, None], left, torch.full((), torch.nan))
        factors = torch.cat([left.flatten(1), right.flatten(1)], dim=1)
        cut = len(tiles) * self._tile_bytes
        out[:cut].copy_(factors.contiguous().view(-1).view(torch.uint8))
        out[cut:].copy_(flat[whole:].contiguous().view(torch.uint8))
        if residual is not None:
            lost = residual.detach().view(-1)
            lost[:whole] = (tiles - left @ right.mT).nan_to_num_(0.0, 0.0, 0.0).view(-1)
            lost[whole:] = 0.0

    def extract(self, payload: Tensor, target: Tensor, *, add: bool = False) -> None:
        """Multiply the factors. See :class:`~plait.compress.codec.Codec`."""
        import torch

        check_tensors(self, target, "target", payload)
        flat, read = target.detach().view(-1), payload.view(-1)
        whole = flat.numel() // self.bucket * self.bucket
        cut = whole // self.bucket * self._tile_bytes
        factors = read[:cut].clone().view(torch.float32).view(-1, 2, self.side, self.rank)
        found = torch.empty(flat.numel(), device=flat.device)
        found[:whole] = (factors[:, 0] @ factors[:, 1].mT).view(-1)
        found[whole:] = read[cut:].clone().view(torch.float32)
        flat.copy_(flat.float() + found if add else found)

    def estimate(self, count: int) -> Estimate:
        """Bytes, and the error for normal numbers, which have no directions that matter: the worst case."""
        tiles = count // self.bucket * self.bucket
        error = (1 - self.rank / self.side) * tiles / count if count else 0.0
        return Estimate(payload_bytes=self.payload_bytes(count), relative_squared_error=error)
