from itertools import product

import pytest

from scheduler.buckets import BUCKET_STRATEGIES, BucketGrid, Pow2, Single
from scheduler.plan import PlanKey


@pytest.mark.parametrize(
    ("minimum", "maximum", "sizes"),
    [
        (1, 1, (1,)),
        (1, 2, (1, 2)),
        (1, 8, (1, 2, 4, 8)),
        (1, 9, (1, 2, 4, 8, 9)),
        (2, 64, (2, 4, 8, 16, 32, 64)),
        (16, 256, (16, 32, 64, 128, 256)),
        (16, 100, (16, 32, 64, 100)),
        (3, 20, (4, 8, 16, 20)),
        (16, 16, (16,)),
        (16, 5, (5,)),
    ],
)
def test_pow2(minimum: int, maximum: int, sizes: tuple[int, ...]) -> None:
    assert Pow2().sizes(minimum, maximum) == sizes


def test_single() -> None:
    assert Single().sizes(1, 100) == (100,)


@pytest.mark.parametrize("name", sorted(BUCKET_STRATEGIES))
@pytest.mark.parametrize("minimum", [1, 2, 3, 16])
def test_sizes_ascend_and_end_at_the_limit(name: str, minimum: int) -> None:
    for maximum in range(1, 70):
        sizes = BUCKET_STRATEGIES[name].sizes(minimum, maximum)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == maximum
        assert sizes[0] >= min(minimum, maximum)


def grid(
    strategy: str = "pow2", *, rows: int, tokens: int, pages: int, min_rows: int = 1
) -> BucketGrid:
    sizes = BUCKET_STRATEGIES[strategy]
    return BucketGrid.build(
        rows=sizes,
        tokens=sizes,
        pages=sizes,
        max_rows=rows,
        max_tokens=tokens,
        max_pages=pages,
        min_rows=min_rows,
    )


def test_keys_add_instead_of_multiplying() -> None:
    keys = grid(rows=6, tokens=40, pages=3).keys()
    assert set(keys) == {
        *(PlanKey("decode", r, r, p) for r in (1, 2, 4, 6) for p in (1, 2, 3)),
        *(PlanKey("mixed", t, 6, p) for t in (32, 40) for p in (1, 2, 3)),
    }
    assert len(keys) == 4 * 3 + 2 * 3
    assert keys[0] == PlanKey("mixed", 40, 6, 3)
    assert keys[1] == PlanKey("decode", 6, 6, 3)


def test_single_buckets_give_two_keys() -> None:
    assert grid("single", rows=6, tokens=40, pages=3).keys() == (
        PlanKey("mixed", 40, 6, 3),
        PlanKey("decode", 6, 6, 3),
    )


def test_least_rows() -> None:
    two = grid(rows=8, tokens=16, pages=1, min_rows=2)
    assert two.decode_rows == (2, 4, 8)
    assert two.decode_key(1, 1) == PlanKey("decode", 2, 2, 1)
    one = grid(rows=1, tokens=1, pages=1, min_rows=2)
    assert set(one.keys()) == {PlanKey("decode", 2, 2, 1), PlanKey("mixed", 2, 2, 1)}


def test_a_mixed_plan_has_no_more_rows_than_tokens() -> None:
    assert grid(rows=64, tokens=256, pages=1).mixed_key(3, 1) == PlanKey("mixed", 32, 32, 1)
    assert grid(rows=64, tokens=256, pages=1).mixed_key(100, 1) == PlanKey("mixed", 128, 64, 1)


@pytest.mark.parametrize("strategy", sorted(BUCKET_STRATEGIES))
@pytest.mark.parametrize(
    ("rows", "tokens", "pages", "min_rows"),
    [(1, 1, 1, 1), (1, 1, 1, 2), (1, 40, 3, 2), (6, 6, 5, 1), (7, 33, 9, 2), (5, 40, 4, 1)],
)
def test_every_need_has_a_key_and_every_key_a_need(
    strategy: str, rows: int, tokens: int, pages: int, min_rows: int
) -> None:
    """What the grid can be asked for is what it lists, and each key is large enough."""
    built = grid(strategy, rows=rows, tokens=tokens, pages=pages, min_rows=min_rows)
    reached = set()
    for count, width in product(range(1, rows + 1), range(1, pages + 1)):
        key = built.decode_key(count, width)
        assert (key.kind, key.tokens) == ("decode", key.rows)
        assert key.rows >= count
        assert pages >= key.pages >= width
        reached.add(key)
    for count, width in product(range(1, tokens + 1), range(1, pages + 1)):
        key = built.mixed_key(count, width)
        assert key.kind == "mixed"
        assert max(tokens, min_rows) >= key.tokens >= count
        assert key.rows >= min(rows, count)
        assert pages >= key.pages >= width
        reached.add(key)
    assert reached == set(built.keys())
    assert len(built.keys()) == len(reached)


def test_a_need_over_the_limit_is_a_fault() -> None:
    built = grid(rows=4, tokens=20, pages=2)
    with pytest.raises(AssertionError, match="5 is over the largest bucket 4"):
        built.decode_key(5, 1)
    with pytest.raises(AssertionError, match="21 is over the largest bucket 20"):
        built.mixed_key(21, 1)
    with pytest.raises(AssertionError, match="3 is over the largest bucket 2"):
        built.mixed_key(2, 3)
