from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admission import (
    ADMISSION,
    AdmissionPolicy,
    AdmissionRound,
    AdmitIfFits,
    Candidate,
    ReserveMax,
    RunningSet,
    Statistical,
)
from scheduler.lengths import Declared, Oracle, Profiled, Rows
from scheduler.pages import pages_for
from scheduler.request import Request, SamplingParams

PAGE = 16
CAPACITY = 100


def candidate(
    tokens: int, limit: int = 100, age: int = 0, profile: int = 0, shared: int = 0
) -> Candidate:
    return Candidate(profile, age, limit, tokens, shared)


def running(*rows: Candidate) -> RunningSet:
    profile, age, limit, tokens, shared = np.array(rows, np.int64).reshape(-1, 5).T
    return RunningSet(Rows(profile, age, limit), tokens, shared)


def begin(
    policy: AdmissionPolicy,
    *rows: Candidate,
    base: int = 0,
    capacity: int = CAPACITY,
    page_size: int = PAGE,
) -> AdmissionRound:
    return policy.round(running(*rows), base, capacity, page_size)


def request(prompt: int = 100) -> Request:
    return Request("r", np.ones(prompt, np.int32), SamplingParams(), 512, arrival=0.0)


def trained(lengths: Sequence[int], limit: int = 512) -> tuple[Profiled, int]:
    """A model that has seen these lengths, and the profile of all its requests."""
    model = Profiled()
    profile = model.profile(request())
    for length in np.random.default_rng(0).permutation(lengths).astype(int).tolist():
        model.observe(request(), profile, min(length, limit), length > limit)
    for _ in range(32):
        model.watch(running().rows)  # until its tables are up to date
    return model, profile


EVERY = [make(Declared(), 0.01) for make in ADMISSION.values()]


# ---- all of them ----


def test_policies_have_names() -> None:
    lengths = Declared()
    made = {name: make(lengths, 0.2) for name, make in ADMISSION.items()}
    assert {name: type(policy) for name, policy in made.items()} == {
        "fits": AdmitIfFits,
        "reserve-max": ReserveMax,
        "statistical": Statistical,
    }
    assert made["statistical"] == Statistical(lengths, bound=0.2)


@pytest.mark.parametrize("policy", EVERY)
def test_the_first_row_always_starts(policy: AdmissionPolicy) -> None:
    """Whatever it may come to need: one that runs alone must get on."""
    first = begin(policy, base=3)
    assert first.reserved == 0
    assert first.admits(candidate(tokens=CAPACITY * PAGE, limit=10_000))
    assert not first.admits(candidate(tokens=1, limit=1)), "and then it counts"


@pytest.mark.parametrize("policy", EVERY)
def test_what_fits_at_its_longest_starts(policy: AdmissionPolicy) -> None:
    # 9 rows of 10 pages at most; no buffer is kept where nothing can go wrong
    one = candidate(tokens=60, limit=100)
    turn = begin(policy, *[one] * 8, base=10)
    assert turn.admits(one)
    assert not begin(ReserveMax(), *[one] * 8, base=11).admits(one)


@pytest.mark.parametrize("policy", EVERY)
def test_a_row_that_was_refused_does_not_count(policy: AdmissionPolicy) -> None:
    turn = begin(policy, candidate(tokens=800, limit=4))
    before = turn.reserved
    assert not turn.admits(candidate(tokens=1600, limit=4))
    assert turn.reserved == before
    assert turn.admits(candidate(tokens=16, limit=4))


@pytest.mark.parametrize("policy", EVERY)
def test_shared_pages_are_counted_once(policy: AdmissionPolicy) -> None:
    # 40 pages of prefix; each row has 42 at most, two of them its own
    one = candidate(tokens=660, limit=8, shared=40)
    turn = begin(policy, one, base=40)
    admitted = sum(turn.admits(one) for _ in range(100))
    assert admitted == 29, "40 + 30 * 2 pages"


# ---- AdmitIfFits, ReserveMax ----


def test_fits_asks_for_the_next_token() -> None:
    one = candidate(tokens=16 * 10)  # exactly 10 pages, so that the next token needs one more
    turn = begin(AdmitIfFits(), *[one] * 7, base=12)
    assert turn.reserved == 7
    assert turn.admits(one)
    assert turn.reserved == 8
    assert not turn.admits(candidate(tokens=1))
    assert begin(AdmitIfFits(), *[one] * 7, base=12).admits(candidate(tokens=16 * 11 - 1))


