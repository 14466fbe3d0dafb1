"""`pd bench serve` as a person has it: figures, results in a file, partial ones after Ctrl-C, faults in two lines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pd.bench.lines import read, written
from pd.bench.load.plan import check
from pd.bench.load.session import connect
from pd.bench.options import LoadOptions
from pd.bench.serve import serve
from pd.runtime.config import ConfigError
from tests.bench.servers import Say, Script, serving

QUICK = Script([Say(0.01)] * 4)


async def bench(*arguments: str, interrupted: Callable[[], bool] | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pd", "bench", "serve", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "100"},
    )
    if interrupted is not None:
        async with asyncio.timeout(60):
            while not interrupted():
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_run_is_told_and_written(tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    async with serving(QUICK) as synthetic:
        status, out, err = await bench(
            *("--url", synthetic.url + "/v1", "--rate", "50", "--num-requests", "20", "--warmup", "1"),
            *("--dataset", "random,input=6,output=4", "--slo", "ttft:2000", "--output", str(output)),
        )
    assert (status, err) == (0, "")
    assert "20 of 20 answered" in out
    assert "100.0 % of requests met ttft:2000" in out
    table = out[out.index("\nms ") :].splitlines()[1:7]  # a note may follow that this client was late
    assert [line.split()[0] for line in table] == ["ms", "TTFT", "ITL", "TPOT", "E2E", "client"]
    assert [len(body["prompt"]) for body in synthetic.bodies] == [64] + [6] * 20  # type: ignore[arg-type]
    head, *requests, summary = [line for line in read(output) if line["kind"] != "sample"]
    assert (head["kind"], head["model"]) == ("run", "synthetic")
    assert {"pd", "python", "cpu", "commit"} <= head["environment"].keys()  # type: ignore[attr-defined]
    assert len(requests) == 20
    assert all(len(request["chunks_s"]) == 4 and request["num_answer"] == 4 for request in requests)  # type: ignore[arg-type]
    assert (summary["kind"], summary["num_ok"], summary["attainment"]) == ("summary", 20, 1.0)


async def test_interrupted_it_keeps_what_it_has(tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"

    def script(number: int, body: dict[str, object]) -> Script:
        return QUICK if number < 3 else Script([Say(0.05)] * 2000)

    async with serving(script) as synthetic:
        running = asyncio.create_task(
            bench(
                *("--url", synthetic.url, "--concurrency", "5", "--num-requests", "6", "--warmup", "0"),
                *("--dataset", "random,input=6,output=4", "--output", str(output)),
                interrupted=lambda: len(synthetic.bodies) == 6,
            )
        )
        status, out, _ = await running
    assert status == 130
    assert "3 of 3 answered" in out
    assert "interrupted: 3 requests were still open and do not count" in out
    assert read(output)[-1]["was_interrupted"] is True


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (LoadOptions(rate=0), "--rate is 0, must be above 0", "pd bench serve --help"),
        (LoadOptions(), "nothing says how much: --rate 2", "pd bench serve --help"),
        (LoadOptions(rate=1, concurrency=2), "--rate and --concurrency exclude each other", "pd bench serve --help"),
        (LoadOptions(rate=1, slo="ttft=5"), "--slo is 'ttft=5': 'ttft=5' is not NAME:MS", "pd bench serve --help"),
        (LoadOptions(rate=1, dataset="azure:/no"), "--dataset: cannot read /no: No such file", "pd bench serve --help"),
        (LoadOptions(rate=1, dataset="azure"), "--dataset azure needs a file: azure:FILE", "pd bench serve --help"),
        (LoadOptions(rate=1, extra="[]"), "--extra is '[]', must be a JSON object", "pd bench serve --help"),
        (LoadOptions(rate=1, tokenizer="/no"), "--tokenizer: /no does not exist", "pd bench serve --help"),
        (LoadOptions(rate=1, url="ftp://x"), "--url is 'ftp://x', must be http://HOST:PORT", "--url is the address"),
        (LoadOptions(rate=1, url="http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9: Conn", "start one"),
        (LoadOptions(rate=1, output="/no/folder/x"), "cannot write /no/folder/x: No such file", "--output takes"),
        (LoadOptions(rate=1, url="http://x:port"), "--url is 'http://x:port', must be http://HOST:PORT: Port", "--url"),
        (LoadOptions(rate=0.1, duration=0.001, seed=1), "nothing arrives within 0.001 s", "raise --duration"),
    ],
)
def test_wrong_use_is_told_before_anything_is_sent(options: LoadOptions, error: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(options)
    assert str(caught.value).startswith(error)
    assert caught.value.hint.startswith(hint)


async def test_a_wrong_model_is_told_with_those_that_are_served() -> None:
    async with serving(QUICK) as synthetic:
        with pytest.raises(ConfigError, match=r"the model 'other' is not served at .*; it serves synthetic") as caught:
            await connect(synthetic.url, "other")
    assert caught.value.hint == "--model synthetic"


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n{"timestamp": "x"}\n')
    with pytest.raises(ConfigError) as caught:
        serve(LoadOptions(dataset=f"mooncake:{trace}", arrival="trace"))
    assert str(caught.value).startswith(f"--dataset: {trace}: line 2: Expected `float`")


def test_a_run_that_does_not_begin_leaves_earlier_results_alone(tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    output.write_bytes(b"what was measured before, and is longer than a line of ours\n")
    with pytest.raises(ConfigError, match="no server answers"):
        serve(LoadOptions(rate=1, url="http://127.0.0.1:9", output=str(output)))
    assert output.read_bytes().startswith(b"what was measured before")
    with written(str(output)) as lines:
        lines.put("x")
        lines.put("y")
    assert output.read_bytes() == b'{"kind":"x"}\n{"kind":"y"}\n'


async def test_a_server_that_cannot_answer_is_told_by_the_warm_up() -> None:
    wanted = check(LoadOptions(rate=1), command="pd bench serve")
    async with serving(Script(status=500)) as synthetic:
        session = await connect(synthetic.url, None)
        with pytest.raises(ConfigError, match=r"a warm-up request failed: status 500: .*as the test wants it"):
            await session.warm_up(wanted)
        session.close()
