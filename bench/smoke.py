"""Does the README's main command answer? Starts `jaxserve serve` with the bundled model, streams
one chat answer, sends SIGTERM, and expects exit code 0. Prints how long each part took.

    uv run python bench/smoke.py
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

START_SECONDS = 240.0


def main() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    began = time.perf_counter()
    command = ["jaxserve", "serve", "--port", str(port), "--compile-cache", "off"]
    server = subprocess.Popen(command)
    try:
        wait_ready(server, url)
        print(f"ready after {time.perf_counter() - began:.1f} s (nothing cached)")
        asked = time.perf_counter()
        parts: list[str] = []
        for chunk in stream_chat(url, "What is the capital of France? Answer in one sentence."):
            if not parts:
                print(f"first text after {time.perf_counter() - asked:.2f} s")
            parts.append(chunk)
        print(f"answer in {time.perf_counter() - asked:.2f} s: {''.join(parts)}")
        assert "Paris" in "".join(parts)
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
        print(f"exit code {code}")
        return code
    finally:
        if server.poll() is None:
            server.kill()


def wait_ready(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit(f"the server stopped with code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:  # not listening yet, or 503 while loading
            time.sleep(0.2)
    sys.exit(f"the server is not ready after {START_SECONDS:.0f} s")


def stream_chat(url: str, question: str) -> Any:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""


if __name__ == "__main__":
    sys.exit(main())
