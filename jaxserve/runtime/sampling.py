"""From logits to tokens, on the device: greedy choice, random choice behind filters, logprobs.

Owns what temperature, top_k, top_p, min_p, key and suppressed ids mean. Every parameter is an
array, so no combination compiles anew, and a row's token depends on its own logits and lanes alone:
never on the other rows, their number or the row's place. Must not know about requests, pages or
plans.

Order (that of vLLM and Hugging Face): suppressed ids, temperature, min_p, top_k, then top_p as a
share of what these leave. Tokens rank by logit, equal logits by lower id, and top_k and top_p each
keep a first part of that ranking: so top_k=1 or a tiny top_p is the greedy token, ties or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scheduler.request import GREEDY_BELOW, MAX_LOGPROBS

_LANES = 128  # a row of logits is also seen as [blocks, _LANES]
_RANKED = 64  # filters that keep at most this many tokens need no search over the vocabulary


class SamplingLanes(NamedTuple):
    """The lanes of a plan that sampling reads."""

    temperature: jax.Array  # float32[rows]; below 1e-4: greedy
    top_k: jax.Array  # int32[rows]; below 1: off
    top_p: jax.Array  # float32[rows]; 1: off
    min_p: jax.Array  # float32[rows]; 0: off
    key: jax.Array  # uint32[rows, 2]
    position: jax.Array  # int32[rows]: position of the token to be sampled
    suppressed: jax.Array  # int32[rows, n]: ids with no probability; out of range: none
    num_logprobs: jax.Array  # int32[rows]; below 0: none wanted


class Sampled(NamedTuple):
    """Logprobs are the model's own, before temperature and filters, over all but suppressed ids.

    They are zeros for rows that want none.
    """

    tokens: jax.Array  # int32[rows]
    logprob: jax.Array  # float32[rows]: the token's
    rank: jax.Array  # int32[rows]: 1 + how many tokens have a larger logit
    top_ids: jax.Array  # int32[rows, 20]: likeliest first, equal ones by lower id
    top_logprobs: jax.Array  # float32[rows, 20]


def sample(logits: jax.Array, lanes: Mapping[str, jax.Array]) -> Sampled:
    """One token for every row of float32[rows, vocab] logits. lanes: SamplingLanes' by name."""
    return _sample(logits, SamplingLanes(*(lanes[name] for name in SamplingLanes._fields)))


def _sample(logits: jax.Array, lanes: SamplingLanes) -> Sampled:
    logits = _suppress(logits, lanes.suppressed)
    tokens = lax.cond(
        jnp.any(lanes.temperature >= GREEDY_BELOW),
        _draw,
        lambda logits, greedy, lanes: greedy,
        *(logits, first_maximum(logits), lanes),
    )
    report = lax.cond(
        jnp.any(lanes.num_logprobs >= 0),
        lambda *rows: _over_rows(_report_row, rows),
        lambda logits, tokens, num_logprobs: jax.vmap(_no_report)(tokens),
        *(logits, tokens, lanes.num_logprobs),
    )
    return Sampled(tokens, *report)


def _over_rows(function: Callable[..., Any], rows: tuple[Any, ...]) -> Any:
    """function(*row) for every row.

    One at a time on a CPU, which keeps the row in its cache through all passes and skips what the
    row does not need; together elsewhere.
    """
    return lax.platform_dependent(
        rows,
        cpu=lambda rows: lax.map(lambda row: function(*row), rows),
        default=lambda rows: jax.vmap(function)(*rows),
    )


def _suppress(logits: jax.Array, ids: jax.Array) -> jax.Array:
    # jax would count a negative index from the end.
    ids = jnp.where(ids < 0, logits.shape[1], ids)
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def _blocks(row: jax.Array) -> jax.Array:
    """[vocab] -> [blocks, _LANES], filled up with logits of tokens that can't be chosen."""
    return jnp.pad(row, (0, -row.size % _LANES), constant_values=-jnp.inf).reshape(-1, _LANES)


def _first(flags: jax.Array) -> jax.Array:
    """Index of the first True of [n]; n - 1 if there is none."""
    places = jnp.arange(flags.size, dtype=jnp.int32)
    return jnp.min(jnp.where(flags, places, flags.size - 1))


def first_maximum(logits: jax.Array) -> jax.Array:
    """argmax over each row, which XLA:CPU does slowly: the first block that holds the maximum, then
    the place in it."""

    def one(row: jax.Array) -> jax.Array:
        blocks = _blocks(row)
        maxima = jnp.max(blocks, axis=1)
        maximum = jnp.max(maxima)
        block = _first(maxima == maximum)
        return jnp.minimum(block * _LANES + _first(blocks[block] == maximum), row.size - 1)

    return jax.vmap(one)(logits)


