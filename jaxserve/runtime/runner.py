"""Runner: owns the device state (weights, KV pools, last tokens) and runs one plan after another on
it.

Donated arrays are re-bound in the same statement that donates them, so no donated array is ever
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.models.linear import select_linear
from jaxserve.runtime.calibrate import copy_costs, no_copies, prefill_cost
from jaxserve.runtime.compiles import CompileCounter
from jaxserve.runtime.executables import (
    DeviceState,
    Executable,
    Sampler,
    compile_sampler,
    compile_step,
    num_bytes,
    run_jobs,
    widen_sampler,
)
from jaxserve.runtime.memory import (
    Device,
    MemoryReport,
    cpu_has_bfloat16,
    host_limit,
    memory_limit,
    size_tiers,
)
from jaxserve.runtime.sampling import Sampled
from jaxserve.runtime.step import Stages
from jaxserve.runtime.transfer import CopyProgram, PageTransfer, compile_copies
from jaxserve.runtime.weights import ModelDef, Progress, load_weights
from jaxserve.weights.checkpoint import Checkpoint
from pallas_kernels.dispatch import AttentionImpl, LayoutError, PageLayout, select
from scheduler.buckets import BUCKET_STRATEGIES, BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.plan import Kind, PlanKey
from scheduler.preemption import PreemptionCosts
from scheduler.stats import Stats
from scheduler.step import Step

# A step of 32 calls keeps the host busy and fills XLA:CPU's queue of 32 (2 rows of SmolLM2: 41 ms
# with single layers, 37 with six), but each further layer of a program adds to the time to compile
# it.
LAYERS_PER_CALL_ON_CPU: dict[Kind, int] = {"decode": 6, "mixed": 3}
FEW_ROWS = 8  # rows of the smaller sampler
# Pages that one call copies: every page costs a call 0.1 ms and more, unless it shares it. On
# XLA:CPU 16 at once take as long as one after the other. (4 or 8 would take five times as long to
# compile as 16, because XLA unrolls so few.)
PAGES_PER_COPY_ON_CPU = (1,)
PAGES_PER_COPY = (1, 16)
COPIED_PAGES = 16  # of the longest copy that is measured


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's samples on the host, in row order (see jaxserve.runtime.sampling.Sampled).

    The logprob arrays are None unless a row of the step asked for them.
    """

    tokens: np.ndarray  # int32[rows]
    logprob: np.ndarray | None = None  # float32[rows]
    rank: np.ndarray | None = None  # int32[rows]
    top_ids: np.ndarray | None = None  # int32[rows, 20]
    top_logprobs: np.ndarray | None = None  # float32[rows, 20]


class Handle(Protocol):
    """A step in flight."""

    def result(self) -> StepResult:
        """Wait for the step and give its samples. Raises what the device raised."""
        ...


class Runner(Protocol):
    """What the engine needs of a device: submit returns at once, result waits for that step
    only."""

    def submit(self, step: Step) -> Handle:
        """Start a step, after the copies that it names."""
        ...

    def reset(self) -> None:
        """Fresh device state after a step that failed. Every cached token is lost, those in host
        memory as well."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _DeviceHandle:
    tokens: jax.Array
    report: Sampled | None
    leaving: list[jax.Array]  # pages on their way to the host

    def result(self) -> StepResult:
        jax.block_until_ready(self.leaving)  # a copy that failed must not be found out later
        if self.report is not None:
            return StepResult(*(np.asarray(array) for array in self.report))
        return StepResult(np.asarray(self.tokens))


def resolve_dtype(name: str, platform: str) -> np.dtype[Any]:
    """auto is bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if name == "auto":
        fast = platform != "cpu" or cpu_has_bfloat16()
        name = "bfloat16" if fast else "float32"
    return jnp.dtype(name)


