"""The table PlanKey -> compiled step. Built ahead of time; a key that is not in it is a bug, not a
compile.

A step is a chain of compiled stages, not one program, because compile time is start-up time: a
group of layers is compiled once and run for every group, and the sampler, which depends on the rows
alone, is shared by all keys and runs only when a row needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.runtime.compiles import CompileCounter
from jaxserve.runtime.sampling import Sampled
from jaxserve.runtime.step import SamplerInput, Stages, sampler, sampler_lanes
from jaxserve.runtime.weights import Progress, Weights
from scheduler.plan import PlanKey, plan_layout

COMPILE_THREADS = 2  # tracing holds the interpreter lock, so more would not help


class DeviceState(NamedTuple):
    """Donated to each step and replaced by what it returns. Arrays, or ShapeDtypeStructs of
    them."""

    pools: tuple[Any, ...]  # one array a layer: [pages, 2, kv_heads, page_size, head_dim]
    last_tokens: Any  # int32[slots]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the compiler says of one step, in bytes; of its stages the largest, or all where they
    add up."""

    temp: int  # largest of a stage, with the arrays that are handed on
    aliased: int  # pools and last tokens that are updated in place
    donated: int  # what should be


@dataclass(frozen=True, slots=True)
class Executable:
    """A compiled step: stages, and how many layers each `layers` call takes."""

    front: Callable[..., Any]
    groups: tuple[tuple[Callable[..., Any], slice], ...]
    back: Callable[..., Any]
    compile_seconds: float
    memory: StepMemory

    def run(
        self,
        weights: Weights,
        state: DeviceState,
        plan: jax.Array,
        sampler: Sampler | None,
    ) -> tuple[DeviceState, jax.Array, Sampled | None]:
        """(new state, tokens int32[rows], what the sampler reports). Returns before the device is
        done. Without a sampler every row is greedy."""
        hidden, shared = self.front(weights.decoder, state.last_tokens, plan)
        pools: list[jax.Array] = []
        for layers, part in self.groups:
            written, hidden = layers(weights.layers[part], state.pools[part], hidden, shared)
            pools += written
        last_tokens, tokens, logits, lanes = self.back(
            weights.decoder, hidden, state.last_tokens, plan
        )
        sampled = None
        if sampler is not None:
            last_tokens, sampled = sampler.run(logits, last_tokens, lanes)
            tokens = sampled.tokens
        return DeviceState(tuple(pools), last_tokens), tokens, sampled


@dataclass(frozen=True, slots=True)
class Stage:
    """A compiled function. Called with other shapes or dtypes it raises."""

    run: Callable[..., Any]
    results: Any  # ShapeDtypeStructs
    temp: int  # bytes, with the results that are not donated arguments
    aliased: int


def compile_stage(
    function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> Stage:
    lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not say what memory a program needs"
    return Stage(
        compiled,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info),
        memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.alias_size_in_bytes,
    )


def compile_step(stages: Stages, weights: Weights, state: DeviceState, group: int) -> Executable:
    """Compile every stage for arguments of these (abstract) shapes, the layers `group` at a
    time."""
    start = time.perf_counter()
    plan = jax.ShapeDtypeStruct((plan_layout(stages.key).size,), "int32")
    front = compile_stage(stages.front, weights.decoder, state.last_tokens, plan)
    hidden, shared = front.results
    by_size: dict[int, Stage] = {}
    groups: list[tuple[Stage, slice]] = []
    for first in range(0, len(weights.layers), group):
        part = slice(first, min(first + group, len(weights.layers)))
        size = part.stop - part.start
        if size not in by_size:
            arguments = (weights.layers[part], state.pools[part], hidden, shared)
            by_size[size] = compile_stage(stages.layers, *arguments, donate=(1, 2))
        groups.append((by_size[size], part))
    back = compile_stage(stages.back, weights.decoder, hidden, state.last_tokens, plan, donate=(2,))
    return Executable(
        front=front.run,
        groups=tuple((stage.run, part) for stage, part in groups),
        back=back.run,
        compile_seconds=time.perf_counter() - start,
        memory=StepMemory(
            temp=max(stage.temp for stage in (front, back, *by_size.values())),
            aliased=sum(stage.aliased - num_bytes(hidden) for stage, _ in groups) + back.aliased,
            donated=num_bytes(state),
        ),
    )


@dataclass(frozen=True, slots=True)
class Sampler:
    """A compiled sampler: (logits float32[rows, vocab], last_tokens, lanes) -> (last_tokens,
    sampled)."""

    run: Callable[..., tuple[jax.Array, Sampled]]
    rows: int
    temp: int  # bytes


def compile_sampler(rows: int, vocab_size: int, last_tokens: Any) -> Sampler:
    """The sampler for this many rows."""
    logits, lanes = _sampler_input(rows, vocab_size)
    stage = compile_stage(sampler, logits, last_tokens, lanes, donate=(1,))
    return Sampler(stage.run, rows, stage.temp)


def widen_sampler(wide: Sampler, rows: int, vocab_size: int) -> Sampler:
    """A sampler of fewer rows out of a wider one: what is missing is filled with greedy rows that
    are stored nowhere."""
    if rows == wide.rows:
        return wide
    logits, lanes = _sampler_input(rows, vocab_size)
    padding = {lane.name: lane.padding for lane in plan_layout(PlanKey("decode", 1, 1, 1)).lanes}

    def widen(logits: jax.Array, lanes: SamplerInput) -> tuple[jax.Array, SamplerInput]:
        def pad(array: jax.Array, value: float) -> jax.Array:
            widths = [(0, wide.rows - rows)] + [(0, 0)] * (array.ndim - 1)
            return jnp.pad(array, widths, constant_values=value)

        return pad(logits, 0), {name: pad(a, padding.get(name, 0)) for name, a in lanes.items()}

    stage = compile_stage(widen, logits, lanes)

    def run(
        logits: jax.Array, last_tokens: jax.Array, lanes: SamplerInput
    ) -> tuple[jax.Array, Sampled]:
        logits, lanes = stage.run(logits, lanes)
        return wide.run(logits, last_tokens, lanes)

    return Sampler(run, rows, wide.temp + stage.temp)


def _sampler_input(rows: int, vocab_size: int) -> tuple[Any, SamplerInput]:
    lanes = {
        lane.name: jax.ShapeDtypeStruct(lane.shape, lane.dtype)
        for lane in plan_layout(PlanKey("decode", rows, rows, 1)).lanes
    }
    return jax.ShapeDtypeStruct((rows, vocab_size), "float32"), sampler_lanes(lanes)


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def run_jobs[Name: Hashable, Result](
    jobs: Mapping[Name, Callable[[], Result]], counter: CompileCounter, progress: Progress
) -> dict[Name, Result]:
    """Run compile jobs on a few threads, counted as warm-up."""

    def counted(job: Callable[[], Result]) -> Result:
        with counter.phase("warmup"):
            return job()

    done: dict[Name, Result] = {}
    progress("compile", 0, len(jobs), "")
    with ThreadPoolExecutor(COMPILE_THREADS, "compile") as threads:
        futures = {threads.submit(counted, job): name for name, job in jobs.items()}
        try:
            for future in as_completed(futures):
                name = futures[future]
                done[name] = future.result()
                progress("compile", len(done), len(jobs), str(name))
        finally:  # after an error nobody waits for the rest
            threads.shutdown(wait=False, cancel_futures=True)
    return done
