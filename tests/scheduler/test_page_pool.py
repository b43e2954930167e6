import pytest

from scheduler.pages import PagePool, pages_for


@pytest.mark.parametrize(
    ("tokens", "page_size", "pages"),
    [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2), (7, 1, 7), (1, 16, 1), (17, 16, 2)],
)
def test_pages_for_rounds_up(tokens: int, page_size: int, pages: int) -> None:
    assert pages_for(tokens, page_size) == pages


def test_hands_out_every_page_but_the_reserved_one() -> None:
    pool = PagePool(5, 4)
    assert [pool.take() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_cached, pool.num_held) == (0, 0, 5)
    with pytest.raises(StopIteration):
        pool.take()


def test_the_page_that_is_free_for_longest_is_taken_first() -> None:
    pool = PagePool(4, 1)
    taken = [pool.take() for _ in range(3)]
    for page in (taken[1], taken[0], taken[2]):
        pool.free(page)
    assert pool.num_free == 4
    assert [pool.take() for _ in range(4)] == [4, 2, 1, 3]


def test_free_counts() -> None:
    pool = PagePool(3, 2)
    pages = [pool.take(), pool.take()]
    assert (pool.num_free, pool.num_held) == (1, 2)
    for page in pages:
        pool.free(page)
    assert (pool.num_free, pool.num_held) == (3, 0)
    pool.check([])


@pytest.mark.parametrize(
    ("page", "message"), [(0, "page 0 is nobody's"), (1, "page 1 freed twice"), (3, "page 3 freed")]
)
def test_a_page_that_nobody_holds_is_not_freed(page: int, message: str) -> None:
    pool = PagePool(3, 2)
    pool.take()
    pool.free(1)
    with pytest.raises(AssertionError, match=message):
        pool.free(page)
    assert pool.num_free == 3


def test_the_ledger_accepts_what_the_owners_hold() -> None:
    pool = PagePool(4, 1)
    owners = [[pool.take(), pool.take()], [pool.take()]]
    pool.check(owners)
    for page in owners.pop(0):
        pool.free(page)
    pool.check(owners)


@pytest.mark.parametrize(
    "owners",
    [
        pytest.param([[1]], id="leak"),
        pytest.param([[1, 2], [2]], id="two owners of one reference"),
        pytest.param([[1, 2, 3]], id="held without having been taken"),
        pytest.param([[1, 2], [0]], id="the reserved page"),
    ],
)
def test_the_ledger_finds(owners: list[list[int]]) -> None:
    pool = PagePool(4, 1)
    pool.take()
    pool.take()
    with pytest.raises(AssertionError, match="references differ"):
        pool.check(owners)


def test_an_empty_pool_is_no_pool() -> None:
    with pytest.raises(AssertionError):
        PagePool(0, 16)


def test_cached_pages_are_taken_after_free_ones_and_in_their_order() -> None:
    pool = PagePool(4, 1)
    taken = [pool.take() for _ in range(3)]
    pool.free(taken[1], cached=True)
    pool.free(taken[0], cached=True)
    assert (pool.num_free, pool.num_cached, pool.num_held, pool.num_available) == (1, 2, 1, 3)
    assert pool.oldest_cached() is None, "there is a free one"
    assert pool.take() == 4
    assert pool.oldest_cached() == taken[1]
    assert [pool.take(), pool.take()] == [taken[1], taken[0]]


def test_a_shared_page_is_free_when_the_last_holder_has_left() -> None:
    pool = PagePool(2, 1)
    page = pool.take()
    pool.share(page)
    pool.check([[page], [page]])
    pool.free(page, cached=True)
    assert (pool.num_held, pool.num_cached) == (1, 0)
    pool.free(page, cached=True)
    assert (pool.num_held, pool.num_cached) == (0, 1)
    pool.share(page)
    assert (pool.references(page), pool.num_cached) == (1, 0)
    pool.free(page, cached=True)
    pool.uncache()
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check([])
