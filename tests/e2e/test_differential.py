"""The strongest test of the project: 24 mixed requests give, token for token, what each gives
alone.

Greedy and seeded in float32, for chunk sizes, token budgets, bucket settings, page sizes,
lookahead, streaming, prefix hits, queue orders, admission rules, and a pool so small that rows must
be preempted, by swapping and by computing again. Everything that is new joins this matrix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, RequestOptions, RequestOutput, SamplingParams
from scheduler.preemption import PreemptionCosts
from scheduler.request import Request

Case = tuple[list[int], SamplingParams]

BASE: dict[str, Any] = {
    "num_pages": 128,
    "page_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "row_buckets": "pow2",
    "token_buckets": "single",
}
# one full-length sequence and little more, and a rule that lets too many in
SMALL_POOL = {"num_pages": 16, "admission": "fits", "num_host_pages": 0}
SWAP = {"num_host_pages": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "no lookahead": {"lookahead": False},
    "chunks of 3": {"max_chunk_tokens": 3},
    "chunks of 1": {"max_chunk_tokens": 1},
    "budget 8": {"max_num_batched_tokens": 8},
    "budget below rows": {"max_num_batched_tokens": 5},
    "single row buckets": {"row_buckets": "single"},
    "pow2 token and page buckets": {"token_buckets": "pow2", "page_buckets": "pow2"},
    "pages of 1": {"page_size": 1, "num_pages": 1024},
    "pages of 16": {"page_size": 16, "num_pages": 64},
    "small pool": SMALL_POOL,
    "small pool, no lookahead": SMALL_POOL | {"lookahead": False},
    "small pool, chunks of 5": SMALL_POOL | {"max_chunk_tokens": 5},
    "small pool of single tokens": SMALL_POOL | {"page_size": 1, "num_pages": 128},
    "small pool, swap": SMALL_POOL | SWAP,
    "small pool, swap, no lookahead": SMALL_POOL | SWAP | {"lookahead": False},
    "small pool, swap, no prefix cache": SMALL_POOL | SWAP | {"prefix_cache": False},
    "small pool, swap to a host of 5 pages": SMALL_POOL | {"num_host_pages": 5},
    "small pool, swap, pages of 4": SMALL_POOL | SWAP | {"page_size": 4, "num_pages": 32},
    "small pool, statistical admission": SMALL_POOL | {"admission": "statistical"},
    "small pool, reserve-max admission": SMALL_POOL | {"admission": "reserve-max"},
    "priorities": SMALL_POOL | SWAP | {"policy": "priority"},
    "shortest first": SMALL_POOL | {"policy": "shortest"},
    "fair": SMALL_POOL | {"policy": "fair"},
    "no prefix cache": {"prefix_cache": False},
}


def mixed_cases(vocab_size: int) -> list[Case]:
    """24 requests: prompts of 1 to 90 tokens, 1 to 40 out, greedy and sampled, with and without
    stops."""
    rng = np.random.default_rng(7)
    cases: list[Case] = []
    for i in range(24):
        length = int(rng.choice([1, 2, 7, 8, 9, 16, 30, 64, 90]))
        options: dict[str, Any] = {"max_tokens": int(rng.integers(1, 41)), "temperature": 0.0}
        if i % 3 == 1:
            options |= {"temperature": 0.9, "seed": i, "top_p": 0.9, "top_k": 40}
        if i % 6 == 4:
            options |= {"min_p": 0.05, "top_p": 1.0, "top_k": 0}
        if i % 4 == 2:
            options |= {"logprobs": 3}
        if i % 5 == 0:
            options |= {"ignore_eos": True}
        if i % 8 == 3 and i % 7 != 5:
            options |= {"min_tokens": options["max_tokens"] // 2}
        if i % 7 == 5:
            options |= {"stop_token_ids": rng.integers(3, vocab_size, 40).tolist()}
        if i % 12 == 7:
            options |= {"stop": ["e", "the"]}
        if i % 12 == 11:
            options |= {"n": 2, "temperature": 1.2, "seed": 5}
        prompt = rng.integers(3, vocab_size, length)
        if i % 4 == 1:  # documents that begin alike
            prompt[:30] = np.random.default_rng(i % 8).integers(3, vocab_size, 30)[:length]
        cases.append((prompt.tolist(), SamplingParams(**options)))
    return cases


def essence(output: RequestOutput) -> list[tuple[Any, ...]]:
    """What must be equal: ids, text, why it ended, and which ids were likeliest."""
    return [
        (
            choice.token_ids,
            choice.text,
            choice.finish_reason,
            choice.stop_reason,
            None if choice.logprobs is None else [list(entry) for entry in choice.logprobs],
        )
        for choice in output.outputs
    ]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return mixed_cases(320)


@pytest.fixture(scope="module")
def alone(make_llm: Callable[..., LLM], tiny_llama: str, cases: list[Case]) -> list[Any]:
    """Each request by itself, in an engine that has never seen another one running."""
    llm = make_llm(tiny_llama, **BASE | {"lookahead": False})
    return [essence(llm.generate([prompt], params)[0]) for prompt, params in cases]


def test_the_cases_are_worth_it(alone: list[Any]) -> None:
    reasons = [choice[2] for choices in alone for choice in choices]
    assert reasons.count("stop") >= 3
    assert reasons.count("length") >= 10
    lengths = {len(choice[0]) for choices in alone for choice in choices}
    assert len(lengths) >= 10
    sampled = [choices[0][0] for choices in alone]
    assert len({tuple(ids) for ids in sampled}) > 20


@pytest.mark.parametrize("variant", VARIANTS)
def test_batched_equals_alone(
    make_llm: Callable[..., LLM],
    tiny_llama: str,
    cases: list[Case],
    alone: list[Any],
    variant: str,
) -> None:
    llm = make_llm(tiny_llama, **BASE | VARIANTS[variant])
    llm.scheduler.cache.costs = (
        PreemptionCosts()
    )  # whatever this machine's: swap where there is room
    options = [options_of(i, llm.config.policy) for i in range(len(cases))]
    outputs = llm.generate(
        [prompt for prompt, _ in cases], [params for _, params in cases], options
    )
    for i, (output, expected) in enumerate(zip(outputs, alone, strict=True)):
        assert essence(output) == expected, f"request {i}"
    llm.scheduler.check_invariants()
    stats = llm.stats
    assert stats.pages_held == stats.host_pages["held"] == 0
    assert stats.compilations["serving"] == 0
    if "num_pages" not in VARIANTS[variant]:  # in a small pool a prefix may be gone when asked for
        assert (stats.prefix_tokens["hit"] > 0) == llm.config.prefix_cache
    if llm.config.admission == "fits":
        assert sum(stats.preemptions.values()) > 0
    if "swap" in variant:
        assert stats.preemptions["swap"] > 0
        assert stats.pages_copied["out"] > 0
        assert stats.pages_copied["back"] > 0
    llm.close()


def options_of(i: int, policy: str) -> RequestOptions:
    return RequestOptions(
        priority=i % 3 if policy == "priority" else 0,
        tenant="abc"[i % 3],
        cache_salt="x" if i % 8 == 1 else "",
    )


def test_streamed_equals_alone(
    make_llm: Callable[..., LLM], tiny_llama: str, cases: list[Case], alone: list[Any]
) -> None:
    """Eight streams open at once, read in turn, joined delta by delta."""
    llm = make_llm(tiny_llama, **BASE)
    single = [i for i, (_, params) in enumerate(cases) if params.n == 1][:8]
    streams = {i: llm.stream(*cases[i]) for i in single}
    texts = dict.fromkeys(single, "")
    ids: dict[int, list[int]] = {i: [] for i in single}
    reasons: dict[int, str | None] = {}
    while streams:
        for i, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[i]
                continue
            texts[i] += delta.text
            ids[i] += delta.token_ids
            reasons[i] = delta.finish_reason
    for i in single:
        assert (ids[i], texts[i], reasons[i]) == alone[i][0][:3]


@pytest.fixture(scope="module")
def under_pressure(make_llm: Callable[..., LLM], tiny_llama: str) -> Iterator[LLM]:
    """A small pool with a small host beside it, and priorities."""
    llm = make_llm(tiny_llama, **BASE | SMALL_POOL | {"policy": "priority", "num_host_pages": 20})
    llm.scheduler.cache.costs = PreemptionCosts()
    yield llm
    llm.close()


@pytest.mark.parametrize("seed", range(20))
def test_arrivals_and_aborts_between_steps(
    under_pressure: LLM, cases: list[Case], alone: list[Any], seed: int
) -> None:
    """Requests join at random steps and every third is aborted in whatever state it is: waiting, in
    its prompt, decoding, swapped out or coming back. The others don't notice. Ten times as many
    such schedules run in tests/scheduler/test_random_schedules.py, without a model."""
    llm, rng = under_pressure, np.random.default_rng(seed)
    engine = llm._engine
    ended_before = sum(llm.stats.finished.values())
    chosen = [i for i, (_, params) in enumerate(cases) if params.n == 1]
    rng.shuffle(chosen)
    pending, doomed = list(chosen), {i for i in chosen if i % 3 == seed % 3}
    made: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    while pending or engine.has_work:
        while pending and rng.random() < 0.3:
            i = pending.pop()
            options = options_of(int(rng.integers(24)), "priority")
            requests: list[Request] = engine.requests(
                f"{i}-{seed}", *cases[i], time.monotonic(), options
            )
            engine.add(requests[0])
            made[requests[0].request_id] = []
        for name in list(made):
            if int(name.split("-")[0]) in doomed and name not in ended and rng.random() < 0.1:
                engine.abort(name)
        for delta in engine.step():
            made[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                assert delta.request_id not in ended
                ended[delta.request_id] = delta.finish_reason
        engine.scheduler.check_invariants()
    assert len(ended) == len(chosen)
    assert "abort" in ended.values()
    for i in chosen:
        expected = alone[i][0][0]
        name = f"{i}-{seed}-0"
        tokens = made[name]
        if ended[name] == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    assert llm.stats.pages_held == llm.stats.host_pages["held"] == 0
    assert sum(llm.stats.finished.values()) == ended_before + len(chosen)


def test_the_pressure_was_real(under_pressure: LLM) -> None:
    stats = under_pressure.stats
    assert stats.preemptions["swap"] > 20
    assert stats.pages_copied["back"] > 20
    assert stats.prefix_tokens["hit"] > 0
    assert stats.prefix_tokens["hit_host"] > 0
    assert stats.compilations["serving"] == 0


@pytest.mark.parametrize(
    "settings", [{}, {"num_pages": 14, "max_chunk_tokens": 40, "admission": "fits"}]
)
def test_smollm2_batched_equals_alone(
    make_llm: Callable[..., LLM], settings: dict[str, Any]
) -> None:
    """The real model, 8 real texts of 1 to 130 tokens; the second time under preemption."""
    base = {"num_pages": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    base |= {"row_buckets": "single", "token_buckets": "single"}
    llm = make_llm(**base | settings)
    text = "The quick brown fox jumps over the lazy dog, and then it rests. " * 14
    prompts = [text[: 3 + 65 * i] for i in range(8)]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=16 + i)
        for i in range(8)
    ]
    together = llm.generate(prompts, params)
    preemptions = sum(llm.stats.preemptions.values())
    for prompt, param, output in zip(prompts, params, together, strict=True):
        assert essence(llm.generate([prompt], param)[0]) == essence(output)
    assert (preemptions > 0) == ("num_pages" in settings)
    llm.scheduler.check_invariants()
