"""What makes two runs of one job equal to the bit: keyed seeds, fixed threads, ordered algorithms.

Nothing random in plait depends on what was drawn before it. Every draw is seeded by a key: initial
weights by (seed, parameter name), the order of the data by (seed, epoch), dropout by (seed, step,
micro-batch, rank). So a resumed run, a recomputed block or another strand draws the same numbers without
carrying generator states around.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def derive(seed: int, *key: int | str) -> int:
    """A seed of 63 bits for one keyed thing, independent of every other key under the same seed."""
    text = "/".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_micro_batch(seed: int, step: int, micro_batch: int, *, rank: int = 0) -> None:
    """Seed torch's generators for one micro-batch, before its forward pass.

    ``step`` counts from 0 over the whole job, ``micro_batch`` from 0 within the rank's share of the step.
    The rank is part of the key so that ranks draw different dropout masks, as they do under DDP; a single
    process is rank 0.
    """
    import torch

    number = derive(seed, "micro-batch", step, micro_batch, rank)
    if torch.accelerator.is_available():  # not run where plait is developed
        torch.manual_seed(number)
    else:  # that would write down the call stack for a GPU that might still come, at a millisecond a step
        torch.default_generator.manual_seed(number)


def generator_state(device: torch.device) -> torch.Tensor:
    """Where the random generator of a device is."""
    import torch

    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Bring it there."""
    import torch

    if device.type == "cuda":  # not run where plait is developed
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def reproducible(threads: int) -> Iterator[None]:
    """Run with a fixed number of torch threads and deterministic algorithms, then put everything back.

    Both change bits: the thread count changes the order of sums, and with more than one thread the
    gradient of indexing is otherwise added up in the order in which threads arrive. The generators' states
    are restored too, so that training a job does not disturb the caller's random numbers.
    """
    import torch
    import torch.utils.deterministic

    memory: Any = torch.utils.deterministic  # a module whose attribute is a setting
    before = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = memory.fill_uninitialized_memory
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.set_num_threads(threads)
        # Where only an unordered kernel exists (some on CUDA), torch warns by name and the run goes on.
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # costs a pass over every new tensor
        try:
            yield
        finally:
            torch.set_num_threads(before)
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
            memory.fill_uninitialized_memory = fill
