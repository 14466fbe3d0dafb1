"""`pd bench router` drives the real router, and every answer is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd.bench.lines import read
from pd.bench.options import RouterOptions
from pd.bench.routing.command import router
from pd.runtime.config import ConfigError
from tests.tiny import make_tiny


def test_requests_and_streams_go_through_the_router_and_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = make_tiny("llama", tmp_path / "tiny"), tmp_path / "out.jsonl"
    options = RouterOptions(model=str(model), requests=80, streams=6, tokens=5, step_ms=2, output=str(output))
    assert router(options) == 0
    head, *loads = read(output)
    assert head["kind"] == "router"
    found = [(one["server"], one["what"], one["summary"]["num_ok"], one["summary"]["answer_tokens"]) for one in loads]  # type: ignore[index]
    assert found == [
        (server, what, num, num_tokens)
        for server in ("direct", "router")
        for what, num, num_tokens in (("idle", 60, 60), ("requests", 80, 80), ("streams", 6, 30))
    ]
    assert all(one["summary"]["doubts"] == {} for one in loads)  # type: ignore[index]
    assert "added by the router" in capsys.readouterr().out


def test_wrong_use_is_told_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        router(RouterOptions(requests=0, step_ms=-1.0))
    assert str(caught.value).splitlines() == ["--requests is 0, must be above 0", "--step-ms is -1.0, must be above 0"]
