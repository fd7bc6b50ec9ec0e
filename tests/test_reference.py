"""The definition in plain JAX against float64, closed forms, and what must hold for any input."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CASES, assert_close, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from platforms import truth

from jax_kda import kda_gate, reference
from jax_kda.validate import segment_offsets

OPTIONS: dict[str, Any] = {
    "scale": 0.5, "lower_bound": None, "gate": "activated", "beta_mode": "probability",
    "l2norm": False, "output_final_state": True,
}  # fmt: skip


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def draw(
    *rows: int, T: int, H: int = 2, K: int = 8, V: int = 4, N: int | None = None, seed: int = 0
):
    """q, k, v, g, beta [*rows, T, ...] and an initial state [*rows[:-1], N, ...], in float64."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, *rows, T, H, K)) / np.sqrt(K)
    v = rng.standard_normal((*rows, T, H, V))
    g = -np.exp(rng.standard_normal((*rows, T, H, K)) - 2)
    beta = rng.uniform(size=(*rows, T, H))
    S0 = rng.standard_normal((*rows[:-1], rows[-1] if N is None else N, H, V, K))
    return q, k, v, g, beta, S0


@jax.jit
def packed(*x: Any) -> Any:
    """o and S of q, k, v, g, beta, S0, offsets."""
    *tokens, S0, offsets = x
    return fwd(*tokens, None, None, offsets, S0, **OPTIONS)


def fwd(*x: Any, **options: Any) -> Any:
    return reference.chunk_fwd(*x, **options)


def op(x: dict[str, Any], **options: Any) -> Any:
    return reference.chunk_kda(**x, **options, output_final_state=True)


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_values_in_float64(name: str, x64: None):
    x, options = make_inputs(CASES[name], np.float64)
    x = {name: a.astype(np.float64) for name, a in x.items()}
    results = jax.jit(functools.partial(op, **options))(x)
    for what, actual, expected in zip(("o", "state"), results, truth(x, **options), strict=True):
        assert_close(actual, expected, 1e-12, what)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["ragged_tail", "grouped_heads", "packed_short", "segments"])
def test_values(name: str, dtype: Any):
    x, options = make_inputs(CASES[name], dtype)
    results = jax.jit(functools.partial(op, **options))(x)
    for what, actual, expected in zip(("o", "state"), results, truth(x, **options), strict=True):
        bound = 1e-5 if actual.dtype == jnp.float32 else 2e-3
        assert_close(actual, expected, bound, what)


def test_the_length_of_a_chunk_means_nothing(monkeypatch: pytest.MonkeyPatch, x64: None):
    x, options = make_inputs(CASES["ragged_tail"])
    results = []
    for C in (64, 7):
        monkeypatch.setattr(reference, "CHUNK", C)
        results.append(op(x, **options))
    for o, state in results[1:]:
        assert_close(o, results[0][0], 1e-6)
        assert_close(state, results[0][1], 1e-6)


def test_leading_axes_are_rows(x64: None):
    """And A_log, dt_bias and offsets may differ by row."""
    *x, S0 = draw(2, 3, T=20, N=6)
    rng = np.random.default_rng(1)
    A_log, dt_bias = rng.standard_normal((2, 3, 2)), rng.standard_normal((2, 3, 2, 8))
    offsets = np.sort(rng.integers(0, 20, (2, 3, 4), np.int32)).reshape(2, 3, 2, 2)
    options = OPTIONS | {"gate": "softplus"}
    call = jax.jit(functools.partial(fwd, **options))
    o, S = call(*x, A_log, dt_bias, offsets, S0)
    assert S.shape == S0.shape
    for i, j in np.ndindex(2, 3):
        row, states = np.s_[i, j : j + 1], np.s_[i, 2 * j : 2 * j + 2]
        args = [a[row] for a in (*x, A_log, dt_bias, offsets)]
        o_row, S_row = call(*args, S0[states])
        assert_close(o[row], o_row, 1e-12)
        assert_close(S[states], S_row, 1e-12)


# ---- Properties, for any values and any lengths --------------------------------------------------

T = 40
lengths = st.lists(st.integers(0, T), min_size=3, max_size=3).map(lambda x: [0, *sorted(x)])
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=20, deadline=None, derandomize=True)


