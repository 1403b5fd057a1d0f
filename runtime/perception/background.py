"""One thread that works on whatever is wanted now, a unit at a time, and stops between two units."""

from __future__ import annotations

import threading
from collections.abc import Callable

Unit = Callable[[], None]


class Background:
    """Runs units that `find` gives until it gives none; `wake` after anything changed.

    `find` is called with `lock` held, a unit without it. What a unit raises is passed to `failed`.
    """

    def __init__(self, find: Callable[[], Unit | None], failed: Callable[[Exception], None]) -> None:
        self._find, self._failed = find, failed
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._running = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Something may be wanted."""
        with self.lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="speceyes-perception", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until nothing is wanted any more."""
        with self.lock:
            self._changed.wait_for(lambda: self._thread is None or (not self._running and self._find() is None))

    def stop(self) -> None:
        """Begin no further unit, and wait for the one at work."""
        with self.lock:
            self._stopping = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._stopping = False

    def _run(self) -> None:
        while True:
            with self.lock:
                self._running = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping or self._find() is not None)
                unit = None if self._stopping else self._find()
                if unit is None:
                    return
                self._running = True
            try:
                unit()
            except Exception as fault:
                self._failed(fault)
