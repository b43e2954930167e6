from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.lengths import (
    LENGTH_MODELS,
    Declared,
    LengthModel,
    Oracle,
    Profiled,
    Rows,
    Sample,
    cell_of,
    product_limit,
)
from scheduler.request import Request, RequestOptions, SamplingParams

# 64 quantiles each of the output lengths in the Azure LLM inference traces of 2023 (CC-BY 4.0;
# Splitwise, ISCA 2024). Whole traces: 211, 213, 169, 93 tokens remain on average after 0, 128, 256,
# 512 in conversation; 28, 42, 64, 93 after 0, 16, 32, 64 in code.
CONVERSATION = [
    *(14, 28, 37, 43, 47, 51, 54, 58, 63, 66, 70, 73, 76, 79, 82, 84, 86, 88, 89, 91, 93, 94, 96),
    *(98, 100, 103, 105, 108, 112, 116, 121, 126, 132, 138, 145, 153, 161, 167, 178, 187, 205, 217),
    *(273, 375, 382, 387, 392, 394, 396, 396, 398, 401, 405, 409, 411, 414, 418, 423, 429, 433),
    *(446, 472, 528, 615),
]
CODE = [
    *(6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 8, 8, 8, 8, 9, 9, 9, 9, 9, 10, 10, 10, 10, 11, 11, 11, 11, 12),
    *(12, 12, 13, 13, 13, 14, 14, 14, 15, 15, 16, 16, 17, 18, 18, 19, 20, 21, 22, 23, 24, 26, 28),
    *(30, 32, 35, 40, 44, 49, 55, 61, 72, 85, 106, 151, 283),
]


def request(prompt: int = 100, tenant: str = "", profile: str = "", name: str = "r") -> Request:
    options = RequestOptions(tenant=tenant, profile=profile)
    return Request(
        name, np.ones(prompt, np.int32), SamplingParams(), 1000, arrival=0.0, options=options
    )


def rows(profiles: int | Sequence[int], ages: int | Sequence[int], limit: int = 1000) -> Rows:
    profile, age = np.broadcast_arrays(np.atleast_1d(profiles), np.atleast_1d(ages))
    return Rows(profile.astype(np.int64), age.astype(np.int64), np.full(age.shape, limit, np.int64))


def survival(model: LengthModel, profile: int, age: int, horizon: int, limit: int = 1000) -> float:
    result = model.survival(rows(profile, age, limit), np.array([horizon]))
    assert result.shape == (1, 1)
    assert result.dtype == np.float64
    return float(result[0, 0])


def learn(model: Profiled, lengths: Sequence[int], like: Request | None = None) -> int:
    """Requests of these lengths have finished, in no order; what their kind's profile is now."""
    like = like or request()
    for length in np.random.default_rng(0).permutation(lengths).tolist():
        model.observe(like, model.profile(like), length, censored=False)
    settle(model)
    return model.profile(like)


def settle(model: Profiled) -> None:
    """Tables may lag behind by a sixteenth of the data, for a few steps."""
    for _ in range(32):
        model.watch(rows([], []))


def sample(ended: Sequence[int], censored: Sequence[int] = ()) -> Sample:
    length = np.array([*ended, *censored], np.int64)
    none = np.zeros(len(length), np.int64)
    return Sample(none, length, np.arange(len(length)) < len(ended), none.astype(np.bool_))


def at(table: np.ndarray, *tokens: int) -> list[float]:
    return table[cell_of(np.array(tokens))].tolist()


# ---- the estimator ----


def test_kaplan_and_meiers_own_example() -> None:
    # J. Am. Stat. Assoc. 53 (1958), table 1, in tenths: deaths at 0.8, 3.1, 5.4, 9.2; losses at
    # 1.0, 2.7, 7.0, 12.1
    table = product_limit(sample([8, 31, 54, 92], [10, 27, 70, 121]))
    assert at(table, 7, 8, 30, 31, 53, 54, 91, 92) == pytest.approx(
        [1, 0.875, 0.875, 0.7, 0.7, 0.525, 0.525, 0.2625]
    )
    assert at(table, 500) == pytest.approx([0.2625]), "constant beyond the last observation"


def test_the_textbook_example_with_ties_between_ends_and_losses() -> None:
    # remission under 6-MP: Freireich et al. 1963; Kleinbaum and Klein, Survival Analysis, table 2.2
    ended = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    censored = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    table = product_limit(sample(ended, censored))
    assert at(table, 5, 6, 7, 10, 13, 16, 22, 23, 35) == pytest.approx(
        [1, 0.8571, 0.8067, 0.7529, 0.6902, 0.6275, 0.5378, 0.4482, 0.4482], abs=5e-5
    )