@examples
@given(lengths, seeds)
def test_packed_sequences_are_as_if_alone(offsets: list[int], seed: int):
    with jax.enable_x64(True):
        *x, S0 = draw(1, T=T, N=3, seed=seed)
        o, S = packed(*x, S0, np.array(offsets, np.int32))
        for n in range(3):
            begin, end = offsets[n : n + 2]
            rolled = [np.roll(a, -begin, axis=1) for a in x]
            alone = np.array([0, *[end - begin] * 3], np.int32)
            o_n, S_n = packed(*rolled, np.roll(S0, -n, axis=0), alone)
            np.testing.assert_array_equal(o[:, begin:end], o_n[:, : end - begin])
            np.testing.assert_array_equal(S[n], S_n[0])
        assert not np.any(o[:, offsets[-1] :])


@examples
@given(st.integers(0, T), seeds)
def test_a_sequence_may_be_split_anywhere(t: int, seed: int):
    with jax.enable_x64(True):
        *x, S0 = draw(1, T=T, seed=seed)
        pairs = lambda begin, end: np.array([[[begin, end]]], np.int32)
        o, S = packed(*x, S0, pairs(0, T))
        o_1, S_1 = packed(*x, S0, pairs(0, t))
        o_2, S_2 = packed(*x, S_1, pairs(t, T))
        assert_close(o_1 + o_2, o, 1e-13)
        assert_close(S_2, S, 1e-13)


