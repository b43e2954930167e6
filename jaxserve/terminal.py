"""What the commands write to a terminal: progress while a model loads, and how to call the
server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

_LABELS = {"load": "loading weights", "compile": "compiling"}


class Progress(Protocol):
    """Called by the engine, from any thread. phase: "load" or "compile"; done counts up to
    total."""

    def __call__(self, phase: str, done: int, total: int, note: str) -> None: ...


@contextmanager
def progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A bar per phase on a terminal, plain lines elsewhere. `stream` None: stderr."""
    out: TextIO = stream or sys.stderr
    if out.isatty():
        with _bars(out) as bars:
            yield bars
    else:
        yield _Lines(out)


class _Lines:
    """A line when a phase begins, at each quarter of it, and at its end."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last: tuple[str, int] | None = None

    def __call__(self, phase: str, done: int, total: int, note: str) -> None:
        mark = (phase, 4 * done // total if total else 0)
        if mark == self._last:
            return
        self._last = mark
        label = _LABELS.get(phase, phase)
        print(f"{label}: {done}/{total} {note}".rstrip(), file=self._stream, flush=True)


@contextmanager
def _bars(stream: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=Console(file=stream), transient=True) as bars:

        def show(phase: str, done: int, total: int, note: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(_LABELS.get(phase, phase), note=note)
            bars.update(tasks[phase], completed=done, total=total, note=note)

        yield show


def address(host: str, port: int) -> str:
    """The URL to paste: a wildcard host is reached as localhost, IPv6 goes into brackets."""
    reachable = {"0.0.0.0": "localhost", "::": "localhost", "": "localhost"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def ready_text(model: str, url: str) -> str:
    """The address, a curl command and a Python snippet, ready to paste."""
    body = {
        "model": model,
        "stream": True,
        "max_tokens": 100,
        "temperature": 0.2,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    }
    return f"""
{model} is ready on {url}  (Ctrl-C drains and stops)

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{json.dumps(body)}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  for chunk in client.chat.completions.create(
      model={json.dumps(model)}, stream=True, max_tokens=100, temperature=0.2,
      messages=[{{"role": "user", "content": "Why is the sky blue?"}}],
  ):
      print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
