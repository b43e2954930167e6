"""What a client is told when its deadline ends the request. Field note 21: no wait without end."""

import asyncio
import json
import time

import openai
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASKS = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}


def choices(events):
    """(index, text, finish reason) of the chunks of completions."""
    return [
        (c["index"], c["text"], c["finish_reason"])
        for e in events
        for c in json.loads(e)["choices"]
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_without_any_token_it_is_504(start, fake, path, stream, n):
    running = await start(fake(timeouts=dict.fromkeys(range(n), 0)))
    body = ASKS[path] | {"timeout": 2.5, "stream": stream, "n": n}
    async with running.http.post(running.url + path, json=body) as response:
        assert response.status == 504
        assert response.content_type == "application/json"
        assert response.headers["X-Should-Retry"] == "false"
        assert "Retry-After" not in response.headers
        assert await response.json() == {
            "error": {
                "message": "The request's timeout of 2.5 s passed before its first token.",
                "type": "server_error",
                "param": "timeout",
                "code": "timeout",
            }
        }
    assert running.engine.running == {}


async def test_several_prompts_without_any_token(start, fake):
    running = await start(fake(timeouts={0: 0, 1: 0}))
    status, body = await running.post(COMPLETIONS, {"prompt": ["a", "b"], "timeout": 1})
    assert (status, body["error"]["code"]) == (504, "timeout")


async def test_a_whole_answer_holds_what_there_is(start, fake):
    running = await start(fake(timeouts={0: 2}))
    status, body = await running.post(COMPLETIONS, {"prompt": "abc", "timeout": 1})
    assert status == 200
    assert body["choices"] == [
        {
            "index": 0,
            "text": "w0.0 w0.1 ",
            "logprobs": None,
            "finish_reason": "timeout",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


async def test_a_stream_ends_with_timeout_usage_and_done(start, fake):
    running = await start(fake(timeouts={0: 2}))
    ask = {"prompt": "abc", "timeout": 1, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = await running.events(COMPLETIONS, ask)
    assert choices(chunks) == [(0, "w0.0 ", None), (0, "w0.1 ", None), (0, "", "timeout")]
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 2
    assert done == "[DONE]"


async def test_a_chat_stream_ends_with_timeout(start, fake):
    running = await start(fake(timeouts={0: 1}))
    *_, last, done = await running.events(CHAT, ASKS[CHAT] | {"timeout": 1, "stream": True})
    assert done == "[DONE]"
    [choice] = json.loads(last)["choices"]
    assert (choice["delta"], choice["finish_reason"]) == ({}, "timeout")


@pytest.mark.parametrize(("empty", "full"), [(0, 1), (1, 0)])
async def test_a_choice_that_made_nothing_beside_one_that_did(start, fake, empty, full):
    running = await start(fake(timeouts={empty: 0, full: 2}))
    ask = {"prompt": "a", "n": 2, "timeout": 1}
    status, body = await running.post(COMPLETIONS, ask)
    assert status == 200
    by_index = {c["index"]: (c["text"], c["finish_reason"]) for c in body["choices"]}
    assert by_index == {empty: ("", "timeout"), full: (f"w{full}.0 w{full}.1 ", "timeout")}
    *chunks, done = await running.events(COMPLETIONS, ask | {"stream": True})
    assert done == "[DONE]"
    assert sorted(choices(chunks)) == sorted(
        [
            (empty, "", "timeout"),
            (full, f"w{full}.0 ", None),
            (full, f"w{full}.1 ", None),
            (full, "", "timeout"),
        ]
    )


async def test_a_choice_that_made_nothing_beside_one_that_was_complete(start, fake):
    running = await start(fake(timeouts={1: 0}))
    ask = {"prompt": ["a", "b"], "max_tokens": 1, "timeout": 1}
    status, body = await running.post(COMPLETIONS, ask)
    assert status == 200
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [
        ("w0.0 ", "length"),
        ("", "timeout"),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_without_text_yet_is_an_answer(start, fake, stream):
    """Its text may be held back: part of a character, or the start of a stop string."""
    script = [("", (1,), None), ("late", (2,), "stop")]
    running = await start(fake(script=script, timeouts={0: 1}))
    ask = {"prompt": "a", "timeout": 1, "stream": stream}
    if stream:
        chunk, done = await running.events(COMPLETIONS, ask)
        assert (choices([chunk]), done) == ([(0, "", "timeout")], "[DONE]")
    else:
        status, body = await running.post(COMPLETIONS, ask)
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "timeout"
        assert body["usage"]["completion_tokens"] == 1


async def test_openai_clients_do_not_ask_again(start, fake):
    """They retry every status from 500 on: under pressure, three requests for one."""
    running = await start(fake(timeouts={0: 0}))
    client = running.client.with_options(max_retries=2)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="fake", prompt="a", extra_body={"timeout": 1})
    assert caught.value.status_code == 504
    assert len(running.engine.ids) == 1


async def test_the_deadline_counts_from_before_the_prompt_was_encoded(start, monkeypatch):
    running = await start()
    encoded = []

    def encode(text):
        encoded.append(time.monotonic())
        return list(text.encode())

    monkeypatch.setattr(running.engine, "encode", encode)
    await running.post(COMPLETIONS, {"prompt": "a", "timeout": 1})
    assert running.engine.arrivals[0] <= encoded[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_end_of_the_server_cuts_before_its_first_token_is_503(start, fake, stream):
    """Field note 22: someone else can serve it, so it is no empty answer."""
    running = await start(fake(stall=0), drain_timeout=0.05)
    ask = asyncio.create_task(running.post(COMPLETIONS, {"prompt": "a", "stream": stream, "n": 2}))
    while not running.engine.running:
        await asyncio.sleep(0.005)
    running.server.stop()
    status, body = await ask
    assert (status, body["error"]["code"]) == (503, "draining")
    await running.task
