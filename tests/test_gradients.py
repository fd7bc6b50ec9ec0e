"""Gradients of the op against plain JAX in float64, by whatever the platform runs.

The CPU has a kernel of its own, `kda_chunk_bwd`. What JAX makes of it: tests/test_derivatives.py.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CASES, Case, assert_close, make_inputs
from platforms import op, step, truth

HALF_ULP = 2.0**-8  # of bfloat16: few numbers round worse than many


def draw_cotangents(x: dict[str, Any], **options: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(r.shape) for r in truth(x, **options)]


def gradients(x: dict[str, Any], cotangents: Any, f: Any = op, **options: Any) -> dict[str, Any]:
    def vjp(x, cotangents):
        results, pullback = jax.vjp(functools.partial(f, **options), x)
        return pullback(tuple(c.astype(r.dtype) for c, r in zip(cotangents, results, strict=True)))[
            0
        ]

    return jax.device_get(jax.jit(vjp)(x, cotangents))


def check(x: dict[str, Any], tolerance: float = 1e-5, **options: Any) -> dict[str, Any]:
    """Gradients of both results, after comparing all of them."""
    cotangents = draw_cotangents(x, **options)
    actual = gradients(x, cotangents, **options)
    with jax.enable_x64(True):
        wide = {name: np.asarray(a, np.float64) for name, a in x.items()}
        expected = gradients(wide, cotangents, **options, implementation="reference")
    for name, gradient in actual.items():
        assert gradient.dtype == x[name].dtype
        # A cotangent has the dtype of its primal: that of a bfloat16 state is rounded before it.
        rounded = (x[name].dtype, x.get("initial_state", x["q"]).dtype, x["q"].dtype)
        bound = HALF_ULP if jnp.bfloat16 in rounded else tolerance
        assert_close(gradient, expected[name], bound, f"gradient of {name}")
    return actual


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str):
    x, options = make_inputs(CASES[name])
    check(x, **options)


@pytest.mark.parametrize("name", ["whole_chunks", "grouped_heads", "segments"])
def test_gradients_in_bfloat16(name: str):
    x, options = make_inputs(CASES[name], jnp.bfloat16)
    check(x, **options)


def test_more_chunks_than_are_kept_at_once():
    case = Case(T=64 * 130 + 5, H=1, HV=2, K=8, V=4, gate="activated", log_decay=-0.01)
    x, options = make_inputs(case)
    check(x, **options)


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -5.0, -20.0, -60.0, -1e4, -1e30, -np.inf])
def test_constant_gates_of_any_strength(log_decay: float):
    x, options = make_inputs(Case(T=100, gate="activated", log_decay=log_decay))
    actual = check(x, **options)
    if log_decay <= -1e4:  # nothing can come through
        assert not np.any(actual["g"]) and not np.any(actual["initial_state"])


def test_strong_gates_beside_weak_ones():
    x, options = make_inputs(Case(T=130, H=1, gate="activated"))
    rng = np.random.default_rng(2)
    x["g"] = -(10.0 ** rng.integers(-4, 5, x["g"].shape)).astype(np.float32)
    check(x, **options)


def test_zero_queries_and_keys():
    x, options = make_inputs(CASES["ragged_tail"])
    x["q"][:, 3:9] = x["k"][:, 5:20] = 0
    x["k"][:, 60:70] = 0
    check(x, **options)


def test_repeated_keys():
    """Every token corrects the one before it: beta's gradient is a difference of large numbers."""
    x, options = make_inputs(Case(T=100, H=1, K=16, V=16, gate="activated", log_decay=-1e-3))
    x["k"][:] = x["k"][:, :1]
    check(x, **options)


def test_beta_of_zero_by_differences():
    """With all others 0 the results are linear in one token's beta."""
    x, options = make_inputs(Case(T=20, B=1, H=1, K=8, V=4, logits=False, beta=0.0))
    cotangents = draw_cotangents(x, **options)
    actual = gradients(x, cotangents, **options)["beta"]

    def loss(beta: np.ndarray) -> float:
        results = truth(x | {"beta": beta}, **options)
        return sum(float(np.sum(c * r)) for c, r in zip(cotangents, results, strict=True))

    expected = np.zeros(x["beta"].shape)
    for t in range(x["beta"].shape[1]):
        one = np.zeros_like(expected)
        one[0, t, 0] = 1
        expected[0, t, 0] = loss(one) - loss(0 * one)
    assert_close(actual, expected, 1e-5, "gradient of beta")


