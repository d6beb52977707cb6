"""Where values come from: grids, chance, and Optuna where it is installed."""

import sys

import pytest

from plait.errors import UsageError
from plait.spill.sampling import Chance, Grid, Optuna
from plait.spill.space import Choice, Real, Whole

SPACE = {"optimizer.lr": Real(1e-4, 1e-1, log=True), "model.layers": Whole(1, 3), "batch": Choice([4, 8])}


def test_a_grid_has_every_combination_once():
    grid = Grid({"a": Choice(["x", "y"]), "b": Whole(1, 3)})
    rows = [grid.ask(i) for i in range(len(grid))]
    assert rows == [{"a": a, "b": b} for a in "xy" for b in (1, 2, 3)]
    assert grid.ask(6) is None


def test_a_range_has_no_grid():
    with pytest.raises(UsageError, match="no steps for the range"):
        Grid(SPACE)


def test_chance_is_the_same_for_a_seed_and_a_number():
    drawn = [Chance(SPACE, seed=3).ask(i) for i in range(20)]
    again = Chance(SPACE, seed=3)
    assert [again.ask(i) for i in reversed(range(20))] == drawn[::-1]
    assert len({tuple(row.items()) for row in drawn}) == 20
    assert drawn != [Chance(SPACE, seed=4).ask(i) for i in range(20)]


def test_optuna_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match="not installed") as error:
        Optuna(SPACE)
    assert error.value.works == "pip install 'optuna>=4.5'; or Chance(space)"


def descend(sampler, count=40):
    """Ask and tell on a bowl whose lowest point is at lr 1e-2, 2 layers."""
    found = []
    for number in range(count):
        row = sampler.ask(number)
        if row is None:
            break
        value = abs(row["optimizer.lr"] - 1e-2) * 10 + abs(row["model.layers"] - 2)
        sampler.tell(number, 10, value, finished=number % 3 > 0)
        found.append((row, value))
    return found


@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_optuna_is_the_same_for_a_seed(kind):
    pytest.importorskip("optuna")
    one, two = (descend(Optuna(SPACE, seed=1, sampler=kind)) for _ in range(2))
    assert one == two
    assert all(1e-4 <= row["optimizer.lr"] <= 1e-1 and row["batch"] in (4, 8) for row, _ in one)


def test_optuna_learns_from_what_it_is_told():
    pytest.importorskip("optuna")
    late = [value for _, value in descend(Optuna(SPACE, seed=0), 60)[30:]]
    drawn = [value for _, value in descend(Chance(SPACE, seed=0), 60)[30:]]
    assert sum(late) < sum(drawn)


def test_optunas_grid_ends():
    pytest.importorskip("optuna")
    space = {"optimizer.lr": Choice([1e-3, 1e-2]), "model.layers": Whole(1, 3)}
    rows = [tuple(row.values()) for row, _ in descend(Optuna(space, sampler="grid"), 40)]
    assert sorted(rows) == [(lr, layers) for lr in (1e-3, 1e-2) for layers in (1, 2, 3)]


def test_optuna_hears_of_failures():
    pytest.importorskip("optuna")
    sampler = Optuna(SPACE)
    for number, value in enumerate((None, float("nan"), 1.0)):
        sampler.ask(number)
        sampler.tell(number, 1, value, finished=True)
        sampler.tell(number, 2, 5.0, finished=True)  # once is enough
    assert sampler.ask(3) is not None


def test_samplers_that_there_are_not():
    pytest.importorskip("optuna")
    with pytest.raises(UsageError, match="no sampler 'cmaes'"):
        Optuna(SPACE, sampler="cmaes")
