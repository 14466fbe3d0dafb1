"""The fake keeps a transport's promises, by a schedule that a seed repeats."""

from __future__ import annotations

import pytest

from pd.transfer.fake import FakeTransport
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span, TransferError


def run(seed: int) -> list[list[Completion]]:
    fake = FakeTransport(me="a", seed=seed, max_polls=6, fail_rate=0.2)
    for peer in ("b", "c"):
        fake.connect(peer, b"fake:" + peer.encode())
    for job in range(40):
        (fake.write if job % 3 else fake.read)("bc"[job % 2], [Span(0, 0, job)], job=job)
    polls = [fake.poll() for _ in range(200)]
    fake.close()
    return polls


@pytest.mark.parametrize("seed", range(20))
def test_each_job_ends_once_in_its_peers_order_and_the_seed_repeats_it(seed: int) -> None:
    polls = run(seed)
    assert polls == run(seed)
    ended = [end for poll in polls for end in poll]
    jobs = [end.job for end in ended if not isinstance(end, PeerLost)]
    assert sorted(jobs) == list(range(40)), f"seed {seed}"
    for parity in (0, 1):
        assert [job for job in jobs if job % 2 == parity] == list(range(parity, 40, 2)), f"seed {seed}"


def test_schedules_differ_by_seed_and_hold_both_outcomes() -> None:
    assert len({str(run(seed)) for seed in range(20)}) == 20
    ended = [end for seed in range(20) for poll in run(seed) for end in poll]
    num_failed = sum(isinstance(end, JobFailed) for end in ended)
    assert 0.1 < num_failed / len(ended) < 0.3
    assert all(end.nbytes == end.job for end in ended if isinstance(end, JobDone))


def test_loss_and_severing_fail_what_waits() -> None:
    fake = FakeTransport(me="a", seed=1, max_polls=0)
    for peer in ("b", "c"):
        fake.connect(peer, b"fake:" + peer.encode())
        fake.write(peer, [], job=ord(peer))
    fake.lose("b", "pulled the plug")
    assert fake.sever("c")
    assert fake.poll() == [
        JobFailed(ord("b"), "b", "pulled the plug"),
        PeerLost("b", "pulled the plug"),
        JobFailed(ord("c"), "c", "severed here"),
    ]
    with pytest.raises(TransferError, match="unknown peer b"):
        fake.write("b", [], job=1)
    fake.close()
