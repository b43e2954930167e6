import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from scheduler.plan import DROPPED, PlanKey, plan_layout
from scheduler.request import MAX_SUPPRESSED, Request, SamplingParams, Sequence
from scheduler.slots import SlotTable

Make = Callable[..., Request]
NONE = [DROPPED] * MAX_SUPPRESSED


def enter(table: SlotTable, request: Request, pages: list[int], computed: int = 0) -> Sequence:
    sequence = Sequence(request, request.prompt.tolist(), order=0)
    table.enter(sequence)
    for page in pages:
        table.append_page(sequence, page)
    sequence.num_computed = computed
    table.computed[sequence.slot] = computed
    return sequence


def test_slots_are_given_and_taken_back(make_request: Make) -> None:
    table = SlotTable(3, 4, 4)
    sequences = [enter(table, make_request(i, 2), []) for i in range(3)]
    assert [s.slot for s in sequences] == [0, 1, 2]
    assert table.num_free == 0
    table.leave(sequences[1])
    assert sequences[1].slot == -1
    assert table.num_free == 1
    assert enter(table, make_request(3, 2), []).slot == 1


def test_a_slot_forgets_who_had_it(make_request: Make) -> None:
    table = SlotTable(1, 4, 4)
    stop_ids = frozenset(range(MAX_SUPPRESSED))
    first = make_request(1, 9, 20, stop_ids=stop_ids, min_tokens=3, top_k=5, logprobs=2)
    sequence = enter(table, first, [3, 4, 5], computed=9)
    table.last_token[0] = -1
    table.leave(sequence)
    enter(table, make_request(2, [7, 8], 5, stop_ids=frozenset({6}), min_tokens=1), [9])
    assert table.computed[0] == 0
    assert table.target[0] == 2
    assert table.limit[0] == 7
    assert table.num_pages[0] == 1
    assert table.block_tables[0, 0] == 9
    assert table.last_token[0] == 8
    assert table.top_k[0] == 0
    assert table.num_logprobs[0] == -1
    assert table.suppress_until[0] == 3
    assert table.suppressed[0].tolist() == [6, *NONE[1:]]


def test_a_sequence_that_comes_back_enters_with_its_output(make_request: Make) -> None:
    table = SlotTable(1, 4, 4)
    sequence = Sequence(make_request(1, [5, 6], 8), [5, 6, 40, 41], order=0)
    table.enter(sequence)
    assert table.target[0] == 4
    assert table.limit[0] == 10
    assert table.last_token[0] == 41


@pytest.mark.parametrize(("top_k", "lane"), [(-1, 0), (0, 0), (5, 5), (10**12, 2**31 - 1)])
def test_top_k_fits_its_lane(make_request: Make, top_k: int, lane: int) -> None:
    table = SlotTable(1, 4, 4)
    enter(table, make_request(1, 2, top_k=top_k), [])
    assert table.top_k[0] == lane


def test_a_huge_min_tokens_fits_its_lane(make_request: Make) -> None:
    """A client may ask for it with max_tokens left to the server."""
    table = SlotTable(1, 4, 4)
    request = make_request(1, 2, 6, stop_ids=frozenset({1}))
    params = SamplingParams(min_tokens=10**12, max_tokens=None)
    enter(table, dataclasses.replace(request, params=params), [])
    assert table.suppress_until[0] == 8


