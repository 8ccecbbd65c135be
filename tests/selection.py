"""Which tests of tests/mpi run under which numbers of ranks.

``pytest.mark.ranks(2, 3)``: under the first number all cases of the test; under the others a few of them, in which
each value of each parameter occurs. A number of ranks that a test does not name leaves it out, which is no skip.
"""

import collections

DEFAULT = (2, 3)
"""Two ranks are the fewest that exchange something; with three, neighbours differ and sizes do not divide."""

HYBRID = ("square", "hybrid")
"""What the names of fixtures and of values have in them that stand for groups of groups, which four ranks make."""


def ranks_of(item):
    """The numbers of ranks that a test is for, the one with all of its cases first."""
    marker = item.get_closest_marker("ranks")
    ranks = marker.args if marker else DEFAULT
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


def each_value_once(items):
    """A subset in which each value of each parameter of each test occurs; the same on every rank."""
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    for group in cases.values():
        missing = set().union(*map(_values, group))
        while missing:
            best = max(group, key=lambda item: len(_values(item) & missing))
            missing -= _values(best)
            yield best


def _values(item):
    """Names of parameters and their values; not empty, so that a test without any is a case too."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, repr(value)) for name, value in parameters.items()} or {("", "")}
