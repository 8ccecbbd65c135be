"""Places of parameters in a flat buffer where the edges of shards fall between blocks of them. Pure.

A block is what no rank may have a part of: a row, a number of elements, or the whole parameter. All shards have one
size, so where blocks are large there has to be padding. The least is hard to find: ``place_blocks`` takes the smallest
size of a shard, of some hundred, with which a greedy order of the parameters fits.
"""

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Literal

from hpcfsdp.errors import ShardingError

Granularity = int | Literal["row", "whole"]
"""What of a parameter stays on one rank: so many consecutive elements, a row (all but the first dimension), or all."""
GranularityOf = Callable[[str, Sequence[int]], Granularity]  # that of a parameter by its name and whole shape
_MULTIPLES = 32  # of each number that the size of a shard may have to be a multiple of, so many are tried
_REFINEMENTS = 10
_MOST_MULTIPLES = 5  # common multiples of numbers of elements that are tried, too


def block_numel(granularity: Granularity, shape: Sequence[int]) -> int:
    """Return the elements of a block of a parameter."""
    if granularity == "row":
        return max(1, math.prod(shape[1:]))
    return max(1, math.prod(shape)) if granularity == "whole" else granularity


def check_granularity(granularity: object, shape: Sequence[int], fqn: str) -> None:
    """Raise a ``ShardingError`` for what is no granularity, or does not divide the parameter."""
    is_number = isinstance(granularity, numbers.Integral) and not isinstance(granularity, bool) and granularity > 0
    if granularity not in ("row", "whole") and not is_number:
        raise ShardingError(
            f'granularity of {fqn!r} is {granularity!r}: give a positive number of elements, "row" or "whole"'
        )
    if is_number and math.prod(shape) % granularity:  # type: ignore[operator]
        raise ShardingError(
            f"granularity of {fqn!r} is {granularity} elements, which do not divide the {math.prod(shape)} elements "
            f'of its shape {tuple(shape)}: give a divisor, "row" or "whole"'
        )


@functools.lru_cache(maxsize=64)  # the units of a model are much alike
def place_blocks(items: tuple[tuple[int, int], ...], num_shards: int, align: int) -> tuple[tuple[int, ...], int]:
    """Place parameters so that no shard ends within a block. Return the first element of each, and those of a shard.

    Of each parameter are given its elements, and those of a block. All results are multiples of `align` elements.
    """
    steps = [min(math.lcm(block, align), round_up(numel, align)) for numel, block in items]
    sizes = [round_up(numel, align) for numel, _ in items]
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, ((numel, _), step) in enumerate(zip(items, steps, strict=True)):
        if numel:
            kinds.setdefault((numel, step), []).append(index)
    if not kinds:
        return (0,) * len(items), 0
    least = max([round_up(-(-sum(sizes) // num_shards), align), *steps, align])
    tried = 0
    for shard_numel in _candidates(least, sum(sizes), set(steps), align):
        offsets = _filled(kinds, shard_numel, num_shards, align)
        if offsets is None:
            tried = shard_numel
            continue
        low, high, best = tried, shard_numel, offsets
        for _ in range(_REFINEMENTS):  # a smaller size may do that is none of the candidates
            middle = round_up((low + high) // 2, align)
            if not low < middle < high:
                break
            offsets = _filled(kinds, middle, num_shards, align)
            if offsets is None:
                low = middle
            else:
                high, best = middle, offsets
        return tuple(best.get(index, 0) for index in range(len(items))), high
    raise AssertionError("all parameters fit into one shard")


def _candidates(least: int, total: int, steps: set[int], align: int) -> list[int]:
    """Sizes of a shard to try, ascending; the last one has room for everything."""
    steps = {step for step in steps if step}
    multiples = {align, *steps}
    large = sorted(steps, reverse=True)[:_MOST_MULTIPLES]
    multiples |= {
        math.lcm(*some) for count in range(2, len(large) + 1) for some in itertools.combinations(large, count)
    }
    found = {max(least, round_up(total, align))}
    for multiple in multiples:
        first = -(-least // multiple)
        found.update(multiple * (first + more) for more in range(_MULTIPLES))
    found.update(round_up(least + least * part // 16, align) for part in range(64))
    return sorted(size for size in found if size <= max(least, round_up(total, align)))


def _filled(
    kinds: dict[tuple[int, int], list[int]], shard_numel: int, num_shards: int, align: int
) -> dict[int, int] | None:
    """Offsets of all parameters in shards of a size, if they fit. Next comes what wastes least before the next edge."""
    left = {kind: list(reversed(indices)) for kind, indices in kinds.items()}
    offsets: dict[int, int] = {}
    position, end = 0, shard_numel * num_shards
    while left:
        room = shard_numel - position % shard_numel
        best: tuple[int, int, tuple[int, int]] | None = None
        for kind in left:
            numel, step = kind
            gap = 0
            if numel > room:
                head = room // step * step
                if not head or (numel - head > shard_numel and shard_numel % step):
                    continue
                gap = room - head
            if best is None or (gap, -numel) < best[:2]:
                best = gap, -numel, kind
        if best is None:
            position += room
        else:
            gap, _, kind = best
            offsets[left[kind].pop()] = position + gap
            if not left[kind]:
                del left[kind]
            position = round_up(position + gap + kind[0], align)
        if position > end:
            return None
    return offsets


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
