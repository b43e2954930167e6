"""Sampling against a plain numpy oracle; distributions by chi-square with fixed keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxserve.runtime import sampling
from jaxserve.runtime.sampling import SamplingLanes, first_maximum, sample

NONE = 2**31 - 1
DRAWS, VOCAB = 4096, 300  # every shape is a compile: most tests share this one or [8, VOCAB]

jitted = jax.jit(sample)


class Choice(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def _lanes(rows: int, **values: Any) -> dict[str, jax.Array]:
    """Greedy rows without logprobs, unless said otherwise, for all rows or for each."""
    default = {
        "temperature": np.zeros(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "key": np.tile(np.array([1, 2], np.uint32), (rows, 1)),
        "position": np.arange(rows, dtype=np.int32),
        "suppressed": np.full((rows, 8), NONE, np.int32),
        "num_logprobs": np.full(rows, -1, np.int32),
    }
    for name, value in values.items():
        default[name][...] = value
    return {name: jnp.asarray(value) for name, value in default.items()}


def _sample(logits: np.ndarray, **values: Any) -> Any:
    """Sampled, but of numpy arrays."""
    result = jitted(jnp.asarray(logits, jnp.float32), _lanes(len(logits), **values))
    return jax.tree.map(np.asarray, result)


def _draw(logits: np.ndarray, choice: Choice) -> np.ndarray:
    """Tokens drawn from one row of logits at DRAWS positions."""
    return _sample(np.tile(logits, (DRAWS, 1)), **choice._asdict()).tokens


def _oracle(logits: np.ndarray, choice: Choice) -> np.ndarray:
    """float64[vocab] probabilities after the filters, by sorting."""
    ranking = np.argsort(-logits, kind="stable")  # equal logits by lower id
    weights = np.exp((logits - logits.max()).astype(np.float64) / choice.temperature)[ranking]
    weights[weights < choice.min_p] = 0
    if choice.top_k > 0:
        weights[choice.top_k :] = 0
    weights /= weights.sum()
    if choice.top_p < 1:
        weights[np.cumsum(weights) - weights >= choice.top_p] = 0
    probabilities = np.zeros_like(weights)
    probabilities[ranking] = weights / weights.sum()
    return probabilities


def _clear(logits: np.ndarray, choice: Choice) -> bool:
    """Whether the filters' cuts are the same for any settings within rounding."""
    kept = [
        _oracle(logits, choice._replace(top_p=choice.top_p * by, min_p=choice.min_p * by)) > 0
        for by in (1 - 1e-5, 1, 1 + 1e-5)
        if choice.top_p * by <= 1
    ]
    return all(np.array_equal(kept[0], other) for other in kept[1:])


def _assert_distribution(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    chi2 = ((observed - expected) ** 2 / expected).sum()
    # Mean and deviation of chi-square; the keys are fixed, so this either holds or not.
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees) + 1e-9, (chi2, degrees)


def _random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)


# --- greedy ---


@pytest.mark.parametrize("vocab", [1, 20, 127, 128, 1000, 49152])
def test_first_maximum(vocab: int):
    logits = np.round(_random_logits(6, vocab))  # many ties
    logits[1] = 0
    logits[2] = -np.inf
    logits[2, -1] = -1e30
    logits[3] = -3e38
    logits[3, vocab // 2] = 3e38
    tokens = jax.jit(first_maximum)(jnp.asarray(logits))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 9.9e-5])
def test_tiny_temperatures_are_greedy(temperature: float):
    logits = np.round(_random_logits(8, VOCAB))
    tokens = _sample(logits, temperature=temperature).tokens
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize(
    "choice",
    [
        Choice(temperature=2.0, top_k=1),
        Choice(temperature=2.0, top_p=1e-4),
        Choice(temperature=2.0, top_k=300, top_p=1e-4),
        Choice(temperature=1e-4),
        Choice(temperature=1e-4, top_p=1e-4),
        Choice(temperature=1e-4, top_k=400, min_p=0.5),
    ],
)
def test_choices_that_equal_greedy(choice: Choice):
    logits = np.round(_random_logits(64, 1000)) * 5
    if choice.temperature < 1:  # equal likeliest tokens would be a fair draw
        logits[:, 77] = 1e4
    tokens = _sample(logits, **choice._asdict()).tokens
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


# --- extremes ---


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("top_k", [0, 70])
def test_extreme_logits_give_tokens_with_probability(temperature: float, top_p: float, top_k: int):
    logits = np.full((8, VOCAB), -np.inf, np.float32)
    logits[0, 299] = 0
    logits[1, [5, 6]] = 3e38
    logits[1, 7:] = -3e38
    logits[2, 10:] = -3e38
    logits[3, 20:90] = 1e30
    logits[4, 100] = -1e-38
    logits[5:, 0] = 0
    result = _sample(logits, temperature=temperature, top_p=top_p, top_k=top_k, num_logprobs=3)
    allowed = [{299}, {5, 6}, set(range(10, 300)), set(range(20, 90)), {100}] + [{0}] * 3
    for token, tokens in zip(result.tokens, allowed, strict=True):
        assert token in tokens
    assert not np.isnan(result.logprob).any()
    assert not np.isnan(result.top_logprobs).any()


