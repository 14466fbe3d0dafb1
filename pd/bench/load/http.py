"""HTTP/1.1 to one server: many streams at once, each piece's time taken as it comes off the socket.

httptools parses, as in uvicorn. A client library dates a chunk when the task that waits for it is run; here it is
dated in the socket's own callback, so a busy moment of ours does not look like a slow server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import httptools

from pd.bench.load.reading import Reading

_CONNECT_S = 10.0
_MAX_BODY = 1 << 20  # of an answer that is no stream; what goes beyond is dropped


class Exchange:
    """One request's answer as it comes. `fault` is the kind and detail of what ended it early."""

    __slots__ = ("body", "done", "fault", "reading", "status")

    def __init__(self, reading: Reading | None = None) -> None:
        self.status = 0
        self.body = bytearray()
        self.reading = reading
        self.fault: tuple[str, str] | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, data: bytes, now: float) -> None:
        if self.reading is not None and self.status == 200:
            self.reading.feed(data, now)
        elif len(self.body) < _MAX_BODY:
            self.body += data

    def end(self, fault: tuple[str, str] | None = None) -> None:
        if not self.done.done():
            self.fault = fault
            self.done.set_result(None)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.is_fresh = True  # nothing has come on it yet
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    def begin(self, exchange: Exchange, payload: bytes) -> None:
        assert self._transport is not None
        self.exchange = exchange
        self._transport.write(payload)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.is_fresh = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(("malformed answer", str(error)))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        reading = self.exchange.reading if self.exchange else None
        complete = reading is not None and reading.has_end
        self._finish(None if complete else ("disconnected", str(error or "the server closed the connection")))

    # ---- the parser's

    def on_headers_complete(self) -> None:
        if self.exchange is not None:
            self.exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.exchange is not None:
            self.exchange.take(body, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._finish(None)

    def _finish(self, fault: tuple[str, str] | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.end(fault)


class Server:
    """Connections to one server. Owns them; `close` ends them all."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        """Raises ValueError for what is no http(s) address."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ValueError(f"--url is {url!r}, must be http://HOST:PORT: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url is {url!r}, must be http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        bearer = f"Authorization: Bearer {key}\r\n" if key else ""
        self._fixed = f"Host: {parts.netloc.rpartition('@')[2]}\r\n{bearer}Content-Type: application/json\r\n"
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()

    def payload(self, method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
        """A request's bytes, so that they can be made before it is due. `headers` end in CRLF each."""
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._fixed}{headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def send(self, payload: bytes, exchange: Exchange, *, timeout_s: float) -> None:
        """Send, and wait for the answer's end. What goes wrong stands in `exchange.fault`; nothing is raised.

        Cancelled, it drops the connection, so that the server sees its client leave.
        """
        timer = asyncio.get_running_loop().call_later(timeout_s, exchange.end, ("timeout", f"after {timeout_s:g} s"))
        try:
            while True:
                connection = self._reused() or await self._connect(exchange)
                if connection is None:
                    return
                was_used = not connection.is_fresh
                connection.is_fresh = True
                if not await self._through(connection, payload, exchange) or not was_used:
                    return
                fresh = Exchange(exchange.reading)  # the server had closed an idle connection: no fault of the request
                exchange.done, exchange.fault = fresh.done, None
        finally:
            timer.cancel()

    async def _through(self, connection: _Connection, payload: bytes, exchange: Exchange) -> bool:
        """Whether the connection broke before anything came on it."""
        try:
            connection.begin(exchange, payload)
            await exchange.done
        finally:
            if connection.exchange is not None or not connection.is_open:  # timed out or cancelled; or closed
                connection.exchange = None
                connection.close()
                self._all.discard(connection)
            else:
                self._idle.append(connection)
        return exchange.fault is not None and exchange.fault[0] == "disconnected" and connection.is_fresh

    async def fetch(self, method: str, path: str, body: bytes = b"", *, timeout_s: float = 10.0) -> Exchange:
        """A small request's whole answer."""
        exchange = Exchange()
        await self.send(self.payload(method, path, body), exchange, timeout_s=timeout_s)
        return exchange

    def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()

    def _reused(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._all.discard(connection)
        return None

    async def _connect(self, exchange: Exchange) -> _Connection | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except (OSError, TimeoutError) as error:
            exchange.end(("no connection", _reason(error)))
            return None
        self._all.add(connection)
        return connection


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or "timed out"
    with contextlib.suppress(ValueError):
        text = text[text.index("] ") + 2 :] if text.startswith("[") else text
    return text
