"""Settings: TOML, overrides, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ConfigError, EngineConfig, ServerConfig, load_config

CONFIGS = Path(__file__).parents[1] / "configs"


def test_a_file_and_what_wins_over_it(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('model = "some/model"\nnum_pages = 512\npage_size = 32\nport = 9000\n')
    engine, server = load_config(str(path), {"page_size": 64, "host": "0.0.0.0", "dtype": None})
    assert engine == EngineConfig(model="some/model", num_pages=512, page_size=64)
    assert server == ServerConfig(host="0.0.0.0", port=9000)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_the_presets_are_valid(path: Path) -> None:
    load_config(str(path))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_pages": 0}, "num_pages: must be an integer of at least 1, got 0"),
        ({"page_size": "16"}, "page_size: must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs: must be an integer"),
        ({"dtype": "int3"}, "dtype: must be one of auto, float32, bfloat16"),
        ({"row_buckets": "magic"}, "row_buckets: must be one of pow2, single"),
        ({"lookahead": 1}, "lookahead: must be true or false"),
        ({"port": 70000}, "port: must be at most 65535"),
        ({"drain_timeout": -1}, "drain_timeout: must be a number of at least 0"),
        ({"model": ""}, "model: must be a path"),
        ({"pages": 3}, "pages: is not a setting"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_pages = ", "is not valid TOML"),
        ("no_such = 1", "no_such: is not a setting"),
        ("[engine]\nnum_pages = 3", "engine: is not a setting"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(str(path))
    with pytest.raises(ConfigError, match="can't read"):
        load_config(str(tmp_path / "none.toml"))