def test_a_mixed_plan_lane_by_lane(make_request: Make) -> None:
    """Two rows that decode (one of them with its last token still on the device), the end of a
    prompt and the middle of another, pages of four tokens."""
    table = SlotTable(5, 8, 4)
    known = enter(table, make_request(10, [1, 2, 3], temperature=0.5), [7, 2], computed=4)
    known.tokens += [50, 51]
    table.target[known.slot], table.last_token[known.slot] = 5, 51
    enter(table, make_request(99, 1), [30])  # runs, but is not in this step
    pending = enter(table, make_request(11, [4], logprobs=3, min_p=0.25), [5], computed=3)
    table.target[pending.slot], table.last_token[pending.slot] = 4, -(pending.slot + 1)
    ending = enter(
        table,
        make_request(12, [20, 21, 22, 23, 24, 25], stop_ids=frozenset({9, 8}), min_tokens=1),
        [3, 4],
        computed=3,
    )
    middle = enter(
        table,
        make_request(13, [30, 31, 32, 33, 34], top_p=0.5, top_k=7, temperature=2),
        [6],
        computed=0,
    )
    assert [known.slot, pending.slot, ending.slot, middle.slot] == [0, 2, 3, 4]

    key = PlanKey("mixed", tokens=10, rows=5, pages=3)
    slots = np.array([known.slot, pending.slot], np.int32)
    plan = table.fill_plan(key, slots, [(ending, 3), (middle, 2)])

    assert (plan.key, plan.num_tokens, plan.num_rows) == (key, 7, 4)
    lanes = {n: v.tolist() for n, v in plan_layout(key).views(plan.buffer).items()}
    assert lanes == {
        "token_ids": [51, -3, 23, 24, 25, 30, 31, 0, 0, 0],
        "positions": [4, 3, 3, 4, 5, 0, 1, 0, 0, 0],
        "write_index": [2 * 4, 5 * 4 + 3, 15, 16, 17, 24, 25, DROPPED, DROPPED, DROPPED],
        "query_start": [0, 1, 2, 5, 0],
        "query_len": [1, 1, 3, 2, 0],
        "context_len": [5, 4, 6, 2, 0],
        "block_tables": [[7, 2, 0], [5, 0, 0], [3, 4, 0], [6, 0, 0], [0, 0, 0]],
        "sample_slot": [0, 2, 3, DROPPED, DROPPED],
        "temperature": [0.5, 1.0, 1.0, 2.0, 0.0],
        "top_k": [0, 0, 0, 7, 0],
        "top_p": [1.0, 1.0, 1.0, 0.5, 1.0],
        "min_p": [0.0, 0.25, 0.0, 0.0, 0.0],
        "key": [[10, 0], [11, 0], [12, 0], [13, 0], [0, 0]],
        "suppressed": [NONE, NONE, [8, 9, *NONE[2:]], NONE, NONE],
        "num_logprobs": [-1, 3, -1, -1, -1],
    }
    # filling decides nothing: the table is as before
    assert table.computed.tolist() == [4, 0, 3, 3, 0]
    assert table.target.tolist() == [5, 1, 4, 6, 5]


def test_a_decode_plan_has_a_token_a_row(make_request: Make) -> None:
    table = SlotTable(4, 2, 2)
    for number, computed in ((1, 2), (2, 1), (3, 3)):
        sequence = enter(table, make_request(number, 1), [2 * number, 2 * number + 1], computed)
        table.target[sequence.slot] = computed + 1
        table.last_token[sequence.slot] = 60 + number
    key = PlanKey("decode", tokens=4, rows=4, pages=2)
    plan = table.fill_plan(key, np.array([2, 0, 1], np.int32), [])
    lanes = plan_layout(key).views(plan.buffer)
    assert lanes["token_ids"].tolist() == [63, 61, 62, 0]
    assert lanes["positions"].tolist() == [3, 2, 1, 0]
    assert lanes["write_index"].tolist() == [7 * 2 + 1, 3 * 2, 4 * 2 + 1, DROPPED]
    assert lanes["query_start"].tolist() == [0, 1, 2, 0]
    assert lanes["query_len"].tolist() == [1, 1, 1, 0]
    assert lanes["context_len"].tolist() == [4, 3, 2, 0]
    assert lanes["sample_slot"].tolist() == [2, 0, 1, DROPPED]
    assert lanes["key"][:, 0].tolist() == [3, 1, 2, 0]


def test_end_tokens_are_held_back_below_min_tokens_only(make_request: Make) -> None:
    """min_tokens 2 after a prompt of 3: the tokens at positions 3 and 4 are none of the ends."""
    table = SlotTable(1, 2, 4)
    sequence = enter(
        table, make_request(1, 3, stop_ids=frozenset({5}), min_tokens=2), [1, 2], computed=2
    )
    key = PlanKey("decode", tokens=1, rows=1, pages=2)
    held = []
    for computed in (2, 3, 4, 5):
        table.computed[sequence.slot] = computed
        table.target[sequence.slot] = computed + 1
        plan = table.fill_plan(key, np.array([0], np.int32), [])
        held.append(5 in plan_layout(key).views(plan.buffer)["suppressed"])
    assert held == [True, True, False, False]
