"""A profile as a chain of live sets: what lies between blocks, and which blocks share weights.

Any graph whose blocks are in an order in which it can run is a chain of live sets: before block i, all that
an earlier block made and block i or a later one reads must lie at the width of block i.
"""

from __future__ import annotations

from plait.profile import Profile


def cut_bytes(profile: Profile) -> tuple[int, ...]:
    """By block, the bytes of one row that are alive before it; none before the first."""
    places = {block.name: place for place, block in enumerate(profile.blocks)}
    last_read = [0] * len(profile.blocks)
    for place, block in enumerate(profile.blocks):
        read = [place - 1] if block.inputs is None else [places[name] for name in block.inputs]
        for source in read:
            if source >= 0:
                last_read[source] = place
    change = [0] * (len(profile.blocks) + 1)
    for place, block in enumerate(profile.blocks):
        if last_read[place]:  # nothing is read by the first block
            change[place + 1] += block.output_bytes_per_sample
            change[last_read[place] + 1] -= block.output_bytes_per_sample
    alive, found = 0, []
    for place in range(len(profile.blocks)):
        alive += change[place]
        found.append(alive)
    return tuple(found)


def sharers(profile: Profile) -> dict[int, tuple[int, ...]]:
    """By block that uses a shared weight first, the later blocks that use it too.

    The weight's bytes are in the first block's parameters, and in backward that block comes last: its
    gradients are synchronised then, over the widest of them all.
    """
    first: dict[str, int] = {}
    found: dict[int, set[int]] = {}
    for place, block in enumerate(profile.blocks):
        for name in block.tied:
            if first.setdefault(name, place) != place:
                found.setdefault(first[name], set()).add(place)
    return {place: tuple(sorted(later)) for place, later in sorted(found.items())}
