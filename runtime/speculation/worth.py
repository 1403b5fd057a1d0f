"""Whether a drafter earns its time, over all requests of a model."""

SMOOTHING = 0.05
TRIALS = 8
PROBE_EVERY = 3
OPEN_EVERY = 4


class Worth:
    """A running mean of the seconds that a drafter saved, over the requests that it began to follow, which only cost,
    and the rounds that it was asked in; one that loses is asked only now and then."""

    def __init__(self) -> None:
        self.saved = 0.0
        self._asked = 0
        self._passed_over = 0
        self._closed = 0

    @property
    def loses(self) -> bool:
        """Whether it is known to cost more time than it saves."""
        return self._asked >= TRIALS and self.saved < 0

    def opens(self) -> bool:
        """Whether a new request is to be followed: always while it gains, else one in `OPEN_EVERY`."""
        if not self.loses:
            return True
        self._closed = (self._closed + 1) % OPEN_EVERY
        return self._closed == 0

    def due(self) -> bool:
        """Whether to ask it now, for a request that it follows: always while it gains, else one in `PROBE_EVERY`."""
        if not self.loses:
            return True
        self._passed_over = (self._passed_over + 1) % PROBE_EVERY
        return self._passed_over == 0

    def learn(self, saved: float) -> None:
        """It saved so many seconds (below 0: lost)."""
        self._asked += 1
        self.saved += max(SMOOTHING, 1 / self._asked) * (saved - self.saved)
