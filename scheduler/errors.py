"""Typed errors that a caller can cause. Each names the field and the limit; internal faults are
assertions instead."""


class RequestError(ValueError):
    """A request that cannot be honoured. `param` names the offending field, `code` is machine
    readable."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidParameter(RequestError):
    """A field has a value outside its range, or a type that it cannot take."""

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}", param=param, code="invalid_value")


class UnsupportedParameter(RequestError):
    """A known field that this version does not honour: refused, never ignored."""

    def __init__(self, param: str, message: str = "is not supported by this server"):
        super().__init__(f"{param}: {message}", param=param, code="unsupported_parameter")


class PromptTooLong(RequestError):
    """Prompt over the model's context. The wording is what clients match on (litellm#10793)."""

    def __init__(self, prompt_tokens: int, max_model_len: int):
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{prompt_tokens} tokens and at least 1 token must be left for the output. "
            "Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )


class PromptExceedsPool(RequestError):
    """Prompt within the context, but more than the whole KV pool can hold: it could never run
    (vllm#39734)."""

    def __init__(self, prompt_tokens: int, pool_tokens: int):
        super().__init__(
            f"The prompt has {prompt_tokens} tokens, but the KV cache pool of this server holds "
            f"{pool_tokens} tokens in all, one of them for the output: it could never run. Shorten "
            "the prompt, or start the server with more pages (--num-pages). This is below the "
            "model's maximum context length.",
            param="prompt",
            code="context_length_exceeded",
        )


class QueueFull(RequestError):
    """The waiting queue is at a limit: of `requests`, of prompt `tokens`, or of the predicted
    `wait`. retry_after: seconds until there should be room, at the measured rate."""

    status = 429

    def __init__(self, limit: str, message: str, retry_after: float):
        super().__init__(f"The waiting queue is full: {message}. Retry later.", code="queue_full")
        self.limit = limit
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    """The request's own timeout passed before it had made a token."""

    status = 504

    def __init__(self, timeout: float):
        super().__init__(
            f"The request's timeout of {timeout:g} s passed before its first token.",
            param="timeout",
            code="timeout",
        )
