"""`generate` and `chat` with a scripted model in the place of a loaded one."""

import io
import os
import signal

import pytest

from jaxserve import cli
from jaxserve.outputs import Delta
from jaxserve.terminal import progress
from scheduler.errors import PromptTooLong


class FakeLLM:
    """Answers with the number of its prompt's characters; refuses more than 40 of them."""

    def __init__(self):
        self.tokenizer = self
        self.prompts = []
        self.params = []
        self.interrupt_after = None
        self.closed = 0

    def render_chat(self, messages):
        return "|".join(message["content"] for message in messages)

    def stream(self, prompt, params):
        if len(prompt) > 40:
            raise PromptTooLong(len(prompt), 40)
        self.prompts.append(prompt)
        self.params.append(params)
        return self._deltas(str(len(prompt)))

    def _deltas(self, text):
        try:
            for i, part in enumerate(["<", text, ">"]):
                if i == self.interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
                yield Delta("r", part, (1,))
        finally:
            self.closed += 1


@pytest.fixture
def llm(monkeypatch):
    llm = FakeLLM()
    monkeypatch.setattr(cli, "_load", lambda args: llm)
    return llm


def test_generate_streams_the_text_and_nothing_else(llm, capsys):
    assert cli.main(["generate", "abc", "--temperature", "0", "--seed", "4"]) == 0
    assert capsys.readouterr().out == "<3>\n"
    [params] = llm.params
    assert (params.temperature, params.seed, params.max_tokens) == (0, 4, 512)


def test_a_prompt_that_is_refused_is_one_line(llm, capsys):
    assert cli.main(["generate", "x" * 41]) == 2
    assert "maximum context length" in capsys.readouterr().err


def chat(monkeypatch, capsys, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code = cli.main(["chat"])
    return code, *capsys.readouterr()


def test_chat_keeps_the_conversation_until_the_end_of_input(llm, monkeypatch, capsys):
    code, out, _ = chat(monkeypatch, capsys, "hi\n\n  \nyou\n")
    assert (code, out) == (0, "<2>\n<10>\n\n")
    assert llm.prompts == ["hi", "hi|<2>|you"]


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(llm, monkeypatch, capsys):
    llm.interrupt_after = 1
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    code, out, _ = chat(monkeypatch, capsys, "hi\nyou\n")
    assert (code, out) == (0, "<2\n<9\n\n")
    assert llm.prompts == ["hi", "hi|<2|you"]
    assert llm.closed == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_the_oldest_turn_goes_when_the_context_is_full(llm, monkeypatch, capsys):
    code, _, err = chat(monkeypatch, capsys, "a" * 20 + "\n" + "b" * 18 + "\n" + "c" * 50 + "\nd\n")
    assert code == 0
    assert llm.prompts == ["a" * 20, "b" * 18, "d"]
    assert err.count("oldest turn was dropped") == 2
    assert err.count("jaxserve: error: This model's maximum context length is 40") == 1


def test_a_bar_per_phase_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    with progress(terminal) as show:
        show("load", 1, 2, "layer")
        show("load", 2, 2, "layer")
        show("compile", 0, 3, "decode")
    assert "loading weights" in terminal.getvalue()
    assert "compiling" in terminal.getvalue()
