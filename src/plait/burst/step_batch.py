"""What one step is given: the whole batch, in how many parts it passes, and what ranks must have alike.

Ranks cut their rows out of the same batch, so one that was given another would train on something else, or
be sent more rows than it has room for. Therefore messages of rows carry a mark of the step and the batch, and
are only received by who has the same; and ranks compare what they were given: who waits looks at the others'
pulse, and all compare their marks when the loss is added up.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from plait.burst import terms
from plait.burst.burst_plan import BurstPlan
from plait.burst.rows import begin
from plait.burst.sweep import cut
from plait.compat import tree_flatten
from plait.data import rows_of, share
from plait.objective import Objective

_TAG_BITS = 31
"""Of gloo's tags, which are not negative."""


class StepBatch:
    """A batch, ready to pass."""

    def __init__(self, batch: Any, micro_batches: int, plan: BurstPlan, *, step: int, training: bool) -> None:
        """Refuses one that leaves a rank of the plan without a row; ``training`` is the model's mode."""
        self.rows = rows_of(batch)
        terms.check_rows(plan, self.rows, micro_batches)
        ranges = [share(self.rows, part, micro_batches) for part in range(micro_batches)]
        self.parts = [(cut(batch, self.rows, part.start, part.stop), len(part)) for part in ranges]
        """Each micro-batch, and its rows."""
        self._width = plan.widths[-1]
        form = f"{_form(batch)}{'' if training else ', not in training'}"
        self.signature = hashlib.blake2b(form.encode(), digest_size=8).hexdigest()
        """Batches of one signature have values of one form; all ranks name them alike."""
        self.alike: dict[str, Any] = {
            "step": step,
            "rows": self.rows,
            "micro_batches": micro_batches,
            "form of the batch": form,
        }
        """What must be the same on all ranks that are in this step."""
        digest = hashlib.blake2b(repr(self.alike).encode(), digest_size=4).digest()
        self.tag = int.from_bytes(digest, "big") % (1 << _TAG_BITS)
        """Stands for what is alike, and marks messages of rows."""

    def weights(self, objective: Objective) -> list[list[float]]:
        """By part, the weights of the ranks that run the last block."""
        return [
            [
                objective.weigh(cut(part, rows, begin(rows, self._width, r), begin(rows, self._width, r + 1)))
                for r in range(self._width)
            ]
            for part, rows in self.parts
        ]


def _form(batch: Any) -> str:
    """Of one row: types and sizes of its tensors, and how they lie in the batch."""
    leaves, structure = tree_flatten(batch)
    forms = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}"
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for leaf in leaves
    ]
    return f"{', '.join(forms)} in {structure}"
