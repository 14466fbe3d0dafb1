"""`pd bench transfer` moves what it was asked to between two processes; the documented counts are the plan's own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pd.bench.lines import read
from pd.bench.shapes import SHAPES, count_descriptors, descriptor_table, read_shape
from pd.bench.transfer import transfer
from pd.bench.transfer_ends import Meeting
from pd.bench.transfer_options import TransferOptions
from pd.runtime.config import ConfigError
from pd.transfer.layout import tp_shards
from pd.transfer.plan import routes_between
from pd.transfer.transport import TransferError
from tests.shape.source import ROOT
from tests.transfer.kit import backends

SHAPE = "layers=2,heads=4,kv-heads=2,head-dim=8"


@pytest.mark.parametrize("backend", backends("shm", "tcp", "nixl", "mooncake"))
def test_every_line_is_moved_and_written(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    options = TransferOptions(
        backend=backend, prefill_tp="2", decode_tp="1,2", tokens="40,16", model_shape=SHAPE, seconds=1e-3,
        output=str(output),
    )  # fmt: skip
    assert transfer(options) == 0
    head, *lines = read(output)
    assert (head["kind"], head["model"]) == ("transfer", SHAPE)
    token_nbytes = 2 * 2 * 8 * 2 * 2  # layers, heads, elements, k and v, bytes
    assert [(line["decode_tp"], line["tokens"], line["descriptors"], line["nbytes"]) for line in lines] == [
        (1, 16, 2, 16 * token_nbytes),
        (1, 40, 6, 48 * token_nbytes),  # whole pages
        (2, 16, 2, 16 * token_nbytes),
        (2, 40, 6, 48 * token_nbytes),
    ]
    for line in lines:
        seconds, limits = line["seconds"], line["limit_seconds"]
        assert isinstance(seconds, list) and isinstance(limits, list) and len(seconds) == len(limits) >= 5
        assert all(0 < value < 60 for value in (*seconds, *limits))
    assert "2 → 1" in capsys.readouterr().out


def test_planning_alone_is_measured_where_nothing_is_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    options = TransferOptions(
        backend="fake", prefill_tp="2", decode_tp="1", tokens="2048", model_shape="llama-3-8b", seconds=1e-3,
        output=str(output),
    )  # fmt: skip
    assert transfer(options) == 0
    _, line = read(output)
    assert (line["descriptors"], line["nbytes"], line["limit_seconds"]) == (256, 2048 * 32 * 8 * 128 * 2 * 2, [])
    assert "fake" in capsys.readouterr().out


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        transfer(TransferOptions(backend="shm,ucx", tokens="0", model_shape="llama", page_size=0, seconds=0))
    told = str(caught.value).splitlines()
    assert told[0] == "--tokens is '0': 0 is not at least 1"
    assert told[1] == "--page-size is 0, must be at least 1"
    assert told[2].startswith("--model-shape: a model shape is one of smollm2-135m, llama-3-8b")
    assert told[3:] == [
        "--backend names ucx, must be of shm, tcp, nixl, mooncake, fake",
        "--seconds is 0, must be above 0 and finite",
    ]


def test_what_is_given_twice_is_one_line_and_nothing_is_no_backend(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "layers=1,heads=1,kv-heads=1,head-dim=8"
    options = TransferOptions(
        backend="fake,fake", prefill_tp="1,1", decode_tp="1", tokens="16,16", model_shape=shape, seconds=1e-3
    )
    assert transfer(options) == 0
    assert capsys.readouterr().out.count("1 → 1") == 1
    with pytest.raises(ConfigError, match=r"--backend names nothing, must be of shm, .*\n--seconds is nan"):
        transfer(TransferOptions(backend="shm,", seconds=float("nan")))


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ("layers=2,heads=3,kv-heads=2,head-dim=8", "3 heads do not share 2 kv-heads evenly"),
        (f"layers={1 << 70},heads=1,kv-heads=1,head-dim=8", f"{1 << 70} is more than any model has: at most 65536"),
    ],
)
def test_a_shape_that_no_model_has_is_told_before_anything_starts(shape: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^--model-shape: {told}$"):
        transfer(TransferOptions(backend="fake", model_shape=shape))


@pytest.mark.parametrize(("backend", "tokens"), [("shm", 10**9), ("fake", 10**13)])
def test_more_than_this_host_has_free_is_told_before_anything_starts(backend: str, tokens: int) -> None:
    options = TransferOptions(backend=backend, prefill_tp="1", decode_tp="1", tokens=str(tokens))
    with pytest.raises(ConfigError, match=rf"^{backend}: {tokens} tokens take \S+ GB in all ranks, of which this host"):
        transfer(options)


def test_an_output_that_takes_no_more_is_told_without_a_traceback() -> None:
    with pytest.raises(ConfigError, match=r"^cannot write /dev/full: No space left on device$"):
        transfer(TransferOptions(backend="fake", tokens="16", output="/dev/full"))


def test_a_parameter_is_a_key_and_a_value_and_given_once() -> None:
    with pytest.raises(ConfigError) as caught:
        transfer(TransferOptions(backend="nixl", transfer_param=["x", "y=1", "y=2"]))
    assert str(caught.value).splitlines() == [
        "--transfer-param is 'x', must be KEY=VALUE",
        "--transfer-param gives y 2 times, must be once",
    ]


def test_what_the_other_process_refuses_is_told_here(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^shm: shm has no parameter x=1$"):
        transfer(TransferOptions(backend="shm", prefill_tp="1", decode_tp="1", tokens="16", transfer_param=["x=1"]))
    assert "Traceback" not in capfd.readouterr().err


PARENT = """
import time
from pd.bench.shapes import read_shape
from pd.bench.transfer_ends import Meeting
with Meeting("shm", read_shape("layers=1,heads=2,kv-heads=2,head-dim=8"), tps=(1, 2), num_tokens=16, params={}) as met:
    print(*(rank._process.pid for rank in met._ranks), flush=True)
    time.sleep(60)
