"""Which plan shapes exist. A strategy lists the sizes of one axis; the grid picks a step's PlanKey.

The grid adds instead of multiplying: decode plans are rows x pages, mixed plans tokens x pages with
the rows at the most that such a plan can have. The largest size of an axis is exactly its limit,
and no key is listed that the scheduler can't reach.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

from scheduler.plan import PlanKey


class BucketStrategy(Protocol):
    """Sizes of one axis, ascending, the last one exactly `maximum`."""

    def sizes(self, minimum: int, maximum: int) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Pow2:
    """Powers of two from the minimum up; at most half of a plan is padding above the minimum."""

    def sizes(self, minimum: int, maximum: int) -> tuple[int, ...]:
        sizes: list[int] = []
        size = 1
        while size < maximum:
            if size >= minimum:
                sizes.append(size)
            size *= 2
        return (*sizes, maximum)


@dataclass(frozen=True, slots=True)
class Single:
    """Always the maximum: one executable, most padding."""

    def sizes(self, minimum: int, maximum: int) -> tuple[int, ...]:
        return (maximum,)


BUCKET_STRATEGIES: dict[str, BucketStrategy] = {"pow2": Pow2(), "single": Single()}


def _fit(sizes: tuple[int, ...], need: int) -> int:
    index = bisect_left(sizes, need)
    assert index < len(sizes), f"{need} is over the largest bucket {sizes[-1]}"
    return sizes[index]


@dataclass(frozen=True, slots=True)
class BucketGrid:
    """All plan shapes of an engine: sizes per axis."""

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    pages: tuple[int, ...]
    max_rows: int

    @classmethod
    def build(
        cls,
        *,
        rows: BucketStrategy,
        tokens: BucketStrategy,
        pages: BucketStrategy,
        max_rows: int,
        max_tokens: int,
        max_pages: int,
        min_rows: int = 1,
        min_tokens: int = 32,
        min_pages: int = 1,
    ) -> BucketGrid:
        """Limits are those of the engine: rows at once, tokens of a step, pages of one sequence.

        min_rows: some devices run two rows faster than one (a single bf16 row on XLA:CPU).
        """
        max_rows, max_tokens = max(max_rows, min_rows), max(max_tokens, min_rows)
        return cls(
            decode_rows=rows.sizes(min_rows, max_rows),
            mixed_tokens=tokens.sizes(max(2, min(min_tokens, max_tokens)), max_tokens),
            pages=pages.sizes(min(min_pages, max_pages), max_pages),
            max_rows=max_rows,
        )

    def decode_key(self, rows: int, pages: int) -> PlanKey:
        rows = _fit(self.decode_rows, rows)
        return PlanKey("decode", rows, rows, _fit(self.pages, pages))

    def mixed_key(self, tokens: int, pages: int) -> PlanKey:
        tokens = _fit(self.mixed_tokens, tokens)
        return PlanKey("mixed", tokens, min(self.max_rows, tokens), _fit(self.pages, pages))

    def keys(self) -> tuple[PlanKey, ...]:
        """Every key that a step can have, the largest of each kind first."""
        decode = [self.decode_key(r, p) for r in self.decode_rows[::-1] for p in self.pages[::-1]]
        mixed = [self.mixed_key(t, p) for t in self.mixed_tokens[::-1] for p in self.pages[::-1]]
        return tuple(dict.fromkeys([*mixed[:1], *decode, *mixed[1:]]))
