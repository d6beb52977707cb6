"""The colours of a picture: a few that most eyes tell apart, by order, and stripes where there are more.

On white they are those of Paul Tol's scheme "light" (Colour Schemes, SRON/EPS/TN/09-002, 2021), which is made
for fills below dark letters, less one of its two greens. Those on black are picked to be far apart below
white letters, with full sight and with the common kinds of colour blindness.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.timeline.utilisation import IDLE

LIGHT = ("#77aadd", "#ee8866", "#44bb99", "#ffaabb", "#99ddff", "#eedd88", "#bbcc33", "#dddddd")
DARK = ("#4759b2", "#b24712", "#567049", "#855685", "#260f99", "#5c2509", "#5f0b70", "#472e37")
_STRIPES = (0, 2, 5)
"""How much of a period of eight is striped, the first, the second and the third time a colour is used."""


def rules(places: Mapping[str, int], scope: str) -> str:
    """The style of every kind's class, on light and on dark, within a picture of this class."""
    light, dark = _rules(places, scope, LIGHT, "#f2f2f2"), _rules(places, scope, DARK, "#23262d")
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _rules(places: Mapping[str, int], scope: str, colours: tuple[str, ...], idle: str) -> str:
    found = []
    for kind, place in places.items():
        colour = idle if kind == IDLE else colours[place % len(colours)]
        striped = kind != IDLE and _width(place)
        fill = f"url(#{scope}p{place})" if striped else colour
        found.append(f".{scope} .f{place}{{fill:{fill};color:{colour}}}")
        found.append(f".{scope} .c{place}{{fill:{colour}}}" * bool(striped))
    return "".join(found)


def stripes(places: Mapping[str, int], scope: str) -> str:
    """The patterns of what comes after all colours have been used; level, so that zoom leaves them alone."""
    return "".join(
        f'<pattern id="{scope}p{place}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect class="c{place}" width="8" height="8"/>'
        f'<rect width="8" height="{_width(place)}" fill="#888" fill-opacity=".55"/></pattern>'
        for kind, place in places.items()
        if kind != IDLE and _width(place)
    )


def _width(place: int) -> int:
    return _STRIPES[place // len(LIGHT) % len(_STRIPES)]
