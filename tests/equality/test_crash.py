"""After a crash = without one: an instance that dies in mid-answer costs its clients nothing but time."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.equality.cluster import Cluster, running
from tests.equality.conftest import COMMON, Case

NUM_TOKENS = 150
"""Long enough to be killed amid."""


def test_a_decode_instance_killed_in_mid_answer_is_not_noticed(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["llama"]
    with running(Cluster(case.model, tmp_path, COMMON)) as cluster:
        cluster.launch("router", "router")
        cluster.launch("prefill", "prefill")
        victim = cluster.launch("decode", "decode-a")
        cluster.launch("decode", "decode-b")
        cluster.wait_ready()
        wait_for(cluster, num_instances=3)
        prompts = case.prompts[:8]
        calm = [cluster.generate(prompt, NUM_TOKENS) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(cluster.generate, prompt, NUM_TOKENS) for prompt in prompts]
            wait_for(cluster, num_instances=3, running_on="decode-a")
            os.killpg(victim.pid, signal.SIGKILL)
            assert [answer.result() for answer in answers] == calm
        victim.wait()
        state = cluster.wait_idle()
        alive = {i["name"]: i for i in state["instances"] if i["standing"] == "alive"}
        assert alive.keys() == {"decode-b", "prefill"}
        for instance in alive.values():
            assert instance["num_free_pages"] == instance["num_pages"], instance


def test_idle_instances_come_back_to_a_restarted_router(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["llama"]
    with running(Cluster(case.model, tmp_path, COMMON)) as cluster:
        router = cluster.launch("router", "router")
        cluster.launch("prefill", "prefill")
        decode = cluster.launch("decode", "decode")
        cluster.wait_ready()
        before = cluster.generate(case.prompts[0], 20)
        router.kill()
        router.wait()
        cluster.launch("router", "router")
        cluster.wait_ready()
        assert cluster.generate(case.prompts[0], 20) == before
        decode.send_signal(signal.SIGTERM)  # and one that ends says so: nobody waits for its beats
        assert decode.wait() == 0
        wait_for(cluster, num_instances=1)
        assert "decode left told to stop" in cluster.tail("router")


def test_a_stream_that_outlives_the_server_is_told_so(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["llama"]
    with running(Cluster(case.model, tmp_path, COMMON)) as cluster:
        router = cluster.launch("router", "router")
        cluster.launch("colocated", "together")
        cluster.wait_ready()
        body = {"prompt": [5], "max_tokens": 450, "min_tokens": 450, "logit_bias": {"7": 5}, "stream": True, "n": 40}
        request = urllib.request.Request(
            f"{cluster.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.readline().startswith(b"data: {")
            router.send_signal(signal.SIGTERM)
            said = answer.read()
        assert router.wait(10) == 0
        assert said.endswith(b"\n\n") and b"the server is stopping" in said.split(b"\n\n")[-2]
        assert "Traceback" not in cluster.tail("router")


def wait_for(cluster: Cluster, *, num_instances: int, running_on: str | None = None) -> None:
    deadline = time.monotonic() + 60
    while True:
        alive = [i for i in cluster.state()["instances"] if i["standing"] == "alive"]
        busy = {i["name"] for i in alive if i["num_running"]}
        if len(alive) == num_instances and (running_on is None or running_on in busy):
            return
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)
