import pytest

from scheduler.errors import (
    DeadlineExceeded,
    InvalidParameter,
    PromptExceedsPool,
    PromptTooLong,
    QueueFull,
    RequestError,
    UnsupportedParameter,
)


def test_prompt_too_long_says_what_clients_match_on() -> None:
    error = PromptTooLong(8193, 8192)
    assert "maximum context length is 8192 tokens" in error.message
    assert "8193 tokens" in error.message
    assert str(error) == error.message
    assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")


def test_prompt_over_the_pool_names_both_numbers_and_the_way_out() -> None:
    error = PromptExceedsPool(1025, 1024)
    assert "1025 tokens" in error.message
    assert "1024 tokens" in error.message
    assert "maximum context length" in error.message
    assert "--num-pages" in error.message
    assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")


def test_queue_full_says_when_to_come_back() -> None:
    error = QueueFull("requests", "12 requests", retry_after=2.5)
    assert "12 requests" in error.message
    assert (error.status, error.code, error.retry_after) == (429, "queue_full", 2.5)


def test_a_deadline_names_itself() -> None:
    error = DeadlineExceeded(2.5)
    assert "2.5 s" in error.message
    assert (error.status, error.param, error.code) == (504, "timeout", "timeout")


def test_parameter_errors_name_the_field() -> None:
    invalid = InvalidParameter("top_p", "must be between 0 and 1, got 2")
    assert invalid.message == "top_p: must be between 0 and 1, got 2"
    assert (invalid.status, invalid.param, invalid.code) == (400, "top_p", "invalid_value")
    unsupported = UnsupportedParameter("logit_bias")
    assert unsupported.message == "logit_bias: is not supported by this server"
    assert (unsupported.param, unsupported.code) == ("logit_bias", "unsupported_parameter")


@pytest.mark.parametrize(
    "error",
    [
        PromptTooLong(2, 1),
        PromptExceedsPool(2, 1),
        QueueFull("wait", "x", 1.0),
        DeadlineExceeded(2.0),
        InvalidParameter("n", "x"),
        UnsupportedParameter("n"),
    ],
)
def test_a_caller_can_catch_them_all_as_one(error: RequestError) -> None:
    assert isinstance(error, RequestError)
    assert isinstance(error, ValueError)
