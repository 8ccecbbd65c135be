"""Which tests of tests/mpi run under which numbers of ranks.

``pytest.mark.ranks(2, 3)``: each case of the test runs once, under one of these numbers, mostly the first; a test
without parameters under the first. What runs on one rank, which has nothing to exchange, runs under the first too.
Tests of a transport (``pytest.mark.transport``), those that lay meshes out over all ranks (``pytest.mark.meshes``), and
all with ``--more-ranks``, run under all of their numbers: all cases under the first, and under the others a few, in
which each value of each parameter occurs. A number of ranks that a test does not name leaves it out, which is no skip.

Of a test with several parameters run those cases in which each value of each occurs, with ``pytest.mark.pairs`` those
in which each two values meet; all cases with ``--more-ranks``.
"""

import collections
import itertools
import zlib

DEFAULT = (2, 3)
"""Two ranks are the fewest that exchange something; with three, neighbours differ and sizes do not divide."""

HYBRID = ("square", "hybrid")
"""What the names of fixtures and of values have in them that stand for groups of groups, which four ranks make."""


def ranks_of(item, more=False):
    """The numbers of ranks that a test is for, the one with all of its cases first."""
    marker = item.get_closest_marker("ranks")
    ranks = marker.args if marker else DEFAULT
    if more and marker:
        ranks += marker.kwargs.get("more", ())
    if "several" in item.fixturenames:
        ranks = tuple(number for number in ranks if number > 1)
    values = [value for _, value in _values(item)]
    if any(name in value.lower() for value in (*values, *item.fixturenames) for name in HYBRID):
        # The engines of tests/mpi/parity.py make such groups of four ranks alone.
        has_engine = {"engine", "engines"} & set(item.fixturenames)
        return (4,) if has_engine else (4, *(number for number in ranks if number != 4))
    if "'two nodes'" in values and 4 not in ranks:
        return (*ranks, 4)
    return ranks


def chosen(items, size, more=False):
    """The tests of `items` that run under `size` ranks; the same on every rank.

    Args:
        more: all cases, under all numbers of ranks that a test names, not under one.
    """
    if not more:
        paired = {item for item in items if item.get_closest_marker("pairs")}
        kept = {*covering(paired, 2), *covering([item for item in items if item not in paired], 1)}
        items = [item for item in items if item in kept]
    here = [(item, ranks_of(item, more)) for item in items]
    several = {item for item, _ in here if more or any(map(item.get_closest_marker, ("transport", "meshes")))}
    thinned = set(covering([item for item, ranks in here if item in several and size in ranks[1:]], 1))
    return [
        item
        for item, ranks in here
        if item in thinned or size in (ranks[:1] if item in several else _some_of(ranks, item))
    ]


def _some_of(ranks, item):
    """The numbers of ranks for one case: mostly the first; for every fourth case, whatever its parameters, another."""
    turn = zlib.crc32(item.nodeid.encode()) if hasattr(item, "callspec") else 1
    number = ranks[0] if turn % 4 or len(ranks) == 1 else ranks[1:][turn // 4 % (len(ranks) - 1)]
    return (number, ranks[0]) if number == 1 else (number,)


def covering(items, number):
    """A subset in which each `number` values of different parameters of a test meet; the same on every rank."""
    cases = collections.defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        values = sorted(_values(item))
        cases[item.nodeid.split("[")[0]].append((item, set(itertools.combinations(values, min(number, len(values))))))
    for group in cases.values():
        missing = set().union(*(met for _, met in group))
        while missing:
            item, met = max(group, key=lambda case: len(case[1] & missing))
            missing -= met
            yield item


def _values(item):
    """Names of parameters and their values; not empty, so that a test without any is a case too."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, repr(value)) for name, value in parameters.items()} or {("", "")}
