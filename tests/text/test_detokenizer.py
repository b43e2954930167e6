import codecs
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.detokenizer import Detokenizer

PLENTY = settings(deadline=None, max_examples=300)
# Texts over few characters, so that stop strings and their beginnings are frequent.
texts = st.text("ab\n é日😀", max_size=40) | st.text(max_size=20)
stops = st.lists(st.text("ab\n é日", min_size=1, max_size=4), max_size=4).map(tuple)


def pieces(detokenizer, ids, cuts):
    """What each push released, and the flush, for pushes that end at `cuts`."""
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pushed = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pushed, detokenizer.flush()]


def in_context(tokenizer, prompt, ids):
    """The text of `ids` behind `prompt`, decoded in one go."""
    before = b"".join(map(tokenizer.token_bytes, prompt))
    after = b"".join(map(tokenizer.token_bytes, ids))
    finished = codecs.getincrementaldecoder("utf-8")("replace").decode(before)
    text = (before + after).decode("utf-8", "replace")[len(finished) :]
    if tokenizer.strips_leading_space and not before:
        text = text.removeprefix(" ")
    return text


def cut(text, stop, include_stop=False):
    """The text up to the stop string that is complete first, the longest of those; and which."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            first = max(found, key=len)
            return text[: end if include_stop else end - len(first)], first
    return text, None


def may_become_stop(text, stop):
    """How many characters at the end of `text` begin a stop string."""
    return max([k for s in stop for k in range(len(s)) if text.endswith(s[:k])], default=0)


@PLENTY
@given(
    ids=st.lists(st.integers(0, 49151) | st.integers(130, 255), max_size=30),
    prompt=st.lists(st.integers(17, 49151) | st.integers(130, 255), max_size=6),
    stop=stops,
    cuts=st.lists(st.integers(0, 100), max_size=6),
)
def test_random_ids_stream_as_they_decode(smollm2, ids, prompt, stop, cuts):
    detokenizer = Detokenizer(smollm2, prompt, stop=stop, skip_special_tokens=False)
    expected, first = cut(in_context(smollm2, prompt, ids), stop)
    assert "".join(pieces(detokenizer, ids, cuts)) == expected
    assert detokenizer.stop_match == first


@PLENTY
@given(
    ids=st.lists(st.integers(0, 599), max_size=40),
    prompt=st.lists(st.integers(0, 599), max_size=4),
    stop=stops,
    cuts=st.lists(st.integers(0, 100), max_size=6),
)
def test_random_sentencepiece_ids(sentencepiece, ids, prompt, stop, cuts):
    detokenizer = Detokenizer(sentencepiece, prompt, stop=stop)
    seen = [[i for i in part if i not in sentencepiece.special_ids] for part in (prompt, ids)]
    expected, first = cut(in_context(sentencepiece, *seen), stop)
    assert "".join(pieces(detokenizer, ids, cuts)) == expected
    assert detokenizer.stop_match == first


@PLENTY
@given(
    text=texts, stop=stops, cuts=st.lists(st.integers(0, 100), max_size=8), include=st.booleans()
)
def test_text_never_leaks_a_stop_nor_half_a_character(smollm2, text, stop, cuts, include):
    ids = smollm2.encode(text, parse_special=False)
    whole = smollm2.decode(ids)
    detokenizer = Detokenizer(smollm2, [1], stop=stop, include_stop=include)
    released = pieces(detokenizer, ids, cuts)
    expected, first = cut(whole, stop, include)
    assert "".join(released) == expected
    assert detokenizer.stop_match == first
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in released)


@PLENTY
@given(text=texts, stop=stops)
def test_nothing_is_held_longer_than_it_must(smollm2, text, stop):
    ids = smollm2.encode(text, parse_special=False)
    detokenizer = Detokenizer(smollm2, [1], stop=stop)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    whole = released = ""
    for token in ids:
        whole += utf8.decode(smollm2.token_bytes(token))
        released += detokenizer.push((token,))
        if detokenizer.stop_match is not None:
            break
        assert released == whole[: len(whole) - may_become_stop(whole, stop)]


def test_the_stop_string_that_is_complete_first_wins(smollm2):
    def run(text, *stop):
        detokenizer = Detokenizer(smollm2, [], stop=stop)
        return detokenizer.push(smollm2.encode(text)), detokenizer.stop_match

    assert run("xabcd", "abcd", "bc") == ("xa", "bc")
    assert run("xabcd", "bcd", "abcd", "cd") == ("x", "abcd")  # at one character: the longest
    assert run("xabc", "ab", "abc") == ("x", "ab")
    assert run("aabaabaac", "aabaac") == ("aab", "aabaac")  # overlaps itself
    assert run("no stop", "xyz") == ("no stop", None)


def test_ids_behind_the_stop_do_not_count(smollm2):
    ids = smollm2.encode("one two three four")
    assert len(ids) == 4
    detokenizer = Detokenizer(smollm2, [], stop=(" two",))
    assert detokenizer.push(ids) == "one"
    assert detokenizer.num_tokens == 2
    assert detokenizer.push(ids) == detokenizer.flush() == ""
    assert detokenizer.num_tokens == 2


def test_a_stop_prefix_is_released_when_it_fails_or_at_the_end(smollm2):
    detokenizer = Detokenizer(smollm2, [], stop=("STOP",))
    assert detokenizer.push(smollm2.encode("go ST")) == "go "
    assert detokenizer.push(smollm2.encode("ART ST")) == "START "
    assert detokenizer.flush() == "ST"


def test_stop_strings_wait_for_min_tokens(smollm2):
    ids = smollm2.encode("a b a b a b")
    text = smollm2.decode(ids)
    assert len(ids) == 6
    for minimum, expected in ((0, "a"), (1, "a"), (2, "a b a"), (3, "a b a"), (6, text)):
        detokenizer = Detokenizer(smollm2, [], stop=(" b",), min_tokens=minimum)
        assert detokenizer.push(ids) + detokenizer.flush() == expected, minimum
    # a stop string that begins in the text of the first tokens has been sent already
    detokenizer = Detokenizer(smollm2, [], stop=("a b",), min_tokens=1)
    assert detokenizer.push(ids) == "a b "
    assert detokenizer.stop_match == "a b"


def test_an_unfinished_character_is_one_replacement(smollm2):
    ids = smollm2.encode("hi 😀")
    detokenizer = Detokenizer(smollm2, [])
    assert detokenizer.push(ids[:-1]) == "hi "
    assert detokenizer.flush() == "\ufffd"
    detokenizer = Detokenizer(smollm2, [])
    assert detokenizer.push(ids[:-1]) + detokenizer.push(ids[-1:]) == "hi 😀"


def test_invalid_bytes_resolve_at_once(smollm2):
    lead = smollm2.encode("😀")[:-1]
    detokenizer = Detokenizer(smollm2, [])
    assert detokenizer.push(lead) == ""
    assert detokenizer.push(smollm2.encode("a")) == "\ufffda"


def test_a_character_begun_by_the_prompt_belongs_to_the_output(smollm2):
    ids = smollm2.encode("x😀y")
    detokenizer = Detokenizer(smollm2, np.array(ids[:2], np.int32))
    assert detokenizer.push(np.array(ids[2:], np.int32)) == "😀y"


@pytest.mark.parametrize("prompt", [[], [1]])
def test_sentencepiece_space_at_the_start_of_all_text(sentencepiece, prompt):
    ids = sentencepiece.encode("Hello", add_special_tokens=False)
    assert sentencepiece.token_bytes(ids[0]).startswith(b" ")
    assert Detokenizer(sentencepiece, prompt).push(ids) == "Hello"


def test_sentencepiece_space_behind_a_prompt(sentencepiece):
    ids = sentencepiece.encode("Hello", add_special_tokens=False)
    assert Detokenizer(sentencepiece, [1, *ids]).push(ids) == " Hello"


def test_special_tokens_can_be_shown(smollm2):
    ids = [28120, 2]
    assert Detokenizer(smollm2, []).push(ids) == "hello"
    shown = Detokenizer(smollm2, [], skip_special_tokens=False, stop=("<|im_end|>",))
    assert shown.push(ids) == "hello"
    assert shown.stop_match == "<|im_end|>"
