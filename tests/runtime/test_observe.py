"""What the router counts: events by kind, and nothing of instances that have gone."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pd.runtime.core.events import Stamp
from pd.runtime.observe import RouterMetrics, TokenMetrics, log_stamp
from pd.runtime.wire.values import Load


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_events_are_counted_by_kind_and_unknown_ones_make_no_series() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for what in ("repeated", "repeated", "lost", "corrupted", "placed"):
        metrics.stamped(what)
    counted = [line for line in lines(registry) if line.startswith("pd_router_events_total")]
    assert 'pd_router_events_total{what="repeated"} 2.0' in counted
    assert 'pd_router_events_total{what="lost"} 1.0' in counted
    assert 'pd_router_events_total{what="corrupted"} 1.0' in counted
    assert 'pd_router_events_total{what="suspect"} 0.0' in counted
    assert not any("placed" in line for line in counted)


def test_gaps_between_tokens_are_told_as_prometheus_itself_would() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    found = TokenMetrics(ours)
    bounds = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
    wanted = Histogram("pd_itl_seconds", "Token to next token", buckets=bounds, registry=theirs)
    for seconds in (0.0, 0.005, 0.0051, 0.3, 0.3, 300.0, 301.0):
        found.gap(seconds)
        wanted.observe(seconds)
    found.tokens(3)
    found.tokens(4)
    told = lines(ours)
    assert told[0] == "pd_answer_tokens_total 7.0"
    assert told[1:] == [line for line in lines(theirs) if "_created" not in line]


def test_a_thousand_instances_that_came_and_went_leave_no_series() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    before = len(lines(registry))
    for number in range(1000):
        metrics.beat(f"decode-{number}", Load(1, 2, 3, 4, 5))
        metrics.left(f"decode-{number}")
        metrics.left("never heard of")
    assert len(lines(registry)) == before


def test_of_a_request_that_goes_well_nothing_is_said_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("pd.test")
    loud = ["r repeated why", "d0 suspect why", "r ended why"]
    for level, told in (("DEBUG", ["r placed p0, d0", "r ended length", *loud]), ("INFO", loud)):
        caplog.clear()
        with caplog.at_level(level, logger="pd"):
            for line in ("r placed p0, d0", "r ended length", *loud):
                log_stamp(log, Stamp(*line.split(" ", 2)))
        assert [record.getMessage() for record in caplog.records] == told