class DeviceRunner:
    """Loads a checkpoint, sizes the pool, compiles every plan shape and the copies, then submits
    steps.

    After construction nothing compiles and no device memory is allocated beyond the report. `costs`
    are the measured seconds of what preemption can choose from.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, stats: Stats, progress: Progress
    ):
        device = jax.devices()[0]
        self.dtype = resolve_dtype(config.dtype, device.platform)
        self.counter = CompileCounter(stats.compilations, strict=config.strict_compile)
        try:
            with self.counter.phase("warmup"):
                self._build(config, checkpoint, device, progress)
        except BaseException:
            self.counter.close()
            raise

    def _build(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        device: Device,
        progress: Progress,
    ) -> None:
        shape = checkpoint.config
        self.model = ModelDef.build(shape, select_linear(device.platform, self.dtype), self.dtype)
        try:
            self.layout = PageLayout(
                shape.num_kv_heads, config.page_size, shape.head_dim, self.dtype
            )
            self.layout.shape(1)  # checks that its indices fit
        except LayoutError as error:
            raise ConfigError("page_size", str(error)) from error
        self.attention: AttentionImpl = select(device.platform, self.layout, shape.num_heads)
        whole: dict[Kind, int] = {"decode": shape.num_layers, "mixed": shape.num_layers}
        on_cpu = device.platform == "cpu"
        self._layers_per_call = LAYERS_PER_CALL_ON_CPU if on_cpu else whole
        self._pages_per_copy = PAGES_PER_COPY_ON_CPU if on_cpu else PAGES_PER_COPY
        self._weights = load_weights(checkpoint, self.model, progress)

        self.scheduler_config = self._limits(config, device)
        self.grid = build_grid(config, self.scheduler_config, device.platform)
        self._allocate()
        self._compile(device, progress)
        self.memory = self._report(config, device)
        self.memory.check()
        self.transfer.reserve(self._page)
        self.costs = self._measure()

    def _compile(self, device: Device, progress: Progress) -> None:
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._state)
        keys = self.grid.keys()
        jobs: dict[PlanKey | str, Callable[[], Any]] = {
            key: partial(self._compile_step, key, state) for key in keys
        }
        row_counts = {key.rows for key in keys}
        # a sampler takes long to compile, and costs by the rows that use it: two sizes are enough
        widest = max(row_counts)
        few = min((rows for rows in row_counts if rows >= FEW_ROWS), default=widest)
        vocab_size = self.model.config.vocab_size
        names = {size: f"sampler[rows={size}]" for size in (few, widest)}
        for size, name in names.items():
            jobs[name] = partial(compile_sampler, size, vocab_size, state.last_tokens)
        num_host_pages = self.scheduler_config.num_host_pages
        copies = {n: f"copy[pages={n}]" for n in self._pages_per_copy if n <= num_host_pages}
        for size, name in copies.items():
            jobs[name] = partial(self._compile_copies, size, state)
        done = run_jobs(jobs, self.counter, progress)
        self.executables: dict[PlanKey, Executable] = {key: done[key] for key in keys}
        self._samplers: dict[int, Sampler] = {
            rows: widen_sampler(done[names[few if rows <= few else widest]], rows, vocab_size)
            for rows in row_counts
        }
        self.transfer = self._transfer([done[n] for n in copies.values()], num_host_pages, device)

    def _compile_step(self, key: PlanKey, state: DeviceState) -> Executable:
        stages = Stages(key, self.model, self.attention)
        group = self._layers_per_call[key.kind]
        return compile_step(stages, self.model.abstract_weights(), state, group)

    def _compile_copies(self, num_pages: int, state: DeviceState) -> CopyProgram:
        return compile_copies(num_pages, state.pools, self._layers_per_call["decode"])

    def _transfer(
        self, programs: list[CopyProgram], num_host_pages: int, device: Device
    ) -> PageTransfer:
        kind = None if device.platform == "cpu" else "pinned_host"
        return PageTransfer(programs, num_host_pages, device, kind)

    @property
    def _page(self) -> jax.ShapeDtypeStruct:
        """A page of all layers."""
        shape = (self.model.config.num_layers, *self.layout.shape(1)[1:])
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def _limits(self, config: EngineConfig, device: Device) -> SchedulerConfig:
        """The scheduler's limits, with the numbers of pages from memory when they are not given."""
        max_position = self.model.config.max_position
        max_model_len = config.max_model_len or max_position
        if max_model_len > max_position:
            raise ConfigError(
                "max_model_len",
                f"must be at most the model's context of {max_position}, got {max_model_len}",
            )
        limits = SchedulerConfig(
            num_pages=1 << 20,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_chunk_tokens=config.max_chunk_tokens,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            max_queue_wait=config.max_queue_wait,
            prefix_cache=config.prefix_cache,
        )
        most = limits.max_pages_per_sequence
        num_pages, num_host_pages = size_tiers(
            config,
            device,
            weights=self.model.num_bytes,
            page_bytes=num_bytes(self._page),
            useful_pages=config.max_num_seqs * most,
            largest_temp=lambda: self._largest_temp(
                config, replace(limits, num_pages=max(most, config.max_num_seqs)), device
            ),
        )
        return replace(limits, num_pages=num_pages, num_host_pages=num_host_pages)

    def _largest_temp(self, config: EngineConfig, limits: SchedulerConfig, device: Device) -> int:
        """Temporary bytes of the largest plan and copy; they do not depend on the pool's size."""
        key = build_grid(config, limits, device.platform).keys()[0]
        pool = jax.ShapeDtypeStruct(self.layout.shape(limits.num_pages + 1), self.dtype)
        state = DeviceState(
            (pool,) * self.model.config.num_layers,
            jax.ShapeDtypeStruct((limits.max_rows,), jnp.int32),
        )
        sampler = compile_sampler(key.rows, self.model.config.vocab_size, state.last_tokens)
        step = self._compile_step(key, state)
        copies = [] if config.num_host_pages == 0 else self._pages_per_copy
        programs = [self._compile_copies(size, state) for size in copies]
        return _temp(config, [step], [sampler], self._transfer(programs, 0, device))

    def _report(self, config: EngineConfig, device: Device) -> MemoryReport:
        report = MemoryReport(
            weights=self.model.num_bytes,
            pool=num_bytes(self._state.pools),
            temp=_temp(config, self.executables.values(), self._samplers.values(), self.transfer),
            limit=memory_limit(device, config.memory_fraction),
            host=self.transfer.num_host_pages * num_bytes(self._page),
        )
        return replace(report, host_limit=host_limit(device, report.total))

    def _measure(self) -> PreemptionCosts:
        """Run what preemption can choose from, on pages that hold nothing yet."""
        if not self.transfer.num_host_pages:
            return no_copies()
        num_pages = min(self.transfer.num_host_pages, self.scheduler_config.num_pages, COPIED_PAGES)
        pools, costs = copy_costs(self.transfer.copy, self._state.pools, num_pages)
        self._state = self._state._replace(pools=pools)
        self.transfer.reset()
        key = self.grid.keys()[0]  # the largest mixed one

        def run(plan: np.ndarray) -> jax.Array:
            self._state, tokens, _ = self.executables[key].run(
                self._weights, self._state, jax.device_put(plan), None
            )
            return tokens

        return replace(costs, prefill=prefill_cost(run, key, self.layout.page_size))

    def _allocate(self) -> None:
        pages = self.scheduler_config.num_pages + 1  # page 0 is reserved
        # zeros: a page's unwritten tail may be read (and masked), and uninitialised NaN must not be
        # there
        self._state = DeviceState(
            tuple(
                jnp.zeros(self.layout.shape(pages), self.dtype)
                for _ in range(self.model.config.num_layers)
            ),
            jnp.zeros(self.scheduler_config.max_rows, jnp.int32),
        )

    def reset(self) -> None:
        self.transfer.reset()
        del self._state  # first: two pools may not fit
        with self.counter.phase("warmup"):
            self._allocate()

    def submit(self, step: Step) -> Handle:
        plan = step.plan
        sampler = self._samplers[plan.key.rows] if step.use_sampler else None
        with self.counter.phase("serving"):
            pools, leaving = self.transfer.copy(self._state.pools, step.copies)
            self._state = self._state._replace(pools=pools)
            self._state, tokens, sampled = self.executables[plan.key].run(
                self._weights, self._state, jax.device_put(plan.buffer), sampler
            )
            report = sampled if step.wants_logprobs else None
            for array in (tokens,) if report is None else report:
                array.copy_to_host_async()
        return _DeviceHandle(tokens, report, leaving)

    def close(self) -> None:
        self.counter.close()


def _temp(
    config: EngineConfig,
    executables: Iterable[Executable],
    samplers: Iterable[Sampler],
    transfer: PageTransfer,
) -> int:
    """Temporary bytes of the largest step and its copies; with lookahead the arrays of two can be
    alive."""
    largest = max(executable.memory.temp for executable in executables)
    sampling = max(sampler.temp for sampler in samplers)
    return (1 + config.lookahead) * (largest + sampling + transfer.temp)


def build_grid(config: EngineConfig, limits: SchedulerConfig, platform: str) -> BucketGrid:
    return BucketGrid.build(
        rows=BUCKET_STRATEGIES[config.row_buckets],
        tokens=BUCKET_STRATEGIES[config.token_buckets],
        pages=BUCKET_STRATEGIES[config.page_buckets],
        max_rows=limits.max_rows,
        max_tokens=limits.max_tokens,
        max_pages=limits.max_pages_per_sequence,
        # one bfloat16 row on XLA:CPU costs ten times as much as two
        min_rows=2 if platform == "cpu" else 1,
    )