def test_late_entry_counts_only_while_it_was_seen() -> None:
    # at 3: one of two (the third enters at 4); at 6: one of two; at 9: the last one
    every = np.array([True, True, True])
    seen = Sample(np.array([0, 0, 4]), np.array([3, 6, 9]), ended=every, running=every)
    assert at(product_limit(seen), 2, 3, 5, 6, 8, 9) == [1, 0.5, 0.5, 0.25, 0.25, 0]


def test_all_that_have_come_as_far_are_at_risk() -> None:
    """Also where a cell is wider than a token, and one ends at its beginning."""
    for age in (149, 150, 1001, 1002, 1003):
        table = product_limit(sample([age], [age] * 63))
        assert at(table, age - 1, age + 10) == [1, 63 / 64]


def test_numbers_at_risk_are_not_below_those_of_the_finished() -> None:
    # by late entry alone one of one would end at 50, and nothing could live longer than that
    every = np.array([True, True, True])
    seen = Sample(np.array([49, 80, 80]), np.array([50, 90, 90]), ended=every, running=~every)
    assert at(product_limit(seen), 49, 50, 89) == pytest.approx([1, 2 / 3, 2 / 3])


@given(st.lists(st.integers(1, 120), max_size=40), st.floats(0.1, 20))
def test_the_prior_counts_for_so_many_requests(lengths: list[int], weight: float) -> None:
    # without censoring, the Bayes estimate under a Dirichlet process prior is a plain average
    prior = product_limit(sample([3, 50, 50, 100]))
    table = product_limit(sample(lengths), prior, weight)
    tokens = np.arange(125)
    longer = (np.array(lengths, np.int64)[:, None] > tokens).sum(0)
    expected = (longer + weight * prior[:125]) / (len(lengths) + weight)
    assert table[cell_of(tokens)] == pytest.approx(expected)


@given(st.integers(0, 2**20))
def test_cells_are_exact_where_lengths_are_short_and_fine_everywhere(tokens: int) -> None:
    cell, following = cell_of(np.array([tokens, tokens + 1])).tolist()
    if tokens < 127:
        assert (cell, following) == (tokens, tokens + 1)
    else:
        assert following - cell in (0, 1)
        width = (tokens + 128) // 100
        assert cell_of(np.array([tokens - width]))[0] < cell, "never wider than a hundredth"


# ---- Declared and Oracle ----


def test_declared_expects_all_that_was_asked_for() -> None:
    model = Declared()
    profile = model.profile(request())
    model.observe(request(), profile, 3, censored=False)
    model.watch(rows(profile, 3))
    result = model.survival(rows([profile] * 2, [0, 7], limit=10), np.array([0, 2, 3, 9, 10]))
    assert result.tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert model.expected(profile, 4, 10) == 6
    assert model.expected(profile, 11, 10) == 0


def test_the_oracle_knows_each_length() -> None:
    model = Oracle({"short": 3, "long": 99})
    short, long = (model.profile(request(name=name)) for name in ("short", "long"))
    model.observe(request(), short, 3, censored=False)
    model.watch(rows([short, long], 1))
    result = model.survival(rows([short, long], [1, 5], limit=10), np.array([0, 1, 2, 4, 5]))
    assert result.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert model.expected(short, 1, 10) == 2
    assert model.expected(long, 1, 10) == 9, "the limit ends it before"
    assert model.expected(short, 5, 10) == 0
    with pytest.raises(KeyError):
        model.profile(request(name="never seen"))


def test_models_that_need_no_data_have_names() -> None:
    made = {name: type(make()) for name, make in LENGTH_MODELS.items()}
    assert made == {"declared": Declared, "profiled": Profiled}


# ---- Profiled ----


def test_before_any_data_lengths_spread_over_all_scales() -> None:
    model = Profiled()
    profile = model.profile(request())
    assert survival(model, profile, 0, 256) == pytest.approx(1 / 2)
    assert survival(model, profile, 256, 512) == pytest.approx(1 / 2)
    assert survival(model, profile, 0, 999) > 0.2
    assert survival(model, profile, 0, 1000) == 0, "the limit"
    # the integral of 256 / (256 + t)
    assert model.expected(profile, 0, 1000) == pytest.approx(256 * np.log(1256 / 256), rel=0.01)
    assert model.expected(profile, 0, 10) == pytest.approx(9.83, abs=0.01)


def test_mean_remaining_falls_with_age_in_one_workload_and_rises_in_another() -> None:
    falls, rises = Profiled(), Profiled()
    conversation, code = learn(falls, CONVERSATION * 6), learn(rises, CODE * 6)
    remaining = [falls.expected(conversation, age, 1000) for age in (0, 128, 256, 512)]
    assert remaining == pytest.approx([211, 213, 164, 68], rel=0.04)
    remaining = [rises.expected(code, age, 1000) for age in (0, 16, 32, 64)]
    assert remaining == pytest.approx([27, 40, 61, 85], rel=0.04)


