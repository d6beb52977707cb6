"""Messages: compressed numbers that say themselves what they are, for a file, a socket or a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.compress import wire
from plait.compress.codec import Quantizer
from plait.compress.rounding import stream_key
from plait.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def quantize(
    tensor: Tensor,
    *,
    bits: int = 4,
    bucket: int = 1024,
    stochastic: bool = True,
    seed: int = 0,
    step: int = 0,
    rank: int = 0,
    phase: int = 0,
    parameter: str | int = "",
) -> Tensor:
    """The tensor's numbers in ``bits`` bits each, as a message: bytes (uint8) in host memory.

    The numbers may be fp32, fp16 or bf16, in any shape; the message keeps their order, not the shape.
    Rounding is random, drawn from (seed, step, rank, phase, parameter) and the place of each number; with
    ``stochastic=False`` it is to the nearest.
    """
    import torch

    codec = Quantizer(bits=bits, bucket=bucket, stochastic=stochastic)
    key = stream_key(seed=seed, step=step, rank=rank, phase=phase, parameter=parameter)
    size = codec.payload_bytes(tensor.numel())
    message = torch.empty(wire.HEADER_BYTES + size, dtype=torch.uint8)
    payload = message[wire.HEADER_BYTES :]
    there = payload.to(tensor.device)  # itself, where the tensor is in host memory
    codec.compress(tensor.contiguous(), there, key=key)
    payload.copy_(there)
    header = wire.Header(
        bits=bits, bucket=bucket, dtype=str(tensor.dtype).removeprefix("torch."), count=tensor.numel()
    )
    message[: wire.HEADER_BYTES] = torch.frombuffer(bytearray(header.seal(payload)), dtype=torch.uint8)
    return message


def dequantize(message: Tensor) -> Tensor:
    """The numbers of a message, flat, in the dtype they had; one that was damaged is an error."""
    import torch

    if not isinstance(message, torch.Tensor) or message.dtype != torch.uint8 or message.dim() != 1:
        raise UsageError(
            f"a message is a flat tensor of uint8, not {_described(message)}",
            setting="message",
            works="what quantize returned",
        )
    message = message.cpu().contiguous()
    payload = message[wire.HEADER_BYTES :]
    head = bytes(message[: wire.HEADER_BYTES].tolist())
    header = wire.Header.open(head, payload, payload.numel())
    numbers = torch.empty(header.count, dtype=getattr(torch, header.dtype))
    Quantizer(bits=header.bits, bucket=header.bucket).extract(payload, numbers)
    return numbers


def _described(message: object) -> str:
    shape = getattr(message, "shape", None)
    return type(message).__name__ if shape is None else f"{message.dtype} of shape {tuple(shape)}"  # type: ignore[attr-defined]
