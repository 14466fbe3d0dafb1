"""The page shows what the results hold: right axes, right bars, and nothing of the network."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pd.bench.lines import written
from pd.bench.load.outcome import Outcome
from pd.bench.load.session import put
from pd.bench.options import ReportOptions
from pd.bench.report.charts import phases
from pd.bench.report.command import report
from pd.bench.report.svg import Axis, Chart, Line
from pd.runtime.config import ConfigError


def outcome(index: int, due: float, *, slow: float = 1.0, timings: dict[str, float] | None = None) -> Outcome:
    chunks = [due + 0.1 * slow, due + 0.15 * slow, due + 0.17 * slow]
    return Outcome(
        index,
        due,
        sent_s=due,
        chunks_s=chunks,
        num_asked=3,
        num_prompt=5,
        num_answer=3,
        finish="length",
        timings=timings,
    )


def write(path: Path, name: str, rates: tuple[float | None, ...] = (1.0, 2.0), slow: float = 1.0) -> Path:
    """A comparison's file of one server, whose requests are slower at higher rates."""
    with written(str(path)) as lines:
        lines.put("compare", format=1, shapes=[name])
        for rate in rates:
            options = {"slo": "ttft:250", "target": 0.9, "dataset": "random", "arrival": "poisson"}
            environment = {"pd": "0", "cores": 2, "cpu": "<cpu>"}
            lines.put("run", name=name, rate=rate, repeat=0, model="m", options=options, environment=environment)
            for index in range(10):
                put(lines, outcome(index, 0.2 * index, slow=slow * (rate or 1.0) * (1 + (index > 7))))
            instance = {"name": "prefill-0", "role": "prefill", "num_running": 1, "num_waiting": 3}
            for at_s in (0.5, 1.0):
                lines.put("sample", at_s=at_s, instances=[instance | {"num_free_pages": 25, "num_pages": 100}])
            lines.put("summary", seconds=2.0)
    return path


def test_a_page_stands_alone_and_its_drawings_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one.jsonl", "colocated", slow=2.0)
    other = write(tmp_path / "other.jsonl", "apart")
    html = tmp_path / "page.html"
    assert report(ReportOptions(results=[str(one), str(other)], html=str(html), title="A <b> B")) == 0
    text = html.read_text()
    assert "A &lt;b&gt; B" in text and "&lt;cpu&gt;" in text
    assert not re.search(r"https?:|src=|<script|<link|@import|url\(", text)
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 4 + 4 + 2 * 6  # over the rate, distributions, each server's timeline and waterfall
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing and "inf" not in drawing
    assert "colocated (one.jsonl)" in text and "apart (other.jsonl)" in text
    assert "at 2 requests/s" in text
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " #1 " in line]
    assert [(row[0], row[2], row[9]) for row in rows] == [
        ("colocated", "1/s", "80"),
        ("colocated", "2/s", "0"),
        ("apart", "1/s", "100"),
        ("apart", "2/s", "80"),
    ]


def test_other_goals_judge_the_same_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 1 a second TTFT is 100 ms, 200 for the last two of ten; at 2 twice that."""
    path, html = write(tmp_path / "a.jsonl", "apart"), str(tmp_path / "page.html")
    said = []
    for slo in (None, "ttft:450", "ttft:150"):
        assert report(ReportOptions(results=[str(path)], html=html, slo=slo)) == 0
        said += [line for line in capsys.readouterr().out.splitlines() if line.startswith("apart: ")]
    assert said == [
        "apart: 90 % of requests met ttft:250 up to 1.50 requests/s",
        "apart: 90 % of requests met ttft:450 up to at least 2.00 requests/s",
        "apart: 90 % of requests met ttft:150 up to less than 1.00 requests/s",
    ]
    with pytest.raises(ConfigError, match="--slo is 'x'"):
        report(ReportOptions(results=[str(path)], html=html, slo="x"))


def test_one_run_without_a_rate_has_a_page_too(tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    assert report(ReportOptions(results=[str(write(tmp_path / "a.jsonl", "serve", (None,)))], html=str(html))) == 0
    text = html.read_text()
    assert "Over the rate" not in text and "<h2>Latencies</h2>" in text


def test_phases_are_the_routers_durations_laid_against_the_first_token() -> None:
    said = {"queued_s": 0.03, "prefill_s": 0.06, "handoff_s": 0.02}
    one = outcome(0, 1.0, timings=said)
    assert [(name, round(begin, 6), round(end, 6)) for name, begin, end in phases(one)] == [
        ("queued", 1.0, 1.04),
        ("prefill", 1.04, 1.1),
        ("handoff", 1.1, 1.12),
        ("decode", 1.12, 1.17),
    ]
    assert [name for name, _, _ in phases(outcome(0, 1.0))] == ["until the first token", "decode"]


def test_axes_have_round_numbers_and_data_its_place() -> None:
    assert Axis(0.0, 12.0, 0, 100).ticks() == [0, 2, 4, 6, 8, 10, 12]
    assert Axis(1.0, 100.0, 0, 100, is_log=True).ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert Axis(1.0, 100.0, 50, 250, is_log=True).at(10.0) == pytest.approx(150)
    drawn = Chart(x_label="x", y_label="y", width=172, height=152, y_high=10, x_high=10).draw(
        [Line("a", [(0.0, 0.0), (5.0, 10.0), (10.0, 5.0)], "red")]
    )
    assert 'd="M58.0 112.0L108.0 12.0L158.0 62.0"' in drawn


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read "),
        ("", " is empty"),
        ("{x}\n", ":1: no JSON object: "),
        ("{}\n", ":1: no result of pd bench: it has no kind"),
        ('{"kind": "latency"}\n', " holds no run of pd bench serve or compare, but: latency"),
        ('{"kind": "run"}\n{"kind": "request", "index": "a"}\n', ": result 2 (request): Expected `int`, got `str`"),
        ('{"kind": "run", "format": 99}\n', ": format 99, this pd reads 1"),
    ],
)
def test_what_is_no_result_is_told(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        report(ReportOptions(results=[str(path)], html=str(tmp_path / "page.html")))
    assert says in str(caught.value)
    assert not (tmp_path / "page.html").exists()
