"""Real English with no download: the help texts that every CPython carries, as a data set of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LETTERS = 128
"""Characters are numbered as in ASCII; what is beyond it becomes a question mark."""


class English:
    """Windows of ``context`` characters, one after another; a tenth of the text is kept for evaluation."""

    def __init__(self, *, context: int, held_out: bool) -> None:
        from pydoc_data import topics

        import torch

        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        letters = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
        cut = len(letters) * 9 // 10
        self._letters = letters[cut:] if held_out else letters[:cut]
        self._context = context

    def __len__(self) -> int:
        return len(self._letters) // self._context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._letters[index * self._context : (index + 1) * self._context]
        return {"input_ids": window, "labels": window.clone()}


def english(seed: int, *, context: int = 64, held_out: bool = False) -> English:
    """A job's ``data``: the windows are the same for every seed, their order is the job's."""
    return English(context=context, held_out=held_out)
