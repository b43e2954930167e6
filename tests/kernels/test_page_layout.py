"""Sizes, refusals and the choice of an implementation."""

import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import CANDIDATES, LayoutError, PageLayout, select


def test_shape_and_bytes_of_a_page():
    layout = PageLayout(num_kv_heads=3, page_size=16, head_dim=64, dtype="bfloat16")
    assert layout.shape(7) == (7, 2, 3, 16, 64)
    assert layout.page_bytes == 2 * 3 * 16 * 64 * 2
    assert layout == PageLayout(3, 16, 64, jnp.bfloat16)
    assert hash(layout) == hash(PageLayout(3, 16, 64, jnp.bfloat16))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_heads", 0),
        ("page_size", -16),
        ("head_dim", 64.0),
        ("page_size", True),
        ("dtype", "int8"),
        ("dtype", "no such type"),
        ("dtype", None),
    ],
)
def test_a_bad_layout_names_the_field(field, value):
    good = {"num_kv_heads": 3, "page_size": 16, "head_dim": 64, "dtype": "float32"}
    with pytest.raises(LayoutError, match=field) as error:
        PageLayout(**{**good, field: value})
    assert error.value.field == field


@pytest.mark.parametrize("num_pages", [0, -1, 2**31 // (2 * 3 * 16) + 1])
def test_a_pool_that_cannot_be_indexed_is_refused(num_pages):
    with pytest.raises(LayoutError, match=r"num_pages: .*" + str(num_pages)):
        PageLayout(3, 16, 64, "float32").shape(num_pages)


def test_the_first_candidate_that_serves_is_taken():
    layout = PageLayout(3, 16, 64, "float32")
    chosen = select("cpu", layout, 9)
    assert chosen.name == "xla"
    special = type("Special", (), {"name": "special"})()
    only_gpu = lambda platform, layout, heads: special if platform == "gpu" else None  # noqa: E731
    candidates = (only_gpu, *CANDIDATES)
    assert select("gpu", layout, 9, candidates) is special
    assert select("cpu", layout, 9, candidates) == chosen
    with pytest.raises(LayoutError, match=r"platform: .*'cpu'"):
        select("cpu", layout, 9, (only_gpu,))


@pytest.mark.parametrize("num_heads", [0, 2, 10, -3])
def test_query_heads_must_be_a_multiple_of_kv_heads(num_heads):
    with pytest.raises(LayoutError, match=f"num_heads: .*3 KV heads.*{num_heads}"):
        select("cpu", PageLayout(3, 16, 64, "float32"), num_heads)
