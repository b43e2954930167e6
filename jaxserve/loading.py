"""From settings to a warm engine: the one place where checkpoint, tokenizer, runner and scheduler
meet."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.runtime.runner import DeviceRunner
from jaxserve.runtime.weights import Progress
from jaxserve.text.ids_only import IdsOnlyTokenizer
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import MissingTokenizer
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.open import open_checkpoint
from scheduler.admission import ADMISSION
from scheduler.core import Scheduler
from scheduler.errors import RequestError
from scheduler.lengths import LENGTH_MODELS
from scheduler.policy import POLICIES
from scheduler.stats import Stats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A warm engine and what its callers want to know of the model."""

    name: str
    engine: Engine
    runner: DeviceRunner
    tokenizer: Tokenizer
    stats: Stats

    @property
    def max_model_len(self) -> int:
        return self.engine.scheduler.config.max_model_len


def no_progress(phase: str, done: int, total: int, note: str) -> None:
    """For callers that don't watch."""


def load_model(config: EngineConfig, progress: Progress = no_progress) -> LoadedModel:
    """Open, load and compile. Raises ConfigError, or ModelError for a checkpoint that can't be
    served."""
    _use_compile_cache(config.compile_cache)
    progress("load", 0, 1, "opening the checkpoint")
    checkpoint = open_checkpoint(config.model)
    stats = Stats()
    # building a tokenizer takes a second that the compiler's threads can use
    with ThreadPoolExecutor(1, "tokenizer") as threads:
        loading = threads.submit(_load_tokenizer, checkpoint)
        runner = DeviceRunner(config, checkpoint, stats, progress)
        tokenizer = loading.result()
    lengths = LENGTH_MODELS[config.lengths]()
    scheduler = Scheduler(
        runner.scheduler_config,
        runner.grid,
        policy=POLICIES[config.policy](lengths),
        admission=ADMISSION[config.admission](lengths, config.admission_bound),
        lengths=lengths,
        costs=runner.costs,
        stats=stats,
    )
    engine = Engine(
        scheduler,
        runner,
        tokenizer,
        vocab_size=checkpoint.config.vocab_size,
        # a GGUF file may name one end token where its vocabulary has several
        eos_ids={*checkpoint.generation.eos_token_ids, *tokenizer.eos_ids},
        lookahead=config.lookahead,
    )
    return LoadedModel(checkpoint.name, engine, runner, tokenizer, stats)


def _use_compile_cache(directory: str | None) -> None:
    """JAX has one persistent cache a process: that of the engine that is being loaded."""
    if jax.config.jax_compilation_cache_dir != directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()
    # the default threshold of one second would leave small steps out
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    try:
        tokenizer = checkpoint.load_tokenizer()
        if tokenizer.has_chat_template:
            # the first client must not wait for the template engine to be imported; whether this
            # template takes such a conversation does not matter
            with suppress(RequestError):
                tokenizer.render_chat([{"role": "user", "content": "Hello"}])
        return tokenizer
    except MissingTokenizer as error:
        log.warning("%s: only prompts of token ids can be served, and answers have no text", error)
        return IdsOnlyTokenizer()
