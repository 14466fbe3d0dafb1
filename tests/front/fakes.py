"""A scripted router, tiny tokenizers, and the front on a real server over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pd.runtime.core.events import Emit, End, Submit
from pd.runtime.front.http import make_app
from pd.runtime.front.settings import FrontSettings
from pd.runtime.front.text import Text, load_text
from pd.runtime.wire.values import Finish, ModelCard, Role, Token

WAIT_S = 20.0
"""Far above what a loaded machine needs; a test that reaches it has found a hang."""

SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>")
MERGES = ["th", "he", "in", "er", "Ġt", "Ġa", "ll", "lo"]
NUM_PLAIN = 256 + len(MERGES)
END_OF_TEXT, IM_START, IM_END = (NUM_PLAIN + index for index in range(3))
VOCAB_SIZE = NUM_PLAIN + len(SPECIALS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, *MERGES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[:-1], pair[-1]) for pair in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: SentencePiece BPE with byte tokens; ids 3 to 258 are the bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdehlorw", "▁a", "▁h", "lo"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁", "h"), ("l", "o")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """A directory with a tokenizer and nothing to compute."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def tiny_text(directory: Path) -> Text:
    return load_text(write_model(directory, byte_level(), chat_template=TEMPLATE))


def tokens(text: str) -> list[int]:
    """Of the byte-level vocabulary, one a byte: the worst cut there is."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [letters.index(letter) for part, _ in spelled for letter in part]


def emits(
    ids: Sequence[int], finish: Finish | None = Finish.LENGTH, *, group: int = 1, logprobs: bool = False
) -> list[Emit]:
    """Tokens in groups; the last carries the ending. Logprobs are -id/100, alternatives the next ids."""
    made = [Token(id, -id / 100, ((id, -id / 100), (id + 1, -9.0))) if logprobs else Token(id) for id in ids]
    groups = [tuple(made[start : start + group]) for start in range(0, len(made), group)]
    return [
        Emit("", index * group, part, finish if index == len(groups) - 1 else None, 2 if index == 0 else None)
        for index, part in enumerate(groups)
    ]


class FakeStream:
    def __init__(self) -> None:
        self._events: asyncio.Queue[Emit | End] = asyncio.Queue()

    def put(self, *events: Emit | End) -> None:
        for event in events:
            self._events.put_nowait(event)

    async def next(self) -> Emit | End:
        return await self._events.get()

    @property
    def num_waiting(self) -> int:
        return self._events.qsize()


class FakeDoor:
    """Plays `script` for every submit; with None, a test puts events into `streams` itself."""

    def __init__(self, script: Callable[[Submit], Sequence[Emit | End]] | None = None) -> None:
        self.script = script
        self.streams: dict[str, FakeStream] = {}
        self.submits: list[Submit] = []
        self.abandons: dict[str, str] = {}
        self.endings: dict[str, str] = {}
        self.arrivals: asyncio.Queue[Submit] = asyncio.Queue()
        self.departures: asyncio.Queue[str] = asyncio.Queue()
        self.absent: tuple[Role, ...] = ()
        self.apart: str | None = None
        self.model: ModelCard | None = ModelCard("tiny", "f", VOCAB_SIZE, 512)

    def submit(self, request: Submit) -> FakeStream:
        stream = self.streams[request.request_id] = FakeStream()
        self.submits.append(request)
        self.arrivals.put_nowait(request)
        if self.script is not None:
            stream.put(*self.script(request))
        return stream

    def abandon(self, request_id: str, reason: str, *, ending: str = "abandoned") -> None:
        self.abandons[request_id] = reason
        self.endings[request_id] = ending
        self.departures.put_nowait(request_id)

    def missing(self) -> tuple[Role, ...]:
        return self.absent

    def why_none_meet(self) -> str | None:
        return self.apart

    def card(self) -> ModelCard | None:
        return self.model

    def state(self) -> dict[str, object]:
        return {"instances": ["one"], "requests": {}}

    async def arrived(self) -> Submit:
        return await asyncio.wait_for(self.arrivals.get(), WAIT_S)

    async def left(self) -> str:
        return await asyncio.wait_for(self.departures.get(), WAIT_S)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(door: FakeDoor, text: Text, settings: FrontSettings | None = None) -> AsyncIterator[str]:
    """The front on a port of its own; gives its address."""
    registry = CollectorRegistry()
    app = make_app(
        door,
        text,
        settings=settings or FrontSettings(),
        metrics_text=lambda: generate_latest(registry),
        registry=registry,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it only where proto is not 0
    server = _Server(
        uvicorn.Config(app, http="httptools", ws="none", lifespan="off", access_log=False, log_config=None)
    )
    task = asyncio.create_task(server.serve([listener]))
    await asyncio.wait_for(server.up.wait(), WAIT_S)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task
        listener.close()