# --- distributions ---


@pytest.mark.parametrize(
    "choice",
    [
        Choice(),
        Choice(temperature=0.5),
        Choice(temperature=1.7),
        Choice(top_k=5),
        Choice(top_k=90),
        Choice(top_p=0.7),
        Choice(temperature=3.0, top_p=0.95),
        Choice(min_p=0.05),
        Choice(temperature=4.0, min_p=0.2),
        Choice(top_k=40, top_p=0.8, min_p=0.01),
        Choice(temperature=4.0, top_k=200, top_p=0.9, min_p=0.1),
    ],
)
def test_distribution(choice: Choice):
    logits = _random_logits(1, VOCAB, seed=3)[0]
    _assert_distribution(_draw(logits, choice), _oracle(logits, choice))


def test_equal_logits_are_drawn_evenly():
    logits = np.zeros(VOCAB, np.float32)
    _assert_distribution(_draw(logits, Choice()), np.full(VOCAB, 1 / VOCAB))


def test_draws_over_keys_are_independent_of_position():
    logits = np.tile(_random_logits(1, VOCAB, seed=5), (DRAWS, 1))
    keys = np.stack([np.arange(DRAWS), np.zeros(DRAWS)], axis=1).astype(np.uint32)
    tokens = _sample(logits, temperature=1.0, key=keys, position=7).tokens
    _assert_distribution(tokens, _oracle(logits[0], Choice()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.3, 1.0, 3.0]),
    tied=st.booleans(),
    choice=st.builds(
        Choice,
        temperature=st.sampled_from([0.5, 1.0, 2.5]),
        top_k=st.one_of(st.just(0), st.just(-1), st.integers(1, 350)),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
        min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    ),
)
def test_filters_keep_what_the_oracle_keeps(seed: int, scale: float, tied: bool, choice: Choice):
    """Drawn tokens are among the kept ones, and every kept token that must appear does."""
    logits = _random_logits(1, VOCAB, seed, scale)[0]
    if tied:
        logits = np.round(logits)
    assume(_clear(logits, choice))
    probabilities = _oracle(logits, choice)
    counts = np.bincount(_draw(logits, choice), minlength=VOCAB)
    assert counts[probabilities == 0].sum() == 0
    assert (counts[probabilities > 0.008] > 0).all()  # one is missed with probability 1e-14


def test_ties_at_the_cut_go_to_lower_ids():
    logits = np.zeros(VOCAB, np.float32)
    logits[200] = 1.0
    for top_k in (3, 100):  # by ranking, by search
        tokens = set(_draw(logits, Choice(top_k=top_k)).tolist())
        assert tokens == {200, *range(top_k - 1)}
    # The smallest set that holds 0.4 of the probability: token 200 and 118 of the 299 others.
    tokens = set(_draw(logits, Choice(top_p=0.4)).tolist())
    assert tokens == {200, *range(118)}


# --- suppressed ids ---


@pytest.mark.parametrize("choice", [Choice(temperature=0.0), Choice(), Choice(top_k=2)])
def test_suppressed_ids_have_no_probability(choice: Choice):
    logits = np.full((DRAWS, VOCAB), -30, np.float32)
    logits[:, :10] = 0
    logits[:, 4] = 9
    logits[:, 9] = 8
    logits[:, 6] = 7
    suppressed = np.array([9, NONE, -1, 4, VOCAB, -(2**31), NONE, NONE], np.int32)
    result = _sample(logits, suppressed=suppressed, num_logprobs=2, **choice._asdict())
    assert not {4, 9} & set(result.tokens.tolist())
    assert 6 in result.tokens
    np.testing.assert_array_equal(result.top_ids[:, :2], [[6, 0]] * DRAWS)
    expected = 7 - np.log(np.exp(7) + 7)
    np.testing.assert_allclose(result.top_logprobs[:, 0], expected, atol=1e-6)


def test_suppression_touches_no_other_row():
    logits = np.zeros((8, VOCAB), np.float32)
    logits[:, 4] = 9
    suppressed = np.full((8, 8), NONE, np.int32)
    suppressed[2, 0] = 4
    tokens = _sample(logits, suppressed=suppressed).tokens
    np.testing.assert_array_equal(tokens, [4, 4, 0, 4, 4, 4, 4, 4])


# --- logprobs ---


