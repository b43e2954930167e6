"""Every bad request: its status, the field it names, its code; and the engine never sees it."""

import math

import openai
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
ASKS = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": HELLO}}


def check_shape(body, status, param, code):
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert isinstance(error["message"], str)
    kinds = {429: "rate_limit_error", 503: "service_unavailable_error", 500: "server_error"}
    assert error["type"] == kinds.get(status, "invalid_request_error")
    return error["message"]


VALUES = [
    ("n", 0),
    ("n", -1),
    ("n", 1000),
    ("n", "2"),
    ("n", True),
    ("temperature", -1),
    ("temperature", 2.5),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "many"),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("seed", "x"),
    ("seed", 2**70),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", 7),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "x"),
    ("ignore_eos", 1),
    ("include_stop_str_in_output", "yes"),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
    ("request_id", "two words"),
    ("request_id", "x" * 129),
    ("request_id", "a\r\nSet-Cookie: b"),
    ("best_of", -1),
    ("user", 5),
    ("metadata", "x"),
]


@pytest.mark.parametrize(("name", "value"), VALUES)
async def test_bad_values_are_400_and_named(start, name, value):
    running = await start()
    status, body = await running.post(COMPLETIONS, {"prompt": "a", name: value})
    assert status == 400
    assert check_shape(body, 400, name, "invalid_value").startswith(name)
    assert running.engine.ids == []


UNSUPPORTED = [
    (COMPLETIONS, "echo", True),
    (COMPLETIONS, "suffix", "x"),
    (COMPLETIONS, "best_of", 2),
    (COMPLETIONS, "logit_bias", {"5": 1}),
    (COMPLETIONS, "presence_penalty", 0.5),
    (COMPLETIONS, "frequency_penalty", 1),
    (COMPLETIONS, "repetition_penalty", 1.2),
    (COMPLETIONS, "prompt_logprobs", 1),
    (COMPLETIONS, "store", True),
    (COMPLETIONS, "use_beam_search", True),
    (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}]),
    (CHAT, "tool_choice", "required"),
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "reasoning_effort", "high"),
    (CHAT, "continue_final_message", True),
]


@pytest.mark.parametrize(("path", "name", "value"), UNSUPPORTED)
async def test_what_is_not_supported_is_refused_by_name(start, path, name, value):
    running = await start()
    status, body = await running.post(path, ASKS[path] | {name: value})
    assert status == 400
    check_shape(body, 400, name, "unsupported_parameter")
    assert running.engine.ids == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_unknown_fields_are_refused(start, path):
    running = await start()
    status, body = await running.post(path, ASKS[path] | {"temprature": 1})
    assert status == 400
    message = check_shape(body, 400, "temprature", "unknown_parameter")
    assert message == "Unrecognized request argument supplied: temprature"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "nothing"),
        ("", "no tokens"),
        ([], "not empty"),
        ([""], "no tokens"),
        (["a", ""], "no tokens"),
        ([[]], "[0] must not be empty"),
        ([[1], []], "[1] must not be empty"),
        ([-1], "[0] must be a token id between 0 and 255, got -1"),
        ([1, 256], "[1] must be a token id between 0 and 255, got 256"),
        ([[1], [10**9]], "[1][0] must be a token id between 0 and 255, got 1000000000"),
        ([1, "a"], '[1] must be an integer token id, got "a"'),
        (["a", 1], "must be a list of token ids"),
        ([1.5], "must be a list of token ids"),
        ([True], "[0] must be an integer token id, got true"),
        ([[1.5]], "[0][0] must be an integer token id, got 1.5"),
        (5, "got 5"),
        ({"a": 1}, 'got {"a": 1}'),
        ([["a"] * 2], "[0][0] must be an integer"),
        (["x"] * 2049, "at most 2048"),
    ],
)
async def test_bad_prompts(start, prompt, said):
    """Field notes 41 and 46."""
    running = await start()
    status, body = await running.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
    assert status == 400
    assert said in check_shape(body, 400, "prompt", "invalid_value")
    assert running.engine.ids == []


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        (None, "messages", "invalid_value"),
        ([], "messages", "invalid_value"),
        ("hi", "messages", "invalid_value"),
        (["hi"], "messages[0]", "invalid_value"),
        ([{"content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": "king", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": 1, "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", "invalid_value"),
        ([{"role": "user", "content": 5}], "messages[0].content", "invalid_value"),
        ([*HELLO, {"role": "user", "content": ["x"]}], "messages[1].content[0]", "invalid_value"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "invalid_value",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "unsupported_parameter"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
        (
            [{"role": "user", "content": "x", "colour": "red"}],
            "messages[0].colour",
            "unknown_parameter",
        ),
    ],
)
async def test_bad_messages(start, messages, param, code):
    running = await start()
    status, body = await running.post(CHAT, {"messages": messages})
    assert status == 400
    check_shape(body, 400, param, code)
    assert running.engine.ids == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ],
)
async def test_bad_combinations(start, fields, param):
    running = await start()
    status, body = await running.post(CHAT, {"messages": HELLO} | fields)
    assert status == 400
    check_shape(body, 400, param, "invalid_value")