def test_reserve_max_counts_the_page_rounding_of_each_row() -> None:
    # marin-community/marin#1838: the sum of tokens fits where the sum of pages does not
    one = candidate(tokens=30, limit=19)  # 49 tokens: 4 pages; 25 rows of 49 tokens: 77 pages
    turn = begin(ReserveMax(), one)
    assert sum(turn.admits(one) for _ in range(40)) == 24
    assert turn.reserved == 25 * 2


def test_reserve_max_counts_only_what_is_left() -> None:
    returning = candidate(tokens=100 + 60, limit=64, age=60)
    assert begin(ReserveMax(), returning).reserved == pages_for(164, PAGE) - 10


# ---- Statistical ----


def test_known_lengths_are_packed_to_the_page() -> None:
    """With an oracle the demand is certain, and rows that end make room for those that grow."""
    policy = Statistical(Oracle({}), buffer=0.0)
    # 37 pages now, 40 and gone after 50 tokens; the new ones have 1 page now, 61 in the end, which
    # is in the interval that the limit ends, with 63
    old = candidate(tokens=40 * PAGE - 50, limit=1000, age=0, profile=50)
    new = candidate(tokens=1, limit=1000, profile=960)
    turn = begin(policy, old)
    assert turn.admits(new)
    assert turn.reserved == 63 - 38
    assert not turn.admits(new), "two would need 122"
    short = candidate(tokens=1, limit=1000, profile=50)
    assert turn.admits(short), "one that has ended by then"
    assert not begin(ReserveMax(), old).admits(new)


def test_where_nothing_is_known_each_row_is_expected_to_reach_its_limit() -> None:
    one = candidate(tokens=100, limit=100)
    turn = begin(Statistical(Declared(), buffer=0.0), one, base=9)
    assert sum(turn.admits(one) for _ in range(20)) == 6, "9 + 7 * 13 pages"
    assert turn.reserved == 7 * (13 - 7)


def test_a_tenth_that_runs_to_the_cap_is_multiplexed() -> None:
    lengths, profile = trained([10] * 9 * 38 + [512] * 38)
    one = candidate(tokens=32, limit=512, profile=profile)
    policies = {"statistical": Statistical(lengths), "max": ReserveMax(), "fits": AdmitIfFits()}
    admitted: dict[str, int] = {}
    for name, policy in policies.items():
        turn = begin(policy, one, capacity=1000)
        admitted[name] = 1 + sum(turn.admits(one) for _ in range(400))
    assert admitted["max"] == 1000 // 34
    assert admitted["fits"] == 1000 // 3
    # 34 pages for one in ten: 3.4 a row on average, and room for luck
    assert 150 < admitted["statistical"] < 1000 / 3.4


def test_a_rare_long_row_has_its_pages() -> None:
    """One in fifty is far likelier than the bound, though its share of the mean is small."""
    lengths, profile = trained([5] * 49 * 7 + [512] * 7)
    one = candidate(tokens=32, limit=512, profile=profile)
    for bound in (0.005, 0.04):
        assert begin(Statistical(lengths, bound), one).reserved == 34 - 2
    assert begin(Statistical(lengths, bound=0.2), one).reserved < 10


def test_shared_pages_are_no_part_of_a_rows_demand() -> None:
    lengths, profile = trained([5, 20, 50, 100, 200, 400] * 64)
    alone = [candidate(tokens, 512, profile=profile) for tokens in (10, 30, 70)]
    sharing = [row._replace(tokens=row.tokens + 40 * PAGE, shared=40) for row in alone]
    reserved = begin(Statistical(lengths), *alone).reserved
    assert reserved > 0
    assert begin(Statistical(lengths), *sharing, base=40).reserved == reserved


def test_a_candidate_may_live_longer_than_all_that_run() -> None:
    policy = Statistical(Declared(), buffer=0.0)
    turn = begin(policy, candidate(tokens=50 * PAGE, limit=4))
    assert not turn.admits(candidate(tokens=49 * PAGE, limit=40)), "both grow by a page at once"
    # it has 100 pages to itself when the other has ended, and comes to need 101
    assert not turn.admits(candidate(tokens=PAGE, limit=100 * PAGE))
    assert turn.admits(candidate(tokens=PAGE, limit=99 * PAGE))


def test_the_buffer_is_kept_free() -> None:
    one = candidate(tokens=100, limit=1000, profile=50)  # 10 pages in the end
    for buffer, rows in ((0.0, 10), (0.1, 9), (0.45, 5)):
        turn = begin(Statistical(Oracle({}), buffer=buffer), one)
        assert 1 + sum(turn.admits(one) for _ in range(20)) == rows
        assert turn.reserved == rows * (10 - 7)


