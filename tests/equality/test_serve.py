"""`pd serve` for real: it starts, answers, survives a killed instance, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny import make_tiny

pytestmark = pytest.mark.slow
START_S = 90.0
READY = re.compile(r"^ready: (\S+) at (http://\S+)", re.MULTILINE)


class Serve:
    """A command that ends in `pd serve`, its output in a file that can be awaited."""

    def __init__(self, log: Path, *command: str) -> None:
        self._log = log
        self.scratch = Path(tempfile.mkdtemp(prefix="t-"))  # short: sockets are bound below it
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(self.scratch)},
            )
        self.relatives: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until(self, claim: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not claim():
            self.note_relatives()
            assert self.process.poll() is None, f"ended while waiting until {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"never {what}:\n{self.output}"
            time.sleep(0.05)

    def wait_ready(self) -> str:
        self.until(lambda: "\nstop   Ctrl-C" in self.output, "ready")  # the last line of what is shown then
        match = READY.search(self.output)
        assert match is not None
        return match[2]

    def note_relatives(self) -> list[psutil.Process]:
        """All processes below, remembered for the question who outlives it."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.relatives |= {process.pid: process for process in found}
        return found

    def survivors(self) -> list[psutil.Process]:
        return [process for process in self.relatives.values() if is_alive(process)]

    def child(self, name: str) -> psutil.Process:
        """The process of an instance, by its --name."""
        return next(process for process in self.note_relatives() if f"--name={name}" in process.cmdline())

    def close(self) -> None:
        if self.process.poll() is None:
            self.note_relatives()
            self.process.kill()
            self.process.wait()
        for process in self.survivors():
            process.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)


def is_alive(process: psutil.Process) -> bool:
    """A zombie is none: the init of a container may not reap an orphan that was killed."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    made: list[Serve] = []

    def make(*command: str) -> Serve:
        made.append(Serve(tmp_path / f"log-{len(made)}", *command))
        return made[-1]

    yield make
    for serve in made:
        serve.close()


def ask(address: str, model: str, *, max_tokens: int = 8) -> str:
    """The answer's text. Asks again while an instance is missing (503), for as long as a start may take."""
    body = {"model": model, "prompt": "the rain in Spain", "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_S) as response:
                return str(json.load(response)["choices"][0]["text"])
        except urllib.error.HTTPError as error:
            assert error.code == 503 and time.monotonic() < deadline, f"{error.code}: {error.read()!r}"
            time.sleep(0.2)


def test_serve_answers_survives_a_killed_instance_and_leaves_nothing(
    model: Path, start: Callable[..., Serve], tmp_path: Path
) -> None:
    serve = start("-m", "pd", "serve", str(model), "--port=0", "--prefill=tp=2", "--num-pages=64", "--threads=1")
    address = serve.wait_ready()
    assert re.search(r"^prefill-0 +\d+ +prefill +2\b", serve.output, re.MULTILINE), serve.output
    first = ask(address, "tiny")
    assert len(first) > 0

    leader = serve.child("prefill-0")
    ranks = leader.children(recursive=True)
    assert len(ranks) == 2
    leader.kill()
    serve.until(lambda: "prefill-0 was ended by SIGKILL; starting it again" in serve.output, "the death is told")
    serve.until(lambda: not any(is_alive(rank) for rank in ranks), "its ranks are gone")
    assert ask(address, "tiny") == first

    serve.note_relatives()
    began = time.monotonic()
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(timeout=20) == 0, serve.output
    assert time.monotonic() - began < 5.5, serve.output
    assert serve.survivors() == []
    assert list(serve.scratch.iterdir()) == []
    assert [name for name in os.listdir("/dev/shm") if "pd" in name] == []


def test_ctrl_c_while_weights_load_ends_all(model: Path, start: Callable[..., Serve]) -> None:
    serve = start("-m", "pd", "serve", str(model), "--port=0", "--threads=1")
    serve.until(lambda: "starting decode" in serve.output, "an instance starts")
    serve.note_relatives()
    began = time.monotonic()
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(timeout=20) == 0, serve.output
    assert time.monotonic() - began < 5.5, serve.output
    assert serve.survivors() == []


def changed(model: Path, folder: Path, **settings: object) -> Path:
    """A copy of `model` with other settings in its config.json."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["--decode=tp=10"], {}, "error: decode-0: tp is 10, the model has 9 query heads"),
        ([], {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}, "GPTNeoXForCausalLM"),
        ([], {"num_hidden_layers": 4}, "model.layers.3."),  # only a rank that reads the weights sees it
    ],
)
def test_a_model_that_cannot_be_served_is_told_and_nothing_stays(
    model: Path, start: Callable[..., Serve], tmp_path: Path, *, arguments: list[str], settings: dict, message: str
) -> None:
    folder = changed(model, tmp_path / "changed", **settings)
    serve = start("-m", "pd", "serve", str(folder), "--port=0", "--threads=1", *arguments)
    assert serve.process.wait(timeout=START_S) == 2, serve.output
    assert any("error: " in line and message in line for line in serve.output.splitlines()), serve.output
    assert "Traceback" not in serve.output


def test_make_serve_shows_a_first_chat_of_the_default_model(start: Callable[..., Serve]) -> None:
    serve = start("scripts/serve_and_chat.py", "--port=0", "--num-pages=64")
    serve.until(lambda: "\nassistant " in serve.output, "the first chat is answered")
    assert "\nassistant  The capital of France is Paris.\n" in serve.output
    serve.note_relatives()
    serve.process.terminate()
    assert serve.process.wait(timeout=20) == 0, serve.output
    assert serve.survivors() == []
