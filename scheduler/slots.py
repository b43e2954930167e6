"""SlotTable: the per-slot numpy mirror of the running sequences, from which plans are filled at one
stroke.

A Python loop over 256 rows costs some 50 times as much as these vectorised reads, so everything
that a plan needs of a row lies here, written once when it changes. It is the only writer of plan
buffers.
"""

from __future__ import annotations

import numpy as np

from scheduler.plan import DROPPED, BatchPlan, PlanKey, plan_layout
from scheduler.request import GREEDY_BELOW, MAX_SUPPRESSED, Sequence


class SlotTable:
    def __init__(self, max_slots: int, max_pages: int, page_size: int):
        self.page_size = page_size
        self.computed = np.zeros(max_slots, np.int32)  # int32[slots]
        self.target = np.zeros(max_slots, np.int32)  # int32[slots] tokens, those in flight included
        self.limit = np.zeros(max_slots, np.int32)  # int32[slots] target never passes it
        self.max_tokens = np.zeros(max_slots, np.int32)  # int32[slots] of output
        self.profile = np.zeros(max_slots, np.int64)  # int64[slots] the length model's
        self.num_pages = np.zeros(max_slots, np.int32)  # int32[slots]
        self.num_shared = np.zeros(max_slots, np.int32)  # int32[slots] of these, found at the start
        self.protected = np.zeros(max_slots, np.bool_)  # bool[slots] never a victim
        self.block_tables = np.zeros((max_slots, max_pages), np.int32)
        # the token at target - 1: its id, or -(slot + 1) for "the last one sampled for this slot"
        self.last_token = np.zeros(max_slots, np.int32)
        self.temperature = np.zeros(max_slots, np.float32)
        self.top_k = np.zeros(max_slots, np.int32)
        self.top_p = np.ones(max_slots, np.float32)
        self.min_p = np.zeros(max_slots, np.float32)
        self.key = np.zeros((max_slots, 2), np.uint32)
        self.num_logprobs = np.full(max_slots, -1, np.int32)
        # end tokens may not be sampled at positions below suppress_until
        self.suppress_until = np.zeros(max_slots, np.int32)
        self.suppressed = np.full((max_slots, MAX_SUPPRESSED), DROPPED, np.int32)
        self._free = list(range(max_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence, *, protected: bool = False) -> None:
        """Give a sequence a slot and write its row of every array, its pages included."""
        slot = self._free.pop()
        sequence.slot = slot
        request, params = sequence.request, sequence.request.params
        self.computed[slot] = sequence.num_computed
        self.target[slot] = sequence.num_tokens
        self.limit[slot] = len(request.prompt) + request.max_tokens
        self.max_tokens[slot] = request.max_tokens
        self.profile[slot] = sequence.profile
        self.num_pages[slot] = len(sequence.pages)
        self.block_tables[slot, : len(sequence.pages)] = sequence.pages
        self.num_shared[slot] = sequence.num_shared // self.page_size
        self.protected[slot] = protected
        self.last_token[slot] = sequence.tokens[-1]
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(max(params.top_k, 0), 2**31 - 1)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.key[slot] = request.key
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        # never past the limit: a client may name a min_tokens that no int32 holds
        self.suppress_until[slot] = len(request.prompt) + min(params.min_tokens, request.max_tokens)
        self.suppressed[slot] = DROPPED
        if params.min_tokens:
            self.suppressed[slot, : len(request.stop_ids)] = sorted(request.stop_ids)

    def leave(self, sequence: Sequence) -> None:
        self._free.append(sequence.slot)
        sequence.slot = -1

    def append_page(self, sequence: Sequence, page: int) -> None:
        slot = sequence.slot
        self.block_tables[slot, self.num_pages[slot]] = page
        self.num_pages[slot] += 1
        sequence.pages.append(page)

    def needs_sampler(self, slots: np.ndarray) -> np.ndarray:
        """bool[n] of int32[n] slots: the token just planned is not simply the likeliest one."""
        held_back = self.target[slots] - 1 < self.suppress_until[slots]
        return (self.temperature[slots] >= GREEDY_BELOW) | held_back

    def fill_plan(
        self,
        key: PlanKey,
        decode_slots: np.ndarray,
        chunks: list[tuple[Sequence, int]],
    ) -> BatchPlan:
        """Write the step's plan: one row a decode slot (int32[rows]), then one row a (sequence,
        length) chunk.

        Reads `computed` as it is before the step. A row samples when the step brings it to its
        target.
        """
        layout = plan_layout(key)
        buffer = layout.blank.copy()
        view = layout.views(buffer)
        num_decode = len(decode_slots)
        slots = np.concatenate([decode_slots, [s.slot for s, _ in chunks]]).astype(np.int32)
        lengths = np.ones(len(slots), np.int32)
        lengths[num_decode:] = [length for _, length in chunks]
        rows, tokens = len(slots), int(lengths.sum())
        computed = self.computed[slots]
        context = computed + lengths

        view["token_ids"][:num_decode] = self.last_token[decode_slots]
        start = num_decode
        for sequence, length in chunks:
            done = sequence.num_computed
            view["token_ids"][start : start + length] = sequence.tokens[done : done + length]
            start += length

        query_start = np.cumsum(lengths) - lengths
        row_of_token = np.repeat(np.arange(rows), lengths)  # int[tokens]
        positions = np.arange(tokens) - query_start[row_of_token] + computed[row_of_token]
        tables = self.block_tables[slots, : key.pages]
        page = tables[row_of_token, positions // self.page_size]
        view["positions"][:tokens] = positions
        view["write_index"][:tokens] = page * self.page_size + positions % self.page_size
        view["query_start"][:rows] = query_start
        view["query_len"][:rows] = lengths
        view["context_len"][:rows] = context
        view["block_tables"][:rows] = tables
        view["sample_slot"][:rows] = np.where(context == self.target[slots], slots, DROPPED)
        view["temperature"][:rows] = self.temperature[slots]
        view["top_k"][:rows] = self.top_k[slots]
        view["top_p"][:rows] = self.top_p[slots]
        view["min_p"][:rows] = self.min_p[slots]
        view["key"][:rows] = self.key[slots]
        view["num_logprobs"][:rows] = self.num_logprobs[slots]
        view["suppressed"][:rows] = np.where(
            (context < self.suppress_until[slots])[:, None], self.suppressed[slots], DROPPED
        )
        return BatchPlan(key, buffer, tokens, rows)