@pytest.mark.parametrize("vocab", [20, 300, 49152])
def test_logprobs(vocab: int):
    logits = _random_logits(8, vocab)
    logits[2:4] = np.round(logits[2:4])
    temperature, top_k = [0, 5.0, 0.7, 5.0] * 2, [0, 0, 5, 0] * 2
    result = _sample(logits, num_logprobs=20, temperature=temperature, top_k=top_k)
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    for row in range(8):
        ranking = np.argsort(-logits[row], kind="stable")[:20]
        token = result.tokens[row]
        np.testing.assert_array_equal(result.top_ids[row], ranking)
        np.testing.assert_allclose(result.top_logprobs[row], logprobs[row, ranking], atol=1e-4)
        np.testing.assert_allclose(result.logprob[row], logprobs[row, token], atol=1e-4)
        assert result.rank[row] == 1 + (logits[row] > logits[row, token]).sum()
        # Clients test these for equality.
        if token in ranking:
            assert result.logprob[row] == result.top_logprobs[row, list(ranking).index(token)]
    assert result.rank[0] == 1


def test_rows_that_want_no_logprobs_get_zeros():
    wanted = np.arange(8) % 3 == 1
    result = _sample(_random_logits(8, VOCAB), num_logprobs=np.where(wanted, 0, -1))
    np.testing.assert_array_equal(result.rank, wanted)
    np.testing.assert_array_equal(result.logprob != 0, wanted)
    np.testing.assert_array_equal(result.top_logprobs.any(axis=1), wanted)
    for unasked in _sample(_random_logits(8, VOCAB))[1:]:
        assert not unasked.any()


# --- independence ---

MIXED = [
    Choice(temperature=0.0),
    Choice(),
    Choice(temperature=0.8, top_k=40),
    Choice(temperature=3.0, top_k=100),
    Choice(temperature=0.7, top_p=0.9),
    Choice(temperature=3.0, top_p=0.9),
    Choice(temperature=2.0, min_p=0.02),
    Choice(temperature=2.5, top_k=500, top_p=0.9, min_p=0.001),
]


def _mixed(rows: int) -> dict[str, np.ndarray]:
    lanes = {
        name: np.array([getattr(MIXED[row % len(MIXED)], name) for row in range(rows)])
        for name in Choice._fields
    }
    random = np.random.default_rng(9)
    lanes["key"] = random.integers(0, 2**32, (rows, 2), np.uint32)
    lanes["position"] = random.integers(0, 1000, rows)
    lanes["num_logprobs"] = np.where(np.arange(rows) % 3 == 0, 5, -1)
    return lanes


@pytest.mark.parametrize(("rows", "vocab"), [(1, 49152), (8, 49152), (2, 1000)])
def test_a_row_does_not_depend_on_its_batch(rows: int, vocab: int):
    logits, lanes = _random_logits(64, vocab), _mixed(64)
    together = _sample(logits, **lanes)
    order = np.random.default_rng(1).permutation(64)
    for start in range(0, 64, max(rows, 64 // 8)):  # the first few batches of a permutation
        some = order[start : start + rows]
        alone = _sample(logits[some], **{name: lane[some] for name, lane in lanes.items()})
        for part, whole in zip(alone, together, strict=True):
            np.testing.assert_array_equal(part, whole[some])


def test_small_errors_of_logits_seldom_change_a_draw():
    """Other batches round otherwise. Inverting a cumulative sum (as here once) changes 17 of
    these draws: it has a boundary per lane, and each of them moves."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 0.1, VOCAB)
    noisy = np.tile(logits, (DRAWS, 1)) + rng.normal(0, 1e-3, (DRAWS, VOCAB))
    changed = _sample(noisy, temperature=1.0).tokens != _draw(logits, Choice())
    assert changed.sum() < 10


def test_keys_and_positions_decide():
    logits = np.tile(_random_logits(1, 1000, scale=0.1), (64, 1))
    first = _sample(logits, temperature=1.0).tokens
    np.testing.assert_array_equal(first, _sample(logits, temperature=1.0).tokens)
    assert len(set(first.tolist())) > 50  # by position
    other = _sample(logits, temperature=1.0, key=np.array([2, 1], np.uint32)).tokens
    assert (first != other).sum() > 55
    same = _sample(logits, temperature=1.0, position=5).tokens
    assert len(set(same.tolist())) == 1


def test_rows_together_choose_what_rows_one_by_one_choose():
    """Accelerators batch the rows that a CPU takes in turn."""
    logits, values = jnp.asarray(_random_logits(64, 1000)), _mixed(64)
    lanes = SamplingLanes(**_lanes(64, **values))
    greedy = jnp.argmax(logits, axis=1).astype(jnp.int32)
    together = jax.jit(jax.vmap(sampling._draw_row))(logits, greedy, lanes)
    np.testing.assert_array_equal(together, _sample(np.asarray(logits), **values).tokens)


def test_parameters_never_compile_anew():
    traces: list[int] = []

    @jax.jit
    def step(logits: jax.Array, lanes: dict[str, jax.Array]) -> Any:
        traces.append(1)
        return sample(logits, lanes)

    logits = jnp.asarray(_random_logits(8, VOCAB))
    for choice in MIXED:
        step(logits, _lanes(8, **choice._asdict()))
        step(logits, _lanes(8, num_logprobs=20, **choice._asdict()))
    step(logits, _lanes(8, **_mixed(8)))
    assert len(traces) == 1
