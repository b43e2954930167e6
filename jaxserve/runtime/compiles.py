"""Counts what JAX compiles on this engine's behalf, by phase. After warm-up the count must not
move.

jax.monitoring reports every compile of the process, on the thread that compiles. A compile belongs
to this engine if that thread is inside one of its phases, so engines and user code don't disturb
each other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from jax import monitoring

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

Phase = Literal["warmup", "serving"]


class CompiledWhileServing(RuntimeError):
    """Something compiled after warm-up: a bug of the engine, made loud by strict_compile."""


class CompileCounter:
    def __init__(self, counts: Counter[str], *, strict: bool):
        self.counts = counts
        self._strict = strict
        self._phases: dict[int, Phase] = {}  # by thread
        self._names: list[str] = []
        monitoring.register_event_duration_secs_listener(self._on_event)

    def close(self) -> None:
        monitoring.unregister_event_duration_listener(self._on_event)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Compiles on this thread count for `phase` until the block ends."""
        thread = threading.get_ident()
        self._phases[thread] = phase
        try:
            yield
        finally:
            del self._phases[thread]
            if phase == "serving" and self._names and self._strict:
                names, self._names = self._names, []
                raise CompiledWhileServing(f"compiled after warm-up: {', '.join(names)}")

    def _on_event(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event != _COMPILE_EVENT:
            return
        phase = self._phases.get(threading.get_ident())
        if phase is not None:
            self.counts[phase] += 1
            if phase == "serving":
                self._names.append(str(details.get("fun_name", "?")))
