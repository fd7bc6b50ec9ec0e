"""Faults that users reported of the recurrent state: its layout, type, hand-over and gradient."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import CPU_F32, OPERANDS, Platform, draw, judge, op, rms_ratio, run, truth


def part(x: dict[str, Any], begin: int, end: int, state: Any) -> dict[str, Any]:
    return {name: x[name][:, begin:end] for name in OPERANDS} | {"initial_state": state}


# --- layout and type ------------------------------------------------------------------------------


def test_state_is_value_first(platform: Platform):
    """A state that holds one association, k_0 -> v_5, answers q = e_0 with e_5."""
    x = draw(platform, T=1, H=1, state=True)
    x["initial_state"][:] = 0
    x["initial_state"][0, 0, 5, 0] = 1  # [N, HV, V, K]
    x["q"][:] = 0
    x["q"][..., 0] = 1
    x["g"] = np.zeros(x["g"].shape, np.float32)
    x["beta"][:] = 0
    o, state = run(platform, x, scale=0.5)
    expected = np.zeros((1, 1, 1, 128))
    expected[..., 5] = 0.5
    np.testing.assert_array_equal(o.astype(np.float64), expected)
    np.testing.assert_array_equal(state, x["initial_state"])


@pytest.mark.parametrize(
    "state_dtype", [None, np.float32, jnp.bfloat16], ids=["none", "f32", "bf16"]
)
@pytest.mark.parametrize("T", [0, 1, 64, 70])
def test_types_of_results(platform: Platform, T, state_dtype):
    """The state keeps its type (float32 without one), the output has v's; tracing says the same."""
    x = draw(platform, T=T, H=2, state=state_dtype is not None)
    if state_dtype is not None:
        x["initial_state"] = x["initial_state"].astype(state_dtype)
    o, state = run(platform, x)
    assert o.dtype == platform.dtype and o.shape == x["v"].shape
    assert state.dtype == (state_dtype or np.float32) and state.shape == (1, 2, 128, 128)
    traced = jax.eval_shape(op, x)
    for abstract, actual in zip(traced, (o, state), strict=True):
        assert (abstract.shape, abstract.dtype) == (actual.shape, actual.dtype)


def test_no_decay_and_no_write_leave_the_state_bitwise(platform: Platform):
    """As padding of a batch is expressed without slots: g = 0, beta = 0."""
    x = draw(platform, B=3, T=70, H=2, state=True)
    x["g"][1:], x["beta"][1:] = 0, 0
    for dtype, l2norm in itertools.product((np.float32, jnp.bfloat16), (False, True)):
        x["initial_state"] = x["initial_state"].astype(dtype)
        _, state = run(platform, x, use_qk_l2norm_in_kernel=l2norm)
        np.testing.assert_array_equal(state[1:], x["initial_state"][1:])
        assert not np.array_equal(state[0], x["initial_state"][0])


# --- hand-over ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_split_sequence_equals_the_whole(platform: Platform, state_dtype):
    T = 640
    x = draw(platform, T=T, H=2, state=True)
    whole_o, whole_state = run(platform, x)
    exact_o, exact_state = truth(x)
    bf16_state = state_dtype == jnp.bfloat16
    errors = []
    for borders in (
        [0, 1, T],
        [0, 37, T],
        [0, 65, T],
        [0, T - 1, T],
        [0, 64, 320, T],
        [*range(0, T + 1, 64)],
    ):
        state, outputs = x["initial_state"].astype(state_dtype), []
        for begin, end in itertools.pairwise(borders):
            o, state = run(platform, part(x, begin, end, state))
            assert state.dtype == state_dtype
            outputs.append(o)
        o = np.concatenate(outputs, axis=1)
        errors.append(rms_ratio(o, exact_o))
        assert errors[-1] <= (5.5e-3 if bf16_state else platform.tolerance)
        assert rms_ratio(state, exact_state) <= (5.5e-3 if bf16_state else platform.tolerance)
        if not bf16_state and all(border % 64 == 0 for border in borders):
            np.testing.assert_array_equal(o, whole_o)
            np.testing.assert_array_equal(state, whole_state)
    assert errors[-1] <= 2 * errors[0] + 1e-3 * bf16_state  # ten parts are not worse than two


