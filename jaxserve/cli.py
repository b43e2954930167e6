"""The command line: serve, generate, chat, bench, simulate. What a command needs is imported when
it runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

    from jaxserve import LLM
    from jaxserve.config import EngineConfig, ServerConfig
    from jaxserve.outputs import Delta
    from scheduler.request import SamplingParams


class CannotListen(OSError):
    """The address is taken, or not ours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 1: the model or the machine is at fault; 2: the caller."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv[0] if argv else "").parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except _caller_errors() as error:
        return _complain(error, 2)
    except _outside_errors() as error:
        return _complain(error, 1)


def _caller_errors() -> tuple[type[Exception], ...]:
    from jaxserve.config import ConfigError
    from scheduler.errors import RequestError

    return ConfigError, RequestError


def _outside_errors() -> tuple[type[Exception], ...]:
    from jaxserve.weights.errors import ModelError

    return ModelError, OSError


def _complain(error: Exception, code: int) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    print(f"jaxserve: error: {' '.join(text.split())}", file=sys.stderr)
    return code


# Flags that are settings: name -> (type, help). Absent flags leave the file's or the default value.
_ENGINE_FLAGS: dict[str, tuple[type, str]] = {
    "dtype": (str, "auto, float32 or bfloat16"),
    "num_pages": (int, "pages in the KV cache pool"),
    "page_size": (int, "tokens in a page"),
    "max_num_seqs": (int, "sequences that run at once"),
    "max_num_batched_tokens": (int, "token budget of one step"),
    "max_model_len": (int, "context limit in tokens"),
    "max_chunk_tokens": (int, "what one prompt may take of a step's budget"),
    "row_buckets": (str, "bucket strategy for rows: pow2 or single"),
    "token_buckets": (str, "bucket strategy for tokens"),
    "page_buckets": (str, "bucket strategy for block table widths"),
    "memory_fraction": (float, "share of the device's memory for weights, pool and temporaries"),
    "num_host_pages": (int, "KV pages that host memory keeps; 0: none"),
    "compile_cache": (str, "directory of compiled steps, or off (default: the user's cache)"),
}
_QUEUE_FLAGS: dict[str, tuple[type, str]] = {
    "policy": (str, "order of the queue: fcfs, priority, shortest or fair"),
    "admission": (str, "rule for starting requests: statistical, reserve-max or fits"),
    "admission_bound": (float, "how likely the running requests may be to outgrow the pool"),
    "lengths": (str, "model of output lengths: profiled or declared"),
    "max_waiting": (int, "sequences in the queue before new requests get 429"),
    "max_waiting_tokens": (int, "prompt tokens in the queue before new requests get 429"),
    "max_queue_wait": (float, "seconds of predicted wait above which new requests get 429"),
}
_SERVE_FLAGS: dict[str, tuple[type, str]] = {
    "host": (str, "address to listen on"),
    "port": (int, "port to listen on"),
    "drain_timeout": (float, "seconds that running streams may take after SIGTERM"),
    "slow_reader_timeout": (float, "seconds that a client may leave its stream unread"),
    "keepalive": (float, "seconds of silence after which a stream gets a comment"),
    "stuck_timeout": (float, "seconds of one step after which /health turns to 503"),
}


def _add_settings(parser: argparse.ArgumentParser, flags: dict[str, tuple[type, str]]) -> None:
    for name, (kind, text) in flags.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, help=text, metavar=kind.__name__.upper())


def _add_switches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="share the KV pages of equal prompt prefixes (default: yes)",
    )


def _parser(name: str) -> argparse.ArgumentParser:
    """`name`: the command that is given. Only its module is imported, for some are slow."""
    parser = argparse.ArgumentParser(
        prog="jaxserve", description="Continuous-batching LLM inference in JAX."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    model = "a Hugging Face id, a local directory or a .gguf file (default: bundled SmolLM2)"

    serve = commands.add_parser("serve", help="an OpenAI-compatible HTTP server")
    serve.add_argument("model", nargs="?", metavar="MODEL", help=model)
    _add_settings(serve, _SERVE_FLAGS)
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="continue one text, streamed to the terminal")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="a conversation in the terminal")
    chat.set_defaults(run=_chat)

    bench = commands.add_parser("bench", help="measure the steps of an engine on this machine")
    bench.add_argument("--model", help=model)
    bench.set_defaults(run=_bench)
    simulate = commands.add_parser("simulate", help="the scheduler under a load, without a device")
    _add_settings(simulate, _QUEUE_FLAGS)
    simulate.set_defaults(run=_simulate)
    if name == "bench":
        from jaxserve.fit import add_arguments

        add_arguments(bench)
    elif name == "simulate":
        from jaxserve.simulate import add_arguments

        add_arguments(simulate)

    for command in (generate, chat):
        command.add_argument("--model", help=model)
        command.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
        command.add_argument("--top-p", type=float, default=1.0)
        command.add_argument("--top-k", type=int, default=0, help="0 switches it off")
        command.add_argument("--max-tokens", type=int, default=512, help="length of an answer")
        command.add_argument("--seed", type=int)
    _add_settings(serve, _QUEUE_FLAGS)
    for command in (serve, generate, chat, bench):
        command.add_argument("--config", metavar="FILE", help="settings as TOML")
    for command in (serve, generate, chat, bench, simulate):
        _add_settings(command, _ENGINE_FLAGS)
        _add_switches(command)
    return parser


