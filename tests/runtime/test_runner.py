"""What the device side promises: everything compiled before ready, pools updated in place, memory
known, and a compile while serving made loud."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from jaxserve.config import ConfigError
from jaxserve.runtime.calibrate import prompt_plan
from jaxserve.runtime.compiles import CompileCounter, CompiledWhileServing
from jaxserve.runtime.runner import StepResult, resolve_dtype
from scheduler.plan import DROPPED, BatchPlan, PlanKey, plan_layout
from scheduler.stats import Stats
from scheduler.step import Step
from scheduler.tiers import PageCopies

SMALL = {"num_pages": 40, "page_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM], tiny_llama: str) -> LLM:
    return make_llm(tiny_llama, **SMALL)


def test_every_key_of_the_grid_is_compiled(llm: LLM) -> None:
    assert set(llm.runner.executables) == set(llm.runner.grid.keys())
    assert llm.stats.compilations["warmup"] > 0
    assert llm.stats.compilations["serving"] == 0


def test_pools_and_last_tokens_are_updated_in_place(llm: LLM) -> None:
    """memory_analysis(): every donated byte is aliased, and nothing near a pool is temporary."""
    for key, executable in llm.runner.executables.items():
        memory = executable.memory
        assert memory.aliased == memory.donated, str(key)
        assert memory.donated == llm.runner.memory.pool + 4 * 4
    # float32, two layers, 41 pages (one is reserved) of K and V of 2 heads x 8 tokens x 8
    config = llm.runner.model.config
    page = 2 * config.num_kv_heads * 8 * config.head_dim * 4
    assert llm.runner.memory.pool == config.num_layers * 41 * page


def test_the_temporary_does_not_grow_with_the_pool(
    make_llm: Callable[..., LLM], tiny_llama: str, llm: LLM
) -> None:
    large = make_llm(tiny_llama, **SMALL | {"num_pages": 4000})
    assert large.runner.memory.pool > 90 * llm.runner.memory.pool
    assert large.runner.memory.temp == llm.runner.memory.temp


def test_the_host_tier_is_part_of_the_proof_and_can_be_off(
    make_llm: Callable[..., LLM], tiny_llama: str, llm: LLM
) -> None:
    """By default as many host pages as the pool has; its own page 0 is the one more."""
    memory = llm.runner.memory
    assert llm.scheduler.config.num_host_pages == 40
    assert memory.host == memory.pool // 41 * 40
    assert memory.host_limit == memory.limit - memory.total
    off = make_llm(tiny_llama, **SMALL, num_host_pages=0)
    assert off.runner.memory.host == 0
    assert off.runner.memory.temp < memory.temp
    assert not off.runner.costs.prefers_swap(1, page_size=8)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = [[5, 6, 7], [8, 9]]
    assert texts(off.generate(prompts, params)) == texts(llm.generate(prompts, params))


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_costs_are_measured_without_a_trace(make_llm: Callable[..., LLM], tiny_llama: str) -> None:
    runner = make_llm(tiny_llama, **SMALL).runner
    costs = runner.costs
    assert all(0 < value < 1 for value in (costs.copy_out, costs.copy_back, costs.prefill))
    assert 0 <= costs.copy_base < 1
    assert not any(np.asarray(pool).any() for pool in runner._state.pools)
    assert not np.asarray(runner._state.last_tokens).any()


def test_the_plan_that_is_measured_is_full() -> None:
    key = PlanKey("mixed", tokens=64, rows=8, pages=3)
    plan, tokens = prompt_plan(key, page_size=8)  # rows are at most 24 tokens long
    view = plan_layout(key).views(plan)
    assert tokens == 48
    assert view["query_len"].tolist() == view["context_len"].tolist() == [24] * 2 + [0] * 6
    assert view["query_start"][:2].tolist() == [0, 24]
    assert view["positions"].tolist() == [*range(24), *range(24)] + [0] * 16
    assert (view["write_index"] == DROPPED).all()
    assert (view["sample_slot"] == DROPPED).all()
    wide = PlanKey("mixed", tokens=64, rows=8, pages=100)
    assert prompt_plan(wide, page_size=8)[1] == 64


def test_a_step_finds_what_its_copies_brought(
    make_llm: Callable[..., LLM], tiny_llama: str
) -> None:
    """Pages 1 and 2 hold a prompt. One step copies them out and overwrites them with another
    prompt; the next brings them back elsewhere, and reads them there."""
    runner = make_llm(tiny_llama, **SMALL).runner

    def prompt(ids: list[int], copies: PageCopies) -> StepResult:
        key = runner.grid.mixed_key(len(ids), 1)
        plan = plan_layout(key).blank.copy()
        view = plan_layout(key).views(plan)
        view["token_ids"][: len(ids)] = ids
        view["positions"][: len(ids)] = range(len(ids))
        view["write_index"][: len(ids)] = np.arange(len(ids)) + 8  # page 1 starts at 8
        view["query_len"][0] = view["context_len"][0] = len(ids)
        view["block_tables"][0, :2] = 1, 2
        return runner.submit(Step(BatchPlan(key, plan, len(ids), 1), (), copies=copies)).result()

    def follow(token: int, tables: tuple[int, int], copies: PageCopies) -> StepResult:
        """The token after a prompt of 12, which lies in these pages."""
        key = runner.grid.decode_key(1, 1)
        plan = plan_layout(key).blank.copy()
        view = plan_layout(key).views(plan)
        view["token_ids"][0], view["positions"][0] = token, 12
        view["query_len"][0], view["context_len"][0] = 1, 13
        view["write_index"][0] = tables[1] * 8 + 4
        view["block_tables"][0, :2] = tables
        view["num_logprobs"][0] = 5
        step = Step(
            BatchPlan(key, plan, 1, 1), (), copies=copies, use_sampler=True, wants_logprobs=True
        )
        return runner.submit(step).result()

    random = np.random.default_rng(3)
    first, second = random.integers(3, 100, (2, 12)).tolist()
    prompt(first, PageCopies())
    expected = follow(9, (1, 2), PageCopies())
    prompt(second, PageCopies(out=((1, 0), (2, 1))))
    other = follow(9, (1, 2), PageCopies())
    returned = follow(9, (6, 5), PageCopies(back=((0, 6), (1, 5))))
    assert expected.top_logprobs is not None
    assert returned.top_logprobs is not None
    assert other.top_logprobs is not None
    np.testing.assert_array_equal(returned.top_logprobs[0], expected.top_logprobs[0])
    assert (other.top_logprobs[0, :5] != expected.top_logprobs[0, :5]).any()


def test_no_option_compiles_anything(llm: LLM) -> None:
    """vllm PR#15309: sampler options are data; strict mode would raise here."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, seed=1, max_tokens=4),
        SamplingParams(temperature=1e-5, top_p=1e-4, max_tokens=2),
        SamplingParams(logprobs=20, max_tokens=3),
        SamplingParams(logprobs=0, max_tokens=3),
        SamplingParams(min_tokens=4, max_tokens=9, stop=["a"], stop_token_ids=[4, 5]),
        SamplingParams(n=3, max_tokens=2),
    ]
    for length in range(1, 90, 8):
        llm.generate([[7] * length] * len(params), params)
    assert llm.stats.compilations["serving"] == 0


