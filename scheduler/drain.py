"""DrainRate: how fast the queue gets shorter, measured. It answers how long a newcomer would wait:
for Retry-After, and for refusing at the door. Time comes in as an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class DrainRate:
    """The rate at which queued work starts, in tokens and in requests a second, over a window that
    fades with time constant `window`, in seconds.

    Only time in which somebody is left waiting counts, and only what starts in it: a request that
    finds a free slot says nothing about how fast a queue drains, nor does an idle night. Old
    data fades only when something starts, so while nothing does, the estimated wait grows in
    proportion to the time that has passed. The first starts after a stall are weighed against all
    of it; the stall is forgotten within a few windows of waiting time.
    """

    window: float = 10.0
    _waited: float = 0.0  # seconds with somebody waiting, faded
    _tokens: float = 0.0  # what started in them
    _requests: float = 0.0
    _open: float = 0.0  # seconds with somebody waiting since the last start
    _since: float | None = None  # the last round, if it left somebody waiting

    def observe(self, now: float, waiting: int, requests: int = 0, tokens: float = 0.0) -> None:
        """A scheduling round has ended: `requests` have started, with `tokens` of queued work, and
        `waiting` are left. Both are net of what the round pushed back into the queue: a round that
        pushes back as much as it starts drains nothing.

        Call it once a round, also when nothing started, so that a stall is seen.
        """
        if self._since is not None:
            self._open += max(now - self._since, 0.0)
            if requests > 0:
                fade = math.exp(-self._open / self.window)
                self._waited = self._waited * fade + self._open
                self._tokens = self._tokens * fade + max(tokens, 0.0)
                self._requests = self._requests * fade + requests
                self._open = 0.0
        self._since = now if waiting else None

    def emptied(self) -> None:
        """The last one that waited has gone without starting (aborted, timed out): nobody waits
        until a round leaves somebody."""
        self._since = None

    def seconds(self, now: float, tokens: float = 0.0, requests: float = 0.0) -> float:
        """How long until that many queued tokens, and that many requests, have started at the
        measured rate. 0.0 before any data. Another thread than the observing one may ask."""
        known_tokens, known_requests, since = self._tokens, self._requests, self._since
        if not known_requests:
            return 0.0
        waited = self._waited + self._open
        if since is not None:
            waited += max(now - since, 0.0)
        by_tokens = tokens / known_tokens if known_tokens else 0.0
        return waited * max(by_tokens, requests / known_requests)
