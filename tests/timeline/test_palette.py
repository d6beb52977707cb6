"""Whether colours can be told apart."""

import math
from itertools import combinations

import pytest

from plait.timeline.palette import DARK, LIGHT, rules, stripes
from plait.timeline.utilisation import IDLE

# What is left of linear RGB: Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009, severity 1.0.
SIGHT = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def linear(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(colour, sight):
    seen = [
        min(1, max(0, sum(a * b for a, b in zip(row, linear(colour), strict=True)))) for row in SIGHT[sight]
    ]
    to_xyz = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))  # by the white
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (sum(a * b for a, b in zip(row, seen, strict=True)) for row in to_xyz)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_no_two_look_alike(colours, sight):
    least = 20 if sight == "full" else 10
    for one, other in combinations(colours, 2):
        assert math.dist(lab(one, sight), lab(other, sight)) > least, (one, other)


@pytest.mark.parametrize(
    ("colours", "letters", "back"), [(LIGHT, "#222222", "#ffffff"), (DARK, "#eeeeee", "#16191f")]
)
def test_letters_can_be_read_on_them_and_they_stand_out(colours, letters, back):
    def contrast(one, other):
        low, high = sorted(
            0.05 + sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(each), strict=True))
            for each in (one, other)
        )
        return high / low

    for colour in colours:
        assert contrast(colour, letters) >= 4.5
        assert contrast(colour, back) >= 1.25


def test_once_all_are_used_they_are_striped():
    places = {f"job{place}": place for place in range(20)} | {IDLE: 20}
    style, patterns = rules(places, "t1"), stripes(places, "t1")
    light = style[: style.index("@media")]
    assert f".t1 .f7{{fill:{LIGHT[7]};color:{LIGHT[7]}}}" in light
    assert f".t1 .f8{{fill:url(#t1p8);color:{LIGHT[0]}}}.t1 .c8{{fill:{LIGHT[0]}}}" in light
    assert f".t1 .c8{{fill:{DARK[0]}}}" in style[len(light) :]
    assert patterns.count("<pattern") == 12
    assert patterns.count('height="2"') == 8  # the second time
    assert patterns.count('height="5"') == 4  # the third
    assert "f20{fill:#f2f2f2;" in light
