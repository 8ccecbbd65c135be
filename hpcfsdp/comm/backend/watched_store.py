"""torch's store, where the job outlives ranks: who waits in it for a key of a rank that has died raises."""

import datetime
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hpcfsdp import env
from hpcfsdp.errors import HangError
from hpcfsdp.hang import departure, lost

_PAUSE_S = 0.005
_ATTEND_EVERY_S = 0.5


class WatchedStore(dist.Store):
    """A store that waits for keys by asking again and again. Messages of torch go through the methods named here."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self.port = store.port
        self.set_timeout(store.timeout)
        self._asked_s: dict[int, float] = {}  # when a thread has asked the server for what it has not answered yet
        threading.Thread(target=_attend, args=[weakref.ref(self)], name="hpcfsdp-store", daemon=True).start()

    def get(self, key: str) -> bytes:
        self._await([key], self.timeout)
        return self._ask("get", key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._await(keys, self.timeout)
        return self._ask("multi_get", keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._await(keys, self.timeout if timeout is None else timeout)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if block:
            self._wait_until(lambda: self._ask("queue_len", key) > 0, [key], self.timeout)
        return self._ask("queue_pop", key, False)

    def _await(self, keys: list[str], timeout: datetime.timedelta) -> None:
        self._wait_until(lambda: self._ask("check", keys), keys, timeout)

    def _wait_until(self, is_over: Callable[[], bool], keys: list[str], timeout: datetime.timedelta) -> None:
        until_s = time.monotonic() + timeout.total_seconds()
        while not is_over():
            lost.check(f"torch's store, for {', '.join(keys)}")
            if time.monotonic() > until_s:
                raise dist.DistStoreError(f"waited {timeout.total_seconds():g} s in the store for {', '.join(keys)}")
            time.sleep(_PAUSE_S)

    def _ask(self, name: str, *arguments: Any) -> Any:
        thread = threading.get_ident()
        self._asked_s[thread] = time.monotonic()
        try:
            return getattr(self._store, name)(*arguments)
        except dist.DistNetworkError:  # its server has died, or has noticed a death before this rank
            if lost.news(lost.REPORTED_WITHIN_S):
                lost.check("torch's store")
            raise
        finally:
            del self._asked_s[thread]


def _attend(reference: "weakref.ref[WatchedStore]") -> None:
    """Watch over calls in which torch waits for the server, in C++ and without a timeout: rank 0 may hang."""
    limit_s = env.hang_s()
    while (store := reference()) is not None:
        asked_s = min(list(store._asked_s.values()), default=None)
        del store
        watch = lost.current
        if watch is not None and asked_s is not None and (waited_s := time.monotonic() - asked_s) > _ATTEND_EVERY_S:
            watch.beat()
            if 0 < limit_s < waited_s:
                watch.end_hung(limit_s)
            if 0 < 2 * limit_s + lost.REPORTED_WITHIN_S < waited_s:
                departure.abort(
                    f"torch's store has not answered for {waited_s:.0f} s: rank 0 hangs", HangError.exit_code
                )
        time.sleep(_ATTEND_EVERY_S)


def _pass_on(name: str) -> Callable[..., Any]:
    def method(self: WatchedStore, *arguments: Any) -> Any:
        return self._ask(name, *arguments)

    return method


# torch's C++ code looks for some of them by other names.
_NAMES = {
    name: name for name in "set compare_set add check append multi_set has_extended_api queue_push queue_len".split()
}
_NAMES |= {"delete_key": "delete_key", "deleteKey": "delete_key", "num_keys": "num_keys", "getNumKeys": "num_keys"}
for _name, _theirs in _NAMES.items():
    setattr(WatchedStore, _name, _pass_on(_theirs))
