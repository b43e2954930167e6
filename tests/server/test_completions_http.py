"""/v1/completions on a real socket."""

import asyncio
import json

import aiohttp
import openai
import pytest


def words(choice: int, count: int) -> str:
    return "".join(f"w{choice}.{i} " for i in range(count))


async def test_whole_answer(start):
    running = await start()
    answer = await running.client.completions.create(model="fake", prompt="abc", max_tokens=3)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fake"
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, words(0, 3), "length")
    assert choice.logprobs is None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
    }
    assert running.engine.prompts == [[97, 98, 99]]
    assert running.engine.running == {}
    assert running.engine.aborted == []


async def test_max_tokens_is_16_by_default_and_the_model_may_be_left_out(start):
    running = await start()
    status, answer = await running.post("/v1/completions", {"prompt": "x"})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 16
    assert running.engine.params[0].temperature == 1.0


async def test_stream_joins_to_the_whole_answer(start):
    running = await start()
    stream = await running.client.completions.create(
        model="fake", prompt="abc", max_tokens=5, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == words(0, 5)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_every_chunk_has_finish_reason_and_object_and_no_usage(start):
    """Field notes 49 and 50: null until the last chunk; usage only when asked for."""
    running = await start()
    *events, done = await running.events(
        "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True}
    )
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)


async def test_include_usage_adds_one_chunk_without_choices(start):
    running = await start()
    *events, done = await running.events(
        "/v1/completions",
        {
            "prompt": "ab",
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    *chunks, last = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


async def test_continuous_usage(start):
    running = await start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = await running.events(
        "/v1/completions",
        {"prompt": "ab", "max_tokens": 3, "stream": True, "stream_options": options},
    )
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events]
    assert counts == [1, 2, 3, 3]


async def test_no_chunk_before_there_is_text(start, fake):
    """vllm bench takes its first-token time from the first chunk with choices."""
    script = [("", (1,), None), ("", (2,), None), ("hé", (3,), None), ("", (4,), "stop")]
    running = await start(fake(script=script))
    *events, _ = await running.events("/v1/completions", {"prompt": "ab", "stream": True})
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["hé", ""]
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "END"


async def test_prompts_times_choices_are_numbered_prompt_first(start):
    running = await start()
    answer = await running.client.completions.create(
        model="fake", prompt=["a", "bc"], n=2, max_tokens=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [words(c, 2) for c in (0, 1, 0, 1)]
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 8
    assert running.engine.prompts == [[97], [98, 99]]
    assert len(set(running.engine.ids)) == 2


async def test_prompts_times_choices_in_a_stream(start):
    running = await start()
    stream = await running.client.completions.create(
        model="fake", prompt=["a", "b", "c"], n=2, max_tokens=4, stream=True
    )
    texts = [""] * 6
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [words(c, 4) for c in (0, 1, 0, 1, 0, 1)]


@pytest.mark.parametrize(
    ("prompt", "ids"), [([1, 2, 255], [[1, 2, 255]]), ([[7], [8, 9]], [[7], [8, 9]])]
)
async def test_token_ids_as_prompt(start, prompt, ids):
    running = await start()
    await running.client.completions.create(model="fake", prompt=prompt, max_tokens=1)
    assert running.engine.prompts == ids


async def test_a_long_prompt_is_encoded_off_the_loop(start, fake):
    running = await start(fake(max_model_len=10_000))
    answer = await running.client.completions.create(model="fake", prompt="x" * 9000, max_tokens=1)
    assert answer.usage.prompt_tokens == 9000


async def test_sampling_parameters_arrive(start):
    running = await start()
    await running.client.completions.create(
        model="fake",
        prompt="a",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stop=["x", "y"],
        seed=11,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3, 4],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "repetition_penalty": 1.0,
        },
    )
    [params] = running.engine.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 2, 11)
    assert (params.stop, params.stop_token_ids) == (("x", "y"), (3, 4))
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


