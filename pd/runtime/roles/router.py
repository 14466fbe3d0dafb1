"""The router's process: its brain between HTTP and the instances. One asyncio loop. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import assert_never

import uvicorn
import uvloop
import zmq
from prometheus_client import CollectorRegistry, generate_latest

from pd.runtime.checkpoint import resolve
from pd.runtime.config import ConfigError, RouterConfig, is_loopback
from pd.runtime.core.events import (
    Abandon,
    Drain,
    Effect,
    Emit,
    End,
    Event,
    Exit,
    HungUp,
    Launch,
    Order,
    Peer,
    Received,
    Send,
    Stamp,
    Submit,
    Tick,
)
from pd.runtime.core.router import RouterBrain
from pd.runtime.front.http import make_app
from pd.runtime.front.settings import FrontSettings
from pd.runtime.front.text import Text, load_text
from pd.runtime.keys import read_api_keys, read_cluster_key
from pd.runtime.observe import RouterMetrics, log_stamp
from pd.runtime.roles.process import StopSignals, new_epoch, setup_logging
from pd.runtime.wire.link import Hub, LinkError
from pd.runtime.wire.lock import Lock
from pd.runtime.wire.messages import Beat, Hello, Reserved
from pd.runtime.wire.values import ModelCard, Role
from pd.runtime.wire.watch import Complaints

log = logging.getLogger("pd.router")

_TICK_S = 0.05
_DRAIN_S = 3.0
_FAREWELL_S = 0.5
"""In which clients read that their answer ends here."""
_KEEP_ALIVE_S = 3600
"""Idle connections are cheap; a client that finds its own closed sees a failed request."""
_MAX_LIVES = 4096
"""Names that can be answered. Those that live speak every half second; names that have gone are forgotten first."""
_MAX_MESSAGES_A_TURN = 256
"""Read before HTTP gets its turn again."""


class ClientStream:
    """Effects for one client, waiting to be read. Tokens that wait together are read together: a busy router, or a slow
    client, makes fewer and longer events. Bounded by tokens: see `is_full`."""

    def __init__(self, max_tokens: int) -> None:
        self._emits: list[Emit] = []
        self._end: End | None = None
        self._num_tokens = 0
        self._max_tokens = max_tokens
        self._reader: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        return self._num_tokens > self._max_tokens

    def put(self, item: Emit | End) -> None:
        if isinstance(item, Emit):
            self._emits.append(item)
            self._num_tokens += len(item.tokens)
        else:
            self._end = item
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> Emit | End:
        """One reader at a time."""
        while not self._emits and self._end is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._emits:
            assert self._end is not None
            return self._end
        emits, self._emits, self._num_tokens = self._emits, [], 0
        return emits[0] if len(emits) == 1 else _joined(emits)


def _joined(emits: Sequence[Emit]) -> Emit:
    """Of one answer, each following the one before."""
    first, last = emits[0], emits[-1]
    tokens = tuple(token for emit in emits for token in emit.tokens)
    return Emit(first.request_id, first.position, tokens, last.finish, first.cached_tokens, last.timings)


class Router:
    """The Door that HTTP knows, and the loop's end of the link. Everything happens on the one asyncio loop."""

    def __init__(self, config: RouterConfig, *, hub: Hub, metrics: RouterMetrics) -> None:
        self._config = config
        self._hub = hub
        self._metrics = metrics
        self._brain = RouterBrain(config, new_epoch())
        self._streams: dict[str, ClientStream] = {}
        self._lives: OrderedDict[str, Peer] = OrderedDict()  # by name: the life last heard of; who spoke last, last
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    # ---- Door -----------------------------------------------------------------------------------------------

    def submit(self, request: Submit) -> ClientStream:
        stream = ClientStream(self._config.stream_buffer_tokens)
        self._streams[request.request_id] = stream
        self._metrics.submitted(request, time.monotonic())
        self._give(request)
        return stream

    def abandon(self, request_id: str, reason: str, *, ending: str = "abandoned") -> None:
        if self._streams.pop(request_id, None) is not None:
            self._metrics.abandoned(request_id, ending)
            self._give(Abandon(request_id, f"{ending}: {reason}"))

    def missing(self) -> tuple[Role, ...]:
        return self._brain.missing()

    def why_none_meet(self) -> str | None:
        return self._brain.why_none_meet()

    def card(self) -> ModelCard | None:
        return self._brain.card()

    def state(self) -> dict[str, object]:
        return self._brain.state() | {
            "num_dropped_messages": self._hub.num_dropped,
            "num_refused_connections": self._hub.num_refused,
        }

    # ---- the loop's end -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tick, and read the link whenever it may have something; until cancelled."""
        loop = asyncio.get_running_loop()
        descriptor = self._hub.socket.fileno()
        complaints = Complaints(log)
        loop.add_reader(descriptor, self._read)
        try:
            while True:
                self._give(Tick())
                complaints.say(self._hub.refused(), time.monotonic())
                if self._hub.has_lost():
                    self._give(HungUp())
                self._metrics.linked(num_dropped=self._hub.num_dropped, num_refused=self._hub.num_refused)
                await asyncio.sleep(_TICK_S)
        finally:
            loop.remove_reader(descriptor)

    def drain(self, reason: str) -> None:
        self._give(Drain(reason))

    def end_all(self, reason: str) -> None:
        """Each open answer gets its ending: an error that says `reason`."""
        for request_id, stream in list(self._streams.items()):
            stream.put(End(request_id, 503, reason))
            self.abandon(request_id, reason, ending="error_503")

    def _read(self) -> None:
        for _ in range(_MAX_MESSAGES_A_TURN):
            received = self._hub.receive()
            if received is None:
                return
            self._note(received)
            self._act_on(received)
        asyncio.get_running_loop().call_soon(self._read)

    def _note(self, received: Received) -> None:
        sender = received.sender
        match received.message:
            case Hello():
                self._lives[sender.name] = sender
            case Beat(load=load):
                self._metrics.beat(sender.name, load)
                self._lives.setdefault(sender.name, sender)  # an idle worker says nothing else to a restarted router
            case Reserved(ticket=ticket):
                self._metrics.reserved(ticket)
                self._lives.setdefault(sender.name, sender)
            case _:
                self._lives.setdefault(sender.name, sender)
        self._lives.move_to_end(sender.name)
        if len(self._lives) > _MAX_LIVES:
            self._lives.popitem(last=False)

    def _give(self, event: Event) -> None:
        """An event that did not come by the link."""
        self._act_on(event)
        # ZMQ's descriptor is edge-triggered: a send may swallow the edge of a message that came meanwhile.
        if self._hub.has_message():
            asyncio.get_running_loop().call_soon(self._read)

    def _act_on(self, event: Event) -> None:
        now = time.monotonic()
        for effect in self._brain.on(event, now):
            self._perform(effect, now)

    def _perform(self, effect: Effect, now: float) -> None:
        match effect:
            case Send(to=to, message=message):
                for peer in self._hub.send(message, self._lives[to]) if to in self._lives else ():
                    asyncio.get_running_loop().call_soon(self._give, HungUp(peer))
            case Emit(request_id=request_id, finish=finish):
                self._metrics.emitted(effect, now)
                self._pass_on(request_id, effect, is_last=finish is not None)
            case End(request_id=request_id):
                self._metrics.failed(effect)
                self._pass_on(request_id, effect, is_last=True)
            case Stamp():
                log_stamp(log, effect)
                self._metrics.stamped(effect.what)
                if effect.what in ("left", "lost"):
                    self._metrics.left(effect.subject)
            case Exit():
                if not self.exit.done():
                    self.exit.set_result(effect)
            case Launch() | Order():
                raise AssertionError(f"a router has no ranks: {effect}")
            case _:
                assert_never(effect)

    def _pass_on(self, request_id: str, item: Emit | End, *, is_last: bool) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.put(item)
        if is_last:
            del self._streams[request_id]
        elif stream.is_full:
            reason = f"the client lies {self._config.stream_buffer_tokens} tokens behind"
            stream.put(End(request_id, 503, reason))
            asyncio.get_running_loop().call_soon(self.abandon, request_id, reason)


