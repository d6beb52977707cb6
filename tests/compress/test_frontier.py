"""The search for the cheapest choice, against trying them all."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.compress.frontier import Options, cheapest


@st.composite
def problems(draw, most_layers=6, ready=True):
    """(layers, budget): few distinct numbers, so that ties are common; the last option has no error."""
    number = st.integers(0, draw(st.sampled_from([3, 20, 1000])))
    budget = draw(st.integers(0, 4000))
    layers = []
    for _ in range(draw(st.integers(1, most_layers))):
        options = draw(st.lists(st.tuples(number, number), max_size=3))
        options = [(min(error, budget), cost) for error, cost in options] + [(0, draw(number))]
        when = draw(number) if ready else 0
        layers.append(Options(np.array([e for e, _ in options]), np.array([c for _, c in options]), when))
    return layers, budget


def search(layers, budget, states, known=None):
    return cheapest(layers, budget, known=known or [len(layer.errors) - 1 for layer in layers], states=states)


def end(layers, options):
    idle = 0
    for layer, option in zip(layers, options, strict=True):
        idle = max(idle, layer.ready) + int(layer.costs[option])
    return idle


def error(layers, options):
    return sum(int(layer.errors[option]) for layer, option in zip(layers, options, strict=True))


def best_of_all(layers, budget):
    """The least (cost, error) within the budget: nothing is dropped on the way."""
    idle, error = np.zeros(1, dtype=object), np.zeros(1, dtype=object)
    for layer in layers:
        idle = np.add.outer(np.maximum(idle, layer.ready), layer.costs.astype(object)).ravel()
        error = np.add.outer(error, layer.errors.astype(object)).ravel()
    return min(zip(idle[error <= budget], error[error <= budget], strict=True))


@given(problem=problems() | problems(ready=False))
@settings(max_examples=200, deadline=None)
def test_it_is_the_cheapest_of_all_and_of_those_has_the_least_error(problem):
    layers, budget = problem
    found, best = search(layers, budget, states=10**6), best_of_all(layers, budget)
    assert (found.cost, found.least) == (best[0], best[0])
    assert (end(layers, found.options), error(layers, found.options)) == best


@given(problem=problems(), states=st.sampled_from([1, 3, 10**6]))
@settings(max_examples=150, deadline=None)
def test_the_best_choice_where_it_is_known_is_found_with_any_number_of_states(problem, states):
    layers, budget = problem
    found = search(layers, budget, states=10**6)
    again = search(layers, budget, states=states, known=found.options)
    assert again.cost == found.cost
    assert error(layers, again.options) == error(layers, found.options)


@given(problem=problems(), states=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_a_thinned_search_keeps_the_budget_and_encloses_the_optimum(problem, states):
    layers, budget = problem
    found, best = search(layers, budget, states=states), best_of_all(layers, budget)
    assert error(layers, found.options) <= budget
    assert end(layers, found.options) == found.cost
    assert found.least <= best[0] <= found.cost


def test_a_thinned_search_says_that_it_may_be_off():
    rng = np.random.default_rng(0)
    layers = [
        Options(np.sort(rng.integers(0, 10**6, 8)), np.sort(rng.integers(0, 10**6, 8))[::-1].copy(), 0)
        for _ in range(40)
    ]
    known = [0] * 40
    budget = error(layers, known) + 5 * 10**6
    rough, exact = (search(layers, budget, states, known) for states in (2, 10**5))
    assert exact.least == exact.cost
    assert rough.least < rough.cost
    assert rough.least <= exact.cost <= rough.cost


def test_one_layer_ready_late_decides_and_the_early_ones_are_exact():
    # The first two are sent long before the third is ready at 100, so their errors need not be spent.
    early = Options(np.array([5, 0]), np.array([10, 30]), 0)
    late = Options(np.array([5, 0]), np.array([10, 30]), 100)
    found = search([early, early, late], 5, states=100)
    assert found.options == (1, 1, 0)
    assert found.cost == 110


def test_the_largest_numbers_do_not_overflow():
    huge = 2**60
    layers = [Options(np.array([huge, huge // 2, 0]), np.array([1, 2, huge // 4]), 0) for _ in range(3)]
    assert search(layers, huge, states=100).cost == best_of_all(layers, huge)[0]


def test_a_known_choice_is_taken_for_granted():
    # Its error is one too much, as after rounding up, and it is the cheapest all the same.
    layers = [Options(np.array([1, 0]), np.array([3, 5]), 0)] * 2
    found = search(layers, 1, states=10, known=[0, 0])
    assert (found.options, found.cost, found.least) == ((0, 0), 6, 6)
    assert search(layers, 1, states=10).cost == 8
