"""A server as users run it: a process and a real socket."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import openai
from prometheus_client.parser import text_string_to_metric_families

SETTINGS = ["--dtype=float32", "--num-pages=64", "--page-size=8", "--max-num-seqs=16"]
SETTINGS += ["--max-num-batched-tokens=64", "--token-buckets=single", "--row-buckets=single"]


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    port: int

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Samples by name, or name{first label value}, without the prefix jaxserve_."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                labels = "".join(f"{{{value}}}" for value in sample.labels.values())
                found[sample.name.removeprefix("jaxserve_") + labels] = sample.value
        return found

    def wait_idle(self, seconds: float = 20.0) -> dict[str, float]:
        """The metrics, once nothing runs or waits; nothing is held then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            metrics = self.metrics()
            if not metrics["num_requests_running"] + metrics["num_requests_waiting"]:
                assert metrics["kv_pages{held}"] == metrics["host_kv_pages{held}"] == 0
                assert metrics["queue_tokens"] == 0
                assert metrics["compilations_total{serving}"] == 0
                return metrics
            time.sleep(0.05)
        raise AssertionError("the server does not become idle")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(60) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    model: str, cache: str, *flags: str, program: Sequence[str] = ("-m", "jaxserve.cli")
) -> Served:
    """A server that is ready. Later flags win over SETTINGS."""
    port = free_port()
    command = [sys.executable, *program, "serve", model, f"--port={port}"]
    process = subprocess.Popen(
        [*command, f"--compile-cache={cache}", *SETTINGS, *flags],
        stdout=subprocess.DEVNULL,
        text=True,
    )
    served = Served(process, f"http://127.0.0.1:{port}", port)
    end = time.monotonic() + 240
    while time.monotonic() < end:
        assert process.poll() is None, "the server stopped; see its stderr above"
        try:
            if served.get("/health")[0] == 200:
                return served
        except OSError:
            pass
        time.sleep(0.2)
    process.kill()
    raise AssertionError("the server does not become ready")
