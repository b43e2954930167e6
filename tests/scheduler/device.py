"""A device for the scheduler's tests that remembers what every page holds.

Its cache keeps, for each token, a hash of the whole prefix that led to it, made from the entry
before it in the row's own pages, as attention would read it. So a page that is reused too early, a
wrong position, a stale placeholder, a copy that went astray or a recompute that was forgotten
changes what is sampled, and is also seen directly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.pages import pages_for
from scheduler.plan import DROPPED, plan_layout
from scheduler.request import Request
from scheduler.step import Step

VOCAB = 8
EMPTY = -1  # a cache entry that nothing has written
ROOT = 0  # the hash of the empty prefix


def extend(state: int, token: int) -> int:
    """The hash of a prefix with one more token."""
    return hash((state, token)) & 0x7FFFFFFFFFFFFFFF


def choose(state: int, suppressed: set[int]) -> int:
    """The token that follows a prefix: the first allowed one from a place that the hash names."""
    return next(t for i in range(VOCAB) if (t := (state + i) % VOCAB) not in suppressed)


@dataclass
class Alone:
    """What a request gives when nothing else runs. The chain goes on past the end on purpose: rows
    in flight when a sequence ends are computed too."""

    request: Request

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt.tolist()
        self.states = [ROOT]  # states[i]: the hash of the first i tokens
        for token in self.tokens:
            self.states.append(extend(self.states[-1], token))

    def grow(self, length: int) -> None:
        request = self.request
        hold_until = len(request.prompt) + request.params.min_tokens
        while len(self.tokens) < length:
            held = request.stop_ids if len(self.tokens) < hold_until else frozenset()
            self.tokens.append(choose(self.states[-1], set(held)))
            self.states.append(extend(self.states[-1], self.tokens[-1]))

    def end(self) -> tuple[list[int], str]:
        """The output ids and the reason of the whole request."""
        request, start = self.request, len(self.request.prompt)
        self.grow(start + request.max_tokens)
        for count in range(request.params.min_tokens + 1, request.max_tokens + 1):
            if self.tokens[start + count - 1] in request.stop_ids:
                return self.tokens[start : start + count], "stop"
        return self.tokens[start : start + request.max_tokens], "length"


class Device:
    """Runs plans in the order in which they come. The cache is int64[pages * page_size], the host's
    int64[host pages * page_size]."""

    def __init__(self, config: SchedulerConfig):
        self.page_size = config.page_size
        self.size = (config.num_pages + 1) * config.page_size
        self.host_size = config.num_host_pages * config.page_size
        self.max_rows = config.max_rows
        self.reset()

    def reset(self) -> None:
        self.cache = np.full(self.size, EMPTY, np.int64)
        self.host = np.full(self.host_size, EMPTY, np.int64)
        self.last_token = [EMPTY] * self.max_rows

    def copy(self, step: Step) -> None:
        """All that is read, is read before anything is written."""
        device, host = self.cache.reshape(-1, self.page_size), self.host.reshape(-1, self.page_size)
        out, back = step.copies
        assert len({page for _, page in out}) == len(out), "two pages go to one place"
        assert len({page for _, page in back}) == len(back), "two pages go to one place"
        going = [device[page].copy() for page, _ in out]
        coming = [host[page].copy() for page, _ in back]
        assert all((page != EMPTY).all() for page in (*going, *coming)), "nothing was there"
        for (_, page), content in zip(out, going, strict=True):
            host[page] = content
        for (_, page), content in zip(back, coming, strict=True):
            device[page] = content

    def run(self, step: Step, alone: dict[tuple[int, int], Alone]) -> np.ndarray:
        """Checks every lane of the plan against what each row's request alone would hold, and
        returns the sampled tokens."""
        self.copy(step)
        plan = step.plan
        view = plan_layout(plan.key).views(plan.buffer)
        ids = [i if i >= 0 else self.last_token[-i - 1] for i in view["token_ids"].tolist()]
        sampled = np.full(plan.key.rows, EMPTY, np.int32)
        written: list[int] = []
        rows: list[tuple[int, int]] = []
        stores: list[tuple[int, int]] = []
        start = 0
        for row in range(plan.num_rows):
            key = tuple(view["key"][row].tolist())
            request = alone[key]
            rows.append(key)
            length, context = int(view["query_len"][row]), int(view["context_len"][row])
            assert view["query_start"][row] == start
            assert 1 <= length <= context
            request.grow(context + 1)
            table = view["block_tables"][row]
            held = table[: pages_for(context, self.page_size)].tolist()
            assert 0 not in held
            assert len(set(held)) == len(held)

            def index(position: int, table: np.ndarray = table) -> int:
                return int(table[position // self.page_size]) * self.page_size + (
                    position % self.page_size
                )

            for place, position in enumerate(range(context - length, context), start=start):
                assert view["positions"][place] == position
                assert ids[place] == request.tokens[position], "a token is not the row's own"
                assert view["write_index"][place] == index(position)
                before = int(self.cache[index(position - 1)]) if position else ROOT
                self.cache[index(position)] = extend(before, ids[place])
                written.append(index(position))
            start += length
            found = [int(self.cache[index(position)]) for position in range(context)]
            assert found == request.states[1 : context + 1], "the pages don't hold the row's tokens"

            slot = int(view["sample_slot"][row])
            params = request.request.params
            assert view["temperature"][row] == np.float32(params.temperature)
            assert view["num_logprobs"][row] == (-1 if params.logprobs is None else params.logprobs)
            if slot != DROPPED:
                suppressed = {i for i in view["suppressed"][row].tolist() if i != DROPPED}
                minimum = len(request.request.prompt) + params.min_tokens
                assert suppressed == (request.request.stop_ids if context < minimum else set())
                sampled[row] = choose(found[-1], suppressed)
                stores.append((slot, int(sampled[row])))
        assert start == plan.num_tokens
        assert len(set(rows)) == len(rows), "a sequence is twice in one plan"
        assert len(set(written)) == len(written), "two tokens are written to one place"
        assert len({slot for slot, _ in stores}) == len(stores)
        for slot, token in stores:
            self.last_token[slot] = token

        named = [(row, s.request.key) for row, s in step.sampled]
        assert named == [
            (r, key) for r, key in enumerate(rows) if view["sample_slot"][r] != DROPPED
        ]
        wanted = any(s.request.params.logprobs is not None for _, s in step.sampled)
        assert step.wants_logprobs == wanted
        self.check_padding(step)
        return sampled

    def check_padding(self, step: Step) -> None:
        plan = step.plan
        layout = plan_layout(plan.key)
        view, blank = layout.views(plan.buffer), layout.views(layout.blank)
        for lane in layout.lanes:
            real = plan.num_tokens if lane.shape[0] != plan.key.rows else plan.num_rows
            if lane.name in ("token_ids", "positions", "write_index"):
                real = plan.num_tokens
            assert np.array_equal(view[lane.name][real:], blank[lane.name][real:])
        assert (view["write_index"][plan.num_tokens :] == DROPPED).all()
        assert (view["sample_slot"][plan.num_rows :] == DROPPED).all()
        assert (view["context_len"][plan.num_rows :] == 0).all()
