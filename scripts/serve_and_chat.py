"""`make serve`: run `pd serve`, send it one chat when it is ready, show the answer, and stay until it ends.

Arguments are handed on to `pd serve`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

QUESTION = "What is the capital of France?"
ANSWER_S = 120.0
READY = re.compile(r"ready: (?P<model>\S+) at (?P<address>http://\S+)")


def main() -> int:
    serve = subprocess.Popen(
        [sys.executable, "-m", "pd", "serve", *sys.argv[1:]], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches it as well, and it ends within 5 s
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: serve.send_signal(number))
    assert serve.stdout is not None
    where = None
    for line in serve.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        where = where or READY.match(line)
        if where and line.startswith("stop"):
            show_chat(where["address"], where["model"])
    return serve.wait()


def show_chat(address: str, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            answer = json.load(response)
    except OSError as error:
        sys.stdout.write(f"the first chat failed: {error}\n")
        return
    text = answer["choices"][0]["message"]["content"]
    usage = answer["usage"]
    sys.stdout.write(
        f"\nuser       {QUESTION}\nassistant  {text}\n"
        f"           {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
        f" in {time.monotonic() - began:.2f} s\n\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
