"""Settings of an engine and of a server: frozen dataclasses, read from TOML, overridden by the
caller.

Field names are the same everywhere: keyword arguments of LLM, keys of a TOML file, and CLI flags
(with dashes). Nothing else in the project reads configuration.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scheduler.admission import ADMISSION
from scheduler.buckets import BUCKET_STRATEGIES
from scheduler.lengths import LENGTH_MODELS
from scheduler.policy import POLICIES

DTYPES = ("auto", "float32", "bfloat16")

# names that a setting can have
_CHOICES = {
    "row_buckets": tuple(BUCKET_STRATEGIES),
    "token_buckets": tuple(BUCKET_STRATEGIES),
    "page_buckets": tuple(BUCKET_STRATEGIES),
    "policy": tuple(POLICIES),
    "admission": tuple(ADMISSION),
    "lengths": tuple(LENGTH_MODELS),
}


class ConfigError(ValueError):
    """A setting that can't be used; the message names it and its limits."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


def _check_integer(config: Any, name: str, low: int, *, optional: bool = False) -> None:
    value = getattr(config, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(name, f"must be an integer of at least {low}, got {value!r}")


def _check_number(
    config: Any, name: str, low: float, high: float = math.inf, *, optional: bool = False
) -> None:
    value = getattr(config, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        limit = f"of at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ConfigError(name, f"must be a number {limit}, got {value!r}")


def _check_boolean(config: Any, name: str) -> None:
    if not isinstance(getattr(config, name), bool):
        raise ConfigError(name, f"must be true or false, got {getattr(config, name)!r}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """model: None (the bundled SmolLM2), a Hugging Face id, a local directory, or a .gguf file.

    num_pages None: as many as memory allows (see jaxserve.runtime.memory). max_model_len None: the
    model's own context. max_num_batched_tokens is the token budget of one step; max_chunk_tokens
    caps one prompt's share of it. *_buckets name a strategy of scheduler.buckets for each axis of a
    plan. lookahead plans the next step while one runs. strict_compile raises if anything compiles
    after warm-up; otherwise it is only counted. compile_cache: a directory for XLA's persistent
    cache.

    memory_fraction: share of the device's memory for weights, pool and temporaries; None: see
    jaxserve.runtime.memory. num_host_pages: KV pages that host memory keeps for preempted requests
    and evicted prefixes; None: as many as the pool, if a quarter of the free memory holds them.
    policy, admission and lengths name a queue order, a rule for starting requests, and a model of
    their lengths (see scheduler.policy, .admission, .lengths); admission_bound is the probability
    that the running requests may outgrow the pool. The queue refuses (429) beyond max_waiting
    requests, max_waiting_tokens prompt tokens, or a predicted wait of max_queue_wait seconds.
    """

    model: str | None = None
    dtype: str = "auto"
    num_pages: int | None = None
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_chunk_tokens: int | None = None
    max_model_len: int | None = None
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    max_queue_wait: float | None = None
    memory_fraction: float | None = None
    num_host_pages: int | None = None
    prefix_cache: bool = True
    policy: str = "fcfs"
    admission: str = "statistical"
    admission_bound: float = 0.1
    lengths: str = "profiled"
    row_buckets: str = "pow2"
    token_buckets: str = "pow2"
    page_buckets: str = "single"
    lookahead: bool = True
    strict_compile: bool = True
    compile_cache: str | None = None

    def __post_init__(self) -> None:
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ConfigError("model", f"must be a path or a Hugging Face id, got {self.model!r}")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _check_integer(self, "num_pages", 1, optional=True)
        _check_integer(self, "page_size", 1)
        _check_integer(self, "max_num_seqs", 1)
        _check_integer(self, "max_num_batched_tokens", 1)
        _check_integer(self, "max_chunk_tokens", 1, optional=True)
        _check_integer(self, "max_model_len", 2, optional=True)
        _check_integer(self, "max_waiting", 1, optional=True)
        _check_integer(self, "max_waiting_tokens", 1, optional=True)
        _check_integer(self, "num_host_pages", 0, optional=True)
        _check_number(self, "max_queue_wait", 0.0, optional=True)
        _check_number(self, "memory_fraction", 0.0, 1.0, optional=True)
        _check_number(self, "admission_bound", 1e-6, 0.5)
        if self.memory_fraction == 0:
            raise ConfigError("memory_fraction", "must be greater than 0, got 0")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    name, f"must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.compile_cache is not None and (
            not isinstance(self.compile_cache, str) or not self.compile_cache
        ):
            raise ConfigError("compile_cache", f"must be a directory, got {self.compile_cache!r}")
        _check_boolean(self, "prefix_cache")
        _check_boolean(self, "lookahead")
        _check_boolean(self, "strict_compile")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Times are in seconds. keepalive: how long a started stream may be silent before a comment
    keeps its connection open. drain_timeout: how long running streams may go on after SIGTERM.
    slow_reader_timeout: how long a client may leave its stream unread. stuck_timeout: a step that
    takes longer than this while work waits turns /health to 503."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout: float = 30.0
    slow_reader_timeout: float = 60.0
    stuck_timeout: float = 60.0
    keepalive: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError("host", f"must be a host name or an address, got {self.host!r}")
        _check_integer(self, "port", 0)
        if self.port > 65535:
            raise ConfigError("port", f"must be at most 65535, got {self.port}")
        for name in ("drain_timeout", "slow_reader_timeout", "stuck_timeout"):
            _check_number(self, name, 0.0)
        _check_number(self, "keepalive", 0.1)


def load_config(
    path: str | None = None, overrides: dict[str, Any] | None = None
) -> tuple[EngineConfig, ServerConfig]:
    """Read a TOML file (flat keys) and let `overrides` (those that are not None) win over it.

    Raises ConfigError for a file that can't be read or parsed, an unknown key, or a bad value.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("config", f"can't read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError("config", f"{path} is not valid TOML: {error}") from error
    engine_names = {field.name for field in fields(EngineConfig)}
    server_names = {field.name for field in fields(ServerConfig)}
    for name in settings:
        if name not in engine_names | server_names:
            raise ConfigError(name, f"is not a setting (in {path})")
    settings |= {k: v for k, v in (overrides or {}).items() if v is not None}
    engine = {name: value for name, value in settings.items() if name in engine_names}
    server = {name: value for name, value in settings.items() if name in server_names}
    unknown = settings.keys() - engine_names - server_names
    if unknown:
        raise ConfigError(min(unknown), "is not a setting")
    return EngineConfig(**engine), ServerConfig(**server)
