"""The session for asyncio: pieces are taken at once, answers are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ..processing.prompt import ImageSource
from ..results import Result
from .arrival import PushedImage
from .session import Session


class AsyncSession:
    """As `Session`. What waits or computes runs in a thread; the event loop goes on meanwhile."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def push_image(self, source: ImageSource) -> PushedImage:
        """See `Session.push_image`."""
        return self._session.push_image(source)

    def open_image(self) -> PushedImage:
        """See `Session.open_image`."""
        return self._session.open_image()

    def retract_image(self, image: PushedImage) -> None:
        """See `Session.retract_image`."""
        self._session.retract_image(image)

    def push_text(self, text: str) -> None:
        """See `Session.push_text`."""
        self._session.push_text(text)

    def replace_text(self, text: str) -> None:
        """See `Session.replace_text`."""
        self._session.replace_text(text)

    async def commit(self, **options: Any) -> Result:
        """See `Session.commit`. Cancelling the task cancels the request after the round at hand."""
        async for _ in (stream := self.stream(**options)):
            pass
        return stream.result

    def stream(self, **options: Any) -> AsyncStream:
        """See `Session.stream`."""
        return AsyncStream(self._session, options)

    async def settle(self) -> None:
        """See `Session.settle`."""
        await asyncio.to_thread(self._session.settle)

    async def cancel(self) -> None:
        """See `Session.cancel`."""
        await asyncio.to_thread(self._session.cancel)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.cancel()


class AsyncStream:
    """Pieces of an answer, to be iterated once; `result` is the whole of it, then."""

    def __init__(self, session: Session, options: dict[str, Any]) -> None:
        self._session, self._options = session, options
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """The answer. Raises RuntimeError before the iteration has ended."""
        if self._result is None:
            raise RuntimeError("the answer is not there yet; iterate over the stream first")
        return self._result

    async def __aiter__(self) -> AsyncIterator[str]:
        stream = await asyncio.to_thread(self._session.stream, **self._options)
        step: asyncio.Future[str | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(next, stream, None))
                # A thread cannot be cancelled: its round ends before the stream is closed.
                piece = await asyncio.shield(step)
                if piece is None:
                    break
                yield piece
        finally:
            if step is not None and not step.done():
                await asyncio.wait([step])
            await asyncio.to_thread(stream.close)
            self._result = stream.result
