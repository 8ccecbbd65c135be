"""Permutations of numbers as functions of a key, which need no list of the numbers."""

import hashlib

import numpy as np

_TABLE = 1 << 16  # up to so many numbers a table is kept, which is better mixed than a network of few bits
_TURNS = [np.uint64(0x9E3779B97F4A7C15 * turn % (1 << 64)) for turn in range(1, 9)]  # one for each round


def keys_of(*facts: object, count: int = 1) -> np.ndarray:
    """Return `count` numbers, uint64, that depend on all facts, such as a seed and an epoch."""
    digest = hashlib.shake_128(repr(facts).encode()).digest(8 * count)
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return uint64 of which each bit depends on all bits of the uint64 given: the finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Network:
    """A Feistel network: permutations of ``range(length)``, of another key for each number if wanted."""

    def __init__(self, length: int) -> None:
        bits = max(2, (length - 1).bit_length())
        self._right = np.uint64(bits - bits // 2)
        self._masks = [np.uint64((1 << size) - 1) for size in (bits // 2, bits - bits // 2)]

    def __call__(self, numbers: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Permute each of `numbers` within ``range`` of its length, at most that of the network; all uint64, 1-D."""
        return self._walk(self._forward, numbers, lengths, keys)

    def inverse(self, numbers: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the numbers that are permuted to `numbers`."""
        return self._walk(self._backward, numbers, lengths, keys)

    @staticmethod
    def _walk(step, numbers: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> np.ndarray:
        # The network permutes all numbers of its bits. What leaves the range goes on until it is back, as in a cycle.
        found = step(numbers, keys)
        while (outside := np.flatnonzero(found >= lengths)).size:
            found[outside] = step(found[outside], keys[outside])
        return found

    def _forward(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._right, numbers & self._masks[1]
        for turn in range(len(_TURNS)):
            left, right = right, left ^ (self._function(right, keys, turn) & self._masks[turn % 2])
        return (left << self._right) | right

    def _backward(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._right, numbers & self._masks[1]
        for turn in reversed(range(len(_TURNS))):
            left, right = right ^ (self._function(left, keys, turn) & self._masks[turn % 2]), left
        return (left << self._right) | right

    @staticmethod
    def _function(half: np.ndarray, keys: np.ndarray, turn: int) -> np.ndarray:
        return _mixed(_mixed(half + keys) + _TURNS[turn])


class Permutation:
    """A permutation of ``range(length)``; its memory does not grow with `length`."""

    def __init__(self, length: int, key: np.uint64) -> None:
        self._length, self._key, self._table = np.uint64(length), key, None
        if length <= _TABLE:
            self._table = np.argsort(_mixed(_mixed(np.arange(length, dtype=np.uint64)) + key), kind="stable")
        else:
            self._network = Network(length)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at places of the permutation, int64, 1-D."""
        if self._table is not None:
            return self._table[places]
        return self._network(*self._each(places)).astype(np.int64)

    def inverse(self, numbers: np.ndarray) -> np.ndarray:
        """Return the places of numbers, int64, 1-D."""
        if self._table is not None:
            places = np.empty_like(self._table)
            places[self._table] = np.arange(len(places))
            return places[numbers]
        return self._network.inverse(*self._each(numbers)).astype(np.int64)

    def _each(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        numbers = numbers.astype(np.uint64)
        return numbers, np.full_like(numbers, self._length), np.full_like(numbers, self._key)
