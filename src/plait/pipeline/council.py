"""What all ranks of a pipeline tell each other between its steps, by way of the first.

Words go over the links that steps use, so a rank that dies, stalls or gives up ends the wait for its word as
it ends a step. A word is anything that can be pickled; its tensors cross as they are, beside the rest.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from plait.pipeline.spec import Spec
from plait.pipeline.wire import Wire

_BYTES = "latin-1"
"""The encoding in which every byte is a letter, so that pickled bytes travel in a message's text."""


class Council:
    """The ranks of a pipeline; all make the same calls in the same order."""

    def __init__(self, wire: Wire, *, place: int, stages: int) -> None:
        self._wire, self._place, self._stages = wire, place, stages
        self._number = 0

    def gather(self, word: Any, about: str) -> list[Any] | None:
        """Every rank's word, by stage, on the first rank; None on the others."""
        self._number += 1
        if self._place:
            self._send(0, word)
            return None
        return [word, *(self._receive(place, about) for place in range(1, self._stages))]

    def hand_out(self, words: Sequence[Any] | None, about: str) -> Any:
        """This rank's of the words that the first rank has for each stage."""
        self._number += 1
        if self._place:
            return self._receive(0, about)
        assert words is not None, "the first rank has them"
        for place in range(1, self._stages):
            self._send(place, words[place])
        return words[0]

    def tell(self, word: Any, about: str) -> Any:
        """The first rank's word, on every rank."""
        return self.hand_out(None if self._place else [word] * self._stages, about)

    def _send(self, place: int, word: Any) -> None:
        text, tensors = _packed(word)
        specs = tuple(Spec(tuple(tensor.shape), tensor.dtype, False) for tensor in tensors)
        outbox = self._wire.to(place).outbox
        outbox.send("word", self._wire.step, self._number, tensors, specs=specs, extra=text)

    def _receive(self, place: int, about: str) -> Any:
        inbox, number = self._wire.to(place).inbox, self._number
        inbox.expect("word", self._wire.step, number)
        self._wire.wait(lambda: inbox.has("word", number) or None, f"{about}, from stage {place}")
        parcel = inbox.take("word", number)
        return _Unpacker(parcel.extra, parcel.tensors).load()


class _Packer(pickle.Pickler):
    """Leaves tensors out, with a note of how each lay in memory; those of one number or none stay in."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        """The note in the place of a tensor."""
        if not isinstance(value, torch.Tensor) or value.numel() <= 1 or value.layout != torch.strided:
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1, value.stride()


class _Unpacker(pickle.Unpickler):
    def __init__(self, text: str, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(text.encode(_BYTES)))
        self._tensors = tensors

    def persistent_load(self, note: Any) -> torch.Tensor:
        place, stride = note
        found: torch.Tensor = self._tensors[place]
        if found.stride() == stride:
            return found
        return torch.empty_strided(found.shape, stride, dtype=found.dtype).copy_(found)


def _packed(word: Any) -> tuple[str, list[torch.Tensor]]:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(word)
    return file.getvalue().decode(_BYTES), packer.tensors
