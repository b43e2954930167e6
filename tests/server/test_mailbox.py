"""The mailbox between the engine's steps and a reader."""

import asyncio

import pytest

from jaxserve.outputs import Delta, Logprob
from jaxserve.server.mailbox import Mailbox, join


def delta(text, token, reason=None, count=0):
    return Delta("r", text, (token,), finish_reason=reason, num_output_tokens=count)


def never():
    raise AssertionError("aborted")


async def read(mailbox):
    return [(choice, d.text, d.finish_reason) async for choice, d in mailbox]


async def test_order_and_end():
    mailbox = Mailbox(2, never)
    mailbox.put(0, delta("a", 1))
    mailbox.put(1, delta("b", 2, "stop"))
    mailbox.put(0, delta("c", 3, "length"))
    assert await read(mailbox) == [(0, "a", None), (1, "b", "stop"), (0, "c", "length")]
    assert await read(mailbox) == []
    mailbox.abort()


async def test_a_waiting_reader_wakes():
    mailbox = Mailbox(1, never)
    reader = asyncio.create_task(read(mailbox))
    for i in range(5):
        await asyncio.sleep(0)
        mailbox.put(0, delta(str(i), i, "stop" if i == 4 else None))
    assert "".join(text for _, text, _ in await reader) == "01234"


async def test_a_slow_reader_gets_joined_deltas():
    mailbox = Mailbox(2, never, limit=8)
    largest = 0
    for i in range(1000):
        last = "length" if i == 999 else None
        for choice in (0, 1):
            mailbox.put(choice, delta(f"{choice}:{i} ", i, last, i + 1))
            largest = max(largest, len(mailbox))
    assert largest == 8
    got = {0: [], 1: []}
    async for choice, d in mailbox:
        got[choice].append(d)
    for choice, deltas in got.items():
        assert "".join(d.text for d in deltas) == "".join(f"{choice}:{i} " for i in range(1000))
        assert [t for d in deltas for t in d.token_ids] == list(range(1000))
        assert [d.finish_reason for d in deltas][-1] == "length"
        assert deltas[-1].num_output_tokens == 1000


async def test_many_choices_fit_whatever_the_limit():
    mailbox = Mailbox(100, never, limit=8)
    for choice in range(100):
        mailbox.put(choice, delta("a", 1))
    assert len(mailbox) == 100


@pytest.mark.parametrize("reading", [False, True])
async def test_abort_is_told_once_and_ends_the_reader(reading):
    told = []
    mailbox = Mailbox(1, lambda: told.append(1))
    reader = asyncio.create_task(read(mailbox)) if reading else None
    await asyncio.sleep(0)
    mailbox.abort()
    mailbox.abort()
    mailbox.put(0, delta("late", 1, "stop"))
    assert told == [1]
    assert len(mailbox) == 0
    if reader is not None:
        assert await reader == []
    assert await read(mailbox) == []


async def test_abort_after_the_end_is_not_told():
    mailbox = Mailbox(1, never)
    mailbox.put(0, delta("a", 1, "stop"))
    mailbox.abort()


async def test_a_cancelled_reader_loses_nothing():
    mailbox = Mailbox(1, never)
    reader = asyncio.create_task(anext(mailbox))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    mailbox.put(0, delta("a", 1, "stop"))
    assert await read(mailbox) == [(0, "a", "stop")]


def test_join_keeps_everything():
    entry = Logprob(-1.0, 1, "x", b"x")
    a = Delta("r", "a", (1, 2), ({1: entry}, {2: entry}), num_prompt_tokens=5, num_output_tokens=2)
    b = Delta("r", "b", (3,), ({3: entry},), "stop", "END", 5, 3)
    assert join(a, b) == Delta(
        "r", "ab", (1, 2, 3), ({1: entry}, {2: entry}, {3: entry}), "stop", "END", 5, 3
    )
    assert join(delta("a", 1), delta("b", 2)).logprobs is None
