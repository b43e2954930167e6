"""What the device side promises: everything compiled before ready, pools updated in place, memory
known, and a compile while serving made loud."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import ConfigError
from jaxserve.runtime.compiles import CompileCounter, CompiledWhileServing
from jaxserve.runtime.runner import resolve_dtype
from scheduler.stats import Stats

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