def test_expected_is_the_sum_of_survival_up_to_the_limit() -> None:
    model = Profiled()
    profile = learn(model, CONVERSATION)
    for age, limit in ((0, 1), (0, 100), (3, 1000), (200, 700), (700, 701), (900, 40_000)):
        every = model.survival(rows(profile, age, limit), np.arange(limit - age))
        assert model.expected(profile, age, limit) == pytest.approx(every.sum())
    assert model.expected(profile, 10, 10) == 0


def test_what_ran_into_its_limit_counts_as_longer() -> None:
    model = Profiled()
    for _ in range(100):
        model.observe(request(), model.profile(request()), 50, censored=True)
    for _ in range(20):
        model.observe(request(), model.profile(request()), 30, censored=False)
    settle(model)
    profile = model.profile(request())
    assert survival(model, profile, 0, 29) > 0.99
    assert survival(model, profile, 0, 30) == pytest.approx(100 / 120, abs=0.01)
    assert survival(model, profile, 0, 50) == pytest.approx(100 / 120, abs=0.01)
    assert survival(model, profile, 40, 200) > 0.5, "censored at 50 says nothing about after"


def test_nothing_is_certain_to_end_before_its_limit() -> None:
    model = Profiled()
    profile = learn(model, [20] * 384)
    assert survival(model, profile, 0, 19) > 0.99
    assert 0 < survival(model, profile, 0, 20) < 0.01
    # older than anything seen: the prior's word, more the older it is
    assert survival(model, profile, 500, 499) == pytest.approx(756 / 1255, rel=0.01)
    assert survival(model, profile, 20, 20) < survival(model, profile, 500, 20)
    assert survival(model, profile, 2**21, 2**21, limit=2**23) > 0, "of any age"


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=80),
    st.integers(0, 6000),
    st.integers(1, 6000),
)
@settings(max_examples=50)
def test_survival_falls_from_one_and_stays_above_zero_up_to_the_limit(
    ends: list[tuple[int, bool]], age: int, rest: int
) -> None:
    model = Profiled(window=64)
    for length, censored in ends:
        model.observe(request(), model.profile(request()), length, censored)
    horizons = np.unique(np.concatenate([[0], np.geomspace(1, 2 * rest, 40).astype(int)]))
    curve = model.survival(rows(model.profile(request()), age, age + rest), horizons)[0]
    assert curve[0] == 1
    assert (np.diff(curve) <= 0).all()
    assert ((curve > 0) == (horizons < rest)).all()


def test_each_key_has_its_own_estimate_and_a_new_one_has_that_of_all() -> None:
    model = Profiled()
    short = learn(model, [10] * 100, request(tenant="short"))
    long = learn(model, [500] * 100, request(tenant="long"))
    assert survival(model, short, 0, 100) < 0.02
    assert survival(model, long, 0, 100) > 0.98
    new = model.profile(request(tenant="new"))
    assert survival(model, new, 0, 100) == pytest.approx(0.5, abs=0.01)
    model.observe(request(tenant="new"), new, 10, censored=False)
    settle(model)
    assert survival(model, new, 0, 100) == pytest.approx((2 * 0.5 + 0) / 3, abs=0.01)
    # the profile that a request names goes before its tenant
    assert survival(model, model.profile(request(tenant="short", profile="long")), 0, 100) > 0.98


def test_the_oldest_data_are_forgotten() -> None:
    model = Profiled(window=100)
    profile = learn(model, [500] * 100)
    learn(model, [10] * 50)
    assert survival(model, profile, 0, 100) == pytest.approx(0.5, abs=0.05)
    learn(model, [10] * 50)
    assert survival(model, profile, 0, 100) < 0.05


def test_a_key_that_had_to_go_falls_back_to_what_all_do() -> None:
    model = Profiled(max_keys=2)
    first = learn(model, [10] * 100, request(tenant="a"))
    learn(model, [500] * 100, request(tenant="b"))
    model.profile(request(tenant="a"))
    learn(model, [500] * 100, request(tenant="c"))
    assert survival(model, first, 0, 100) < 0.02, "b was the one that was used longest ago"
    learn(model, [500] * 84, request(tenant="d"))  # 384 in all
    assert survival(model, first, 0, 100) == pytest.approx(0.74, abs=0.01)
    assert model.expected(first, 0, 1000) > 300
    again = model.profile(request(tenant="a"))
    assert again != first
    assert survival(model, again, 0, 100) == pytest.approx(0.74, abs=0.01)
    for number in range(1000):
        model.observe(request(tenant=str(number)), first, 10, censored=False)
    settle(model)
    assert survival(model, first, 0, 100) < 0.01
    assert len(model._owned) == 2


