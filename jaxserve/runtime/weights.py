"""From named tensors of a checkpoint to the model's leaves on the device: fused, cast, in flat
order.

NNX defines and names the weights; once loaded they are one flat tuple of arrays, because a flat
tuple costs a compiled call 0.3 ms where a module costs 20 ms and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder, DecoderLayer
from jaxserve.models.linear import LinearImpl
from jaxserve.weights.checkpoint import Checkpoint

Progress = Callable[[str, int, int, str], None]  # phase, done, total, note


class Weights(NamedTuple):
    """Flat leaves on the device, in `nnx.split` order."""

    decoder: tuple[jax.Array, ...]
    layers: tuple[tuple[jax.Array, ...], ...]


@dataclass(frozen=True)
class Part[Module]:
    """An NNX module without arrays: what to build, and which flat leaf goes where."""

    graph: Any  # nnx.GraphDef
    treedef: Any  # of the module's state
    paths: tuple[str, ...]  # "attention.qkv", in flat order
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, build: Callable[[], Module]) -> Part[Module]:
        graph, state = nnx.split(nnx.eval_shape(build))
        flat, treedef = jax.tree_util.tree_flatten_with_path(state)
        paths = tuple(".".join(str(k.key) for k in path if hasattr(k, "key")) for path, _ in flat)
        return cls(graph, treedef, paths, tuple(leaf.shape for _, leaf in flat))

    def bind(self, leaves: tuple[Any, ...]) -> Module:
        """The module over these arrays; used inside the jitted step."""
        return nnx.merge(self.graph, jax.tree_util.tree_unflatten(self.treedef, leaves))


@dataclass(frozen=True)
class ModelDef:
    """The shape of a model: its Decoder, and the one DecoderLayer that all layers are instances
    of."""

    config: ModelConfig
    dtype: np.dtype[Any]
    decoder: Part[Decoder]
    layer: Part[DecoderLayer]

    @classmethod
    def build(cls, config: ModelConfig, linear: LinearImpl, dtype: np.dtype[Any]) -> ModelDef:
        return cls(
            config,
            dtype,
            Part.of(lambda: Decoder(config, linear, dtype)),
            Part.of(lambda: DecoderLayer(config, linear, dtype)),
        )

    @property
    def num_bytes(self) -> int:
        decoder = sum(math.prod(shape) for shape in self.decoder.shapes)
        layer = sum(math.prod(shape) for shape in self.layer.shapes)
        return (decoder + layer * self.config.num_layers) * self.dtype.itemsize

    def abstract_weights(self) -> Weights:
        """ShapeDtypeStructs in place of the arrays."""

        def leaves(shapes: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
            return tuple(jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes)

        layers = (leaves(self.layer.shapes),) * self.config.num_layers
        return Weights(leaves(self.decoder.shapes), layers)

    def leaf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every leaf of the model by path; those of layer i are under "layers.i."."""
        shapes = dict(zip(self.decoder.paths, self.decoder.shapes, strict=True))
        for i in range(self.config.num_layers):
            for path, shape in zip(self.layer.paths, self.layer.shapes, strict=True):
                shapes[f"layers.{i}.{path}"] = shape
        return shapes


def _fuse_qkv(config: ModelConfig, parts: list[np.ndarray]) -> np.ndarray:
    """q, k, v with [heads * head_dim, ...] rows -> rows grouped by KV head: its query heads, its k,
    its v."""
    groups = [p.reshape(config.num_kv_heads, -1, *p.shape[1:]) for p in parts]
    return np.concatenate(groups, axis=1).reshape(-1, *parts[0].shape[1:])


def _stack(config: ModelConfig, parts: list[np.ndarray]) -> np.ndarray:
    return np.stack(parts)


def _only(config: ModelConfig, parts: list[np.ndarray]) -> np.ndarray:
    return parts[0]


Fuse = Callable[[ModelConfig, list[np.ndarray]], np.ndarray]

_ATTENTION, _MLP = "self_attn.", "mlp."
_QKV = tuple(f"{_ATTENTION}{name}_proj" for name in "qkv")
_LAYER_SOURCES: dict[str, tuple[tuple[str, ...], Fuse]] = {
    "input_norm.weight": (("input_layernorm.weight",), _only),
    "post_norm.weight": (("post_attention_layernorm.weight",), _only),
    "attention.qkv": (tuple(f"{name}.weight" for name in _QKV), _fuse_qkv),
    "attention.qkv_bias": (tuple(f"{name}.bias" for name in _QKV), _fuse_qkv),
    "attention.output": ((f"{_ATTENTION}o_proj.weight",), _only),
    "attention.output_bias": ((f"{_ATTENTION}o_proj.bias",), _only),
    "attention.q_norm.weight": ((f"{_ATTENTION}q_norm.weight",), _only),
    "attention.k_norm.weight": ((f"{_ATTENTION}k_norm.weight",), _only),
    "mlp.gate_up": ((f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight"), _stack),
    "mlp.gate_up_bias": ((f"{_MLP}gate_proj.bias", f"{_MLP}up_proj.bias"), _stack),
    "mlp.down": ((f"{_MLP}down_proj.weight",), _only),
    "mlp.down_bias": ((f"{_MLP}down_proj.bias",), _only),
}
_MODEL_SOURCES: dict[str, tuple[tuple[str, ...], Fuse]] = {
    "embedding": (("model.embed_tokens.weight",), _only),
    "norm.weight": (("model.norm.weight",), _only),
    "head": (("lm_head.weight",), _only),
}


def leaf_sources(path: str) -> tuple[tuple[str, ...], Fuse]:
    """Checkpoint tensor names that a leaf is made of, and how."""
    if not path.startswith("layers."):
        return _MODEL_SOURCES[path]
    _, index, rest = path.split(".", 2)
    names, fuse = _LAYER_SOURCES[rest]
    return tuple(f"model.layers.{index}.{name}" for name in names), fuse


def load_weights(checkpoint: Checkpoint, model: ModelDef, progress: Progress) -> Weights:
    """Stream the checkpoint's tensors to the device, one leaf at a time, cast to the model's dtype.

    Raises CorruptCheckpoint (from the checkpoint) for missing, extra-shaped or truncated tensors.
    """
    shape_of = model.leaf_shapes()
    plans = {path: leaf_sources(path) for path in shape_of}
    owner = {name: path for path, (names, _) in plans.items() for name in names}
    missing = {path: set(names) for path, (names, _) in plans.items()}
    pieces: dict[str, np.ndarray] = {}
    leaves: dict[str, jax.Array] = {}
    for name, tensor in checkpoint.tensors():
        path = owner.get(name)
        if path is None:
            continue  # a tensor that this family does not use, such as a stored rotary table
        pieces[name] = tensor
        missing[path].discard(name)
        if missing[path]:
            continue
        names, fuse = plans[path]
        leaf = fuse(model.config, [pieces.pop(n) for n in names])
        assert leaf.shape == shape_of[path], f"{path}: {leaf.shape} is not {shape_of[path]}"
        leaves[path] = jax.device_put(np.ascontiguousarray(leaf.astype(model.dtype)))
        progress("load", len(leaves), len(plans), path)
    checkpoint.check_names(name for names in missing.values() for name in names)
    return Weights(
        tuple(leaves[path] for path in model.decoder.paths),
        tuple(
            tuple(leaves[f"layers.{i}.{path}"] for path in model.layer.paths)
            for i in range(model.config.num_layers)
        ),
    )
