import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from scheduler.errors import InvalidParameter, UnsupportedParameter
from scheduler.request import Request, SamplingParams, Sequence

GOOD: dict[str, list[Any]] = {
    "n": [1, 128],
    "temperature": [0, 0.0, 1e-5, 2, 100.0],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 10**12],
    "min_p": [0, 0.0, 0.5, 1],
    "seed": [None, 0, -1, -(2**63), 2**64 - 1],
    "max_tokens": [None, 0, 1, 10**9],
    "min_tokens": [0, 1, 16],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "logprobs": [None, 0, 1, 20],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "logit_bias": [None, {}],
    "prompt_logprobs": [None],
}
# field -> bad value and what the message must say of the limit
BAD: list[tuple[str, Any, str]] = [
    ("n", 0, "between 1 and 128, got 0"),
    ("n", 129, "between 1 and 128, got 129"),
    ("n", 1.0, "must be an integer, got 1.0"),
    ("n", True, "must be an integer, got True"),
    ("n", None, "must be an integer, got None"),
    ("temperature", -1, "between 0 and 100, got -1"),
    ("temperature", 100.5, "between 0 and 100, got 100.5"),
    ("temperature", math.nan, "between 0 and 100, got nan"),
    ("temperature", math.inf, "between 0 and 100, got inf"),
    ("temperature", 10**400, "between 0 and 100, got 1000"),
    ("temperature", "1", "must be a number, got '1'"),
    ("temperature", False, "must be a number, got False"),
    ("temperature", None, "must be a number, got None"),
    ("top_p", 0, "greater than 0, got 0"),
    ("top_p", -0.1, "between 0 and 1, got -0.1"),
    ("top_p", 1.1, "between 0 and 1, got 1.1"),
    ("top_k", -2, "at least -1, got -2"),
    ("top_k", 1.5, "must be an integer, got 1.5"),
    ("min_p", -0.1, "between 0 and 1, got -0.1"),
    ("min_p", 1.1, "between 0 and 1, got 1.1"),
    ("seed", 2**64, f"between {-(2**63)} and {2**64 - 1}, got {2**64}"),
    ("seed", -(2**63) - 1, f"between {-(2**63)} and {2**64 - 1}"),
    ("seed", "7", "must be an integer, got '7'"),
    ("max_tokens", -1, "at least 0, got -1"),
    ("max_tokens", 1.0, "must be an integer, got 1.0"),
    ("min_tokens", -1, "at least 0, got -1"),
    ("min_tokens", None, "must be an integer, got None"),
    ("stop", "", "must not contain an empty string"),
    ("stop", ["a", ""], "must not contain an empty string"),
    ("stop", [1], "must be a string or a list of strings"),
    ("stop", {"a": 1}, "must be a list, got {'a': 1}"),
    ("stop", ["a"] * 17, "at most 16 strings are allowed, got 17"),
    ("stop_token_ids", [-1], "between 0 and 2147483647, got -1"),
    ("stop_token_ids", [2**31], "between 0 and 2147483647, got 2147483648"),
    ("stop_token_ids", [1.0], "must be an integer, got 1.0"),
    ("stop_token_ids", 5, "must be a list, got 5"),
    ("include_stop_str_in_output", 1, "must be a boolean, got 1"),
    ("ignore_eos", "yes", "must be a boolean, got 'yes'"),
    ("skip_special_tokens", None, "must be a boolean, got None"),
    ("logprobs", -1, "between 0 and 20, got -1"),
    ("logprobs", 21, "between 0 and 20, got 21"),
    ("logprobs", True, "must be an integer, got True"),
]
UNSUPPORTED: list[tuple[str, Any, str]] = [
    ("presence_penalty", 0.5, "only 0 is supported"),
    ("frequency_penalty", -1, "only 0 is supported"),
    ("repetition_penalty", 1.1, "only 1 is supported"),
    ("repetition_penalty", 1.5, "only 1 is supported"),
    ("logit_bias", {5: 100.0}, "is not supported"),
    ("prompt_logprobs", 0, "is not supported"),
]


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.stop) == (16, 0, ())
    assert not params.greedy


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in GOOD.items() for value in values]
)
def test_good(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value", "limit"), BAD)
def test_bad(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}: ")
    assert limit in caught.value.message


@pytest.mark.parametrize(("field", "value", "limit"), UNSUPPORTED)
def test_unsupported(field: str, value: Any, limit: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert limit in caught.value.message


def test_every_field_is_tested() -> None:
    tested = {*GOOD, "stop", "stop_token_ids"}
    refused = {field for field, _, _ in [*BAD, *UNSUPPORTED]}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert tested == refused == fields


def test_least_over_most() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    with pytest.raises(InvalidParameter, match=r"min_tokens: must not exceed max_tokens \(6 > 5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("ab", ("ab",)),
        (["a", "b"], ("a", "b")),
        ((), ()),
        ([], ()),
        (None, ()),
        (["a"] * 16, ("a",) * 16),
    ],
)
def test_stop_becomes_a_tuple(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


def test_stop_token_ids_become_a_tuple() -> None:
    assert SamplingParams(stop_token_ids=[3, 0]).stop_token_ids == (3, 0)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # pyright: ignore


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (0.0, True), (9e-5, True), (1e-4, False), (1, False)]
)
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_params_and_requests_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # pyright: ignore[reportAttributeAccessIssue]
    request = Request("a", np.ones(2, np.int32), SamplingParams(), 16, arrival=0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.max_tokens = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_pending_tokens_count() -> None:
    request = Request("a", np.ones(2, np.int32), SamplingParams(), 16, arrival=0.0)
    sequence = Sequence(request, [1, 1], order=0)
    assert (sequence.num_prompt, sequence.num_tokens, sequence.num_output) == (2, 2, 0)
    sequence.num_pending = 1
    sequence.tokens.append(5)
    assert (sequence.num_prompt, sequence.num_tokens, sequence.num_output) == (2, 4, 2)