def test_less_risk_means_fewer_rows() -> None:
    lengths, profile = trained([5, 20, 50, 100, 200, 400] * 64)
    one = candidate(tokens=100, limit=512, profile=profile)
    admitted = []
    for bound in (0.5, 0.1, 0.01, 0.0001):
        turn = begin(Statistical(lengths, bound=bound), one, capacity=500)
        admitted.append(sum(turn.admits(one) for _ in range(100)))
    assert admitted == sorted(admitted, reverse=True)
    assert len(set(admitted)) == 4


def test_rows_age() -> None:
    """Half end at 10 tokens, half run to 500: one that has made 11 is known to be long."""
    lengths, profile = trained([10, 500] * 192)
    policy = Statistical(lengths)
    young = begin(policy, *[candidate(100, 512, 0, profile)] * 20).reserved
    old = begin(policy, *[candidate(100, 512, 11, profile)] * 20).reserved
    assert young < 20 * 31 * 0.85
    assert old > 20 * 30 * 0.95


@pytest.mark.parametrize("longest", [False, True])
def test_rows_admitted_one_by_one_count_like_rows_that_run(longest: bool) -> None:
    lengths, profile = trained([5, 20, 50, 100, 200, 400] * 64)
    policy = Statistical(lengths)
    random = np.random.default_rng(3)
    rows = [
        candidate(int(random.integers(1, 300)), int(random.integers(50, 500)), profile=profile)
        for _ in range(30)
    ]
    rows.sort(key=lambda row: row.limit, reverse=longest)
    turn = begin(policy, *rows[:3], capacity=500)
    assert turn.reserved > 0
    assert all(turn.admits(row) for row in rows[3:])
    together = begin(policy, *rows, capacity=500)
    assert turn.reserved == together.reserved
    for one in rows:
        assert turn.admits(one) == together.admits(one)


def draws(lengths: Profiled, rows: Rows, number: int, random: np.random.Generator) -> np.ndarray:
    """int64[number, n]: tokens still to come, as the model itself says."""
    curves = lengths.survival(rows, np.arange(int((rows.limit - rows.age).max())))
    uniform = random.random((number, len(curves)))
    return np.stack(
        [np.searchsorted(-curve, -u) for curve, u in zip(curves, uniform.T, strict=True)], axis=1
    )


WORKLOADS = {
    "nothing is known": [],
    "heavy tail": [6, 7, 8, 9, 10, 11, 13, 15, 18, 24, 40, 85, 283, 900] * 27,
    "all alike": [*range(290, 310)] * 19,
    "a stale tail": [*([10, 20, 30, 40, 60, 90] * 54), *([600] * 60)],
}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("ages", ["start together", "mixed ages"])
@pytest.mark.parametrize("number", [1, 4, 16, 64])
def test_rows_outgrow_what_was_set_aside_less_often_than_the_bound(
    number: int, ages: str, workload: str
) -> None:
    """And not much less: one in a hundred sets needs as much as 0.7 of it."""
    bound, tries = 0.01, 3000
    lengths, profile = trained(WORKLOADS[workload])
    random = np.random.default_rng(number)
    age = random.integers(0, 250, number) * (ages == "mixed ages")
    rows = Rows(np.full(number, profile), age, np.full(number, 512))
    tokens = age + random.integers(1, 400, number)
    present = int((-(-tokens // PAGE)).sum())
    policy = Statistical(lengths, bound)
    turn = policy.round(RunningSet(rows, tokens, np.zeros(number, np.int64)), 0, 10**6, PAGE)
    asked = present + turn.reserved

    rest = draws(lengths, rows, tries, random)
    need = np.zeros(tries)
    for step in range(512):
        pages = -(-(tokens + step) // PAGE)
        need = np.maximum(need, (rest > step).astype(np.float64) @ pages)
    assert (need > asked).mean() <= bound
    assert np.quantile(need, 1 - bound) >= 0.7 * asked


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 400), st.integers(0, 399)), max_size=12
    ),
    bound=st.sampled_from([0.001, 0.01, 0.3, 0.9]),
    page_size=st.sampled_from([1, 16, 48]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_set_aside_lies_between_nothing_and_the_most(
    rows: list[tuple[int, int, int]], bound: float, page_size: int
) -> None:
    lengths, profile = trained([5, 20, 50, 100, 200, 400] * 8)
    seen = [candidate(t + min(a, n - 1), n, min(a, n - 1), profile) for t, n, a in rows]
    policy = Statistical(lengths, bound)
    reserved = begin(policy, *seen, page_size=page_size).reserved
    most = begin(ReserveMax(), *seen, page_size=page_size).reserved
    assert 0 <= reserved <= most
    stricter = begin(Statistical(lengths, bound / 2), *seen, page_size=page_size).reserved
    assert reserved <= stricter