@examples
@given(seeds, st.floats(-8, 8))
def test_outputs_are_linear_in_values_and_states(seed: int, factor: float):
    with jax.enable_x64(True):
        q, k, v, g, beta, S0 = draw(1, T=T, seed=seed)
        offsets = np.array([0, T], np.int32)
        o, S = packed(q, k, v, g, beta, S0, offsets)
        o_scaled, S_scaled = packed(q, k, factor * v, g, beta, factor * S0, offsets)
        np.testing.assert_allclose(o_scaled, factor * o, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(S_scaled, factor * S, rtol=1e-9, atol=1e-11)


@examples
@given(seeds, st.permutations(range(2)))
def test_heads_do_not_meet(seed: int, order: list[int]):
    with jax.enable_x64(True):
        *x, S0 = draw(1, T=T, seed=seed)
        offsets = np.array([0, T], np.int32)
        o, S = packed(*x, S0, offsets)
        o_p, S_p = packed(*(a[:, :, order] for a in x), S0[:, order], offsets)
        np.testing.assert_array_equal(o_p, o[:, :, order])
        np.testing.assert_array_equal(S_p, S[:, order])


@examples
@given(seeds)
def test_without_writing_a_state_only_decays(seed: int):
    with jax.enable_x64(True):
        q, k, v, g, beta, S0 = draw(1, T=T, seed=seed)
        _, S = packed(q, k, v, g, 0 * beta, S0, np.array([0, T], np.int32))
        np.testing.assert_allclose(S, S0 * np.exp(g.sum(1))[:, :, None], rtol=1e-12)


@examples
@given(seeds)
def test_orthonormal_keys_recall_their_values(seed: int):
    """Without decay and with beta = 1 the state is a dictionary; a key's last value is kept."""
    rng = np.random.default_rng(seed)
    H, K, V = 2, 8, 4
    keys = np.linalg.qr(rng.standard_normal((H, K, K)))[0]
    index = rng.integers(0, K, T)
    k = keys[:, index].swapaxes(0, 1)[None]
    v = rng.standard_normal((1, T, H, V))
    with jax.enable_x64(True):
        q = k / OPTIONS["scale"]
        S0 = np.zeros((1, H, V, K))
        x = (q, k, v, np.zeros((1, T, H, K)), np.ones((1, T, H)))
        o, S = packed(*x, S0, np.array([0, T], np.int32))
        assert_close(o, v, 1e-12)
        for i in set(index.tolist()):
            last = np.flatnonzero(index == i)[-1]
            recalled = np.einsum("hvk,hk->hv", S[0], keys[:, i])
            np.testing.assert_allclose(recalled, v[0, last], atol=1e-12)


# ---- Gates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.3])
def test_gates_in_closed_form(lower_bound: float | None):
    x = np.concatenate([np.linspace(-100, 100, 401), [-1e4, 1e4, -1e-30]]).astype(np.float32)
    x = np.broadcast_to(x[:, None, None], (x.size, 2, 3))
    A_log = np.array([-1.0, 2.5], np.float32)
    dt_bias = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    g = kda_gate(x, A_log, dt_bias, lower_bound)
    slope, z = np.exp(A_log.astype(np.float64))[:, None], (x + dt_bias).astype(np.float64)
    if lower_bound is None:
        expected = -slope * np.logaddexp(0, z)
    else:
        expected = lower_bound * np.exp(-np.logaddexp(0, -slope * z))
    assert g.dtype == jnp.float32
    assert np.all(g <= 0)
    # Steep sigmoids round their argument; subnormal numbers may be flushed to zero.
    np.testing.assert_allclose(g, expected, rtol=2e-5 if lower_bound else 1e-6, atol=1e-36)
    total = lambda x, A_log, dt_bias: jnp.sum(kda_gate(x, A_log, dt_bias, lower_bound))
    gradients = jax.grad(total, range(3))(x, A_log, dt_bias)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_gates_have_defaults():
    x = jnp.linspace(-3, 3, 8).reshape(2, 4)
    zeros = jnp.zeros(2), jnp.zeros((2, 4))
    np.testing.assert_array_equal(kda_gate(x, zeros[0]), kda_gate(x, *zeros))
    np.testing.assert_array_equal(kda_gate(x, lower_bound=-1.0), kda_gate(x, *zeros, -1.0))


def test_gradients_are_finite_at_any_constant_gate():
    gates = np.array([0, -1e-6, -0.5, -6.0, -104.0, -1e4, -np.inf], np.float32)
    q, k, v, g, beta, S0 = (a.astype(np.float32) for a in draw(gates.size, T=70))
    g = np.broadcast_to(gates[:, None, None, None], g.shape)

    def loss(*x):
        o, S = fwd(*x[:5], None, None, None, x[5], **OPTIONS)
        return jnp.sum(o * o) + jnp.sum(S * S)

    gradients = jax.jit(jax.grad(loss, range(6)))(q, k, v, g, beta, S0)
    assert all(np.isfinite(a).all() for a in gradients)


def test_a_reset_forgets_everything_before_it():
    q, k, v, g, beta, S0 = (a.astype(np.float32) for a in draw(1, T=70))
    g[:, 64] = -np.inf
    offsets = np.array([0, 70], np.int32)
    o, S = packed(q, k, v, g, beta, S0, offsets)
    o_other, S_other = packed(q, k, v, g, beta, 1e6 * S0, offsets)
    np.testing.assert_array_equal(o[:, 64:], o_other[:, 64:])
    np.testing.assert_array_equal(S, S_other)
    after = jax.grad(lambda S0: jnp.sum(packed(q, k, v, g, beta, S0, offsets)[0][:, 64:]))(S0)
    assert not np.any(after)


def test_zero_keys_and_queries_have_finite_gradients():
    q, k, v, g, beta, S0 = (a.astype(np.float32) for a in draw(1, T=12))
    q[:, 3], k[:, 5], k[:, 8:] = 0, 0, 0
    options = OPTIONS | {"l2norm": True}

    def loss(*x):
        o, S = fwd(*x[:5], None, None, None, x[5], **options)
        return jnp.sum(o * o) + jnp.sum(S * S)

    assert all(np.isfinite(a).all() for a in jax.grad(loss, range(6))(q, k, v, g, beta, S0))


# ---- What does not belong to a sequence never reaches it -----------------------------------------


@pytest.mark.parametrize("bad", ["q", "k", "v", "g", "beta", "S0"])
def test_nan_stays_in_its_sequence(bad: str):
    names = ("q", "k", "v", "g", "beta", "S0")
    x: dict[str, Any] = {}
    x |= zip(names, (a.astype(np.float32) for a in draw(1, T=40, N=3)), strict=True)
    offsets = np.array([0, 10, 25, 36], np.int32)

    def results(x):
        f = lambda *x: packed(*x, offsets)
        (o, S), vjp = jax.vjp(f, *(jnp.asarray(x[name]) for name in names))
        return (o, S, *vjp((jnp.ones_like(o), jnp.ones_like(S))))

    clean = results(x)
    if bad == "S0":
        x["S0"][1] = np.nan
    else:
        x[bad][:, 15] = np.nan  # the second sequence
        x[bad][:, 36:] = np.nan  # no sequence
    for name, actual, expected in zip(("o", "S", *names), results(x), clean, strict=True):
        actual, expected = np.array(actual), np.array(expected)
        part = np.s_[1] if name in ("S", "S0") else np.s_[:, 10:25]
        actual[part] = expected[part] = 0
        np.testing.assert_array_equal(actual, expected, name)


@pytest.mark.parametrize(
    "offsets",
    [[2, 10, 20], [0, 15, 10], [0, 10, 25], [-1, 10, 20], [0, 5, 2**31 - 1], [-(2**31), 0, 20]],
)
def test_malformed_lengths_give_nan(offsets: list[int]):
    x = (a.astype(np.float32) for a in draw(1, T=20, N=2))
    o, S = packed(*x, np.array(offsets, np.int32))
    assert np.isnan(o).all()
    assert np.isnan(S).all()


@pytest.mark.parametrize("pairs", [[[-1, -1]] * 2, [[0, 9], [8, 12]], [[4, 3], [5, 6]]])
def test_malformed_pairs_give_nan_in_their_row_only(pairs: list[list[int]]):
    *x, S0 = (a.astype(np.float32) for a in draw(2, T=20, N=4))
    good = [[1, 7], [7, 20]]
    o, S = packed(*x, S0, np.array([pairs, good], np.int32))
    assert np.isnan(o[0]).all()
    assert np.isnan(S[:2]).all()
    o_good, S_good = packed(*x, S0, np.array([good, good], np.int32))
    np.testing.assert_array_equal(o[1], o_good[1])
    np.testing.assert_array_equal(S[2:], S_good[2:])


def test_segment_offsets():
    ids = np.array(
        [[1, 1, 2, 2, 0, 2], [0, 0, 0, 0, 0, 0], [5, -1, 5, 0, 0, 7], [1, 2, 3, 4, 5, 6]]
    )
    expected = [
        [[0, 2], [2, 4], [5, 6], [6, 6]],
        [[6, 6]] * 4,
        [[0, 1], [1, 2], [2, 3], [5, 6]],
        [[-1, -1]] * 4,  # too many
    ]
    for dtype in (np.int32, np.int8):
        offsets = segment_offsets(jnp.asarray(ids, dtype), 4)
        assert offsets.dtype == jnp.int32
        np.testing.assert_array_equal(offsets, expected)
    np.testing.assert_array_equal(segment_offsets(jnp.zeros((1, 0), jnp.int32), 2), [[[0, 0]] * 2])


# ---- JAX -----------------------------------------------------------------------------------------


def test_forward_mode_and_second_derivatives(x64: None):
    *x, S0 = draw(1, T=5, H=1, K=3, V=2, N=2)
    x = (*x, np.array([0.3]), np.array([[-1.0, 0.0, 1.0]]), S0)
    rng = np.random.default_rng(1)
    direction = tuple(rng.standard_normal(a.shape) for a in x)
    options = OPTIONS | {"gate": "softplus", "l2norm": True, "beta_mode": "two_sigmoid"}

    def loss(*x):
        *x, S0 = x
        o, S = fwd(*x, np.array([0, 1, 4], np.int32), S0, **options)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(S))

    gradient = jax.grad(loss, range(len(x)))
    first, second = jax.jit(lambda *x: jax.jvp(gradient, x, direction))(*x)
    slope = jax.jit(lambda *x: jax.jvp(loss, x, direction)[1])(*x)
    np.testing.assert_allclose(slope, sum(map(np.vdot, first, direction)), rtol=1e-10)
    step = 1e-5
    ahead, behind = (
        jax.jit(gradient)(*(a + sign * step * d for a, d in zip(x, direction, strict=True)))
        for sign in (1, -1)
    )
    for actual, a, b in zip(second, ahead, behind, strict=True):
        assert_close(actual, (a - b) / (2 * step), 1e-7)


