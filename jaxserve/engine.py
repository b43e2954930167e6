"""The engine loop: schedule, submit, commit, detokenize; with one step of lookahead.

Synchronous and single-threaded: whoever calls step() drives it (LLM from the caller's thread,
AsyncEngine from its own). Knows nothing of event loops and HTTP.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jaxserve.outputs import Delta, Logprob
from jaxserve.runtime.runner import Handle, Runner, StepResult
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer
from scheduler.core import Scheduler
from scheduler.errors import InvalidParameter, UnsupportedParameter
from scheduler.policy import Priority
from scheduler.request import (
    MAX_SUPPRESSED,
    Request,
    RequestOptions,
    SamplingParams,
    Sequence,
    Status,
)
from scheduler.step import Progress, Step

log = logging.getLogger(__name__)

DEFAULT_OPTIONS = RequestOptions()
WARNING_PERIOD = 60.0  # seconds
MAX_FAILURES = 2  # steps in a row that may fail on the device before their requests are given up


@dataclass(slots=True, eq=False)
class _Live:
    """The engine's side of a running sequence."""

    sequence: Sequence
    text: Detokenizer
    new_text: str = ""  # of the token that is being committed
    error: str | None = None


class Engine:
    """`clock` gives seconds; the scheduler sees time only as an argument."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_ids: Iterable[int],
        lookahead: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.clock = clock
        self._lookahead = lookahead
        self._live: dict[str, _Live] = {}
        self._in_flight: tuple[Step, Handle] | None = None
        self._ended: list[Delta] = []  # ended outside a commit, to be told with the next step
        self._failures = 0
        self._preemptions_told = 0
        self._next_warning = 0.0

    # ---- requests ----

    def requests(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        arrival: float,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> list[Request]:
        """Check a client's request and make its n choices. May be called from any thread.

        Raises InvalidParameter, UnsupportedParameter, PromptTooLong or PromptExceedsPool.
        """
        if options.priority and not isinstance(self.scheduler.policy, Priority):
            raise UnsupportedParameter(
                "priority", "has a meaning only when the server runs with --policy priority"
            )
        if not prompt_ids:
            raise InvalidParameter("prompt", "must hold at least one token")
        low, high = min(prompt_ids), max(prompt_ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidParameter(
                "prompt",
                f"token ids must be between 0 and {self.vocab_size - 1}, got "
                f"{low if low < 0 else high}",
            )
        if params.max_tokens == 0:
            raise InvalidParameter("max_tokens", "must be at least 1, got 0")
        if any(token >= self.vocab_size for token in params.stop_token_ids):
            raise InvalidParameter(
                "stop_token_ids", f"token ids must be between 0 and {self.vocab_size - 1}"
            )
        if params.stop and not self.tokenizer.has_text:
            raise UnsupportedParameter("stop", "this model has no tokenizer: use stop_token_ids")
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_ids
        if params.min_tokens and len(stop_ids) > MAX_SUPPRESSED:
            raise InvalidParameter(
                "stop_token_ids",
                f"with min_tokens, at most {MAX_SUPPRESSED} end tokens (the model's included) can "
                f"be held back, got {len(stop_ids)}",
            )
        self.scheduler.check_prompt(len(prompt_ids))
        max_tokens = self.scheduler.max_output(len(prompt_ids), params.max_tokens)
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        prompt = np.asarray(prompt_ids, np.int32)
        return [
            Request(
                request_id=f"{request_id}-{choice}",
                prompt=prompt,
                params=params,
                max_tokens=max_tokens,
                arrival=arrival,
                stop_ids=stop_ids,
                key=_random_key(seed, choice),
                options=options,
            )
            for choice in range(params.n)
        ]

    def check_queue(
        self, requests: Iterable[Request], num_queued: int = 0, tokens_queued: int = 0
    ) -> None:
        """May all of these join the queue? The counts are of others on their way to it. Raises
        QueueFull; may be called from any thread."""
        lengths = [len(request.prompt) for request in requests]
        self.scheduler.check_queue(
            len(lengths) + num_queued, sum(lengths) + tokens_queued, self.clock()
        )

    def add(self, request: Request) -> None:
        params = request.params
        text = Detokenizer(
            self.tokenizer,
            request.prompt.tolist(),
            stop=tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._live[request.request_id] = _Live(self.scheduler.add(request), text)

    def abort(self, request_id: str) -> None:
        """End a request now; its last delta comes with the next step. Harmless if it has ended."""
        live = self._live.get(request_id)
        if live is not None:
            self.scheduler.abort(request_id)
            self._ended.append(self._last_delta(live, "abort"))

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight or self._ended)

    # ---- the loop ----

    def step(self) -> list[Delta]:
        """Submit one step and hand out what the one before it made. Call while has_work."""
        deltas, self._ended = self._ended, []
        try:
            previous = self._in_flight
            now = self.clock()
            for sequence in self.scheduler.expire(now):
                deltas.append(self._last_delta(self._live[sequence.request.request_id], "timeout"))
            step = self.scheduler.schedule(now)
            self._warn_of_preemptions(now)
            self._in_flight = (step, self.runner.submit(step)) if step else None
            if not self._lookahead:
                previous, self._in_flight = self._in_flight, None
            if previous is not None:
                deltas += self._commit(*previous)
                self._failures = 0
            elif step is None:
                assert not self._live, "requests wait, but nothing can run"
        except Exception as error:
            deltas += self._recover(error)
        return deltas

    def _warn_of_preemptions(self, now: float) -> None:
        """One line a minute at most: a storm of them must not be a storm of lines (vllm#11805)."""
        count = sum(self.scheduler.stats.preemptions.values())
        if count > self._preemptions_told and now >= self._next_warning:
            log.warning(
                "%d sequences were preempted since the last such line: pages are short, "
                "or more important requests came",
                count - self._preemptions_told,
            )
            self._preemptions_told, self._next_warning = count, now + WARNING_PERIOD

    def _commit(self, step: Step, handle: Handle) -> list[Delta]:
        result = handle.result()
        deltas: list[Delta] = []
        for progress in self.scheduler.commit(step, result, self.clock(), self._text_ends):
            try:
                deltas.append(self._delta(progress, result))
            except Exception as error:  # the other rows of the step must have theirs
                deltas.append(self._give_up(progress.sequence, error))
        return deltas

    def _give_up(self, sequence: Sequence, error: Exception) -> Delta:
        """End one sequence whose output can't be told."""
        request_id = sequence.request.request_id
        log.error("request %s can't be answered", request_id, exc_info=error)
        if sequence.status is not Status.FINISHED:
            self.scheduler.finish(sequence, "error")
        self._live.pop(request_id, None)
        return Delta(request_id, "", (), finish_reason="error", error=f"no output: {error}")

    def _recover(self, error: Exception) -> list[Delta]:
        """A step failed. The device state is rebuilt and every row computed again; if it fails
        again, the rows that ran (all requests, if none did) end with the error in their streams.
        The engine stays up."""
        self._failures += 1
        log.error("step failed (%d in a row)", self._failures, exc_info=error)
        self._in_flight = None
        victims = self.scheduler.preempt_all()
        self.runner.reset()
        if self._failures < MAX_FAILURES:
            return []
        self._failures = 0
        ended: list[Delta] = []
        for sequence in victims or list(self.scheduler.sequences()):
            self.scheduler.finish(sequence, "error")
            live = self._live[sequence.request.request_id]
            ended.append(self._last_delta(live, "error", error=f"the engine failed: {error}"))
        return ended

    # ---- tokens to text ----

    def _text_ends(self, sequence: Sequence, token: int) -> str | None:
        """Turn a token into text, kept for its delta. "stop" if that completes a stop string."""
        live = self._live[sequence.request.request_id]
        try:
            live.new_text = live.text.push((token,))
        except Exception as error:  # one request's text must not stop the others
            log.error("no text for token %d", token, exc_info=error)
            live.error = f"the text of token {token} could not be made: {error}"
            return "error"
        return "stop" if live.text.stop_match is not None else None

    def _delta(self, progress: Progress, result: StepResult) -> Delta:
        sequence, token = progress.sequence, progress.token
        request, params = sequence.request, sequence.request.params
        live = self._live[request.request_id]
        reason = sequence.finish_reason
        stop_reason: str | int | None = live.text.stop_match
        if token in request.stop_ids and reason == "stop":
            # the model's own end token is no news; one that the request named is
            stop_reason = token if token in params.stop_token_ids else None
            if params.include_stop_str_in_output:  # otherwise an end token is not text
                self._text_ends(sequence, token)
        text, live.new_text = live.new_text, ""
        if reason is not None:
            text += live.text.flush()
            del self._live[request.request_id]
        logprobs = None
        if params.logprobs is not None:
            logprobs = (self._logprobs(progress.row, token, params.logprobs, result),)
        return Delta(
            request_id=request.request_id,
            text=text,
            token_ids=(token,),
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=sequence.num_prompt,
            num_output_tokens=len(sequence.tokens) - sequence.num_prompt,
            error=live.error,
        )

    def _last_delta(self, live: _Live, reason: str, error: str | None = None) -> Delta:
        """The end of a sequence that no token ends; whatever text was held back comes with it."""
        sequence = live.sequence
        del self._live[sequence.request.request_id]
        return Delta(
            request_id=sequence.request.request_id,
            text=live.text.flush(),
            token_ids=(),
            logprobs=None if sequence.request.params.logprobs is None else (),
            finish_reason=reason,
            num_prompt_tokens=sequence.num_prompt,
            num_output_tokens=len(sequence.tokens) - sequence.num_prompt,
            error=error,
        )

    def _logprobs(self, row: int, token: int, count: int, result: StepResult) -> dict[int, Logprob]:
        """The chosen token first, then the `count` likeliest."""
        assert result.logprob is not None
        assert result.rank is not None
        assert result.top_ids is not None
        assert result.top_logprobs is not None
        found = {token: (float(result.logprob[row]), int(result.rank[row]))}
        top_ids = result.top_ids[row, :count].tolist()
        top_logprobs = result.top_logprobs[row, :count].tolist()
        for rank, (top, logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
            if top < self.vocab_size:  # a tiny vocabulary has fewer
                found.setdefault(top, (logprob, rank))
        return {
            t: Logprob(logprob, rank, self.tokenizer.token_text(t), self.tokenizer.token_bytes(t))
            for t, (logprob, rank) in found.items()
        }


def _random_key(seed: int, choice: int) -> tuple[int, int]:
    low, high = np.random.SeedSequence([seed, choice]).generate_state(2)
    return int(low), int(high)
