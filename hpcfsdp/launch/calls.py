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


class _Here(threading.local):
    call = ""


_here = _Here()
_backward: tuple[Callable[[], bool], str] | None = None


def begin(call: str) -> bool:
    """This thread enters a public call; whether it is the outermost one, for ``end``."""
    if _here.call:
        return False
    _here.call = call
    return True


def end(outermost: bool) -> None:
    """This thread leaves the call that ``begin`` has returned `outermost` for."""
    if outermost:
        _here.call = ""


def begin_backward(model: str, is_running: Callable[[], bool]) -> None:
    """Autograd has come to a model, in whatever thread; `is_running` says whether it still is in that backward."""
    global _backward
    _backward = is_running, f'backward of "{model}"'


def current() -> str:
    """The public call that this thread is in, "" outside of all of them."""
    if _backward is not None and _backward[0]():
        return _backward[1]
    return _here.call


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
            outermost = begin(name)
            try:
                return function(*args, **kwargs)
            finally:
                end(outermost)

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
        outermost = begin(self._name)
        try:
            return step(*args)
        finally:
            end(outermost)
