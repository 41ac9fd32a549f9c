"""Values that were used last, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from matex_data.locks import Lock

V = TypeVar("V")


class LeastRecentlyUsed(Generic[V]):
    """Values by key, of which the least recently used ones are dropped. Threads may share it.

    Parameters
    ----------
    nbytes : size of all values, in bytes. The newest value is kept whatever its size.

    Examples
    --------
    >>> values = LeastRecentlyUsed(100)
    >>> for key in "abc":
    ...     values.add(key, key.upper(), nbytes=40)
    >>> values.get("a"), values.get("c"), values.used
    (None, 'C', 80)
    >>> values.made("d", lambda: "D", nbytes=len), values.made("d", lambda: "another one")
    ('D', 'D')
    """

    def __init__(self, nbytes: int) -> None:
        self.used = 0
        self._most = nbytes
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._making: dict[Hashable, Lock] = {}  # of the keys whose values threads make
        self._lock = Lock()

    def get(self, key: Hashable) -> V | None:
        """Return a value; None if it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def made(self, key: Hashable, make: Callable[[], V], nbytes: Callable[[V], int] = lambda _: 1) -> V:
        """Return a value, made now if need be: by the first thread that asks for it, for which the others wait.

        Parameters
        ----------
        key : of the value.
        make : returns the value, and waits for nothing that needs it.
        nbytes : returns the size of a value, in bytes.
        """
        found = self.get(key)
        if found is not None:
            return found
        with self._lock:
            making = self._making.setdefault(key, Lock())
        with making:
            try:
                found = self.get(key)
                if found is None:
                    found = make()
                    size = nbytes(found)
                    with self._lock:
                        if self._making.get(key) is making:  # else the values were dropped meanwhile
                            self._put(key, found, size)
                return found
            finally:
                with self._lock:
                    if self._making.get(key) is making:
                        del self._making[key]

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
            self._making.clear()
            self.used = 0

    def add(self, key: Hashable, value: V, nbytes: int) -> None:
        """Keep a value of ``nbytes``."""
        with self._lock:
            self._put(key, value, nbytes)

    def _put(self, key: Hashable, value: V, nbytes: int) -> None:
        _, replaced = self._values.pop(key, (None, 0))
        self._values[key] = value, nbytes
        self.used += nbytes - replaced
        while self.used > self._most and len(self._values) > 1:
            _, (_, freed) = self._values.popitem(last=False)
            self.used -= freed
