import numpy as np
import pytest

from scheduler.plan import DROPPED, PlanKey, PlanLayout, plan_layout
from scheduler.request import MAX_SUPPRESSED

KEY = PlanKey("mixed", tokens=16, rows=4, pages=3)
SHAPES = {
    "token_ids": ((16,), np.int32, 0),
    "positions": ((16,), np.int32, 0),
    "write_index": ((16,), np.int32, DROPPED),
    "query_start": ((4,), np.int32, 0),
    "query_len": ((4,), np.int32, 0),
    "context_len": ((4,), np.int32, 0),
    "block_tables": ((4, 3), np.int32, 0),
    "sample_slot": ((4,), np.int32, DROPPED),
    "temperature": ((4,), np.float32, 0.0),
    "top_k": ((4,), np.int32, 0),
    "top_p": ((4,), np.float32, 1.0),
    "min_p": ((4,), np.float32, 0.0),
    "key": ((4, 2), np.uint32, 0),
    "suppressed": ((4, MAX_SUPPRESSED), np.int32, DROPPED),
    "num_logprobs": ((4,), np.int32, -1),
}


def test_keys_have_readable_names() -> None:
    assert str(KEY) == "mixed[tokens=16,rows=4,pages=3]"
    assert str(PlanKey("decode", 2, 2, 1, ("a", "b"))) == "decode[tokens=2,rows=2,pages=1]+a+b"


def test_lanes_fill_the_buffer_without_gap_or_overlap() -> None:
    layout = PlanLayout(KEY)
    assert [lane.name for lane in layout.lanes] == list(SHAPES)
    place = 0
    for lane in layout.lanes:
        start, stop = layout.offsets[lane.name]
        assert start == place
        assert stop - start == int(np.prod(lane.shape))
        place = stop
    assert layout.size == place == 3 * 16 + 4 * (3 + 3 + 5 + 2 + MAX_SUPPRESSED + 1)


def test_a_blank_plan_is_padding() -> None:
    layout = plan_layout(KEY)
    assert not layout.blank.flags.writeable
    for name, view in layout.views(layout.blank.copy()).items():
        shape, dtype, padding = SHAPES[name]
        assert view.shape == shape
        assert view.dtype == dtype
        assert (view == padding).all()


def test_views_write_the_plan_and_unpack_reads_it() -> None:
    layout = plan_layout(KEY)
    buffer = layout.blank.copy()
    random = np.random.default_rng(0)
    written = {}
    for name, view in layout.views(buffer).items():
        if view.dtype == np.float32:
            view[...] = random.normal(size=view.shape).astype(np.float32)
        else:
            info = np.iinfo(view.dtype)
            view[...] = random.integers(info.min, info.max, view.shape, view.dtype, endpoint=True)
        written[name] = view.copy()
    assert buffer.dtype == np.int32
    lanes = layout.unpack(buffer, lambda words, dtype: np.ascontiguousarray(words).view(dtype))
    assert lanes.keys() == written.keys()
    for name, lane in lanes.items():
        assert lane.dtype == SHAPES[name][1]
        assert np.array_equal(lane, written[name])


def test_unpack_leaves_int32_alone() -> None:
    layout = plan_layout(KEY)
    cast: list[type] = []

    def bitcast(words: np.ndarray, dtype: type) -> np.ndarray:
        cast.append(dtype)
        return words.view(dtype)

    layout.unpack(layout.blank, bitcast)
    assert cast == [np.float32, np.float32, np.float32, np.uint32]


def test_the_layout_depends_on_the_key_only() -> None:
    same = PlanKey("mixed", 16, 4, 3)
    assert plan_layout(same) is plan_layout(KEY)
    assert PlanLayout(same).offsets == PlanLayout(KEY).offsets


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize(("tokens", "rows", "pages"), [(1, 1, 1), (7, 7, 5), (256, 64, 128)])
def test_any_key_has_a_layout(kind: str, tokens: int, rows: int, pages: int) -> None:
    layout = plan_layout(PlanKey(kind, tokens, rows, pages))  # pyright: ignore[reportArgumentType]
    views = layout.views(layout.blank.copy())
    assert views["token_ids"].shape == (tokens,)
    assert views["block_tables"].shape == (rows, pages)
    assert sum(view.size for view in views.values()) == layout.size
