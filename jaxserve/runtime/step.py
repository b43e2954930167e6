"""The model's step over a plan, as stages that are traced once per PlanKey.

Everything that differs between requests is data in the plan, so that the key alone selects a
program. Stages: `front` (ids to hidden states, and what attention prepares), `layers` (a group of
layers), `back` (logits and the greedy token); and, run only if a row wants more than that,
`sampler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.models.rope import inverse_frequencies, rope_angles
from jaxserve.runtime.sampling import Sampled, first_maximum, sample
from jaxserve.runtime.weights import ModelDef
from pallas_kernels.dispatch import AttentionImpl, PagedBatch
from scheduler.plan import PlanKey, plan_layout

SamplerInput = Mapping[str, jax.Array]  # lanes of the plan, [rows, ...]

_SAMPLER_LANES = (
    "sample_slot",
    "context_len",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "key",
    "suppressed",
    "num_logprobs",
)


class Shared(NamedTuple):
    """What every layer reads of a step."""

    rope: tuple[jax.Array, jax.Array]  # cos and sin, float32[tokens, head_dim / 2]
    batch: PagedBatch
    prepared: Any  # the attention implementation's own


@dataclass(frozen=True)
class Stages:
    """The stages of one PlanKey. Arrays: plan int32[words], last_tokens int32[slots] (the last
    token sampled for each slot), hidden [tokens, hidden], pools one a layer, logits float32[rows,
    vocab]."""

    key: PlanKey
    model: ModelDef
    attention: AttentionImpl

    def _lanes(self, plan: jax.Array) -> Mapping[str, jax.Array]:
        return plan_layout(self.key).unpack(plan, jax.lax.bitcast_convert_type)

    def front(
        self, decoder_leaves: tuple[jax.Array, ...], last_tokens: jax.Array, plan: jax.Array
    ) -> tuple[jax.Array, Shared]:
        """Resolve placeholders, look embeddings up, prepare attention."""
        lanes, config = self._lanes(plan), self.model.config
        decode = self.key.kind == "decode"
        batch = PagedBatch(
            positions=lanes["positions"],
            write_index=lanes["write_index"],
            query_start=jnp.arange(self.key.rows) if decode else lanes["query_start"],
            query_len=lanes["query_len"],
            context_len=lanes["context_len"],
            block_tables=lanes["block_tables"],
        )
        ids = lanes["token_ids"]
        ids = jnp.where(ids < 0, last_tokens[jnp.maximum(-ids - 1, 0)], ids)
        hidden = self.model.decoder.bind(decoder_leaves).embed(ids)
        inverse = inverse_frequencies(config.rope, config.head_dim)
        return hidden, Shared(
            rope_angles(inverse, batch.positions),
            batch,
            self.attention.prepare(batch, decode=decode),
        )

    def layers(
        self,
        layer_leaves: tuple[tuple[jax.Array, ...], ...],
        pools: tuple[jax.Array, ...],
        hidden: jax.Array,
        shared: Shared,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Run a group of layers, each over its own pool."""
        scale = self.model.config.head_dim**-0.5

        def attend(
            pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            pool = self.attention.write(pool, k, v, shared.batch, 0)
            out = self.attention.attend(q, pool, shared.batch, shared.prepared, 0, scale)
            return pool, out

        written: list[jax.Array] = []
        for leaves, pool in zip(layer_leaves, pools, strict=True):
            pool, hidden = self.model.layer.bind(leaves)(hidden, shared.rope, pool, attend)
            written.append(pool)
        return tuple(written), hidden

    def back(
        self,
        decoder_leaves: tuple[jax.Array, ...],
        hidden: jax.Array,
        last_tokens: jax.Array,
        plan: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, SamplerInput]:
        """Each row's last token goes through the head: (last_tokens, greedy tokens, logits, the
        rest that the sampler wants)."""
        lanes = self._lanes(plan)
        if self.key.kind == "mixed":
            hidden = hidden[jnp.maximum(lanes["query_start"] + lanes["query_len"] - 1, 0)]
        logits = self.model.decoder.bind(decoder_leaves).logits(hidden)
        tokens = first_maximum(logits)
        return _store(last_tokens, lanes, tokens), tokens, logits, sampler_lanes(lanes)


def sampler_lanes(lanes: Mapping[str, Any]) -> dict[str, Any]:
    """What `sampler` reads of a plan."""
    wanted = {name: lanes[name] for name in _SAMPLER_LANES}
    wanted["position"] = wanted.pop("context_len")  # of the token to be sampled
    return wanted


def sampler(
    logits: jax.Array, last_tokens: jax.Array, lanes: SamplerInput
) -> tuple[jax.Array, Sampled]:
    """Replace the greedy tokens by what each row's parameters ask for. Depends on the rows
    alone."""
    sampled = sample(logits, lanes)
    return _store(last_tokens, lanes, sampled.tokens), sampled


def _store(last_tokens: jax.Array, lanes: SamplerInput, tokens: jax.Array) -> jax.Array:
    return last_tokens.at[lanes["sample_slot"]].set(tokens, mode="drop")
