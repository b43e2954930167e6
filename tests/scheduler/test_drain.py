from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.drain import DrainRate


def backlog(rate: DrainRate, start: float, count: int, gap: float, tokens: float) -> float:
    """A full queue from `start` on, a start each `gap` seconds; the time of the last one."""
    rate.observe(start, waiting=5)
    for number in range(1, count + 1):
        rate.observe(start + number * gap, waiting=5, requests=1, tokens=tokens)
    return start + count * gap


def test_nothing_is_known_at_first() -> None:
    rate = DrainRate()
    assert rate.seconds(0.0, tokens=1000, requests=10) == 0.0
    rate.observe(1.0, waiting=3)
    assert rate.seconds(9.0, tokens=1000, requests=10) == 0.0


@pytest.mark.parametrize("gap", [0.001, 1.0, 60.0])
def test_a_steady_queue_drains_at_its_rate(gap: float) -> None:
    """Whether a start comes a thousand times within the window, or once in six windows."""
    rate = DrainRate(window=10.0)
    now = backlog(rate, 100.0, 50, gap, tokens=200)
    assert rate.seconds(now, tokens=1000) == pytest.approx(5 * gap)
    assert rate.seconds(now, requests=7) == pytest.approx(7 * gap)
    assert rate.seconds(now, tokens=1000, requests=7) == pytest.approx(7 * gap)
    assert rate.seconds(now, tokens=2000, requests=7) == pytest.approx(10 * gap)
    assert rate.seconds(now) == 0.0


def test_starts_in_one_round_count_together() -> None:
    rate = DrainRate()
    rate.observe(0.0, waiting=20)
    rate.observe(2.0, waiting=12, requests=8, tokens=400)
    assert rate.seconds(2.0, tokens=100) == pytest.approx(0.5)
    assert rate.seconds(2.0, requests=12) == pytest.approx(3.0)


def test_who_finds_a_free_slot_says_nothing_about_the_queue() -> None:
    """An unloaded server starts everything within a step; a queue does not drain like that."""
    rate = DrainRate()
    for number in range(1000):
        rate.observe(number * 0.01, waiting=0, requests=1, tokens=500)
    assert rate.seconds(10.0, tokens=500) == 0.0
    now = backlog(rate, 10.0, 5, 2.0, tokens=500)
    assert rate.seconds(now, tokens=500) == pytest.approx(2.0)


def test_time_without_a_queue_does_not_count() -> None:
    rate = DrainRate()
    now = backlog(rate, 0.0, 10, 1.0, tokens=100)
    rate.observe(now + 1.0, waiting=0, requests=1, tokens=100)
    assert rate.seconds(now + 1.0, tokens=100) == pytest.approx(1.0)
    assert rate.seconds(now + 1e6, tokens=100) == pytest.approx(1.0)
    rate.observe(now + 1e6, waiting=1)
    rate.observe(now + 1e6 + 1.0, waiting=1, requests=1, tokens=100)
    assert rate.seconds(now + 1e6 + 1.0, tokens=100) == pytest.approx(1.0)


def test_nor_does_time_after_the_last_one_that_waited_was_aborted() -> None:
    rate = DrainRate()
    now = backlog(rate, 0.0, 10, 1.0, tokens=100)
    rate.emptied()
    assert rate.seconds(now + 1e6, tokens=100) == pytest.approx(1.0)
    rate.observe(now + 1e6, waiting=1)
    rate.observe(now + 1e6 + 1.0, waiting=1, requests=1, tokens=100)
    assert rate.seconds(now + 1e6 + 1.0, tokens=100) == pytest.approx(1.0)


def test_a_stall_raises_the_estimate_while_it_lasts() -> None:
    rate = DrainRate(window=10.0)
    now = backlog(rate, 0.0, 1000, 0.1, tokens=100)
    assert rate.seconds(now, tokens=1000) == pytest.approx(1.0)
    fresh = rate.seconds(now + 0.1, tokens=1000)
    # ten windows' worth of measuring lie in the data, so one window doubles the estimate
    assert rate.seconds(now + 10.0, tokens=1000) == pytest.approx(2.0, rel=0.01)
    assert rate.seconds(now + 90.0, tokens=1000) == pytest.approx(10.0, rel=0.01)
    assert fresh == pytest.approx(1.01, rel=0.01), "and one more start's time hardly moves it"


