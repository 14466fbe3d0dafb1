"""A router of the simplest kind: `proxy PORT URL [NUM]` passes bytes on. With NUM, it ends at its NUM-th connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from urllib.parse import urlsplit


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(port: int, url: str, most: int | None) -> None:
    there = urlsplit(url)
    num_connections = 0

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        if num_connections == most:
            sys.stderr.write("that was too much\n")
            os._exit(1)
        back_reader, back_writer = await asyncio.open_connection(there.hostname, there.port)
        await asyncio.gather(pass_on(reader, back_writer), pass_on(back_reader, writer))

    server = await asyncio.start_server(meet, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None))