def test_a_compile_on_the_serving_path_raises_in_strict_mode() -> None:
    stats = Stats()
    counter = CompileCounter(stats.compilations, strict=True)
    try:
        with counter.phase("warmup"):
            jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)).block_until_ready()
        assert stats.compilations["warmup"] >= 1
        with pytest.raises(CompiledWhileServing, match="lambda"), counter.phase("serving"):
            jax.jit(lambda x: x * 5 - 2)(jnp.ones(11)).block_until_ready()
        jax.jit(lambda x: x * 7 - 2)(jnp.ones(13)).block_until_ready()  # not ours
    finally:
        counter.close()
    assert stats.compilations["serving"] >= 1


def test_reset_forgets_the_cache_and_answers_stay_the_same(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    before = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    llm.runner.reset()
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == before


def test_a_pool_beyond_memory_is_refused_before_it_is_allocated(
    make_llm: Callable[..., LLM], tiny_llama: str
) -> None:
    with pytest.raises(ConfigError, match=r"num_pages: 1000000000 pages .* exceed"):
        make_llm(tiny_llama, num_pages=10**9)


def test_a_context_beyond_the_model_is_refused(
    make_llm: Callable[..., LLM], tiny_llama: str
) -> None:
    with pytest.raises(ConfigError, match="max_model_len: must be at most the model's context"):
        make_llm(tiny_llama, max_model_len=100_000)


def test_dtypes() -> None:
    assert resolve_dtype("float32", "cpu") == np.float32
    assert resolve_dtype("bfloat16", "cpu") == jnp.bfloat16
    assert resolve_dtype("auto", "gpu") == jnp.bfloat16