def test_rounds_without_a_start_are_a_stall_too() -> None:
    rate = DrainRate(window=10.0)
    now = backlog(rate, 0.0, 1000, 0.1, tokens=100)
    for number in range(1, 2001):
        rate.observe(now + number * 0.01, waiting=5)
    assert rate.seconds(now + 20.0, tokens=1000) == pytest.approx(3.0, rel=0.01)


def test_a_round_that_pushes_back_what_it_starts_drains_nothing() -> None:
    rate = DrainRate(window=10.0)
    now = backlog(rate, 0.0, 1000, 0.1, tokens=100)
    rate.observe(now + 4.0, waiting=5, requests=0, tokens=-300)
    rate.observe(now + 7.0, waiting=7, requests=-2, tokens=-500)
    assert rate.seconds(now + 10.0, tokens=1000) == pytest.approx(2.0, rel=0.01)


def test_a_stall_of_requests_that_gave_up_is_remembered() -> None:
    """Those that wait time out, others come: nobody starts, and the queue is empty now and then."""
    rate = DrainRate(window=10.0)
    now = backlog(rate, 0.0, 1000, 0.1, tokens=100)
    for number in range(1, 6):
        rate.observe(now + 10 * number, waiting=1)
        rate.observe(now + 10 * number + 4.0, waiting=1)
        rate.emptied()
    # ten seconds from the last start to the first round, then four each time
    assert rate.seconds(now + 1000.0, tokens=1000) == pytest.approx(
        1 + 10 / 10 + 5 * 4 / 10, rel=0.01
    )


def test_a_stall_is_forgotten_within_a_few_windows() -> None:
    rate = DrainRate(window=10.0)
    now = backlog(rate, 0.0, 1000, 0.1, tokens=100)
    rate.observe(now + 100.0, waiting=5, requests=1, tokens=100)
    assert rate.seconds(now + 100.0, tokens=1000) > 100.0
    now = backlog(rate, now + 100.0, 500, 0.1, tokens=100)
    assert rate.seconds(now, tokens=1000) == pytest.approx(1.0, rel=0.1)


def test_a_new_rate_replaces_the_old_one() -> None:
    rate = DrainRate(window=10.0)
    now = backlog(rate, 0.0, 1000, 0.1, tokens=100)
    now = backlog(rate, now, 40, 1.0, tokens=100)
    assert rate.seconds(now, tokens=1000) == pytest.approx(10.0, rel=0.2)


def test_a_clock_that_is_read_late_does_no_harm() -> None:
    rate = DrainRate()
    now = backlog(rate, 0.0, 10, 1.0, tokens=100)
    assert rate.seconds(now - 3.0, tokens=100) == pytest.approx(1.0)
    rate.observe(now - 3.0, waiting=5)
    rate.observe(now - 2.0, waiting=5, requests=1, tokens=100)
    assert rate.seconds(now - 2.0, tokens=100) == pytest.approx(1.0)


EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 1e7),  # seconds since the one before
        st.integers(0, 3),  # left waiting
        st.integers(-2, 3),  # requests that started, less those pushed back
        st.integers(-10_000, 10_000),  # tokens of both
        st.booleans(),  # the queue empties after it
    ),
    max_size=30,
)


@given(EVENTS, st.floats(0.0, 1e7), st.floats(0.0, 1e7))
def test_estimates_are_finite_and_grow_with_the_queue_and_with_time(
    events: list[tuple[float, int, int, int, bool]], later: float, much_later: float
) -> None:
    rate = DrainRate()
    now = 0.0
    for gap, waiting, requests, tokens, emptied in events:
        now += gap
        rate.observe(now, waiting, requests, tokens)
        if emptied:
            rate.emptied()
    seconds = rate.seconds(now, tokens=1000, requests=3)
    assert 0.0 <= seconds < float("inf")
    assert rate.seconds(now, tokens=2000, requests=3) >= seconds
    assert rate.seconds(now, tokens=1000, requests=4) >= seconds
    first, second = sorted([later, much_later])
    at_first = rate.seconds(now + first, tokens=1000, requests=3)
    assert seconds <= at_first <= rate.seconds(now + second, tokens=1000, requests=3)
