"""vLLM's prefill and decode apart, as one server: two vLLM servers with its NIXL connector, and a proxy before them.

    pd bench compare --vs 'python -m benchmarks.vllm_apart --vllm PYTHON --model {model} --port {port}' …

The proxy does what vLLM's own example does: the request goes to prefill for one token, and with the transfer's
parameters that it answers, whole, to decode, whose stream is passed on. Each server has one core, prefill the first.
benchmarks/README.md says how that environment is made; it needs `nixl` besides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What prefill is told: keep the KV, and say where it lies."""

_POLL_S, _END_S = 0.5, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="of an environment with vLLM's CPU build")
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cores", default="0,1", help="prefill's and decode's")
    asked = parser.parse_args()
    servers = [Vllm(asked, core) for core in asked.cores.split(",")]
    app = web.Application(client_max_size=64 << 20)
    proxy = Proxy(*servers)
    app.cleanup_ctx.append(proxy.lifetime)
    app.add_routes([web.get("/v1/models", proxy.models), web.post("/v1/completions", proxy.complete)])
    app.add_routes([web.post("/v1/chat/completions", proxy.complete)])
    try:
        web.run_app(app, host="127.0.0.1", port=asked.port, print=None)
    finally:
        for server in servers:
            server.end()


class Vllm:
    """One vLLM server on one core."""

    def __init__(self, asked: argparse.Namespace, core: str) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [asked.vllm, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
        command += [f"--model={asked.model}", f"--served-model-name={asked.model}", f"--dtype={asked.dtype}"]
        command += ["--max-model-len=2048", "--no-enable-prefix-caching", "--disable-log-stats"]
        command += [f"--kv-transfer-config={json.dumps(CONNECTOR)}"]
        env = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": core,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port()),
            "UCX_TLS": "shm,tcp,self",
            "UCX_NET_DEVICES": "lo",
        }
        self._process = subprocess.Popen(command, env=env)

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"vLLM at {self.url} ended with status {self._process.returncode}")

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Proxy:
    def __init__(self, prefill: Vllm, decode: Vllm) -> None:
        self._prefill = prefill
        self._decode = decode
        self._http: aiohttp.ClientSession

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._http:
            for server in (self._prefill, self._decode):
                await self._until_ready(server)
            yield

    async def models(self, _: web.Request) -> web.Response:
        async with self._http.get(f"{self._decode.url}/v1/models") as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        once = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
        once |= {"stream": False, "max_tokens": 1, "kv_transfer_params": WANTED}
        async with self._http.post(self._prefill.url + request.path, json=once) as answer:
            said = await answer.json()
            if answer.status != 200:
                return web.json_response(said, status=answer.status)
        body["kv_transfer_params"] = said["kv_transfer_params"]
        async with self._http.post(self._decode.url + request.path, json=body) as answer:
            stream = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await stream.prepare(request)
            async for part in answer.content.iter_any():
                await stream.write(part)
            await stream.write_eof()
            return stream

    async def _until_ready(self, server: Vllm) -> None:
        while True:
            server.check()
            try:
                async with self._http.get(f"{server.url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_POLL_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
