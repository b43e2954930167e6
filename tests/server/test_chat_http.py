"""/v1/chat/completions and /v1/models on a real socket."""

import json

import openai
import pytest

HELLO = [{"role": "user", "content": "hi"}]


async def test_whole_answer(start):
    running = await start()
    answer = await running.client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=2
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "w0.0 w0.1 ")
    assert choice.message.tool_calls is None  # field note 51
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len("user:hi\n")


async def test_without_max_tokens_the_context_is_the_limit(start):
    running = await start()
    await running.client.chat.completions.create(model="fake", messages=HELLO)
    assert running.engine.params[0].max_tokens is None


@pytest.mark.parametrize(
    "limits",
    [
        {"max_completion_tokens": 3},
        {"max_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ],
)
async def test_both_names_of_the_length_limit(start, limits):
    running = await start()
    await running.client.chat.completions.create(model="fake", messages=HELLO, **limits)
    assert running.engine.params[0].max_tokens == 3


async def test_the_role_comes_with_the_first_text(start, fake):
    script = [("", (1,), None), ("a", (2,), None), ("b", (3,), None), ("", (4,), "stop")]
    running = await start(fake(script=script))
    *events, done = await running.events(
        "/v1/chat/completions", {"messages": HELLO, "stream": True}
    )
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]


async def test_an_empty_answer_still_has_role_usage_and_reason(start, fake):
    """Field note 31."""
    running = await start(fake(script=[("", (1,), "stop")]))
    *events, _ = await running.events(
        "/v1/chat/completions",
        {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}},
    )
    first, last = [json.loads(event) for event in events]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == 1


async def test_streamed_choices(start):
    running = await start()
    stream = await running.client.chat.completions.create(
        model="fake", messages=HELLO, n=3, max_tokens=4, stream=True
    )
    texts = ["", "", ""]
    roles: list[tuple[int, str]] = []
    async for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content
        if choice.delta.role:
            roles.append((choice.index, choice.delta.role))
    assert texts == ["".join(f"w{c}.{i} " for i in range(4)) for c in range(3)]
    assert roles == [(0, "assistant"), (1, "assistant"), (2, "assistant")]


async def test_logprobs_have_the_chat_shape(start, fake):
    """The chosen token (third) is reported beside the top two; bytes are the text's own."""
    running = await start(fake(script=[("é", (1,), "stop")]))
    answer = await running.client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, top_logprobs=2
    )
    [entry] = answer.choices[0].logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("é", -0.75, [0xC3, 0xA9])
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
        ("top1", -0.25),
        ("top2", -0.5),
    ]
    assert running.engine.params[0].logprobs == 2


async def test_logprobs_alone_report_the_chosen_token(start):
    running = await start()
    stream = await running.client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, max_tokens=2, stream=True
    )
    entries = [entry async for c in stream for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == ["w0.0 ", "w0.1 "]
    assert [entry.top_logprobs for entry in entries] == [[], []]


async def test_messages_as_templates_read_them(start):
    """developer is system; text parts are joined; what openai-python dumps comes back unharmed."""
    running = await start()
    answer = await running.client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=1
    )
    await running.client.chat.completions.create(
        model="fake",
        max_tokens=1,
        messages=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "name": "eve", "content": [{"type": "text", "text": t} for t in "ab"]},
            answer.choices[0].message.model_dump(),
            {"role": "user", "content": ""},
        ],
    )
    assert running.engine.messages == [
        {"role": "system", "content": "rules"},
        {"role": "user", "name": "eve", "content": "a\nb"},
        {"role": "assistant", "content": "w0.0 "},
        {"role": "user", "content": ""},
    ]


async def test_a_template_that_refuses_is_400(start):
    """Field note 52."""
    running = await start()
    with pytest.raises(openai.BadRequestError, match="must begin with the user"):
        await running.client.chat.completions.create(
            model="fake", messages=[{"role": "assistant", "content": "x"}]
        )


async def test_models(start):
    running = await start()
    [model] = (await running.client.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "jaxserve")
    assert (await running.client.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        await running.client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
