"""One HTTP exchange over ASGI 3: read a body within bounds, answer once, notice a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from pd.runtime.front.errors import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

JSON = b"application/json"
EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
)
_JSON_LIKE = (b"", JSON, b"text/plain", b"application/x-www-form-urlencoded")
"""The last is what `curl -d` says when told nothing."""


class ClientGone(Exception):
    """The client left before its answer was complete."""


class Exchange:
    """A request and the one answer to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.status: int | None = None
        """As sent; None until then."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._starting = asyncio.Lock()

    def header(self, name: bytes) -> bytes:
        """The last value, or empty. `name` in lower case."""
        values = [value for key, value in self._scope["headers"] if key == name]
        return values[-1].strip() if values else b""

    async def read_body(self, *, limit: int, deadline_s: float) -> bytes:
        """At most `limit` bytes. Raises RequestError 408, 413 or 415, or ClientGone.

        What is left unread after a refusal, the server drops as it comes, so the client can read its 413 and the
        connection stays usable.
        """
        self._check_type()
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        nbytes = 0
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    nbytes += len(parts[-1])
                    if nbytes > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise RequestError(f"the body did not arrive within {deadline_s:g} s", status=408) from error

    async def reply(self, status: int, body: bytes, *, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """The whole answer."""
        lengths = ((b"content-type", content_type), (b"content-length", b"%d" % len(body)))
        await self.start(status, lengths + headers)
        await self.write(body, more=False)

    async def start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status

    async def start_once(self, status: int, headers: Headers) -> None:
        """For several tasks that write to one answer: the first starts it, none writes before that is done."""
        async with self._starting:
            if self.status is None:
                await self.start(status, headers)

    def write(self, body: bytes, *, more: bool = True) -> Awaitable[None]:
        """Waits while the client is behind by more than the server's buffer (64 KiB); a client that left is ignored."""
        return self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def unless_gone(self, work: Coroutine[None, None, None]) -> None:
        """Do `work`, but cancel it as soon as the client leaves: then raises ClientGone. The body must be read."""
        doing = asyncio.create_task(work)
        leaving = asyncio.create_task(self._left())
        try:
            await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ClientGone
            doing.result()
        finally:
            leaving.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait({doing})

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _check_type(self) -> None:
        """JSON, or what clients send that mean JSON."""
        kind = self.header(b"content-type").partition(b";")[0].strip().lower()
        if kind not in _JSON_LIKE and not kind.endswith(b"+json"):
            raise RequestError(
                f"the body's content-type must be application/json, got {kind.decode('latin-1')}", status=415
            )
        encoding = self.header(b"content-encoding").lower()
        if encoding not in (b"", b"identity"):
            raise RequestError(
                f"content-encoding {encoding.decode('latin-1')} is not supported: send the body as it is",
                status=415,
            )


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