async def test_unknown_stream_option(start):
    running = await start()
    options = {"include_usages": True}
    status, body = await running.post(
        CHAT, {"messages": HELLO, "stream": True, "stream_options": options}
    )
    assert status == 400
    check_shape(body, 400, "stream_options.include_usages", "unknown_parameter")


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_over_the_context(start, stream):
    """Field note 48: clients recognise it by its words, and it is never a stream."""
    running = await start()
    status, body = await running.post(COMPLETIONS, {"prompt": [1] * 513, "stream": stream})
    assert status == 400
    message = check_shape(body, 400, "prompt", "context_length_exceeded")
    assert "maximum context length" in message
    assert "512" in message
    assert "513" in message


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_unknown_model(start, path):
    running = await start()
    status, body = await running.post(path, ASKS[path] | {"model": "gpt-9"})
    assert status == 404
    check_shape(body, 404, "model", "model_not_found")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "seed": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\uDFFF x"}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
async def test_malformed_bodies(start, raw):
    running = await start()
    async with running.http.post(
        running.url + COMPLETIONS, data=raw, headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 400
        check_shape(await response.json(), 400, None, "malformed_body")


async def test_surrogate_pairs_are_text(start):
    running = await start()
    async with running.http.post(
        running.url + COMPLETIONS,
        data=b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}',
        headers={"Content-Type": "application/json"},
    ) as response:
        assert response.status == 200
    assert bytes(running.engine.prompts[0]).decode() == "😀"


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
async def test_numbers_beyond_floats(start, number):
    running = await start()
    raw = f'{{"prompt": "a", "temperature": {number}}}'
    async with running.http.post(
        running.url + COMPLETIONS, data=raw, headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 400
        check_shape(await response.json(), 400, "temperature", "invalid_value")


async def test_wrong_content_type(start):
    running = await start()
    async with running.http.post(running.url + COMPLETIONS, data={"prompt": "a"}) as response:
        assert response.status == 415
        message = check_shape(await response.json(), 415, None, "unsupported_media_type")
        assert "application/json" in message


async def test_broken_compression(start):
    running = await start()
    async with running.http.post(
        running.url + COMPLETIONS,
        data=b"not gzip",
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ) as response:
        assert response.status == 400
        check_shape(await response.json(), 400, None, "malformed_body")


async def test_body_over_the_limit(start):
    running = await start(max_body_bytes=1000)
    status, body = await running.post(COMPLETIONS, {"prompt": "a" * 2000})
    assert status == 413
    assert "1000" in check_shape(body, 413, None, "request_too_large")


async def test_unknown_path_and_method(start):
    running = await start()
    async with running.http.get(running.url + "/v2/nothing") as response:
        assert response.status == 404
        check_shape(await response.json(), 404, None, "not_found")
        assert response.headers["X-Request-Id"]
    async with running.http.get(running.url + COMPLETIONS) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        check_shape(await response.json(), 405, None, "method_not_allowed")


async def test_bad_request_id_header(start):
    running = await start()
    status, body = await running.post(COMPLETIONS, {"prompt": "a"}, headers={"X-Request-Id": "a b"})
    assert status == 400
    check_shape(body, 400, "X-Request-Id", "invalid_value")


async def test_full_queue_is_429_with_retry_after(start, fake):
    """Field notes 20 and 21: all choices or none."""
    running = await start(fake(stall=0))
    with pytest.raises(openai.RateLimitError) as caught:
        await running.client.completions.create(model="fake", prompt="a", n=65)
    assert caught.value.response.headers["Retry-After"] == "2"
    check_shape(caught.value.response.json(), 429, None, "queue_full")
    assert running.engine.running == {}


@pytest.mark.parametrize(
    ("seconds", "header"),
    [
        (0.0, "1"),
        (-5.0, "1"),
        (1.01, "2"),
        (37.2, "38"),
        (600.0, "600"),
        (1e9, "600"),
        (math.inf, "600"),
        (math.nan, "1"),
    ],
)
async def test_retry_after_is_what_the_queue_says_within_bounds(start, fake, seconds, header):
    running = await start(fake(retry_after=seconds))
    async with running.http.post(
        running.url + COMPLETIONS, json={"prompt": "a", "n": 65}
    ) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == header


async def test_several_prompts_are_added_all_or_none(start, fake):
    """Field note 20 (vllm PR#53936): no orphans of a request that was admitted in part."""
    running = await start(fake(stall=0))
    status, _ = await running.post(COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 30})
    assert status == 429
    assert (running.engine.ids, running.engine.aborted) == ([], [])


async def test_the_server_goes_on_after_a_fault(start, monkeypatch, caplog):
    running = await start()
    monkeypatch.setattr(running.engine, "encode", lambda text: 1 / 0)
    status, body = await running.post(COMPLETIONS, {"prompt": "a"})
    assert status == 500
    assert "division" not in check_shape(body, 500, None, None)
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert running.engine.running == {}
    assert (await running.post(COMPLETIONS, {"prompt": "a"}))[0] == 200