def _settings(args: argparse.Namespace, **defaults: Any) -> tuple[EngineConfig, ServerConfig]:
    """Flags win over the file; `defaults` only count where there is no file."""
    from dataclasses import replace

    from jaxserve.config import load_config

    names = ("model", "prefix_cache", *_ENGINE_FLAGS, *_QUEUE_FLAGS, *_SERVE_FLAGS)
    given = {name: getattr(args, name, None) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    engine, server = load_config(args.config, given if args.config else defaults | given)
    cache = {None: _default_compile_cache(), "off": None}.get(
        engine.compile_cache, engine.compile_cache
    )
    return replace(engine, compile_cache=cache), server


def _default_compile_cache() -> str:
    """Where the platform keeps caches (XDG base directory specification)."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "jaxserve", "compile")


def _serve(args: argparse.Namespace) -> int:
    engine, server = _settings(args)
    from jaxserve.server.lifecycle import bind

    try:
        sock = bind(server.host, server.port)
    except OSError as error:
        reason = error.strerror or str(error)
        where = f"{server.host}:{server.port}"
        raise CannotListen(f"can't listen on {where}: {reason}") from error
    with sock:
        asyncio.run(_serve_on(sock, engine, server))
    return 0


async def _serve_on(sock: socket.socket, engine: EngineConfig, server: ServerConfig) -> None:
    from jaxserve.server.lifecycle import Server
    from jaxserve.terminal import address, progress, ready_text

    url = address(server.host, sock.getsockname()[1])
    print(f"jaxserve on {url}: loading {engine.model or 'SmolLM2 (bundled)'}", flush=True)
    with contextlib.ExitStack() as loading:
        show = loading.enter_context(progress())

        from jaxserve.async_engine import AsyncEngine

        client = AsyncEngine(engine, server, progress=show)

        def on_ready() -> None:
            loading.close()
            print(f"memory: {client.memory}", flush=True)
            print(ready_text(client.model_name, url), flush=True)

        def on_stop() -> None:
            loading.close()
            print("draining; a second signal ends at once", file=sys.stderr, flush=True)

        http = Server(
            client,
            sock,
            drain_timeout=server.drain_timeout,
            slow_reader_timeout=server.slow_reader_timeout,
            keepalive=server.keepalive,
            on_ready=on_ready,
            on_stop=on_stop,
        )
        http.handle_signals()
        client.start()
        await http.run()


def _bench(args: argparse.Namespace) -> int:
    from jaxserve import fit

    return fit.main(args, _settings(args)[0])


def _simulate(args: argparse.Namespace) -> int:
    from jaxserve import simulate

    return simulate.main(args)


def _params(args: argparse.Namespace) -> SamplingParams:
    from scheduler.request import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )


def _load(args: argparse.Namespace) -> LLM:
    """The model for one sequence at a time, which needs few executables."""
    engine, _ = _settings(args, max_num_seqs=1)
    from jaxserve.terminal import progress

    with progress() as show:
        from jaxserve import LLM

        return LLM(engine, progress=show)


def _generate(args: argparse.Namespace) -> int:
    from scheduler.errors import InvalidParameter

    if not args.prompt:
        raise InvalidParameter("PROMPT", "must not be empty")
    params = _params(args)
    llm = _load(args)
    for _ in _echo(llm.stream(args.prompt, params)):
        pass
    print()
    return 0


def _echo(deltas: Iterator[Delta]) -> Iterator[str]:
    """Print text as it comes, and hand it on."""
    for delta in deltas:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        yield delta.text


def _chat(args: argparse.Namespace) -> int:
    params = _params(args)
    llm = _load(args)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print("Ctrl-C stops an answer, Ctrl-D leaves.")
    history: list[dict[str, str]] = []
    while True:
        try:
            text = input(prompt)
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:  # drops the line, as shells do
            print()
            continue
        if text.strip():
            _turn(llm, history, text, params)


@contextlib.contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """Ctrl-C as an event: an exception could strike in the middle of a step."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda _signal, _frame: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _turn(llm: LLM, history: list[dict[str, str]], text: str, params: SamplingParams) -> None:
    """Ask, print the answer, and keep both; a stopped answer is kept as far as it came."""
    from scheduler.errors import PromptExceedsPool, PromptTooLong

    history.append({"role": "user", "content": text})
    while True:
        parts: list[str] = []
        try:
            with _ctrl_c() as pressed:
                for part in _echo(llm.stream(llm.tokenizer.render_chat(history), params)):
                    parts.append(part)
                    if pressed.is_set():
                        break
        except (PromptTooLong, PromptExceedsPool) as error:
            del history[:2]  # the oldest question and answer
            if not history:
                print(f"jaxserve: error: {error.message}", file=sys.stderr)
                return
            print("(the oldest turn was dropped: the context is full)", file=sys.stderr)
            continue
        print()
        history.append({"role": "assistant", "content": "".join(parts)})
        return


if __name__ == "__main__":
    sys.exit(main())