def test_state_carried_by_a_scan_equals_the_whole(platform: Platform):
    x = draw(platform, T=640, H=2, state=True)
    whole_o, whole_state = run(platform, x)

    @jax.jit
    def scanned(x):
        def body(state, tokens):
            return op(tokens | {"initial_state": state})[::-1]

        tokens = {n: jnp.stack(jnp.split(x[n], 5, axis=1)) for n in OPERANDS}
        return jax.lax.scan(body, x["initial_state"], tokens)

    state, o = scanned({name: jnp.asarray(a) for name, a in x.items()})
    np.testing.assert_array_equal(np.concatenate(np.asarray(o), axis=1), whole_o)
    np.testing.assert_array_equal(np.asarray(state), whole_state)


def test_state_at_a_chunk_border_continues_the_sequence(platform: Platform):
    """As a prefix cache does it; the state of the whole prompt is the wrong one."""
    x = draw(platform, T=130, H=2, state=True)
    whole_o, whole_state = run(platform, x)
    first_o, border = run(platform, part(x, 0, 128, x["initial_state"]))
    np.testing.assert_array_equal(first_o, whole_o[:, :128])
    o, state = run(platform, part(x, 128, 130, border))
    judge(platform, (o, state), tuple(a[:, 128:] if i == 0 else a for i, a in enumerate(truth(x))))
    wrong_o, _ = run(platform, part(x, 128, 130, whole_state))
    assert rms_ratio(wrong_o, whole_o[:, 128:]) > 0.05


# --- gradient -------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [0, 1, 65])
def test_gradient_of_the_initial_state_is_the_linear_map_backwards(T):
    """Output and state are affine in the initial state: <dS, S1 - S0> is the change of the loss."""
    x = draw(CPU_F32, T=T, H=2, K=16, V=8, state=True)
    rng = np.random.default_rng(2)
    w, u = (rng.standard_normal(a.shape) for a in truth(x))

    def loss(state):
        o, state = op(x | {"initial_state": state})
        # Cotangents that arrive transposed and broadcast.
        o = jnp.sum((jnp.float32(w).swapaxes(1, 2) * o.swapaxes(1, 2)).T)
        return o + jnp.sum(jnp.float32(u) * state) + jnp.sum(state)

    def exact_loss(state):
        o, state = truth(x | {"initial_state": state})
        return np.sum(w * o) + np.sum((u + 1) * state)

    exact = [exact_loss(factor * x["initial_state"]) for factor in (0, 1)]
    dS = jax.grad(loss)(x["initial_state"])
    change = np.sum(np.asarray(dS, np.float64) * x["initial_state"])
    np.testing.assert_allclose(change, exact[1] - exact[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dS, jax.grad(loss)(7 * x["initial_state"]), rtol=1e-5, atol=1e-6)


def test_gradient_of_the_initial_state_without_writes_is_the_decay():
    x = draw(CPU_F32, T=40, H=2, K=16, V=8, state=True)
    x["beta"][:] = 0
    u = np.random.default_rng(2).standard_normal(x["initial_state"].shape).astype(np.float32)

    def loss(state):
        return jnp.sum(u * op(x | {"initial_state": state})[1])

    decay = np.exp(x["g"].astype(np.float64).sum(1))[:, :, None, :]
    np.testing.assert_allclose(jax.grad(loss)(x["initial_state"]), u * decay, rtol=1e-5)


def test_gradient_without_a_state_or_of_unused_results():
    x = draw(CPU_F32, T=20, H=1, K=16, V=8)

    def loss(tokens, use_o, use_state):
        o, state = op(tokens)
        return use_o * jnp.sum(o * o) + use_state * jnp.sum(state)

    def used(tokens, index):
        return jnp.sum(op(tokens)[index] ** 2)

    for index in (0, 1):
        gradient = jax.grad(used)(x, index)
        assert all(np.isfinite(dx).all() for dx in gradient.values())
    assert not np.any(jax.grad(used)(x, 1)["q"])  # the state never sees the queries
    nothing = jax.grad(loss)(x, 0.0, 0.0)
    assert not any(np.any(dx) for dx in nothing.values())