class _Server(uvicorn.Server):
    """Leaves signals to us: draining is the brain's, not HTTP's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(config: RouterConfig) -> int:
    """The process body. Raises ConfigError for what a person can mend."""
    setup_logging("router", says=config.log)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    stop = StopSignals()
    key = read_cluster_key(config.link.cluster_key)
    text = load_text(resolve(config.model.model))
    listener = _listen(config.link.host, 8000 if config.link.port is None else config.link.port)
    with zmq.Context[zmq.Socket[bytes]]() as context, Lock(context, key) as lock:
        try:
            hub = Hub(context, config.link.router, lock=lock)
        except LinkError as error:
            listener.close()
            raise ConfigError(str(error), hint="another router runs there: choose another --router address") from error
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(config, hub, listener, text=text, stop=stop))
        finally:
            hub.close()
            listener.close()


async def _serve(config: RouterConfig, hub: Hub, listener: socket.socket, *, text: Text, stop: StopSignals) -> int:
    registry = CollectorRegistry()
    router = Router(config, hub=hub, metrics=RouterMetrics(registry))
    settings = FrontSettings(
        max_body_bytes=config.max_body_bytes,
        request_s=config.request_s,
        api_keys=read_api_keys(config.api_key_file),
    )
    app = make_app(router, text, settings=settings, metrics_text=lambda: generate_latest(registry), registry=registry)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,  # nobody asks who the client is
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    )
    tasks = [asyncio.create_task(router.run()), asyncio.create_task(server.serve([listener]))]
    host, port = listener.getsockname()[:2]
    if not (settings.api_keys or is_loopback(host)):
        log.warning("whoever reaches %s:%d is served; --api-key-file FILE asks clients for a key", host, port)
    log.info("ready: http://%s:%d; instances meet at %s", host, port, config.link.router)
    await _until_told(router, tasks, stop)
    router.end_all("the server is stopping")
    server.should_exit = True
    await asyncio.wait(tasks[1:], timeout=_FAREWELL_S)
    server.force_exit = True
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return 0


async def _until_told(router: Router, tasks: list[asyncio.Task[None]], stop: StopSignals) -> None:
    """Return when everything should end: drained, told twice, or too late. Raises what killed a task."""
    draining: float | None = None
    while not router.exit.done():
        done, _ = await asyncio.wait(tasks, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
            return
        if stop.num_seen and draining is None:
            draining = time.monotonic()
            router.drain("told to stop")
        if draining is not None and (stop.num_seen > 1 or time.monotonic() > draining + _DRAIN_S):
            return


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --port or --host"
        ) from error
    listener.listen(2048)
    return listener
