"""`jax_kda.layers` against vectors of other implementations."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs jax_kda[flax]")

from flax import nnx
from layer_calls import cache_of, call, extend, variables

import jax_kda
from jax_kda import layers
from jax_kda.layers import KimiDeltaAttention

DATA = Path(__file__).parent / "data"


pytestmark = pytest.mark.usefixtures("on_the_cpu")

VECTORS = [
    "b01_kimi_h64",
    "b02_kimi_h96",
    "b03_glm5_next_lb",
    "b04_fla_layer",
    "b05_fla_layer_gva_lb",
]
FLA_NAMES = {f"{x}_proj.{i}": f"{x}_{'ab'[i]}_proj" for x in "fg" for i in range(2)}


class Vector(NamedTuple):
    options: dict[str, Any]  # of the layer
    prefill: int
    x: dict[str, np.ndarray]


@functools.cache
def load(name: str) -> Vector:
    with np.load(DATA / f"{name}.npz") as file:
        meta = json.loads(str(file["meta"]))
        x = {n: file[n] for n in file.files if n != "meta"}
    config = meta.get("config", meta)
    options = {
        "hidden_size": config.get("hidden_size", config.get("hidden")),
        "num_heads": config["num_heads"],
        "num_v_heads": config.get("num_v_heads"),
        "head_dim": config["head_dim"],
        "head_v_dim": int(config["head_dim"] * config.get("expand_v", 1)),
        "lower_bound": meta["lower_bound"],
        "norm_eps": meta.get("rms_norm_eps", 1e-5),
        "g_bias": "config" in meta,
    }
    return Vector(options, meta.get("prefill", 0), x)


def entry(name: str, array: np.ndarray, layer: KimiDeltaAttention):
    """Where a checkpoint's tensor is in the layer, and what it is there."""
    module, _, leaf = name.rpartition(".")
    module = FLA_NAMES.get(module, module)
    if leaf == "A_log":
        return ("A_log",), array.reshape(-1)
    if leaf == "dt_bias":
        return ("dt_bias",), array.reshape(layer.dt_bias.shape)
    if leaf == "bias":
        return (module, "bias"), array
    if module == "o_norm":
        return (module, "scale"), array
    return (module, "kernel"), array[:, 0].T if module.endswith("conv1d") else array.T


def make_layer(options: dict[str, Any], tensors: dict[str, np.ndarray]) -> KimiDeltaAttention:
    layer = nnx.eval_shape(lambda: KimiDeltaAttention(**options, rngs=nnx.Rngs(0)))
    parameters = variables(layer)
    for name, tensor in tensors.items():
        path, value = entry(name, tensor, layer)
        parameter = parameters.pop(path)
        assert parameter.shape == value.shape
        parameter.set_value(jnp.asarray(value))
    assert not parameters
    return layer


def below(prefix: str, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): a for n, a in x.items() if n.startswith(prefix)}