def test_prompt_length_counts_where_it_predicts() -> None:
    model = Profiled()
    for number in range(300):
        length = (20, 100, 400)[number % 3]
        like = request(prompt=(50, 200, 1000)[number % 3])
        model.observe(like, model.profile(like), length, censored=False)
    settle(model)
    expected = [model.expected(model.profile(request(prompt)), 0, 1000) for prompt in (50, 1000)]
    assert expected == pytest.approx([20, 400], abs=12)  # 2 of 102 are not from these data
    assert model.expected(model.profile(request(1)), 0, 1000) == expected[0], "shorter than all"
    assert model.expected(model.profile(request(60_000)), 0, 1000) == expected[1]


@pytest.mark.parametrize("number", [30, 300])
def test_prompt_length_does_not_count_where_it_says_nothing(number: int) -> None:
    """Or where there are too few requests to know."""
    model = Profiled()
    for index in range(number):
        length = (20, 100, 400)[index % 3 if number < 100 else (index // 3) % 3]
        like = request(prompt=(50, 200, 1000)[index % 3])
        model.observe(like, model.profile(like), length, censored=False)
    short, long = (model.expected(model.profile(request(p)), 0, 1000) for p in (50, 1000))
    assert short == long == pytest.approx(180, rel=0.1)


def test_rows_of_different_keys_are_answered_in_one_call() -> None:
    model = Profiled(max_keys=3)
    profiles = [learn(model, [10 * n] * 50, request(tenant=str(n), prompt=n)) for n in (1, 2, 3, 4)]
    horizons = np.array([0, 1, 5, 25, 30, 400])
    together = model.survival(rows(profiles, [0, 5, 29, 1], limit=300), horizons)
    assert together.shape == (4, 6)
    for index, profile in enumerate(profiles):
        for column, horizon in enumerate(horizons.tolist()):
            age = (0, 5, 29, 1)[index]
            assert together[index, column] == survival(model, profile, age, horizon, limit=300)


def test_a_request_that_made_nothing_says_nothing() -> None:
    model = Profiled()
    profile = model.profile(request())
    model.observe(request(), profile, 0, censored=True)
    assert survival(model, profile, 0, 256) == pytest.approx(1 / 2)


class Engine:
    """Slots that are always full: a new request starts wherever one has ended."""

    def __init__(self, model: Profiled, slots: int, seed: int):
        self.model, self.random = model, np.random.default_rng(seed)
        self.age = np.zeros(slots, np.int64)
        self.length = self.random.choice(CONVERSATION, slots)
        self.profile = np.full(slots, model.profile(request()))

    def run(self, steps: int, watched: bool) -> None:
        for _ in range(steps):
            if watched:
                limit = np.full(len(self.age), 1000)
                self.model.watch(Rows(self.profile, self.age.copy(), limit))
            self.age += 1
            for index in np.flatnonzero(self.age == self.length).tolist():
                length = int(self.length[index])
                self.model.observe(request(), int(self.profile[index]), length, censored=False)
                self.age[index], self.length[index] = 0, self.random.choice(CONVERSATION)


def test_a_burst_does_not_pass_for_short_requests() -> None:
    """64 requests start at once. After 150 steps those that have ended are the short ones (33% of
    all make more than 256 tokens); only the rows that still run say otherwise."""
    blind, watching = Profiled(), Profiled()
    Engine(blind, 64, seed=1).run(150, watched=False)
    Engine(watching, 64, seed=1).run(150, watched=True)
    profile = watching.profile(request())
    assert survival(blind, blind.profile(request()), 0, 256) < 0.05
    assert 0.25 < survival(watching, profile, 0, 256) < 0.5
    assert watching.expected(profile, 0, 1000) > 190


@pytest.mark.parametrize("slots", [16, 128])
def test_rows_that_run_do_not_count_twice_under_a_steady_load(slots: int) -> None:
    model = Profiled()
    engine = Engine(model, slots, seed=2)
    engine.run(150_000 // slots // 8 * 2, watched=True)
    means = []
    for _ in range(8):
        engine.run(150_000 // slots // 8, watched=True)
        means.append(model.expected(model.profile(request()), 0, 1000))
    assert np.mean(means) == pytest.approx(211, rel=0.1)


def test_a_new_kind_of_request_is_seen_while_it_still_runs() -> None:
    model = Profiled()
    profile = learn(model, [20] * 384)
    for age in range(1, 201):
        model.watch(rows([profile] * 40, age))
        if age % 20 == 0:
            for _ in range(40):
                model.observe(request(), profile, 20, censored=False)
    assert 0.08 < survival(model, profile, 0, 100) < 0.15, "40 have passed 100 tokens, 384 have not"
