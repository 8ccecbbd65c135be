"""The public call that this process is in, for messages: "checkpoint.save", and not a collective of it.

Of nested calls the outermost counts: the user has made it.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from hpcfsdp.hang import events

Function = TypeVar("Function", bound=Callable[..., Any])


class Here(threading.local):
    """The outermost public `call` of each thread, "" outside of all calls."""

    call = ""


class Backward:
    """The last backward of a model: what describes it, and whether the calling thread is in it."""

    label = ""
    is_running: Callable[[], bool] = staticmethod(lambda: False)


here = Here()
backward = Backward()


def current() -> str:
    """Return the public call that this thread is in, "" outside of all calls."""
    return backward.label if backward.is_running() else here.call


def within(label: str) -> str:
    """Return the label of a collective, with the public call of this thread in front."""
    call = current()
    return f"{call}: {label}" if call else label


def public_call(name: str) -> Callable[[Function], Function]:
    """Decorate a public function, which messages call `name`. Each step of a generator is such a call."""

    def decorate(function: Function) -> Function:
        has_steps = inspect.isgeneratorfunction(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return _Steps(name, function(*args, **kwargs)) if has_steps else _call(name, function, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if here.call:
        return function(*args, **kwargs)
    here.call = name
    events.ring.note(events.CALL, name)
    try:
        return function(*args, **kwargs)
    finally:
        here.call = ""


class _Steps(Generator):
    """A generator whose steps are public calls."""

    def __init__(self, name: str, steps: Generator[Any, Any, Any]) -> None:
        self._name = name
        self._steps = steps

    def send(self, value: Any) -> Any:
        return _call(self._name, self._steps.send, value)

    def throw(self, *error: Any) -> Any:
        return _call(self._name, self._steps.throw, *error)

    def close(self) -> None:
        _call(self._name, self._steps.close)

    def __del__(self) -> None:
        self.close()
