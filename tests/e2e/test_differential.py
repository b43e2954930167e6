"""The strongest test of the project: 24 mixed requests give, token for token, what each gives
alone.

Greedy and seeded in float32, for chunk sizes, token budgets, bucket settings, page sizes,
lookahead, streaming, and a pool so small that preemption must happen. Everything that is new joins
this matrix.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
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
SMALL_POOL = {"num_pages": 16}  # one full-length sequence, and little more
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
    "small pool of single tokens": {"page_size": 1, "num_pages": 128},
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
        cases.append((rng.integers(3, vocab_size, length).tolist(), SamplingParams(**options)))
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
    outputs = llm.generate([prompt for prompt, _ in cases], [params for _, params in cases])
    for i, (output, expected) in enumerate(zip(outputs, alone, strict=True)):
        assert essence(output) == expected, f"request {i}"
    llm.scheduler.check_invariants()
    assert llm.stats.pages_free == llm.config.num_pages
    assert llm.stats.compilations["serving"] == 0
    if "small pool" in variant:
        assert llm.stats.preemptions["recompute"] > 0
    llm.close()


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


def test_arrivals_and_aborts_between_steps(
    make_llm: Callable[..., LLM], tiny_llama: str, cases: list[Case], alone: list[Any]
) -> None:
    """Requests join at random steps and every third is aborted in whatever state it is; the others
    don't notice. With a small pool, so that aborts also hit rows that wait after preemption."""
    llm = make_llm(tiny_llama, **BASE | SMALL_POOL)
    engine, rng = llm._engine, np.random.default_rng(3)
    chosen = [i for i, (_, params) in enumerate(cases) if params.n == 1]
    pending, doomed = list(chosen), {i for i in chosen if i % 3 == 0}
    made: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    while pending or engine.has_work:
        while pending and rng.random() < 0.3:
            i = pending.pop()
            prompt, params = cases[i]
            requests: list[Request] = engine.requests(str(i), prompt, params, time.monotonic())
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
        tokens = made[f"{i}-0"]
        if ended[f"{i}-0"] == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    assert llm.stats.pages_held == 0
    assert sum(llm.stats.finished.values()) == len(chosen)


@pytest.mark.parametrize("settings", [{}, {"num_pages": 14, "max_chunk_tokens": 40}])
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
    preemptions = llm.stats.preemptions["recompute"]
    for prompt, param, output in zip(prompts, params, together, strict=True):
        assert essence(llm.generate([prompt], param)[0]) == essence(output)
    assert (preemptions > 0) == ("num_pages" in settings)
    llm.scheduler.check_invariants()
