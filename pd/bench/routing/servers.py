"""What `pd bench router` measures: null servers alone, our router before one, another router before the same ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from pd.bench.compare.shape import Running, Shape, foreign, free_port, running, said
from pd.bench.load.asks import Ask, Form, spelled
from pd.bench.load.http import Server
from pd.runtime.roles.process import die_with

IDS = tuple(range(100, 228))
TEXT = spelled(IDS)
"""About as many tokens: other routers do not all take ids."""
FORM = Form(model="null", chat=False, ignore_eos=True, extra={})
START_S = 60.0
"""For another router: it loads no weights."""
_ANSWER_S = 5.0
_EXAMPLE = "python -m sglang_router.launch_router --port {port} --worker-urls {backend}"


def null_http(step_s: float) -> AbstractAsyncContextManager[Running]:
    """An HTTP server of OpenAI's kind that computes nothing."""
    words = (sys.executable, "-P", "-m", "pd.bench.routing.null", "http", "{port}", str(step_s))
    return running(Shape("null", words, _cores()), "")


@contextlib.asynccontextmanager
async def our_router(model: str, step_s: float) -> AsyncIterator[Running]:
    """The router, and an instance that waits for it: /ready is 200 when they have met."""
    meeting, parent = f"tcp://127.0.0.1:{free_port()}", os.getpid()
    words = (sys.executable, "-P", "-m", "pd", "launch", "--role=router", "--model={model}", "--served-name=null")
    shape = Shape("router", (*words, "--port={port}", f"--router={meeting}"), _cores())
    command = [sys.executable, "-P", "-m", "pd.bench.routing.null", "instance", meeting, "null", str(step_s)]
    instance = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with(parent))
    try:
        async with running(shape, model) as server:
            yield server
    finally:
        instance.kill()
        instance.wait()


def other_router(command: str) -> Shape:
    """What `--vs` says, checked. Raises ValueError."""
    shape = foreign(command, cores=_cores(), example=_EXAMPLE)
    if "{backend" not in command and not ("{prefill" in command and "{decode" in command):
        raise ValueError(
            f"--vs is {command!r}: it must hold {{backend}}, or {{prefill}} and {{decode}}, as in '{_EXAMPLE}'"
        )
    return shape


def asks_prefill(shape: Shape) -> bool:
    """Whether it takes prefill and decode apart, and so needs two servers."""
    return any("{prefill" in word for word in shape.command)


def before(shape: Shape, model: str, *, backend: str, prefill: str) -> AbstractAsyncContextManager[Running]:
    """Another router before null servers at these URLs; `backend` is decode's as well. It is ready when an answer
    comes through it: what its other pages say differs from router to router."""
    urls = {"backend": backend, "decode": backend, "prefill": prefill}
    ports = {f"{name}_port": url.rpartition(":")[2] for name, url in urls.items()}
    return running(shape.filled(**urls, **ports), model, ready=_answers, start_s=START_S)


async def _answers(url: str) -> str | None:
    server = Server(url)
    try:
        answer = await server.fetch("POST", FORM.path, FORM.body(Ask(TEXT, 1)), timeout_s=_ANSWER_S)
        return None if answer.status == 200 and b'"choices"' in answer.body else said(answer, FORM.path)
    finally:
        server.close()


def _cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))
