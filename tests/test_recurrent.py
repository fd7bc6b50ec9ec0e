"""Decoding: `recurrent_kda` against the definition in float64, and against `chunk_kda`.

All sums are in float32, on every platform, so a result is as exact as its type.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CASES, Case, assert_close, make_inputs
from platforms import (
    CPU_F32,
    GPU,
    OPERANDS,
    Platform,
    draw,
    op,
    rms_ratio,
    run,
    step,
    truth,
)

# Head sizes are those that the CUDA handler has, too.
STEPS = {
    "one_token": Case(T=1, B=3, H=2, HV=4, K=128, V=128),
    "two_tokens": Case(T=2, B=2, H=1, HV=3, K=64, V=96, gate="lower_bound", lower_bound=-5.0),
    "five_tokens": Case(T=5, B=2, H=2, K=256, V=40, state="bfloat16"),
    "sixteen_tokens": Case(T=16, B=1, H=2, HV=6, K=128, V=256, gate_dtype="bfloat16"),
    "one_value": Case(T=3, B=2, H=2, K=64, V=1, gate="lower_bound", lower_bound=-0.5),
    "activated": Case(T=4, B=2, H=2, K=64, V=17, gate="activated", logits=False, l2norm=False),
    "no_state": Case(T=7, B=2, H=2, K=128, V=64, state=None),
    "other_scale": Case(T=1, B=2, K=64, V=64, scale=-0.3, gate="activated", logits=False),
    "beta_beyond_one": Case(T=9, B=2, K=128, V=128, neg_eigval=True),
    "hard_reset": Case(T=3, K=64, V=64, gate="activated", log_decay=-np.inf),
    "no_decay": Case(T=3, K=64, V=64, gate="activated", log_decay=0.0, beta=1.0, logits=False),
    "packed": Case(T=60, K=128, V=64, lengths=(1, 0, 17, 40)),
    "packed_with_tail": Case(T=9, HV=4, K=64, V=64, lengths=(0, 3, 2, 0), state="bfloat16"),
    "packed_tokens": Case(T=16, K=64, V=128, lengths=(1,) * 16),
    "segments": Case(
        T=6, B=2, K=64, V=80, segments=((2, -1, 3), (-2, 1, 1, 2)), max_segments=4, state=None
    ),
    "no_tokens": Case(T=0, B=2, K=64, V=64),
    "no_rows": Case(T=2, B=0, K=64, V=64),
}  # fmt: skip


def bound(result: Any) -> float:
    return 1e-5 if result.dtype == jnp.float32 else 2e-3


def check(results: Any, expected: Any) -> None:
    for name, result, true in zip(("o", "state"), results, expected, strict=True):
        assert_close(result, true, bound(result), name)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", STEPS)
def test_values(name: str, backend: str, dtype: Any):
    platform = GPU if backend == "gpu" else CPU_F32
    x, options = make_inputs(STEPS[name], dtype)
    o, state = run(platform, x, step, **options)
    assert o.dtype == dtype
    assert state.dtype == (x["initial_state"].dtype if "initial_state" in x else jnp.float32)
    check((o, state), truth(x, **options))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.T <= 16 or c.lengths])
def test_values_of_any_head_size(name: str, platform: Platform):
    """By whatever runs them: the GPU has no kernel for most."""
    x, options = make_inputs(CASES[name], platform.dtype)
    check(jax.jit(functools.partial(step, **options))(x), truth(x, **options))


@pytest.mark.parametrize("K, V", [(64, 48), (128, 128), (256, 8)])
@pytest.mark.parametrize("T", range(17))
def test_every_number_of_tokens(T: int, K: int, V: int, platform: Platform):
    x = draw(platform, B=2, T=T, H=1, HV=2, K=K, V=V, state=True)
    check(run(platform, x, step), truth(x))


@pytest.mark.parametrize("T", [0, 1, 2, 16])
def test_agrees_with_chunk_kda(T: int, platform: Platform):
    x = draw(platform, B=3, T=T, H=2, HV=4, raw=True, state=True)
    x |= {"A_log": np.linspace(-1, 1, 4, dtype=np.float32)}
    options = dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True
    )
    results = run(platform, x, step, **options)
    for a, b in zip(results, run(platform, x, op, **options), strict=True):
        assert rms_ratio(a, b) <= 2 * platform.tolerance


def test_many_rows_and_heads(platform: Platform):
    """More than 65535 blocks of a grid."""
    rng = np.random.default_rng(0)
    B, H, K = 4096, 32, 64
    q, k = rng.standard_normal((2, 1, 1, H, K), np.float32) / np.float32(8)
    rows = lambda a: np.broadcast_to(a, (B, *a.shape[1:])).astype(platform.dtype)
    x = {"q": rows(q), "k": rows(k), "v": rng.standard_normal((B, 1, H, 1), np.float32)}
    x["v"] = x["v"].astype(platform.dtype)
    x |= {"g": np.zeros((B, 1, H, K), np.float32), "beta": np.ones((B, 1, H), np.float32)}
    o, state = run(platform, x, step)
    k, q = (np.asarray(a, np.float64)[0] for a in (x["k"], x["q"]))
    expected = x["v"].astype(np.float64)[..., 0, :, :] * k  # [B, H, K]
    assert_close(state[:, :, 0], expected, 1e-5)
    assert_close(o[:, 0, :, 0], np.sum(expected * q, -1) * K**-0.5, bound(o))


# ---- State ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_no_decay_and_no_write_leave_the_state_bitwise(platform: Platform, state_dtype: Any):
    x = draw(platform, B=3, T=2, H=2, state=True)
    x["g"][1:], x["beta"][1:] = 0, 0
    x["initial_state"] = x["initial_state"].astype(state_dtype)
    for l2norm in (False, True):
        _, state = run(platform, x, step, use_qk_l2norm_in_kernel=l2norm)
        np.testing.assert_array_equal(state[1:], x["initial_state"][1:])
        assert not np.array_equal(state[0], x["initial_state"][0])


def test_state_is_value_first(platform: Platform):
    """A state that holds one association, k_0 -> v_5, answers q = e_0 with e_5."""
    x = draw(platform, T=1, H=1, K=128, V=64, state=True)
    x["initial_state"][:] = 0
    x["initial_state"][0, 0, 5, 0] = 1  # [N, HV, V, K]
    x["q"][:], x["beta"][:], x["g"][:] = 0, 0, 0
    x["q"][..., 0] = 1
    o, state = run(platform, x, step, scale=0.5)
    expected = np.zeros((1, 1, 1, 64))
    expected[..., 5] = 0.5
    np.testing.assert_array_equal(o.astype(np.float64), expected)
    np.testing.assert_array_equal(state, x["initial_state"])


@pytest.mark.parametrize("T", [0, 1, 15, 64, 65, 200])
def test_prefill_then_decode_equals_prefill_of_all(T: int, platform: Platform):
    n = 6
    V = 128 if platform.name == "gpu" else 48  # a transposed state would show
    x = draw(platform, B=2, T=T + n, H=2, V=V, state=True)
    part = lambda begin, end: {name: x[name][:, begin:end] for name in OPERANDS}
    expected = truth(x)
    o, state = run(platform, part(0, T) | {"initial_state": x["initial_state"]})
    outputs = [o]
    for t in range(T, T + n):
        o, state = run(platform, part(t, t + 1) | {"initial_state": state}, step)
        outputs.append(o)
    o = np.concatenate(outputs, axis=1)
    for a, b, whole in zip((o, state), expected, run(platform, x), strict=True):
        assert rms_ratio(a, b) <= platform.tolerance
        assert rms_ratio(a, whole) <= 2 * platform.tolerance
    if T:  # and back to prefill, from the state that decoding left
        o, state = run(platform, part(0, T) | {"initial_state": state})
        again = truth(part(0, T) | {"initial_state": expected[1]})
        assert rms_ratio(o, again[0]) <= platform.tolerance
        assert rms_ratio(state, again[1]) <= platform.tolerance


@pytest.mark.parametrize("T", [1, 2, 16])
@pytest.mark.parametrize("state_dtype", [None, np.float32, jnp.bfloat16])
def test_results_have_one_structure(T: int, state_dtype: Any):
    """The same as those of prefill, with and without a state."""
    x = draw(CPU_F32, T=T, H=1, K=64, V=8, state=state_dtype is not None)
    if state_dtype is not None:
        x["initial_state"] = x["initial_state"].astype(state_dtype)
    structure = lambda f: jax.eval_shape(f, x)
    assert structure(step) == structure(op)
    results = step(x)
    for traced, actual in zip(structure(step), results, strict=True):
        assert (traced.shape, traced.dtype) == (actual.shape, actual.dtype)
    if state_dtype is None:
        zeros = {"initial_state": np.zeros(results[1].shape, np.float32)}
        jax.tree.map(np.testing.assert_array_equal, results, step(x | zeros))


# ---- Long texts ----------------------------------------------------------------------------------


def decode(x: dict[str, Any], state: Any, **options: Any) -> tuple[Any, Any]:
    """Every token by itself, in one jitted loop: o and the last state."""

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(x, state):
        def body(state, tokens):
            tokens = {name: a[:, None] for name, a in tokens.items()}
            o, state = step(tokens | {"initial_state": state}, **options)
            return state, o[:, 0].astype(jnp.float32)  # XLA:CPU copies all of a bfloat16 stack

        state, o = jax.lax.scan(body, state, {n: jnp.moveaxis(a, 1, 0) for n, a in x.items()})
        return jnp.moveaxis(o, 0, 1), state

    o, state = loop(x, jnp.asarray(state))
    return np.asarray(o, np.float64), np.asarray(state)


def drift(platform: Platform, state_dtype: Any, logits: bool) -> list[float]:
    """Errors of the state after 100, 1000, 5000 and 20000 tokens, worst of o's beside it."""
    rng = np.random.default_rng(0)
    T, K = 20_000, 64
    q, k, v = (rng.standard_normal((1, T, 1, K)).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    x = {name: a.astype(platform.dtype) for name, a in (("q", q / 8), ("k", k), ("v", v))}
    x["g"] = -rng.uniform(0, 2e-3, (1, T, 1, K)).astype(np.float32)
    beta = rng.standard_normal((1, T, 1)).astype(np.float32)
    x["beta"] = beta.astype(jnp.bfloat16) if logits else 1 / (1 + np.exp(-beta))
    options = {"use_beta_sigmoid_in_kernel": logits}
    state = rng.standard_normal((1, 1, K, K)).astype(state_dtype)
    exact, errors, begin = state.astype(np.float64), [], 0
    for end in (100, 1000, 5000, T):
        part = {name: a[:, begin:end] for name, a in x.items()}
        o, state = decode(part, state, **options, implementation="ffi")
        exact_o, exact = truth(part | {"initial_state": exact}, **options)
        limit = 2e-2 if state_dtype == jnp.bfloat16 else bound(x["q"])
        assert rms_ratio(o, exact_o) <= limit, (rms_ratio(o, exact_o), end)
        errors.append(rms_ratio(state, exact))
        begin = end
    return errors


@pytest.mark.parametrize("logits", [False, True])
def test_drift_of_a_float32_state(platform: Platform, logits: bool):
    assert max(drift(platform, np.float32, logits)) <= 1e-5


def test_drift_of_a_bfloat16_state(platform: Platform):
    """It is rounded after every token. The errors fade as fast as the contents do."""
    errors = drift(platform, jnp.bfloat16, logits=False)
    assert max(errors) <= 2e-2
    assert errors[-1] <= 1.5 * errors[1]


@pytest.mark.parametrize("gate_dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_weak_decay_is_not_lost(platform: Platform, gate_dtype: Any):
    T = 1000
    x = draw(platform, T=T, H=1, K=64, V=64)
    x["g"] = np.full_like(x["g"], -1e-3).astype(gate_dtype)
    x["beta"][:] = 0
    state = np.ones((1, 1, 64, 64), np.float32)
    expected = np.exp(T * x["g"].astype(np.float64)[0, 0, 0, 0])
    _, decoded = decode(x, state, implementation="ffi")
    _, prefilled = op(x | {"initial_state": state})
    for result in (decoded, prefilled):
        np.testing.assert_allclose(np.asarray(result), expected, rtol=0, atol=1e-4)
    # As documented: a bfloat16 state cannot decay by less than half the distance of its numbers.
    _, stuck = decode(x, state.astype(jnp.bfloat16), implementation="ffi")
    np.testing.assert_array_equal(stuck.astype(np.float32), state)


# ---- What does not belong to a row never reaches it ----------------------------------------------


@pytest.mark.parametrize("name", [*OPERANDS, "initial_state"])
def test_nan_stays_in_its_row(name: str, platform: Platform):
    x = draw(platform, B=4, T=2, H=2, K=64, V=64, state=True)
    clean = run(platform, x, step)
    x[name][2] = np.nan
    results = run(platform, x, step)
    assert np.isnan(results[0][2].astype(np.float32)).any()
    for actual, expected in zip(results, clean, strict=True):
        np.testing.assert_array_equal(np.delete(actual, 2, 0), np.delete(expected, 2, 0))


def test_results_are_repeatable(platform: Platform):
    x = draw(platform, B=5, T=3, H=2, HV=4, state=True)
    first = run(platform, x, step)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(platform, x, step), first)
    alone = {name: a[1:2] for name, a in x.items()}  # whatever else is in the batch
    for a, b in zip(run(platform, alone, step), first, strict=True):
        np.testing.assert_array_equal(a, b[1:2])


def test_gradient():
    """Through plain JAX, as that of `chunk_kda`."""
    x, options = make_inputs(dataclasses.replace(STEPS["two_tokens"], K=8, V=4))

    def loss(f: Any, x: Any) -> Any:
        o, state = f(x, **options)
        return jnp.sum(o * jnp.cos(o)) + jnp.sum(state * state)

    actual, expected = (jax.jit(jax.grad(functools.partial(loss, f)))(x) for f in (step, op))
    for name, gradient in actual.items():
        assert_close(gradient, expected[name], 1e-5, name)
