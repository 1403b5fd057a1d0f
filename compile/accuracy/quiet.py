"""Polygraphy's log, which speaks to the users of its command line, kept off ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from polygraphy.logger import G_LOGGER


@contextmanager
def quiet() -> Iterator[None]:
    """Within it Polygraphy logs nothing; what it raises still arrives."""
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        yield