def temp_bytes(f: Any, x: dict[str, jax.ShapeDtypeStruct]) -> int:
    analysis: Any = jax.jit(f).lower(x).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def test_gradient_stores_one_state_a_chunk():
    T, H, K = 8192, 4, 128
    x = {name: jax.ShapeDtypeStruct((1, T, H, K), jnp.float32) for name in "qkvg"}
    x["beta"] = jax.ShapeDtypeStruct((1, T, H), jnp.float32)
    loss = lambda x: jnp.sum(op(x)[0])
    state, chunks = 4 * H * K * K, T // 64
    inputs = 4 * T * H * K * 4
    assert temp_bytes(jax.grad(loss), x) < 3 * chunks * state + 2 * inputs < 1e9


def test_many_sequences_cost_one_state_each():
    T, N, K = 4096, 1000, 64
    x = {name: jax.ShapeDtypeStruct((1, T, 1, K), jnp.float32) for name in "qkvg"}
    x["beta"] = jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
    x["initial_state"] = jax.ShapeDtypeStruct((N, 1, K, K), jnp.float32)
    x["cu_seqlens"] = jax.ShapeDtypeStruct((N + 1,), jnp.int32)
    state, tokens = 4 * K * K, 4 * T * K * 4
    assert temp_bytes(op, x) < 6 * N * state + 4 * tokens