async def test_neutral_values_are_accepted(start):
    running = await start()
    status, _ = await running.post(
        "/v1/completions",
        {
            "prompt": "a",
            "logit_bias": {},
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "best_of": 1,
            "echo": False,
            "suffix": None,
            "user": "me",
            "stop": None,
            "logprobs": None,
            "stream": False,
            "stream_options": None,
        },
    )
    assert status == 200


async def test_logprobs_have_the_legacy_shape(start):
    """N+1 entries when the chosen token is not among the N; its float is the same in both lists."""
    running = await start()
    answer = await running.client.completions.create(
        model="fake", prompt="a", max_tokens=2, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["w0.0 ", "w0.1 "]
    assert logprobs.token_logprobs == [-0.75, -0.75]
    assert logprobs.top_logprobs[0] == {"top1": -0.25, "top2": -0.5, "w0.0 ": -0.75}
    assert logprobs.text_offset == [0, 5]


async def test_logprobs_zero_is_not_off(start):
    running = await start()
    answer = await running.client.completions.create(
        model="fake", prompt="a", max_tokens=1, logprobs=0
    )
    assert answer.choices[0].logprobs.top_logprobs == [{"w0.0 ": -0.75}]


async def test_streamed_logprobs_wait_for_their_text(start, fake):
    script = [("", (1,), None), ("ab", (2, 3), None), ("c", (4,), "length")]
    running = await start(fake(script=script))
    *events, _ = await running.events(
        "/v1/completions", {"prompt": "a", "stream": True, "logprobs": 0}
    )
    logprobs = [json.loads(event)["choices"][0]["logprobs"] for event in events]
    assert [len(entry["tokens"]) for entry in logprobs] == [3, 1]
    assert logprobs[0]["text_offset"] == [0, 0, 2]
    assert logprobs[1]["text_offset"] == [4]


async def test_request_ids_are_made_unique_and_sent_back(start, fake):
    """Field note 23: two requests may carry the same id at the same time."""
    running = await start(fake(interval=0.01))
    answers = await asyncio.gather(
        *(
            running.client.completions.with_raw_response.create(
                model="fake", prompt="a", max_tokens=4, extra_headers={"X-Request-Id": "mine"}
            )
            for _ in range(2)
        )
    )
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    ids = [answer.parse().id for answer in answers]
    assert len(set(ids)) == 2
    assert all(name.startswith("cmpl-mine-") for name in ids)


async def test_a_refused_request_has_its_id_too(start):
    running = await start()
    async with running.http.post(
        running.url + "/v1/completions", json={"n": 0}, headers={"X-Request-Id": "abc"}
    ) as response:
        assert response.status == 400
        assert response.headers["X-Request-Id"] == "abc"


async def test_64_streams_at_once(start, fake):
    running = await start(fake(interval=0.001))

    async def one(i: int) -> str:
        stream = await running.client.completions.create(
            model="fake", prompt=f"p{i}", max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*(one(i) for i in range(64)))
    assert texts == [words(0, 20)] * 64
    assert running.engine.aborted == []


async def test_the_synchronous_client(start):
    running = await start()

    def ask() -> str:
        with (
            openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
            client.completions.create(
                model="fake", prompt="a", max_tokens=3, stream=True
            ) as stream,
        ):
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == words(0, 3)


async def test_tokenize_and_back(start):
    running = await start()
    status, answer = await running.post("/tokenize", {"prompt": "hi"})
    assert (status, answer["tokens"], answer["count"]) == (200, [104, 105], 2)
    status, answer = await running.post("/detokenize", {"tokens": [104, 105]})
    assert (status, answer) == (200, {"prompt": "hi"})
    status, answer = await running.post(
        "/tokenize", {"messages": [{"role": "user", "content": "x"}]}
    )
    assert (status, answer["count"]) == (200, len("user:x\n"))


async def test_keep_alive_connection_serves_several_requests(start):
    running = await start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        for _ in range(3):
            async with session.post(
                running.url + "/v1/completions",
                json={"prompt": "a", "stream": True, "max_tokens": 2},
            ) as response:
                assert (await response.text()).endswith("data: [DONE]\n\n")
