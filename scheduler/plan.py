"""The fixed-shape batch plan: one packed int32 buffer with typed views, named by a PlanKey.

A plan crosses to the device as one array (one transfer, one argument); the compiled step cuts it
into lanes with the same `PlanLayout`. Floats are bit-cast into it. Padding rows and tokens are
inert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from scheduler.request import MAX_SUPPRESSED

Kind = Literal["decode", "mixed"]


@dataclass(frozen=True, slots=True, order=True)
class PlanKey:
    """The only thing that selects an executable.

    decode: one token a row, so tokens == rows. mixed: chunks and single tokens side by side, rows
    at the maximum. `pages` is the width of the block tables. `flags` is a sorted tuple of names.
    """

    kind: Kind
    tokens: int
    rows: int
    pages: int
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        flags = "".join(f"+{flag}" for flag in self.flags)
        return f"{self.kind}[tokens={self.tokens},rows={self.rows},pages={self.pages}]{flags}"


@dataclass(frozen=True, slots=True)
class Lane:
    """One named view of the plan buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    padding: int | float


# Write indices, sampling slots and suppressed ids of padding are out of every range: the device
# drops them.
DROPPED = 2**31 - 1


@dataclass(frozen=True)
class PlanLayout:
    """Where each lane of a key's plan lies. Made from the key alone, on the host and inside the
    jitted step."""

    key: PlanKey

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        tokens, rows, pages = self.key.tokens, self.key.rows, self.key.pages
        return (
            # >= 0: literal id; -(slot + 1): the last token sampled for that slot
            Lane("token_ids", (tokens,), np.int32, 0),
            Lane("positions", (tokens,), np.int32, 0),
            # page * page_size + offset of each token's K and V; DROPPED writes nothing
            Lane("write_index", (tokens,), np.int32, DROPPED),
            # a row's tokens are [query_start, query_start + query_len); 0 for padding rows
            Lane("query_start", (rows,), np.int32, 0),
            Lane("query_len", (rows,), np.int32, 0),
            # tokens of the row in the cache once this step has written its own; 0 for padding rows
            Lane("context_len", (rows,), np.int32, 0),
            Lane("block_tables", (rows, pages), np.int32, 0),
            # where the sampled token is stored; DROPPED: the row samples nothing (a prompt not yet
            # complete)
            Lane("sample_slot", (rows,), np.int32, DROPPED),
            Lane("temperature", (rows,), np.float32, 0.0),
            Lane("top_k", (rows,), np.int32, 0),  # 0: off
            Lane("top_p", (rows,), np.float32, 1.0),
            Lane("min_p", (rows,), np.float32, 0.0),
            Lane("key", (rows, 2), np.uint32, 0),
            # ids that may not be sampled (end tokens while min_tokens is not reached)
            Lane("suppressed", (rows, MAX_SUPPRESSED), np.int32, DROPPED),
            # -1: no logprobs wanted; n >= 0: the chosen token's and the n likeliest
            Lane("num_logprobs", (rows,), np.int32, -1),
        )

    @cached_property
    def offsets(self) -> dict[str, tuple[int, int]]:
        """lane name -> (start, stop) in int32 words."""
        offsets: dict[str, tuple[int, int]] = {}
        start = 0
        for lane in self.lanes:
            stop = start + int(np.prod(lane.shape))
            offsets[lane.name] = (start, stop)
            start = stop
        return offsets

    @cached_property
    def size(self) -> int:
        """int32 words of the whole buffer."""
        return max(stop for _, stop in self.offsets.values())

    @cached_property
    def blank(self) -> np.ndarray:
        """int32[size]: a plan of nothing but padding."""
        buffer = np.empty(self.size, np.int32)
        for name, view in self.views(buffer).items():
            view[...] = next(lane.padding for lane in self.lanes if lane.name == name)
        buffer.flags.writeable = False
        return buffer

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Typed numpy views into an int32[size] buffer; writing to them writes the plan."""
        return {
            lane.name: buffer[slice(*self.offsets[lane.name])].view(lane.dtype).reshape(lane.shape)
            for lane in self.lanes
        }

    def unpack(self, buffer: Any, bitcast: Any) -> dict[str, Any]:
        """The same lanes from a device array; `bitcast(words, dtype)` reinterprets int32 words."""
        lanes: dict[str, Any] = {}
        for lane in self.lanes:
            words = buffer[slice(*self.offsets[lane.name])].reshape(lane.shape)
            lanes[lane.name] = words if lane.dtype is np.int32 else bitcast(words, lane.dtype)
        return lanes


@lru_cache(maxsize=4096)
def plan_layout(key: PlanKey) -> PlanLayout:
    return PlanLayout(key)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A filled plan. num_tokens and num_rows are the real ones, without padding."""

    key: PlanKey
    buffer: np.ndarray  # int32[layout.size]
    num_tokens: int
    num_rows: int