"""


def test_ranks_that_hang_end_with_their_parent_however_that_ends() -> None:
    """They are stopped: so none of them sees that its input has ended."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        assert len(pids) == 3
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        for handle in handles:
            assert select.select([handle], [], [], 30.0)[0], f"of {pids} one goes on without its parent"
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def test_a_rank_that_was_killed_is_told_by_its_signal() -> None:
    shape = read_shape("layers=1,heads=2,kv-heads=2,head-dim=8")
    with Meeting("shm", shape, tps=(1, 1), num_tokens=16, params={}) as meeting:
        sink, source = (rank._process for rank in meeting._ranks)
        for rank in (sink, source):
            assert os.getpgid(rank.pid) == rank.pid, "a terminal's Ctrl-C is ours alone"
        source.kill()
        with pytest.raises(TransferError, match=r"^a rank's process was ended by SIGKILL$"):
            meeting.move(16)


def test_a_shape_is_read_from_its_sizes() -> None:
    shape = read_shape("kv-heads=2, layers=3,heads=6,head-dim=16")
    assert (shape.num_query_heads, shape.layout.num_kv_heads, shape.layout.num_layers) == (6, 2, 3)
    assert shape.layout.token_nbytes == 3 * 2 * 32 * 2
    with pytest.raises(ValueError, match="not 'layers=3,heads=0"):
        read_shape("layers=3,heads=0,kv-heads=1,head-dim=1")


def test_the_documented_descriptor_counts_are_the_plans_own() -> None:
    text = (ROOT / "docs" / "transfer.md").read_text()
    assert "\n".join(descriptor_table()) in text


def test_descriptors_are_counted_as_a_whole_request_has_them() -> None:
    """Counting two pages and multiplying must not lie: here all pages of a request, whole."""

    shape = SHAPES["llama-3-8b"]
    src, dst = (tp_shards(shape.layout, 32, tp, 256) for tp in (4, 8))
    pages = list(range(0, 256, 2))
    routes = routes_between(shape.layout, src, shape.layout, dst)
    whole = sum(len(route.spans(pages, pages[::-1], 0, 2048)) for route in routes)
    assert count_descriptors(shape, prefill_tp=4, decode_tp=8, num_tokens=2048) == whole == 1024
