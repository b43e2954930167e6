"""Door: which requests may join the queue. Refusing at once is kinder than an answer too late."""

from __future__ import annotations

from typing import NoReturn

from scheduler.config import SchedulerConfig
from scheduler.drain import DrainRate
from scheduler.errors import PromptExceedsPool, PromptTooLong, QueueFull
from scheduler.stats import Stats


class Door:
    """The engine's thread writes what `check` reads; each number is whole, which is enough."""

    def __init__(self, config: SchedulerConfig, stats: Stats):
        self._config = config
        self._stats = stats
        self.drain = DrainRate()
        # whether the last step left somebody waiting: else those in the queue have only just come
        self.is_blocked = False

    def check_prompt(self, num_tokens: int) -> None:
        """Refuse what could never run. Raises PromptTooLong, PromptExceedsPool."""
        if num_tokens >= self._config.max_model_len:
            raise PromptTooLong(num_tokens, self._config.max_model_len)
        if num_tokens >= self._config.pool_tokens:
            raise PromptExceedsPool(num_tokens, self._config.pool_tokens)

    def check_queue(self, num_requests: int, num_tokens: int, free_slots: int, now: float) -> None:
        """Refuse what would wait too long or is too much to wait: num_requests sequences with
        num_tokens prompt tokens in all, all or none (those on their way to the queue counted in).
        free_slots: how many need not wait. Raises QueueFull."""
        config, stats = self._config, self._stats
        everyone = stats.num_waiting + num_requests
        over = everyone - (0 if self.is_blocked else free_slots)
        if over <= 0:
            return
        tokens = stats.queue_tokens + num_tokens
        if config.max_waiting is not None and over > config.max_waiting:
            excess = over - config.max_waiting
            self._refuse("requests", f"{config.max_waiting} requests", now, requests=excess)
        if config.max_waiting_tokens is not None and tokens > config.max_waiting_tokens:
            excess = tokens - config.max_waiting_tokens
            limit = f"{config.max_waiting_tokens} prompt tokens"
            self._refuse("tokens", limit, now, tokens=excess)
        if config.max_queue_wait is not None:
            wait = self.drain.seconds(now, tokens * over / everyone, over)
            if wait > config.max_queue_wait:
                stats.requests_refused["wait"] += 1
                limit = f"a wait of {wait:.1f} s is over {config.max_queue_wait:g} s"
                raise QueueFull("wait", limit, wait - config.max_queue_wait)

    def _refuse(
        self, limit: str, message: str, now: float, *, tokens: float = 0, requests: float = 0
    ) -> NoReturn:
        """tokens, requests: how many must have started before there is room."""
        self._stats.requests_refused[limit] += 1
        seconds = self.drain.seconds(now, tokens, requests)
        raise QueueFull(limit, message, max(1.0, seconds))
