"""The active flows of a network, and what each of them gets.

A flow that begins or ends changes the rates of those that it shares something with, of those that share with
them, and so on; the rest keep theirs. Where the same flows meet again, as they do step after step of a plan,
their shares are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from plait.sim import fairness
from plait.sim.route import Route, Routes
from plait.sim.transfer import Transfer

_MOST_KINDS = 1 << 16
"""How many pairs of a route and a cap have a number of their own at a time."""
_MOST_KNOWN = 1 << 19
"""How many figures are kept, in all, for flows that may meet again."""


class Shares:
    """Who is active, and at which rate."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._small: dict[Transfer, None] = {}
        self._large: dict[Transfer, None] = {}
        """Those on large routes."""
        self._kinds: dict[tuple[int, float], int] = {}
        self._last_kind = 0
        self._known: dict[tuple[int, ...], Mapping[int, float]] = {}
        self._known_figures = 0
        self._known_age = 0
        self._time = 0
        """Counts the settlements."""

    def add(self, transfer: Transfer) -> None:
        """Let a transfer take part."""
        route, key = transfer.route, (transfer.route.index, transfer.cap)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
                self._forget()
            self._last_kind = self._kinds[key] = kind = self._last_kind + 1
        transfer.kind = kind
        if route.large:
            self._large[transfer] = None
            return
        self._small[transfer] = None
        for users in route.users:
            users[transfer] = None
        if not route.uses:
            # Nobody can reach it, and nothing but its cap holds it up.
            transfer.change(transfer.cap)

    def remove(self, transfer: Transfer) -> None:
        """It has gone through."""
        if transfer.route.large:
            del self._large[transfer]
            return
        del self._small[transfer]
        for users in transfer.route.users:
            del users[transfer]

    def active(self) -> Iterator[Transfer]:
        """All that take part."""
        yield from self._small
        yield from self._large

    def any_on(self, resource: int) -> bool:
        """Whether one of them uses a resource."""
        return bool(self._on(resource))

    def settle(self, touched: Iterable[Route | int]) -> None:
        """Give all that a change on these routes and resources can reach their new rates."""
        self._time = time = self._time + 1
        for what in touched:
            for start in self._on(what) if isinstance(what, int) else self._near(what):
                if start.seen != time:
                    start.seen = time
                    self._share(self._reached(start))

    def _reached(self, start: Transfer) -> list[Transfer]:
        """A transfer, and all that share with it, with those, and so on."""
        time, together = self._time, [start]
        routes: set[int] = set()
        resources: set[int] = set()
        for each in together:
            route = each.route
            if route.index in routes:
                continue
            routes.add(route.index)
            # Whoever is on a resource is asked once, however many of those found use it.
            groups: list[Iterable[Transfer]] = [
                users
                for resource, users in zip(route.uses, route.users, strict=False)
                if resource not in resources
            ]
            resources.update(route.uses if route.users else ())
            if self._large:
                groups.append(self._far(route))
            for group in groups:
                for other in group:
                    if other.seen != time:
                        other.seen = time
                        together.append(other)
        return together

    def _on(self, resource: int) -> Collection[Transfer]:
        users = self._routes.users[resource]
        if not self._large:
            return users
        return [*users, *(each for each in self._large if resource in each.route.uses)]

    def _near(self, route: Route) -> list[Transfer]:
        """The transfers that share something with a route; some may come twice."""
        found = [each for users in route.users for each in users]
        return found + self._far(route) if self._large or route.large else found

    def _far(self, route: Route) -> list[Transfer]:
        """Those of them that are not noted at the route's resources, as it or they have many."""
        uses = route.uses.keys()
        others = self.active() if route.large else self._large
        return [each for each in others if each.route is route or not uses.isdisjoint(each.route.uses)]

    def _share(self, together: list[Transfer]) -> None:
        """Set the rates of transfers that share with each other and with nobody else."""
        if len(together) == 1:
            (one,) = together
            one.change(min(one.cap, self._routes.alone(one.route)))
            return
        if self._known_age != self._routes.age or self._known_figures > _MOST_KNOWN:
            self._forget()
        key = tuple(sorted([each.kind for each in together]))
        rates = self._known.get(key)
        if rates is None:
            found = fairness.rates(self._needs(together), self._routes.capacities)
            rates = {each.kind: rate for each, rate in zip(together, found, strict=True)}
            self._known[key] = rates
            self._known_figures += 1 + len(key)
        for each in together:
            each.change(rates[each.kind])

    def _forget(self) -> None:
        self._known.clear()
        self._known_figures, self._known_age = 0, self._routes.age

    def _needs(self, together: list[Transfer]) -> list[fairness.Flow]:
        """The transfers with what they share; what one has for itself is in its cap."""
        shared = _shared([each.route for each in together])
        found = []
        for each in together:
            route, cap = each.route, min(each.cap, self._routes.alone(each.route))
            if route.large:
                places = sorted({place for card in shared for place in route.edges_at.get(card, ())})
                edges = [route.edges[place] for place in places]
                links = [link for link in shared if link in route.uses and link not in route.edges_at]
            else:
                edges, links = list(route.edges), list(route.links)
            found.append(
                fairness.Flow(
                    tuple(tuple(card for card in edge if card in shared) for edge in edges),
                    tuple(link for link in links if link in shared),
                    cap,
                )
            )
        return found


def _shared(routes: list[Route]) -> set[int]:
    """What more than one of them uses."""
    once: set[int] = set()
    twice: set[int] = set()
    large = []
    for route in routes:
        if route.large:
            large.append(route.uses)
            continue
        for resource in route.uses:
            (twice if resource in once else once).add(resource)
    for place, uses in enumerate(large):
        twice |= {resource for resource in once if resource in uses}
        for other in large[place + 1 :]:
            twice |= uses.keys() & other.keys()
    return twice
