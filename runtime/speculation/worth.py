"""Whether a drafter earns its time, over all requests of a model."""

SMOOTHING = 0.05
TRIALS = 16
PROBE_EVERY = 12


class Worth:
    """A running mean of the seconds that asking a drafter saved; one that loses is asked only now and then."""

    def __init__(self) -> None:
        self.saved = 0.0
        self._asked = 0
        self._passed_over = 0

    def due(self) -> bool:
        """Whether to ask it this time: always while it is new or saves time, else one time in `PROBE_EVERY`."""
        if self._asked < TRIALS or self.saved >= 0:
            return True
        self._passed_over += 1
        if self._passed_over < PROBE_EVERY:
            return False
        self._passed_over = 0
        return True

    def learn(self, saved: float) -> None:
        """Asking it once saved so many seconds (below 0: lost)."""
        self._asked += 1
        self.saved += max(SMOOTHING, 1 / self._asked) * (saved - self.saved)