def _ranking(row: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The first `count` tokens of [vocab] logits in ranking order: (logits, ids).

    A token in a block that is not among the `count` blocks with the largest maxima (equal ones by
    lower id) has `count` tokens before it.
    """
    blocks = _blocks(row)
    _, chosen = lax.top_k(jnp.max(blocks, axis=1), min(count, blocks.shape[0]))
    chosen = jnp.sort(chosen)  # so that equal logits stay in the order of their ids
    logits, places = lax.top_k(blocks[chosen].reshape(-1), count)
    return logits, chosen[places // _LANES] * _LANES + places % _LANES


# --- logprobs ---


def _report_row(logits: jax.Array, token: jax.Array, num_logprobs: jax.Array) -> tuple[Any, ...]:
    def report(logits: jax.Array, token: jax.Array) -> tuple[Any, ...]:
        maximum = jnp.max(logits)
        normalizer = jnp.log(_total(jnp.exp(_blocks(logits) - maximum)))
        top, ids = _ranking(logits, MAX_LOGPROBS)
        chosen = logits[token]
        rank = 1 + jnp.sum(logits > chosen, dtype=jnp.int32)
        # One formula for both: clients compare the token's logprob with the largest for equality.
        return chosen - maximum - normalizer, rank, ids, top - maximum - normalizer

    return lax.cond(
        num_logprobs >= 0, report, lambda logits, token: _no_report(token), logits, token
    )


def _no_report(token: jax.Array) -> tuple[Any, ...]:
    top = jnp.zeros(MAX_LOGPROBS, jnp.float32)
    return jnp.zeros((), jnp.float32), jnp.zeros_like(token), top.astype(jnp.int32), top


# --- random choice ---


class _Row(NamedTuple):
    logits: jax.Array  # float32[vocab]
    maximum: jax.Array  # float32[]: the largest of them
    temperature: jax.Array  # float32[]
    top_k: jax.Array  # int32[]; vocab: off
    top_p: jax.Array  # float32[]
    min_p: jax.Array  # float32[]

    def weights(self, logits: jax.Array) -> jax.Array:
        """Probabilities relative to the likeliest token's, so that nothing overflows."""
        return jnp.exp((logits - self.maximum) / self.temperature)


def _draw(logits: jax.Array, greedy: jax.Array, lanes: SamplingLanes) -> jax.Array:
    """int32[rows]: a random token where the row's temperature asks for one, else `greedy`."""
    return _over_rows(_draw_row, (logits, greedy, lanes))


def _exponentials(key: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """float32[count] of Exp(1), from key uint32[2] and position alone: fold_in hashes the two."""
    folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
    bits = jax.random.bits(folded, (count,), jnp.uint32)
    # never 0, never 1; finest near 0, where the smallest of many lie
    return -jnp.log1p(-jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24))


def _draw_row(logits: jax.Array, greedy: jax.Array, lanes: SamplingLanes) -> jax.Array:
    vocab = logits.size
    row = _Row(
        logits=logits,
        maximum=jnp.max(logits),
        temperature=jnp.maximum(lanes.temperature, GREEDY_BELOW),
        top_k=jnp.where(lanes.top_k < 1, vocab, jnp.minimum(lanes.top_k, vocab)),
        top_p=lanes.top_p,
        min_p=lanes.min_p,
    )
    blocks = -(-vocab // _LANES)
    noise = _exponentials(lanes.key, lanes.position, _LANES + blocks)
    drawn = lanes.temperature >= GREEDY_BELOW
    filtered = (row.top_k < vocab) | (row.top_p < 1) | (row.min_p > 0)
    done, token = lax.cond(drawn & filtered, _draw_ranked, lambda *_: (~drawn, greedy), row, noise)
    return lax.cond(
        done,
        lambda *_: token,
        lambda row, noise: _draw_any(row, filtered & ~done, noise),
        *(row, noise),
    )


def _draw_ranked(row: _Row, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(whether the filters keep only the first tokens of the ranking, the token drawn if so)."""
    logits, ids = _ranking(row.logits, min(_RANKED, row.logits.size))
    weights = row.weights(logits)
    # What top_p is a share of: without other filters the weight of the whole vocabulary.
    only_top_p = (row.top_k == row.logits.size) & (row.min_p <= 0)
    whole = jnp.where(only_top_p, _total(row.weights(_blocks(row.logits))), jnp.inf)
    enough = (
        (row.top_k <= logits.size)
        | (weights[-1] < row.min_p)
        | (jnp.sum(weights) >= row.top_p * whole)
    )
    return enough, ids[_pick(_keep_ranked(row, weights, whole), noise[: weights.size])]


def _keep_ranked(row: _Row, weights: jax.Array, whole: jax.Array) -> jax.Array:
    """The weights of the first tokens of the ranking, zero for those filtered out.

    whole: the weight that top_p is a share of; inf: that of the tokens which the others leave.
    """
    kept = (jnp.arange(weights.size) < row.top_k) & (weights >= row.min_p)
    weights = jnp.where(kept, weights, 0)
    share = row.top_p * jnp.where(whole < jnp.inf, whole, jnp.sum(weights))
    before = jnp.cumsum(weights) - weights
    return jnp.where((before < share) | (row.top_p >= 1), weights, 0)


def _draw_any(row: _Row, filtered: jax.Array, noise: jax.Array) -> jax.Array:
    """A token drawn from the whole vocabulary: first the lane, then the block."""
    # Where rows go together, both branches run for all: here nothing to search for ends it at once.
    row = row._replace(
        top_k=jnp.where(filtered, row.top_k, row.logits.size),
        top_p=jnp.where(filtered, row.top_p, 1.0),
    )
    weights = row.weights(_blocks(row.logits))
    weights = lax.cond(filtered, _keep_searched, lambda row, weights: weights, row, weights)
    lane = _pick(jnp.sum(weights, axis=0), noise[:_LANES])
    return _pick(weights[:, lane], noise[_LANES:]) * _LANES + lane


def _keep_searched(row: _Row, weights: jax.Array) -> jax.Array:
    """[blocks, _LANES] weights, zero for tokens filtered out; exact for any setting, no sorting."""

    def cut(is_top_p: jax.Array, weights: jax.Array) -> jax.Array:
        every = _total(jnp.where(is_top_p, weights, weights > 0))
        share = jnp.where(is_top_p, row.top_p * every, jnp.minimum(row.top_k, every))
        return jnp.where(share < every, _keep_share(weights, is_top_p, share, every), weights)

    # Below the smallest normal number a weight may compare as zero.
    weights = jnp.where(weights >= jnp.maximum(row.min_p, _TINY), weights, 0)
    # One loop body for top_k and top_p halves what there is to compile.
    return lax.fori_loop(0, 2, lambda step, weights: cut(step == 1, weights), weights)


_TINY = 2.0**-126


def _keep_share(
    weights: jax.Array, by_weight: jax.Array, share: jax.Array, every: jax.Array
) -> jax.Array:
    """The first tokens in the order of weight that add up to `share`; the others' weights zero.

    They add up by weight, or by number when not `by_weight`; `every` is what all add up to. The
    weight at the cut is found by bisection over float bits, until the tokens in question weigh the
    same; of these the first by id are kept.
    """

    def measure(at: jax.Array) -> jax.Array:
        return _total(jnp.where(weights >= at, jnp.where(by_weight, weights, 1), 0))

    def value(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits, jnp.float32)

    def undecided(state: tuple[jax.Array, ...]) -> jax.Array:
        low, high, from_low, from_high = state
        two = 1.5 * jnp.where(by_weight, value(low), 1)  # more than one token, less than two
        return (high - low > 1) & (from_low - from_high > two)

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, from_low, from_high = state
        middle = low + (high - low) // 2
        found = measure(value(middle))
        enough = found >= share
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, found, from_low),
            jnp.where(enough, from_high, found),
        )

    # Tokens from `low` up are enough, those from `high` up are not.
    bounds = lax.bitcast_convert_type(jnp.array([_TINY, 1.0]), jnp.int32)
    start = (
        bounds[0],
        jnp.where(share < every, bounds[1] + 1, bounds[0]),
        every,
        jnp.zeros_like(every),
    )
    low, high, _, from_high = lax.while_loop(undecided, halve, start)

    tied = (weights >= value(low)) & (weights < value(high))
    each = jnp.where(by_weight, jnp.max(jnp.where(tied, weights, 0)), 1)
    count = jnp.maximum(jnp.ceil((share - from_high) / jnp.maximum(each, _TINY)), 1)
    return jnp.where((weights >= value(high)) | _first_of(tied, count), weights, 0)


def _first_of(flags: jax.Array, count: jax.Array) -> jax.Array:
    """[blocks, _LANES] flags without those after the first `count`."""
    ids = lax.broadcasted_iota(jnp.int32, flags.shape, 0) * _LANES
    ids += lax.broadcasted_iota(jnp.int32, flags.shape, 1)

    def number(end: jax.Array) -> jax.Array:
        return _total(jnp.where(flags & (ids < end), 1.0, 0.0))

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        fits = number(middle) <= count
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    everything = jnp.asarray(flags.size)
    start = jnp.where(number(everything) <= count, everything, 0), everything
    end, _ = lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, start)
    return flags & (ids < end)


def _total(weights: jax.Array) -> jax.Array:
    """Sum over [blocks, _LANES]: the long axis first, which vectorises."""
    return jnp.sum(jnp.sum(weights, axis=0))


def _pick(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """Index i of [n] with probability weights[i] / sum(weights), of noise float32[n] from Exp(1).

    The first arrival of a race of Poisson processes (the Gumbel-max trick without logarithms).
    Inverting the cumulative sum would do with one random number, but the rounding of logits moves
    all of its many boundaries: there one seeded token in ten thousand can depend on the batch.
    """
    score = weights / noise
    places = jnp.arange(weights.size, dtype=jnp.int32)
    return jnp.min(jnp.where(score == jnp.max(score), places, weights.size - 1))
