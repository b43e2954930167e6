"""The collapse test's short form: a real server under several times the load that it can take. What
is asserted does not depend on how fast the machine is; the figures that do are bench/collapse.py's.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from bench.claims import claims
from bench.experiment import FEW, MANY, SHORT, Lognormal, Measured, Point, Setting, Stage, measure
from bench.judge import Limits, Run, Served, Window
from bench.load import Answer, Grouping
from bench.machines import serving
from bench.scripted import script

SMALL = Setting(
    num_pages=128,
    page_size=8,
    context=256,
    buckets="single",
    pace=0.01,  # a step of the tiny model takes a millisecond, which nothing overloads
    prompt=Lognormal(60, 0.6, 8, 120),
    output=Lognormal(24, 0.6, 4, 95),
    cap=96,
)
PLAN = replace(
    SHORT,
    saturated=3.0,
    stages=(Stage(1, 0.6, FEW), Stage(2.5, 2.5, MANY), Stage(1.5, 0.4, MANY)),
    sweep=(Point(2, 3, 1),),
    others=(),
    policies=40,
)


@pytest.mark.slow
def test_an_overload_breaks_no_stream_and_loses_no_page(
    tiny_llama: str, compile_cache: str
) -> None:
    """vllm#11805 (a storm of preemptions) and its kin: streams that stop in the middle, requests
    that hang, pages that are never free again."""
    setting = replace(SMALL, model=tiny_llama)

    async def run() -> Measured:
        async with serving(setting.engine(compile_cache), setting.pace) as engine:
            return await measure(engine, setting, PLAN, print)

    measured = asyncio.run(run())
    found = claims(measured, setting, PLAN, None)
    assert [claim for claim in found if not claim.holds and not claim.is_timed] == []
    # it was an overload: some were refused, and without that some were preempted
    assert sum(run.served.refused.sum() for run in measured.own_runs()) > 0
    assert measured.policies["admit if fits"].counters["recomputed"] > 0
    assert measured.policies["reserve max"].counters["recomputed"] == 0


# ---- what the assertions above rest on ----


def answer(tokens: int, *, first: float = 0.5, step: float = 0.1, length: int = 10) -> Answer:
    """Of `length` tokens, of which so many came."""
    made = Answer(due=0.0, prompt_tokens=20, length=length, limit=100, sent=0.0, status=200)
    made.times = [first + step * i for i in range(tokens)]
    made.text = "".join(map(script, range(min(tokens, length - 1))))
    made.finish_reason = "stop" if tokens == length else None
    made.ended = made.times[-1] if made.times else 0.0
    return made


def broken(changed: Answer, **fields: object) -> bool:
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed.broken


def test_a_stream_is_broken_if_a_letter_its_end_or_its_reason_is_missing() -> None:
    assert answer(10).whole
    assert not answer(10).broken
    assert broken(answer(10), text="abcdefghj")
    assert broken(answer(10), finish_reason=None)
    assert broken(answer(10), finish_reason="length")
    assert broken(answer(10), fault="the stream ended without [DONE]")
    assert broken(answer(7))
    assert broken(answer(0), status=0)
    assert broken(answer(0), status=500)
    assert not broken(answer(0), status=429)
    assert not broken(answer(7), ended=math.nan)  # it was cut off by us


def test_an_answer_at_the_cap_ends_by_length() -> None:
    capped = answer(100, length=101)
    capped.finish_reason, capped.text = "length", "".join(map(script, range(100)))
    assert capped.whole


def run_of(answers: list[Answer]) -> Run:
    return Run(Served.of_answers(answers), {}, {}, 0)


def test_goodput_counts_tokens_within_the_window_of_answers_within_the_limits() -> None:
    limits = Limits(step=0.0, token=0.0, per_token=0.15)  # first token within 1 s
    late, slow = answer(10, first=1.5), answer(10, step=0.2)
    cut = answer(5)
    cut.ended = math.nan
    run = run_of([answer(10), late, slow, cut, answer(5)])  # the last one broke
    assert limits.met(run.served).tolist() == [True, False, False, True, False]
    assert run.goodput(Window(0.0, 10.0), limits) == pytest.approx((10 + 5) / 10)
    # 10 tokens from 0.5 s to 1.4 s, a third of them in the window
    assert run_of([answer(10)]).goodput(Window(1.1, 2.1), limits) == pytest.approx(10 / 3)
    assert run.attainment(Window(0.0, 10.0), limits) == pytest.approx(2 / 5)


def test_the_first_token_may_take_a_second_or_ten_times_what_it_takes_alone() -> None:
    prompts = np.array([10, 100])
    limits = Limits(step=0.02, token=0.003, per_token=1.0)
    assert limits.ttft(prompts).tolist() == pytest.approx([1.0, 3.2])


def test_a_group_goes_when_it_is_full_or_its_window_is_over() -> None:
    waiting = [answer(0) for _ in range(6)]  # 120 tokens each at the limit: 8 pages of 16
    static = Grouping(rows=4, pages=100, page_size=16)
    assert static.next(waiting[:3], now=1e6) == 0
    assert static.next(waiting[:4], now=0.0) == 4
    assert static.next(waiting, now=0.0) == 4
    assert replace(static, pages=17).next(waiting, now=0.0) == 2
    dynamic = replace(static, window=0.25)
    assert dynamic.next(waiting[:3], now=0.2) == 0
    assert dynamic.wake(waiting[:3]) == 0.25
    assert dynamic.next(waiting[:3], now=0.25) == 3
    assert dynamic.next([], now=1.0) == 0