def check(name: str, actual: Any, expected: np.ndarray, bound: float = 2e-5) -> None:
    """The largest error over the largest value, as the vectors' README has it."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape, name
    error, size = np.abs(actual - expected).max(), np.abs(expected).max()
    assert error <= bound * size, f"{name}: {error:.2e} of {size:.2e}"


def check_cache(cache: layers.LayerCache, x: dict[str, np.ndarray], when: str) -> None:
    """FLA's cache is V-first and has a part for each convolution; that of transformers is K-first.
    Both keep the newest four inputs of a convolution, this layer three."""
    if f"{when}/recurrent" in x:
        state = x[f"{when}/recurrent"]
        parts = [x[f"{when}/conv_{n}"] for n in "qkv"]
    else:
        state = x[f"recurrent_state_{when}"].swapaxes(-1, -2)
        parts = np.split(x[f"conv_state_{when}"], 3, axis=1)
    check("state", cache.state, state)
    for name, part in zip("qkv", parts, strict=True):
        check(f"conv {name}", getattr(cache, name), part[..., 1:].swapaxes(1, 2), 1e-6)


@pytest.mark.parametrize("name", VECTORS)
def test_vector_without_cache(name: str):
    options, _, x = load(name)
    layer = make_layer(options, below("weights/", x))
    check("y", call(layer, x["x"]), x["y_full"])


@pytest.mark.parametrize("name", VECTORS)
def test_vector_prefill_and_decode(name: str):
    options, prefill, x = load(name)
    layer = make_layer(options, below("weights/", x))
    layer.init_cache(x["x"].shape[0])
    ys = [call(layer, x["x"][:, :prefill])]
    check_cache(cache_of(layer), x, "prefill")
    for t in range(prefill, x["x"].shape[1]):
        ys.append(call(layer, x["x"][:, t : t + 1]))
    check("y", np.concatenate(ys, axis=1), x["y_prefill_decode"])
    check_cache(cache_of(layer), x, "final")


@pytest.mark.parametrize("name", VECTORS[:3])
def test_vector_inside(name: str, monkeypatch: pytest.MonkeyPatch):
    options, _, x = load(name)
    layer = make_layer(options, below("weights/", x))
    seen: dict[str, Any] = {}

    def recorded(q, k, v, g, beta, **arguments):
        o, state = jax_kda.chunk_kda(q, k, v, g, beta, **arguments)
        seen.update(q=q, k=k, v=v, beta=jax.nn.sigmoid(beta), o=o)
        gate = [arguments[name] for name in ("A_log", "dt_bias", "lower_bound")]
        seen.update(g=jax_kda.kda_gate(g, *gate))
        return o, state

    monkeypatch.setattr(layers, "chunk_kda", recorded)

    @nnx.jit
    def inside(layer, inputs):
        layer(inputs)
        return seen

    seen = inside(layer, x["x"][:1, :12])
    expected = below("mid/", x)
    assert expected.keys() == seen.keys()
    for name, value in expected.items():
        check(name, seen[name], value)


@pytest.mark.parametrize("name", [VECTORS[0], VECTORS[2]])
def test_vector_gradients(name: str):
    options, _, x = load(name)
    layer = make_layer(options, below("weights/", x))

    @nnx.jit
    def gradients(layer, inputs):
        loss = lambda layer, inputs: jnp.sum(layer(inputs) * x["dy"])
        return nnx.grad(loss, argnums=(0, 1))(layer, inputs)

    of_layer, dx = gradients(layer, x["x"])
    check("dx", dx, x["dx"])
    of_layer = nnx.to_pure_dict(of_layer)
    for tensor, value in below("grad/", x).items():
        path, expected = entry(tensor, value, layer)
        actual = functools.reduce(dict.__getitem__, path, of_layer)
        check(tensor, actual, expected, 1e-4 if path[0] in ("A_log", "dt_bias") else 2e-5)


def make_stack(name: str) -> tuple[list[tuple[nnx.RMSNorm, KimiDeltaAttention]], Vector]:
    """A residual stack of norms and layers."""
    vector = load(name)
    stack = []
    for i in range(2):
        norm = nnx.RMSNorm(vector.options["hidden_size"], epsilon=1e-5, rngs=nnx.Rngs(0))
        variables(norm)["scale",].set_value(
            jnp.asarray(vector.x[f"weights/layers.{i}.input_layernorm.weight"])
        )
        tensors = below(f"weights/layers.{i}.self_attn.", vector.x)
        stack.append((norm, make_layer(vector.options, tensors)))
    return stack, vector


def test_vector_packed_stack():
    stack, (_, _, x) = make_stack("c01_packed_kimi")
    h, ids = jnp.asarray(x["x"]), x["segment_ids"]
    for i, (norm, layer) in enumerate(stack):
        o, cache = extend(layer, norm(h), segment_ids=ids, max_segments=3)
        h = h + o
        if i == 0:
            check("layer 0", o, x["kda_out_layer0"])
        states = {f"{n}_final": x[f"{n}_final"][:, i] for n in ("conv_state", "recurrent_state")}
        check_cache(cache, states, "final")
    check("y", h, x["y"])


def test_vector_packed_gradients():
    stack, (_, _, x) = make_stack("c01_packed_kimi")

    @nnx.jit
    def gradients(stack, inputs):
        def loss(stack, h):
            for norm, layer in stack:
                h = h + layer(norm(h), segment_ids=x["segment_ids"], max_segments=3)
            return jnp.sum(h * x["dy"])

        return nnx.grad(loss, argnums=(0, 1))(stack, inputs)

    of_stack, dx = gradients(nnx.List(nnx.List(pair) for pair in stack), x["x"])
    check("dx", dx, x["dx"])
    of_stack: Any = nnx.to_pure_dict(of_stack)
    for i, (_, layer) in enumerate(stack):
        of_norm, of_layer = (of_stack[i][j] for j in range(2))
        check("norm", of_norm["scale"], x[f"grad/layers.{i}.input_layernorm.weight"])
        for tensor, value in below(f"grad/layers.{i}.self_attn.", x).items():
            path, expected = entry(tensor, value, layer)
            actual = functools.reduce(dict.__getitem__, path, of_layer)
            check(tensor, actual, expected, 1e-4 if path[0] in ("A_log", "dt_bias") else 2e-5)


def test_vector_packed_grouped_heads():
    options, _, x = load("c02_packed_fla")
    layer = make_layer(options, below("weights/", x))
    y, cache = extend(layer, x["x"], segment_ids=x["segment_ids"], max_segments=3)
    check("y", y, x["y_packed"])
    check("y", y, x["y_docs"])
    check_cache(cache, x, "final")
