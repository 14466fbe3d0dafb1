"""The OpenAI-compatible HTTP front as an ASGI app. It knows the router only by `Door`.

Rules
1. Nothing here keeps state between requests but counters.
2. Whatever is wrong with a request is answered in OpenAI's error form, before anything is submitted.
3. A client that leaves is abandoned at once, wherever its request is.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from pd import __version__
from pd.runtime.front.asgi import ClientGone, Exchange, Receive, Scope, Send
from pd.runtime.front.completions import Completions, known, not_ready, read_body
from pd.runtime.front.door import Door
from pd.runtime.front.errors import RequestError
from pd.runtime.front.openapi import document
from pd.runtime.front.settings import FrontSettings
from pd.runtime.front.shapes import encode
from pd.runtime.front.text import Text
from pd.runtime.front.tokenizing import Tokenizing, parse_detokenize, parse_tokenize
from pd.runtime.front.wanted import check_ids
from pd.runtime.wire.values import ModelCard

App = Callable[[Scope, Receive, Send], Awaitable[None]]
Route = Callable[[Exchange], Awaitable[None]]

_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
_OPEN_TO_ALL = ("/health", "/ready", "/metrics")
"""For those who watch over the router, and hold no key of its users."""
_LEFT = 499  # nginx's status for a client that left; only ever counted


def make_app(
    door: Door,
    text: Text,
    *,
    settings: FrontSettings,
    metrics_text: Callable[[], bytes],
    registry: CollectorRegistry,
) -> App:
    """The app for uvicorn. `registry` takes the front's counters; `metrics_text` is what GET /metrics answers."""
    front = _Front(door, text, settings=settings, metrics_text=metrics_text)
    counters = _Counters(registry)
    keys = tuple(key.encode() for key in settings.api_keys)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"{scope['type']} is not served; set uvicorn's lifespan='off', ws='none'")
        exchange = Exchange(scope, receive, send)
        route, name = front.find(exchange.path)
        counters.running.inc()
        try:
            await _answer(exchange, route, keys)
        finally:
            counters.running.dec()
            counters.requests.labels(name, str(exchange.status or _LEFT)).inc()

    return app


async def _answer(exchange: Exchange, route: dict[str, Route], keys: tuple[bytes, ...]) -> None:
    try:
        if keys and exchange.path not in _OPEN_TO_ALL:
            _check_key(exchange, keys)
        await _pick(exchange, route)(exchange)
    except ClientGone:
        return
    except RequestError as error:
        headers = error.headers()
        if error.status == 405:
            headers += ((b"allow", ", ".join(route).encode()),)
        if error.status == 401:
            headers += ((b"www-authenticate", b"Bearer"),)
        await exchange.reply(error.status, error.body(), headers=headers)


def _check_key(exchange: Exchange, keys: tuple[bytes, ...]) -> None:
    """Raises RequestError 401. Every key is compared, in constant time."""
    scheme, _, shown = exchange.header(b"authorization").partition(b" ")
    matches = [hmac.compare_digest(shown.strip(), key) for key in keys]
    if scheme.lower() != b"bearer" or not any(matches):
        said = "no API key was sent" if not shown else "the API key is not one of this server's"
        raise RequestError(f"{said}: send it as `Authorization: Bearer KEY`", status=401, code="invalid_api_key")


def _pick(exchange: Exchange, route: dict[str, Route]) -> Route:
    if not route:
        raise RequestError(f"there is nothing at {exchange.path}", status=404, code="not_found")
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if method not in route:
        allowed = " or ".join(route)
        raise RequestError(f"{exchange.path} takes {allowed}, got {exchange.method}", status=405)
    return route[method]


class _Counters:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "pd_http_requests",
            "HTTP requests answered, by route and status; 499: the client left before its answer began",
            ["route", "status"],
            registry=registry,
        )
        self.running = Gauge(
            "pd_http_requests_running", "HTTP requests being answered, streams included", registry=registry
        )


class _Front:
    """The routes."""

    def __init__(self, door: Door, text: Text, *, settings: FrontSettings, metrics_text: Callable[[], bytes]) -> None:
        self._door = door
        self._text = text
        self._settings = settings
        self._metrics_text = metrics_text
        self._tokenizing = Tokenizing(text, at_once=settings.tokenize_at_once, max_waiting=settings.tokenize_waiting)
        self._started = int(time.time())
        completions = Completions(door, text, settings=settings, tokenizing=self._tokenizing)
        self._routes: dict[str, dict[str, Route]] = {
            "/v1/completions": {"POST": completions.complete},
            "/v1/chat/completions": {"POST": completions.chat},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            "/state": {"GET": self._state},
            "/version": {"GET": self._version},
            "/openapi.json": {"GET": self._openapi},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
        }
        self._model_route: dict[str, Route] = {"GET": self._model}

    def find(self, path: str) -> tuple[dict[str, Route], str]:
        """The methods at a path, none for an unknown one; and the name it is counted by, of which there are few."""
        if path in self._routes:
            return self._routes[path], path
        if path.startswith("/v1/models/"):
            return self._model_route, "/v1/models/{id}"
        return {}, "other"

    async def _models(self, exchange: Exchange) -> None:
        card = self._door.card()
        models = [] if card is None else [self._model_json(card)]
        await exchange.reply(200, encode({"object": "list", "data": models}))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        await exchange.reply(200, encode(self._model_json(known(self._door, name))))

    def _model_json(self, card: ModelCard) -> dict[str, object]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._started,
            "owned_by": "pd",
            "max_model_len": card.max_model_len,
        }

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(200, encode({"status": "ok"}))

    async def _ready(self, exchange: Exchange) -> None:
        missing, reason = self._door.missing(), self._door.why_none_meet()
        ready = not missing and reason is None and self._door.card() is not None
        headers = () if ready else not_ready(missing).headers()
        body: dict[str, object] = {"ready": ready, "missing": [role.value for role in missing]}
        if reason is not None:
            body["reason"] = reason
        await exchange.reply(200 if ready else 503, encode(body), headers=headers)

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.reply(200, self._metrics_text(), content_type=_PROMETHEUS)

    async def _state(self, exchange: Exchange) -> None:
        await exchange.reply(200, encode(self._door.state()))

    async def _version(self, exchange: Exchange) -> None:
        await exchange.reply(200, encode({"version": __version__}))

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.reply(200, encode(document(__version__)))

    async def _tokenize(self, exchange: Exchange) -> None:
        wanted = parse_tokenize(await read_body(exchange, self._settings))
        card = known(self._door, wanted.model)
        tokens = (await self._tokenizing.prompts(wanted))[0]
        answer = {"count": len(tokens), "max_model_len": card.max_model_len, "tokens": tokens}
        await exchange.reply(200, encode(answer))

    async def _detokenize(self, exchange: Exchange) -> None:
        model, tokens = parse_detokenize(await read_body(exchange, self._settings))
        check_ids("tokens", tokens, known(self._door, model).vocab_size)
        await exchange.reply(200, encode({"prompt": self._text.decode(tokens, skip_special_tokens=False)}))