def test_shard_map_checks_its_types():
    """Rows vary over a mesh axis, parameters over none."""
    x, options = make_inputs(CASES["segments"])
    x |= {n: options.pop(n) for n in ("segment_ids",) if n in options}
    shared = ("A_log", "dt_bias")
    x |= {n: np.concatenate([a, a[::-1]]) for n, a in x.items() if n not in shared}
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    specs = {n: P() if n in shared else P("b") for n in x}
    x = {n: jax.device_put(a, jax.NamedSharding(mesh, specs[n])) for n, a in x.items()}

    @functools.partial(jax.value_and_grad, has_aux=True, allow_int=True)
    def loss(x, sum_over_devices):
        results = op(x, **options)
        total = sum(jnp.sum(r.astype(jnp.float32) ** 2) for r in results)
        return sum_over_devices(total), results

    sharded = jax.shard_map(
        lambda x: loss(x, lambda total: jax.lax.psum(total, "b")),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=((P(), P("b")), specs),
    )
    (_, results), gradients = jax.jit(sharded)(x)
    x = jax.device_get(x)
    (_, expected), expected_gradients = jax.jit(lambda x: loss(x, lambda total: total))(x)
    for actual, true in zip(results, expected, strict=True):
        assert_close(actual, true, 1e-5)
    for n, true in expected_gradients.items():
        if n != "segment_ids":
            assert_close(gradients[n], true, 1e-5 if true.dtype == jnp.float32 else 2**-8, n)


def test_lengths_may_be_symbolic():
    B, T, N = jax.export.symbolic_shape("b, t, n")

    def export(B, **more):
        x = {name: jax.ShapeDtypeStruct((B, T, 2, 8), jnp.float32) for name in "qkvg"}
        x["beta"] = jax.ShapeDtypeStruct((B, T, 2), jnp.float32)
        return jax.export.export(jax.jit(op))(x | more)

    rows = export(B)
    packed_row = export(1, cu_seqlens=jax.ShapeDtypeStruct((N + 1,), jnp.int32))
    for length in (1, 70):
        q, k, v, g, beta, _ = draw(3, T=length, V=8)
        x = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        x = {n: a.astype(np.float32) for n, a in x.items()}
        for actual, expected in zip(rows.call(x), truth(x), strict=True):
            assert_close(actual, expected, 1e-5)
        x = {n: a[:1] for n, a in x.items()}
        offsets = np.array([0, 0, length // 2, length], np.int32)
        results = packed_row.call(x | {"cu_seqlens": offsets})
        for actual, expected in zip(results, truth(x, cu_seqlens=offsets), strict=True):
            assert_close(actual, expected, 1e-5)
