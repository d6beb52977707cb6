"""Branches on a random draw while a model is recorded.

LayerDrop skips a layer ``if torch.rand([]) < probability``. Torch cannot record a branch on a tensor, but
with a probability of 0, which is what most configurations have, this one always goes the same way. The draw
itself stays in the recording: what is drawn after it comes from the same state of the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from plait.errors import TraceError
from plait.tracing.refusal import line_of_model

_IF_NEVER_BELOW = {
    torch.lt: False, torch.Tensor.lt: False, torch.Tensor.__lt__: False,
    torch.ge: True, torch.Tensor.ge: True, torch.Tensor.__ge__: True,
}  # fmt: skip
"""How a comparison of a draw with a number comes out where the number is not above zero."""


class Draws(TorchFunctionMode):
    """Decides branches on draws from [0, 1) that can only go one way, and refuses those that can go both."""

    def __init__(self) -> None:
        super().__init__()
        # By id, and with the tensors, so that no other one gets the same id.
        self._drawn: dict[int, tuple[torch.Tensor, int]] = {}
        self._compared: dict[int, tuple[torch.Tensor, bool, float]] = {}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.__bool__ and id(args[0]) in self._compared:
            _, answer, number = self._compared[id(args[0])]
            if number > 0:
                raise _undecided(number)
            return answer
        result = function(*args, **(kwargs or {}))
        if function is torch.rand or (function is torch.Tensor.uniform_ and len(args) == 1 and not kwargs):
            self._drawn[id(result)] = result, result._version
        elif function in _IF_NEVER_BELOW and len(args) == 2 and isinstance(args[1], (int, float)):
            drawn, version = self._drawn.get(id(args[0]), (None, 0))
            if drawn is not None and drawn._version == version:  # not changed in place since
                self._compared[id(result)] = result, _IF_NEVER_BELOW[function], args[1]
        return result


def _undecided(number: float) -> TraceError:
    at = line_of_model()
    return TraceError(
        f"the model decides by a random draw what it runs, with probability {number:g}, as LayerDrop does"
        f"{f' ({at})' if at else ''}; a recording always runs the same",
        setting="model",
        works="a probability of 0 (in a Hugging Face configuration: layerdrop=0.0)",
    )
