"""SchedulerConfig: the limits that a scheduler works within, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.pages import pages_for


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """num_pages and page_size describe the KV pool, in pages and tokens a page. max_chunk_tokens
    caps what one prompt may take of a step's max_num_batched_tokens.

    num_host_pages: pages that host memory may keep beside the pool. prefix_cache: requests share
    the pages of equal prefixes. The queue refuses beyond max_waiting sequences, max_waiting_tokens
    prompt tokens, or a predicted wait of max_queue_wait seconds.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_chunk_tokens: int | None = None
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    max_queue_wait: float | None = None
    num_host_pages: int = 0
    prefix_cache: bool = True

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def max_rows(self) -> int:
        """Rows of one step: each holds a page, and all must be able to decode in one step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens, self.num_pages)

    @property
    def max_tokens(self) -> int:
        """Tokens of one step that can really come together."""
        most = self.max_rows * (self.max_chunk_tokens or self.max_num_batched_tokens)
        return min(self.max_num_batched_tokens, most)

    @property
    def max_tokens_per_sequence(self) -> int:
        return min(self.max_model_len, self.pool_tokens)

    @property
    def max_pages_per_sequence(self) -> int:
        return pages_for(self.max_tokens_per_sequence, self.page_size)
