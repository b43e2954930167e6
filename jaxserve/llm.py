"""LLM: the Python API for experiments. The engine runs in the caller's thread, step by step."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.loading import load_model, no_progress
from jaxserve.outputs import CompletionOutput, Delta, RequestOutput
from jaxserve.runtime.weights import Progress
from scheduler.errors import InvalidParameter, RequestError
from scheduler.request import Request, RequestOptions, SamplingParams
from scheduler.stats import Stats

Prompt = str | list[int]


class LLM:
    """A model, loaded and compiled, ready to generate.

    model: None (the bundled SmolLM2-135M-Instruct), a Hugging Face id, a local directory, a .gguf
    file, or a whole EngineConfig. Further settings are EngineConfig's fields. Raises ConfigError or
    ModelError. Calls from several threads, and streams that are open at the same time, share the
    engine's steps.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | None = None,
        *,
        progress: Progress = no_progress,
        **settings: Any,
    ):
        if isinstance(model, EngineConfig):
            if settings:
                raise TypeError(f"with an EngineConfig, {min(settings)} belongs into it")
            config = model
        else:
            config = EngineConfig(model=None if model is None else os.fspath(model), **settings)
        self.config = config
        self._loaded = load_model(config, progress)
        self._engine = self._loaded.engine
        self.tokenizer = self._loaded.tokenizer
        self.model_name = self._loaded.name
        self.max_model_len = self._loaded.max_model_len
        self.runner = self._loaded.runner
        self.scheduler = self._engine.scheduler
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._inboxes: dict[str, deque[Delta]] = {}  # by sequence id

    @property
    def stats(self) -> Stats:
        return self._loaded.stats

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        options: RequestOptions | list[RequestOptions] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order; all of them run together.

        prompts: a text, token ids, or a list of either. sampling_params, options: one for all or
        one each. Raises RequestError (a note says which prompt) before anything runs.
        """
        listed = _as_list(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        params = params if isinstance(params, list) else [params] * len(listed)
        for each in params:
            _check_params(each)
        options = RequestOptions() if options is None else options
        options = options if isinstance(options, list) else [options] * len(listed)
        for name, given in (("sampling_params", params), ("options", options)):
            if len(given) != len(listed):
                raise InvalidParameter(
                    name, f"{len(given)} for {len(listed)} prompts; give one, or one each"
                )
        outputs = [
            RequestOutput(
                request_id=f"llm-{next(self._ids)}",
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=self._encode(prompt),
                outputs=[
                    CompletionOutput(i, logprobs=None if p.logprobs is None else [])
                    for i in range(p.n)
                ],
            )
            for prompt, p in zip(listed, params, strict=True)
        ]
        work = [
            (o.request_id, o.prompt_token_ids, p, how)
            for o, p, how in zip(outputs, params, options, strict=True)
        ]
        by_id = {o.request_id: o for o in outputs}
        for request_id, choice, delta in self._run(work):
            _extend(by_id[request_id].outputs[choice], delta)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Iterator[Delta]:
        """Deltas of one prompt as they are made; closing the iterator aborts the request."""
        params = SamplingParams() if sampling_params is None else sampling_params
        _check_params(params)
        if params.n != 1:
            raise InvalidParameter("n", f"must be 1 for a stream, got {params.n}")
        listed = _as_list(prompt)
        if len(listed) != 1:
            raise InvalidParameter("prompt", f"must be one prompt for a stream, got {len(listed)}")
        options = RequestOptions() if options is None else options
        run = self._run([(f"llm-{next(self._ids)}", self._encode(listed[0]), params, options)])
        return (delta for _, _, delta in run)

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        """generate() for one conversation, through the model's own chat template."""
        return self.generate(self.tokenizer.render_chat(messages), sampling_params, options)

    def close(self) -> None:
        self.runner.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(
        self, work: list[tuple[str, list[int], SamplingParams, RequestOptions]]
    ) -> Iterator[tuple[str, int, Delta]]:
        """Check all requests now; add them, and give (request id, choice, delta), as it is
        iterated."""
        now = time.monotonic()
        requests: list[Request] = []
        owners: dict[str, tuple[str, int]] = {}
        for index, (request_id, prompt_ids, params, options) in enumerate(work):
            try:
                choices = self._engine.requests(request_id, prompt_ids, params, now, options)
            except RequestError as error:
                if len(work) > 1:
                    error.add_note(f"in prompt {index} of {len(work)}")
                raise
            requests += choices
            owners |= {r.request_id: (request_id, choice) for choice, r in enumerate(choices)}
        self._engine.check_queue(requests)
        return self._iterate(requests, owners)

    def _iterate(
        self, requests: list[Request], owners: dict[str, tuple[str, int]]
    ) -> Iterator[tuple[str, int, Delta]]:
        inbox: deque[Delta] = deque()
        unfinished = set(owners)
        with self._lock:
            for request in requests:
                self._inboxes[request.request_id] = inbox
                self._engine.add(request)
        try:
            while unfinished:
                self._step(inbox)
                while inbox:
                    delta = inbox.popleft()
                    if delta.finish_reason is not None:
                        unfinished.discard(delta.request_id)
                    yield *owners[delta.request_id], delta
        finally:
            with self._lock:
                for name in unfinished:
                    self._engine.abort(name)
                    self._inboxes.pop(name, None)

    def _step(self, inbox: deque[Delta]) -> None:
        """One engine step, unless another caller's step has filled this inbox meanwhile."""
        with self._lock:
            if inbox:
                return
            for delta in self._engine.step():
                owner = self._inboxes.get(delta.request_id)
                if owner is None:
                    continue  # its reader has left
                owner.append(delta)
                if delta.finish_reason is not None:
                    del self._inboxes[delta.request_id]


def _as_list(prompts: Any) -> list[Prompt]:
    """The four accepted forms as a list of prompts. Raises InvalidParameter for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidParameter("prompt", f"must be a text, token ids, or a list, got {prompts!r}")
    if prompts and all(_is_id(p) for p in prompts):
        return [[int(p) for p in prompts]]
    for prompt in prompts:
        ids = isinstance(prompt, list | tuple) and all(_is_id(p) for p in prompt)
        if not isinstance(prompt, str) and not ids:
            raise InvalidParameter("prompt", f"must be a text or token ids, got {prompt!r}")
    return [p if isinstance(p, str) else [int(i) for i in p] for p in prompts]


def _check_params(params: Any) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidParameter("sampling_params", f"must be SamplingParams, got {params!r}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _extend(output: CompletionOutput, delta: Delta) -> None:
    output.text += delta.text
    output.token_ids += delta.token_ids
    if output.logprobs is not None and delta.logprobs is not None:
        output.logprobs += delta.logprobs
    output.finish_reason = delta.finish_reason
    output.stop_reason = delta.stop_reason
