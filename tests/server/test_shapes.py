"""Answers and chunks, byte by byte."""

import json

import pytest

from jaxserve.outputs import Delta, Logprob
from jaxserve.server.logprobs import TextOffsets, chat_logprobs, legacy_logprobs, legacy_token
from jaxserve.server.shapes import AnswerWriter, ChatShape, ChunkWriter, CompletionShape, Head


def head(**changes):
    values = {
        "id": "cmpl-1",
        "model": 'a "b"',
        "created": 5,
        "prompt_tokens": 3,
        "num_choices": 1,
        "logprobs": None,
    }
    return Head(**(values | changes))


def test_a_chunk_of_each_shape():
    delta = Delta("r", "hi", (1,), num_output_tokens=1)
    assert ChunkWriter(CompletionShape(), head(), False, False).chunk(0, delta) == (
        b'data: {"id":"cmpl-1","object":"text_completion","created":5,"model":"a \\"b\\"",'
        b'"choices":[{"index":0,"text":"hi","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert ChunkWriter(ChatShape(), head(), True, False).chunk(0, delta) == (
        b'data: {"id":"cmpl-1","object":"chat.completion.chunk","created":5,"model":"a \\"b\\"",'
        b'"choices":[{"index":0,"delta":{"role":"assistant","content":"hi"},"logprobs":null,'
        b'"finish_reason":null}],"usage":null}\n\n'
    )


@pytest.mark.parametrize("text", ["a\nb", "\u2028\u2029\x85", '"\\', "😀", "\x00\x1f", "\ufffd"])
def test_any_text_is_one_line_of_ascii(text):
    writer = ChunkWriter(CompletionShape(), head(), False, False)
    chunk = writer.chunk(0, Delta("r", text, (1,)))
    assert chunk.isascii()
    assert len(chunk.decode().splitlines()) == 2  # the event, and the empty line that ends it
    assert json.loads(chunk.removeprefix(b"data: "))["choices"][0]["text"] == text


def test_the_end_of_a_stream():
    writer = ChunkWriter(CompletionShape(), head(num_choices=2), True, False)
    writer.chunk(0, Delta("r", "a", (1,), num_output_tokens=4, finish_reason="stop"))
    writer.chunk(1, Delta("r", "b", (1,), num_output_tokens=6, finish_reason="stop"))
    usage, done, rest = writer.end().split(b"\n\n")
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == 10
    assert (done, rest) == (b"data: [DONE]", b"")
    assert ChunkWriter(CompletionShape(), head(), False, False).end() == b"data: [DONE]\n\n"


def test_a_choice_that_times_out_before_any_token_is_held_back():
    """Its chunk comes with the first token of another choice; the status stays open until then."""
    writer = ChunkWriter(CompletionShape(), head(num_choices=3), False, False)
    late = Delta("r", "", (), finish_reason="timeout")
    assert writer.chunk(2, late) is None
    assert writer.chunk(0, Delta("r", "", (1,), num_output_tokens=1)) is None
    assert writer.chunk(1, Delta("r", "a", (1,), num_output_tokens=1)) == (
        b'data: {"id":"cmpl-1","object":"text_completion","created":5,"model":"a \\"b\\"",'
        b'"choices":[{"index":2,"text":"","logprobs":null,"finish_reason":"timeout",'
        b'"stop_reason":null}]}\n\n'
        b'data: {"id":"cmpl-1","object":"text_completion","created":5,"model":"a \\"b\\"",'
        b'"choices":[{"index":1,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert writer.chunk(1, late) is not None
    assert writer.empty_end() is None


@pytest.mark.parametrize(
    ("reasons", "end"),
    [
        (["timeout", "timeout"], "timeout"),
        (["abort", "abort"], "abort"),
        (["stop", "timeout"], "timeout"),
        (["stop", "stop"], None),
    ],
)
def test_what_ended_an_answer_without_a_token(reasons, end):
    chunks = ChunkWriter(CompletionShape(), head(num_choices=2), False, False)
    answer = AnswerWriter(CompletionShape(), head(num_choices=2))
    for index, reason in enumerate(reasons):
        delta = Delta("r", "", (), finish_reason=reason)
        chunks.chunk(index, delta)
        answer.add(index, delta)
    assert (chunks.empty_end(), answer.empty_end()) == (end, end)


def test_a_whole_answer_is_made_of_its_deltas():
    writer = AnswerWriter(ChatShape(), head(num_choices=2))
    writer.add(1, Delta("r", "x", (1,), num_output_tokens=1))
    writer.add(0, Delta("r", "", (1, 2), num_output_tokens=2))
    writer.add(0, Delta("r", "y", (3,), None, "stop", 7, 3, 3))
    writer.add(1, Delta("r", "z", (2,), None, "length", None, 3, 2))
    answer = writer.answer()
    assert [c["message"]["content"] for c in answer["choices"]] == ["y", "xz"]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length"]
    assert [c["stop_reason"] for c in answer["choices"]] == [7, None]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


SNOWMAN = "☃".encode()
PARTS = [  # a snowman over two tokens, then "ok"
    (1, {1: Logprob(-0.5, 1, "\ufffd", SNOWMAN[:2])}),
    (2, {2: Logprob(-0.25, 1, "\ufffd", SNOWMAN[2:])}),
    (3, {3: Logprob(-0.125, 1, "ok", b"ok"), 4: Logprob(float("-inf"), 2, "no", b"no")}),
]


def test_parts_of_characters_in_the_legacy_shape():
    """Field note 45: such tokens must not collide, and offsets count whole characters."""
    got = legacy_logprobs(PARTS, TextOffsets())
    assert got["tokens"] == ["bytes:\\xe2\\x98", "bytes:\\x83", "ok"]
    assert got["text_offset"] == [0, 0, 1]
    assert got["token_logprobs"] == [-0.5, -0.25, -0.125]
    assert got["top_logprobs"][2] == {"ok": -0.125, "no": -9999.0}
    assert json.loads(json.dumps(got, allow_nan=False)) == got


def test_parts_of_characters_in_the_chat_shape():
    got = chat_logprobs(PARTS, 1)["content"]
    assert [entry["bytes"] for entry in got] == [[0xE2, 0x98], [0x83], [0x6F, 0x6B]]
    assert [len(entry["top_logprobs"]) for entry in got] == [1, 1, 1]
    assert bytes(byte for entry in got for byte in entry["bytes"]).decode() == "☃ok"


def test_ids_that_share_a_text_keep_the_likelier_number():
    """lm-eval tests max(top_logprobs.values()) == token_logprob."""
    entries = {1: Logprob(-0.5, 1, "a", b"a"), 2: Logprob(-3.0, 2, "a", b"a")}
    assert legacy_logprobs([(1, entries)], TextOffsets())["top_logprobs"] == [{"a": -0.5}]


def test_a_token_without_bytes_is_its_text():
    assert legacy_token(Logprob(-1.0, 1, "<eos>")) == "<eos>"
