"""Layers to test, and how they are called."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_kda import layers
from jax_kda.layers import KimiDeltaAttention

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_heads": 2,
    "num_v_heads": 4,
    "head_dim": 8,
    "head_v_dim": 6,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lower_bound": {"lower_bound": -5.0, "num_v_heads": None, "head_v_dim": None},
    "full_rank": {"f_rank": None, "g_rank": None, "g_bias": True, "allow_neg_eigval": True},
    "conv_bias": {"conv_bias": True, "conv_size": 3, "f_rank": 5, "g_rank": 3},
    "one_tap": {"conv_size": 1},
    "no_convolution": {"use_short_conv": False},
    "bfloat16": {"dtype": jnp.bfloat16},
}


def small(seed: int = 0, **options: Any) -> Any:
    """A layer with random weights, large enough for every one of them to matter."""
    layer = nnx.eval_shape(lambda: KimiDeltaAttention(**SMALL | options, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    for path, parameter in variables(layer).items():
        shape = parameter.shape
        scale = 1.5 * shape[0] ** -0.5 if path[-1] == "kernel" else 0.5
        value = scale * rng.standard_normal(shape)
        value += {"scale": 1, "dt_bias": -2}.get(path[-1], 0)
        parameter.set_value(jnp.asarray(value, parameter.dtype))
    return layer


def inputs(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*shape, 24), np.float32)


@functools.partial(nnx.jit, static_argnames=("max_segments",))
def call(layer, x, **packing):
    return layer(x, **packing)


@functools.partial(nnx.jit, static_argnames=("max_segments",))
def extend(layer, x, cache=None, **packing):
    return layer.extend(x, cache, **packing)


def variables(node: Any) -> dict[tuple[str, ...], Any]:
    """The variables of a module or a state, by path."""
    flat: Any = nnx.to_flat_state(nnx.state(node) if isinstance(node, nnx.Module) else node)
    return dict(flat)


def cache_of(layer: KimiDeltaAttention) -> layers.LayerCache:
    names = ("cached_q", "cached_k", "cached_v", "cached_state")
    return layers.LayerCache(*(getattr(layer, name)[...] for name in names))
