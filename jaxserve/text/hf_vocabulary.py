"""A `Vocabulary` out of a Hugging Face model directory. Knows the file names and keys; no network.

tokenizer.json is read by the `tokenizers` library. Where only an older format is there,
transformers converts it (imported then: it takes seconds).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from jaxserve.text.vocabulary import (
    SPACE,
    MissingTokenizer,
    TokenizerLoadError,
    Vocabulary,
    byte_level_bytes,
    sentencepiece_bytes,
)

_OLDER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerLoadError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{path}: must hold a JSON object")
    return value


def _load_encoder(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise TokenizerLoadError(f"{path}: {error}") from error
    older = [name for name in _OLDER_FORMATS if (directory / name).is_file()]
    if not older:
        raise MissingTokenizer(f"{directory} has no tokenizer.json")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return converted.backend_tokenizer
    except Exception as error:  # whatever the converter of that format raises
        raise TokenizerLoadError(
            f"{directory} has no tokenizer.json, and {older[0]} cannot be converted: {error}"
        ) from error


def _flat_decoders(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [inner for outer in decoder["decoders"] for inner in _flat_decoders(outer)]


def _decoding(encoder: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How tokens become bytes, and whether a leading space is dropped, from the decoder's parts."""
    if encoder.decoder is None:
        raise TokenizerLoadError("tokenizer.json has no decoder")
    steps = _flat_decoders(json.loads(encoder.decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return byte_level_bytes, False
    strips = False
    for step in steps:
        match step:
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": pattern}, "content": " "}:
                if pattern != SPACE:
                    raise TokenizerLoadError(f"tokenizer.json: decoder replaces {pattern!r}")
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = strips or start == 1
            case {"type": "Metaspace", "replacement": replacement} if replacement == SPACE:
                strips = strips or step.get("prepend_scheme") != "never"
            case _:
                raise TokenizerLoadError(
                    f"tokenizer.json: decoder {step['type']} is not supported; "
                    "known: ByteLevel, and Replace, ByteFallback, Fuse, Strip, Metaspace for U+2581"
                )
    return sentencepiece_bytes, strips


def _text(token: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def _add_tokens(encoder: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Tokens that tokenizer_config.json knows and tokenizer.json does not, as transformers does."""
    known = {token.content for token in encoder.get_added_tokens_decoder().values()}
    listed: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            known.add(token["content"])
            given = {flag: token[flag] for flag in flags if flag in token}
            encoder.add_tokens([AddedToken(token["content"], **given)])
    encoder.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True)
            for text in named.values()
            if text not in known
        ]
    )


def _ids(encoder: Tokenizer, texts: list[str]) -> tuple[int, ...]:
    return tuple(i for text in texts if (i := encoder.token_to_id(text)) is not None)


def _affixes(
    encoder: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that go before and after every text.

    The post-processor of tokenizer.json decides; add_bos_token and add_eos_token only where there
    is none, as in transformers 5.
    """
    if encoder.post_processor is None:
        bos = [named["bos_token"]] if config.get("add_bos_token") and "bos_token" in named else []
        eos = [named["eos_token"]] if config.get("add_eos_token") and "eos_token" in named else []
        return _ids(encoder, bos), _ids(encoder, eos)
    probe = encoder.encode("a", add_special_tokens=True)
    mask = probe.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return tuple(probe.ids[:first]), tuple(probe.ids[last:])


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat template sources by name; files of their own go before tokenizer_config.json."""
    templates: dict[str, str] = {}
    sources = [config.get("chat_template"), _read_json(directory / "chat_template.json")]
    for source in sources:
        if isinstance(source, Mapping):
            source = source.get("chat_template")
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            templates |= {entry["name"]: entry["template"] for entry in source}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (path := directory / "chat_template.jinja").is_file():
        templates["default"] = path.read_text(encoding="utf-8")
    return templates


def _eos_ids(directory: Path, eos_id: int | None) -> tuple[int, ...]:
    """The tokenizer's end token and those of generation_config.json (else of config.json)."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            break
    more = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in [eos_id, *more] if i is not None))


def vocabulary_from_directory(directory: Path) -> Vocabulary:
    """The tokenizer of a model directory. TokenizerLoadError names the missing or bad file."""
    encoder = _load_encoder(directory)
    config = _read_json(directory / "tokenizer_config.json")
    named_in = _read_json(directory / "special_tokens_map.json") | config
    named = {name: text for name in _NAMED if (text := _text(named_in.get(name)))}
    _add_tokens(encoder, config, named)
    added = encoder.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    ids = {name: encoder.token_to_id(text) for name, text in named.items()}
    special |= {i for i in ids.values() if i is not None}
    to_bytes, strips = _decoding(encoder)
    before, after = _affixes(encoder, config, named)
    return Vocabulary(
        encoder=encoder,
        to_bytes=to_bytes,
        added={i: token.content for i, token in added.items()},
        special_ids=frozenset(special),
        bos_id=ids.get("bos_token"),
        eos_ids=_eos_ids(directory, ids.get("eos_token")),
        prefix_ids=before,
        suffix_ids=after,
        strips_leading_space=strips,
        templates=_templates(directory, config),
        variables=named,
    )