def test_packed_sequences_are_the_single_ones():
    x, options = make_inputs(CASES["packed"])
    cotangents = [c.astype(np.float32) for c in draw_cotangents(x, **options)]
    cu_seqlens = options.pop("cu_seqlens")
    packed = gradients(x, cotangents, **options, cu_seqlens=cu_seqlens)
    shared = ("A_log", "dt_bias")
    total = {name: np.zeros_like(x[name]) for name in shared}
    for n, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
        cut = {
            name: a[:, begin:end] for name, a in x.items() if name not in (*shared, "initial_state")
        }
        cut |= {name: x[name] for name in shared} | {"initial_state": x["initial_state"][n : n + 1]}
        one = gradients(cut, [cotangents[0][:, begin:end], cotangents[1][n : n + 1]], **options)
        for name, gradient in one.items():
            if name in shared:
                total[name] += gradient
            elif name == "initial_state":
                np.testing.assert_array_equal(packed[name][n : n + 1], gradient)
            else:
                np.testing.assert_array_equal(packed[name][:, begin:end], gradient)
    for name in shared:
        assert_close(packed[name], total[name], 1e-6, name)


def test_tokens_of_no_sequence():
    """They get no gradient and are not read, whatever they are."""
    x, options = make_inputs(CASES["packed_with_tail"])
    cotangents = draw_cotangents(x, **options)
    clean = gradients(x, cotangents, **options)
    end = options["cu_seqlens"][-1]
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, end:] = np.nan
    cotangents[0][:, end:] = np.nan
    for name, gradient in gradients(x, cotangents, **options).items():
        np.testing.assert_array_equal(gradient, clean[name])
    for name in ("q", "k", "v", "g", "beta"):
        assert not np.any(clean[name][:, end:])


def test_malformed_offsets():
    """XLA drops the forward call, whose results nobody reads: the gradient has to complain."""
    x, options = make_inputs(CASES["packed_with_tail"])
    del options["cu_seqlens"]
    loss = lambda x, cu_seqlens: jnp.sum(op(x, **options, cu_seqlens=cu_seqlens)[0])
    cu_seqlens = jnp.array([0, 30, 20, 91, 91], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="`cu_seqlens` of row 0 must not decrease"):
        jax.block_until_ready(jax.jit(jax.grad(loss))(x, cu_seqlens))


def test_what_runs():
    """The kernel, except where the state is in a pool."""
    x, options = make_inputs(CASES["one_token"])
    loss = lambda f, x: jnp.sum(f(x, **options)[0])
    lower = lambda f, x: jax.jit(jax.grad(functools.partial(loss, f))).lower(x).as_text()
    for f in (op, step):
        assert "kda_chunk_bwd" in lower(f, x)
    assert "kda_chunk_bwd" not in lower(functools.partial(op, state_indices=[0, 1, 2]), x)


@pytest.mark.parametrize(
    "dtype, kept, besides", [("bfloat16", 1026, 1538), ("float32", 1284, 1796)]
)
@pytest.mark.parametrize("T, H", [(64, 2), (1000, 2), (131072, 32)])
def test_memory_is_what_the_docs_say(T: int, H: int, dtype: str, kept: int, besides: int):
    """Compiled, never run: bytes a token and head of docs/training.md, 64 KiB a state, no more."""
    x, options = make_inputs(Case(T=1, H=H, K=128, V=128, gate_dtype=dtype), jnp.bfloat16)
    tokens = lambda a: (1, T, *a.shape[2:]) if a.shape[:2] == (1, 1) else a.shape
    types = {name: jax.ShapeDtypeStruct(tokens(a), a.dtype) for name, a in x.items()}
    f = functools.partial(op, **options)
    parameters, state = H * (1 + 128) * 4, H * 128 * 128 * 4

    residuals = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(f, x)[1], types))
    nbytes = sum(a.size * a.dtype.itemsize for a in residuals)
    assert nbytes == T * H * kept + parameters + state

    def both(x, cotangents):
        results, pullback = jax.vjp(f, x)
        return results, pullback(cotangents)[0]

    memory: Any = jax.jit(both).lower(types, jax.eval_shape(f, types)).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    tables = 1024  # of pointers
    expected = T * H * (kept + besides) + 2 * parameters + 4 * state
    assert expected <= total + memory.temp_size_in_bytes <= expected + tables
