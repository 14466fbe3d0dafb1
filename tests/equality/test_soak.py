"""A thousand mixed requests, some of whose clients leave.

Every other answer is right, afterwards every page is free, and memory has not grown.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import aiohttp
import psutil

from tests.equality.cluster import Cluster, apart
from tests.equality.conftest import COMMON, NUM_TOKENS, Case

NUM_REQUESTS = 1000
CONCURRENCY = 64
LEAVING = 0.05
MAX_GROWTH_BYTES = 24 << 20
"""Of all processes together between request 300 and the last: allocators' noise, far below 700 requests' state."""


async def ask(session: aiohttp.ClientSession, cluster: Cluster, prompt: list[int], num_tokens: int) -> list[int]:
    """A streamed answer's token ids."""
    body = {
        "model": cluster.model.name,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    ids: list[int] = []
    async with session.post(f"{cluster.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids", ())
    return ids


async def leave(session: aiohttp.ClientSession, cluster: Cluster, prompt: list[int], num_lines: int) -> None:
    """Ask for a long answer and hang up after `num_lines` lines of it; 0: before the first."""
    body = {"model": cluster.model.name, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
    connection = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connection) as own:
        try:
            async with asyncio.timeout(0.02 if num_lines == 0 else 60):
                async with own.post(f"{cluster.url}/v1/completions", json=body) as answer:
                    for _ in range(num_lines):
                        await answer.content.readline()
                    answer.close()
        except TimeoutError:
            pass


async def storm(cluster: Cluster, case: Case, count: int, dice: random.Random) -> int:
    """`count` requests, CONCURRENCY at a time. Returns how many stayed; asserts each of those is right."""
    todo = iter(range(count))
    stayed = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal stayed
        for _ in todo:
            which = dice.randrange(len(case.prompts))
            if dice.random() < LEAVING:
                await leave(session, cluster, case.prompts[which], dice.randrange(6))
                continue
            num_tokens = dice.randint(1, NUM_TOKENS)
            got = await ask(session, cluster, case.prompts[which], num_tokens)
            assert got == case.answers[which][:num_tokens], f"prompt {which}, {num_tokens} tokens"
            stayed += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(CONCURRENCY)))
    return stayed


def memory(cluster: Cluster) -> int:
    """Private bytes of every process of the cluster: its pool of pages is shared and not counted."""
    trees = [psutil.Process(process.pid) for process in cluster.processes.values()]
    return sum(p.memory_full_info().uss for tree in trees for p in (tree, *tree.children(recursive=True)))


async def test_a_thousand_requests_with_clients_that_leave(cases: dict[str, Case], tmp_path: Path) -> None:
    seed = 5
    dice = random.Random(seed)
    case = cases["qwen3"]
    with apart(case.model, tmp_path, common=COMMON) as cluster:
        stayed = await storm(cluster, case, 300, dice)
        early = memory(cluster)
        stayed += await storm(cluster, case, NUM_REQUESTS - 300, dice)
        assert stayed > 0.9 * NUM_REQUESTS, f"seed {seed}"
        for instance in (await asyncio.to_thread(cluster.wait_idle))["instances"]:
            assert instance["num_free_pages"] == instance["num_pages"], instance
        growth = memory(cluster) - early
        assert growth < MAX_GROWTH_BYTES, f"{growth >> 20} MiB more after 700 requests"
