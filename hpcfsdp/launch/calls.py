"""The public call that this process is in, so that messages can name it: "checkpoint.save", not a collective of it.

Of calls within calls the outermost counts, which is the one that the user has made.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Here(threading.local):
    """Where this thread is.

    Attributes:
        call: the outermost public call that the thread is in, "" outside of all of them.
    """

    call = ""


class Backward:
    """The last backward of a model.

    Attributes:
        label: of it.
        is_running: whether the calling thread is in it.
    """

    label = ""

    @staticmethod
    def is_running() -> bool:
        return False


here = Here()
backward = Backward()


def current() -> str:
    """The public call that this thread is in, "" outside of all of them."""
    return backward.label if backward.is_running() else here.call


def within(label: str) -> str:
    """A collective, with the public call that this thread makes it in."""
    call = current()
    return f"{call}: {label}" if call else label


def public_call(name: str) -> Callable[[Function], Function]:
    """A function of the public interface, called `name` in messages. Of a generator each step is such a call."""

    def decorate(function: Function) -> Function:
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def go_through(*args: Any, **kwargs: Any) -> _Steps:
                return _Steps(name, function(*args, **kwargs))

            return go_through  # type: ignore[return-value]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if here.call:
                return function(*args, **kwargs)
            here.call = name
            try:
                return function(*args, **kwargs)
            finally:
                here.call = ""

        return call  # type: ignore[return-value]

    return decorate


class _Steps(Generator):
    """A generator that is inside of a public call while it runs, and outside of it between its steps."""

    def __init__(self, name: str, steps: Generator[Any, Any, Any]) -> None:
        self._name = name
        self._steps = steps

    def send(self, value: Any) -> Any:
        return self._labelled(self._steps.send, value)

    def throw(self, *error: Any) -> Any:
        return self._labelled(self._steps.throw, *error)

    def close(self) -> None:
        self._labelled(self._steps.close)

    def __del__(self) -> None:
        self.close()

    def _labelled(self, step: Callable[..., Any], *args: Any) -> Any:
        if here.call:
            return step(*args)
        here.call = self._name
        try:
            return step(*args)
        finally:
            here.call = ""
