"""The Python API: what prompts may be, what comes back, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from scheduler.errors import InvalidParameter, PromptTooLong, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM], tiny_llama: str) -> LLM:
    return make_llm(
        tiny_llama, num_pages=40, page_size=8, max_num_seqs=4, max_num_batched_tokens=32
    )


def test_forms_of_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello dog")
    one = llm.generate("Hello dog", GREEDY)
    assert len(one) == 1
    assert one[0].prompt == "Hello dog"
    assert one[0].prompt_token_ids == ids
    expected = one[0].outputs[0].token_ids
    assert len(expected) == 6
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == expected
    many = llm.generate([ids, "Hello dog", "other"], GREEDY)
    assert [o.outputs[0].token_ids for o in many[:2]] == [expected, expected]
    assert llm.generate([], GREEDY) == []


def test_outputs_have_the_names_that_vllm_users_know(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    choice = llm.generate("Hello", params)[0].outputs[0]
    assert choice.finish_reason == "length"
    assert choice.index == 0
    assert choice.text == llm.tokenizer.decode(choice.token_ids)
    assert choice.logprobs is not None
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert len(entry) == 2  # greedy: the chosen token is the likeliest
        assert entry[token].rank == 1
        assert entry[token].logprob == max(p.logprob for p in entry.values())
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)
    assert choice.cumulative_logprob == pytest.approx(
        sum(entry[t].logprob for t, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    )


def test_logprobs_zero_is_the_chosen_token_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=5, logprobs=0, ignore_eos=True)
    choice = llm.generate([[5]], params)[0].outputs[0]
    assert choice.logprobs is not None
    assert [list(entry) for entry in choice.logprobs] == [[token] for token in choice.token_ids]


def test_one_parameter_set_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 4)]
    outputs = llm.generate([[5], [6]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4]
    with pytest.raises(InvalidParameter, match="1 for 2 prompts"):
        llm.generate([[5], [6]], params[:1])


@pytest.mark.parametrize("prompt", [3, None, [[]], [""], [3.5], [["a"]], {"a": 1}, [True]])
def test_prompts_that_are_none(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)


def test_streams_take_one_prompt_and_one_set_of_parameters(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="must be one prompt for a stream, got 2"):
        llm.stream(["a", "b"], GREEDY)  # type: ignore[arg-type]
    for call in (llm.stream, llm.generate):
        with pytest.raises(InvalidParameter, match="sampling_params: must be SamplingParams"):
            call("a", {"temperature": 0})  # type: ignore[operator]


def test_a_bad_prompt_in_a_list_runs_none_and_is_named(llm: LLM) -> None:
    steps = llm.stats.steps
    with pytest.raises(PromptTooLong) as caught:
        llm.generate([[5], [6] * 300, [7]], GREEDY)
    assert caught.value.__notes__ == ["in prompt 1 of 3"]
    assert llm.stats.steps == steps
    assert llm.stats.num_waiting == 0


def test_a_stream_that_is_closed_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream([5, 6], SamplingParams(temperature=0.0, max_tokens=200))
    next(stream)
    assert llm.stats.pages_held > 0
    stream.close()  # type: ignore[attr-defined]
    llm.generate([[5]], GREEDY)
    assert llm.stats.pages_held == 0


def test_threads_share_the_engine(llm: LLM) -> None:
    expected = llm.generate([[9, 9]], GREEDY)[0].outputs[0].token_ids
    made: list[list[int]] = []

    def work() -> None:
        made.append(llm.generate([[9, 9]], GREEDY)[0].outputs[0].token_ids)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [expected] * 6


def test_a_model_without_tokenizer_takes_ids_only(make_llm: Callable[..., LLM]) -> None:
    directory = __file__.rsplit("/", 2)[0] + "/golden/tiny/llama-tied"
    llm = make_llm(directory, num_pages=16, page_size=8, max_num_seqs=2, max_num_batched_tokens=16)
    assert len(llm.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids) == 6
    with pytest.raises(RequestError, match="without a tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="stop: this model has no tokenizer"):
        llm.generate([[5]], SamplingParams(stop=["x"]))


def test_a_whole_config_takes_no_further_settings(tiny_llama: str) -> None:
    with pytest.raises(TypeError, match="page_size"):
        LLM(EngineConfig(model=tiny_llama), page_size=8)
