"""Faults that users reported of other delta-rule kernels: gates, norms, precision, sizes.

One body runs on the CPU handler (float32 and bfloat16) and, on a GPU machine, on the CUDA handler.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import CPU_F32, Platform, draw, judge, op, rms_ratio, run, truth

from jax_kda import kda_gate

LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 191]


def expect(platform: Platform, x: dict[str, Any], tolerance: float | None = None, **options: Any):
    """Runs the op on `x`, compares both results with float64 and returns them."""
    results = run(platform, x, **options)
    judge(platform, results, truth(x, **options), tolerance)
    return results


# --- gates ----------------------------------------------------------------------------------------


def test_strong_gates_leave_only_the_token_itself(platform: Platform):
    """From about -50 nats a token, o_t = scale beta_t (q_t . k_t) v_t."""
    gates = np.array([-50, -88, -104, -1e3, -1e4, -np.inf], np.float32)
    x = draw(platform, B=len(gates), T=129, H=1, state=True)
    x["g"] = np.broadcast_to(gates[:, None, None, None], x["g"].shape)
    o, _ = expect(platform, x)
    q, k, v, beta = (x[name].astype(np.float64) for name in ("q", "k", "v", "beta"))
    closed_form = 128**-0.5 * beta[..., None] * np.sum(q * k, -1, keepdims=True) * v
    for row in range(len(gates)):
        assert rms_ratio(o[row, 2:], closed_form[row, 2:]) <= platform.tolerance


def test_gradient_of_strong_gates_is_that_of_the_token_itself():
    x = draw(CPU_F32, T=20, H=1, K=16, V=8)
    x["g"] = np.full_like(x["g"], -104)

    def loss(q, g):
        return jnp.sum(op(x | {"q": q, "g": g})[0] ** 2)

    dq, dg = jax.grad(loss, (0, 1))(x["q"], x["g"])
    q, k, v, beta = (x[name].astype(np.float64) for name in ("q", "k", "v", "beta"))
    write = 16**-0.5 * beta[..., None] * v
    do = 2 * write * np.sum(q * k, -1, keepdims=True)
    assert rms_ratio(dq, np.sum(do * write, -1, keepdims=True) * k) < 1e-5
    assert not np.any(dg)


def test_infinite_gate_forgets_everything_before_it(platform: Platform):
    x = draw(platform, T=80, H=2, state=True)
    x["g"] = np.full(x["g"].shape, -0.01, np.float32)
    x["g"][:, [17, 63, 64]] = -np.inf  # both sides of a chunk's edge
    o, state = expect(platform, x)
    fresh = {name: a[:, 64:] for name, a in x.items() if name != "initial_state"}
    fresh_o, fresh_state = run(platform, fresh)
    assert rms_ratio(o[:, 64:], fresh_o) <= platform.tolerance
    assert rms_ratio(state, fresh_state) <= platform.tolerance
    x["initial_state"] = 1e6 * x["initial_state"]
    huge_o, huge_state = run(platform, x)
    np.testing.assert_array_equal(huge_o[:, 17:], o[:, 17:])
    np.testing.assert_array_equal(huge_state, state)


def test_infinite_gate_on_one_channel_forgets_that_channel(platform: Platform):
    x = draw(platform, T=80, H=2, state=True)
    x["g"] = np.full(x["g"].shape, -0.01, np.float32)
    x["g"][:, 40, :, 5] = -np.inf
    expect(platform, x)
    x["k"][..., 5] = 0  # now nothing but its own decay touches the channel
    o, state = expect(platform, x)
    assert not state[..., 5].any()
    x["initial_state"][..., 5] = 1e6
    huge_o, huge_state = run(platform, x)
    np.testing.assert_array_equal(huge_o[:, 40:], o[:, 40:])
    np.testing.assert_array_equal(huge_state, state)


def test_no_gradient_flows_through_an_infinite_gate():
    x = draw(CPU_F32, T=80, H=1, K=16, V=8, state=True)
    x["g"] = np.full(x["g"].shape, -0.01, np.float32)
    x["g"][:, 17] = -np.inf
    x["g"][:, 40, :, 5] = -np.inf

    def loss(g, initial_state, first):
        o, state = op(x | {"g": g, "initial_state": initial_state})
        return jnp.sum(o[:, first:] ** 2) + jnp.sum(state)

    dg, dS = jax.grad(loss, (0, 1))(x["g"], x["initial_state"], 17)
    assert np.isfinite(dg).all()
    np.testing.assert_array_equal(dS, np.zeros_like(dS))
    dg, dS = jax.grad(loss, (0, 1))(x["g"], x["initial_state"], 0)
    assert np.isfinite(dg).all() and np.isfinite(dS).all() and np.any(dS)


def test_decay_near_zero_beside_no_decay(platform: Platform):
    x = draw(platform, T=64, H=2)
    x["g"] = np.full(x["g"].shape, np.log(1e-12), np.float32)
    expect(platform, x)
    x["g"][..., 1:] = -0.001
    expect(platform, x)


def test_slightly_positive_gate_grows_as_the_recurrence_does(platform: Platform):
    """The domain is g <= 0; just outside it nothing is clamped."""
    x = draw(platform, T=64, H=2, state=True)
    x["g"] = np.full(x["g"].shape, 0.01, np.float32)
    expect(platform, x)


def test_positive_gate_grows_on_the_cpu():
    x = draw(CPU_F32, T=8, H=1, state=True)
    x["g"] = np.full(x["g"].shape, 5.0, np.float32)
    expect(CPU_F32, x, tolerance=1e-4)


def test_gate_is_a_natural_logarithm(platform: Platform):
    """One token is written, decayed by half and read by its own key (base 2 would leave 0.62)."""
    x = draw(platform, T=2, H=1)
    for name in "qk":
        x[name][:] = 0
    x["k"][:, 0, :, 0] = x["k"][:, 1, :, 1] = x["q"][:, 1, :, 0] = 1
    x["beta"][:] = 1
    x["g"] = np.zeros(x["g"].shape, np.float32)
    x["g"][:, 1] = -np.log(2)
    o, _ = run(platform, x)
    half = 128**-0.5 * 0.5 * x["v"][:, 0].astype(np.float64)
    assert rms_ratio(o[:, 1], half) <= platform.tolerance


def test_error_is_taken_after_the_decay(platform: Platform):
    """S = D S0 + beta k (v - (D S0)^T k)^T, and the output reads it."""
    x = draw(platform, T=1, H=1, state=True)
    x["g"] = np.full(x["g"].shape, -0.7, np.float32)
    x["beta"][:] = 0.3
    o, state = run(platform, x)
    q, k, v, beta = (x[name][0, 0, 0].astype(np.float64) for name in ("q", "k", "v", "beta"))
    S = x["initial_state"][0, 0].astype(np.float64)  # [V, K]
    decayed = np.exp(np.float64(np.float32(-0.7))) * S
    decay_first = decayed + beta * np.outer(v - decayed @ k, k)
    error_first = decayed + beta * np.outer(v - S @ k, k)
    assert (
        rms_ratio(state[0, 0], decay_first) <= 1e-6 if platform is CPU_F32 else platform.tolerance
    )
    assert rms_ratio(o[0, 0, 0], 128**-0.5 * decay_first @ q) <= platform.tolerance
    assert rms_ratio(state[0, 0], error_first) > 0.01


# --- raw gates and logits -------------------------------------------------------------------------

LOGITS = [-30.0, -5.0, 0.0, 5.0, 30.0]
RAW_GATES = [-1e4, -20.0, 0.0, 20.0, 1e4]


def raw_inputs(platform: Platform, T: int, K: int = 128) -> dict[str, Any]:
    x = draw(platform, T=T, H=3, K=K, state=True)
    rng = np.random.default_rng(7)
    x["beta"] = rng.choice(LOGITS, x["beta"].shape).astype(np.float32)
    x["g"] = rng.choice(RAW_GATES, x["g"].shape).astype(np.float32)
    x["A_log"] = np.array([-5, 0, 3], np.float32)
    x["dt_bias"] = rng.standard_normal((3, K), np.float32)
    return x


def activated(x: dict[str, Any], lower_bound: float | None) -> dict[str, Any]:
    """The same call with gate and sigmoid applied outside, in float32."""
    y = {name: a for name, a in x.items() if name not in ("A_log", "dt_bias")}
    y["g"] = kda_gate(x["g"], x["A_log"], x["dt_bias"], lower_bound)
    y["beta"] = jax.nn.sigmoid(x["beta"])
    return y


INSIDE: dict[str, Any] = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower_bound"])
def test_raw_gate_and_logits_agree_with_activated_ones(platform: Platform, lower_bound):
    x = raw_inputs(platform, T=70)
    inside = expect(platform, x, **INSIDE, lower_bound=lower_bound)
    outside = run(platform, activated(x, lower_bound))
    judge(platform, inside, outside)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower_bound"])
def test_gradient_of_saturated_gates_and_logits_is_finite_and_right(lower_bound):
    x = raw_inputs(CPU_F32, T=20, K=16)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")

    def loss(args, inside):
        y = x | dict(zip(names, args, strict=True))
        options: dict[str, Any] = INSIDE | {"lower_bound": lower_bound}
        if not inside:
            y, options = activated(y, lower_bound), {}
        o, state = op(y, **options)
        return jnp.sum(o * o) + jnp.sum(state)

    args = tuple(x[name] for name in names)
    inside, outside = (jax.grad(loss)(args, side) for side in (True, False))
    for name, a, b in zip(names, inside, outside, strict=True):
        assert np.isfinite(a).all(), name
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max(), err_msg=name)


def test_saturated_logits_are_no_write_and_a_full_write(platform: Platform):
    x = draw(platform, T=20, H=1, state=True)
    x["g"] = np.full(x["g"].shape, -0.125, np.float32)
    for logit, probability in ((-30.0, 0.0), (30.0, 1.0)):
        x["beta"] = np.full(x["beta"].shape, logit, np.float32)
        results = run(platform, x, use_beta_sigmoid_in_kernel=True)
        x["beta"] = np.full(x["beta"].shape, probability, np.float32)
        judge(platform, results, truth(x))
    x["beta"][:] = 0
    _, state = run(platform, x)
    only_decay = np.exp(-0.125 * 20) * x["initial_state"].astype(np.float64)
    assert rms_ratio(state, only_decay) < 1e-5


# --- l2norm ---------------------------------------------------------------------------------------

NORMED: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}


def test_zero_key_only_decays_the_state(platform: Platform):
    x = draw(platform, T=130, H=2, state=True)
    x["k"][:, 5] = x["q"][:, 9] = 0
    o, state = expect(platform, x, **NORMED)
    assert not o[:, 9].any()
    x["v"][:, 5] = 1e6  # nothing can be written under a zero key
    huge_o, huge_state = expect(platform, x, **NORMED)
    np.testing.assert_array_equal(huge_o, o)
    np.testing.assert_array_equal(huge_state, state)


def test_chunk_of_zero_keys_and_queries(platform: Platform):
    x = draw(platform, T=130, H=2, state=True)
    x["k"][:, :64] = 0
    expect(platform, x, **NORMED)
    for name in ("q", "k", "v"):
        x[name][:] = 0
    o, state = run(platform, x, **NORMED)
    assert not o.any()
    decay = np.exp(x["g"].astype(np.float64).sum(1))[:, :, None, :]
    assert rms_ratio(state, decay * x["initial_state"]) < 1e-5


def test_gradient_where_everything_is_zero_is_zero():
    x = draw(CPU_F32, T=20, H=1, K=16, V=8)

    def loss(q, k, v):
        o, state = op(x | {"q": q, "k": k, "v": v}, **NORMED)
        return jnp.sum(o * o) + jnp.sum(state)

    for dx in jax.grad(loss, (0, 1, 2))(*(jnp.zeros_like(x[name]) for name in "qkv")):
        assert not np.any(dx)


def test_norm_has_its_epsilon_inside_the_square_root(platform: Platform):
    """x rsqrt(sum x^2 + 1e-6): a key of norm 1e-3 becomes one of norm 0.707."""
    x = draw(platform, T=65, H=1)
    for name in "qk":
        unit = x[name].astype(np.float64)
        unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
        norms = np.resize([1e-4, 1e-3, 1e-2, 1.0], 65)[:, None, None]
        x[name] = (norms * unit).astype(platform.dtype)
    expect(platform, x, **NORMED)
    one = {name: a[:, 1:2].copy() for name, a in x.items()}  # norm 1e-3
    one["beta"][:] = 1
    _, state = run(platform, one, **NORMED)
    written = np.linalg.norm(state) / np.linalg.norm(one["v"].astype(np.float64))
    assert abs(written - 0.5**0.5) < 0.01


# --- precision ------------------------------------------------------------------------------------


def test_delta_rule_recalls_every_value_when_nothing_decays(platform: Platform):
    """g = 0, beta = 1, q = k of unit norm, scale 1: o_t is v_t, for any T."""
    x = draw(platform, T=2048, H=1)
    x["g"] = np.zeros(x["g"].shape, np.float32)
    x["beta"][:] = 1
    x["q"] = x["k"]
    o, _ = run(platform, x, scale=1.0, **NORMED)
    # The first 64 tokens have no state to recall from.
    windows = slice(64), slice(64, 128), slice(2048 - 64, 2048)
    first, early, late = (rms_ratio(o[:, t], x["v"][:, t]) for t in windows)
    assert max(first, early, late) <= (1e-4 if platform is CPU_F32 else 1e-2)
    assert late <= 2 * early + 1e-6


def test_small_decays_add_up(platform: Platform):
    """1000 tokens of g = -0.001 and no write leave 1/e of the state."""
    x = draw(platform, T=1000, H=1)
    x["beta"][:] = 0
    x["g"] = np.full(x["g"].shape, -1e-3, np.float32)
    for dtype, tolerance in ((np.float32, 1e-4), (jnp.bfloat16, 2e-3)):
        x["initial_state"] = np.ones((1, 1, 128, 128), dtype)
        _, state = run(platform, x)
        assert state.dtype == dtype
        np.testing.assert_allclose(state.astype(np.float64), np.exp(-1), atol=tolerance)
    x["g"] = x["g"].astype(jnp.bfloat16)
    x["initial_state"] = np.ones((1, 1, 128, 128), np.float32)
    _, state = run(platform, x)
    exact = np.exp(1000 * np.float64(x["g"].flat[0]))
    np.testing.assert_allclose(state, exact, atol=1e-4)


@pytest.mark.parametrize("options", [{}, NORMED], ids=["as_given", "l2norm"])
def test_large_state_is_not_staged_in_a_small_type(platform: Platform, options):
    x = draw(platform, T=64, H=1)
    for name in ("q", "k", "v"):
        x[name][:] = 0
    x["g"] = np.zeros(x["g"].shape, np.float32)
    x["g"][:, 0] = -4
    for dtype, tolerance in ((np.float32, 1e-5), (jnp.bfloat16, 2**-8)):
        x["initial_state"] = np.zeros((1, 1, 128, 128), dtype)
        x["initial_state"][0, 0, 3, 2] = 65536
        _, state = run(platform, x, **options)
        assert abs(float(state[0, 0, 3, 2]) / (65536 * np.exp(-4)) - 1) < tolerance
        assert np.count_nonzero(state) == 1


def test_tiny_state_cotangent_is_not_flushed():
    x = draw(CPU_F32, T=20, H=1, K=16, V=8, state=True)
    x["beta"][:] = 0
    x = {name: jnp.asarray(a, jnp.bfloat16) for name, a in x.items()}
    u = np.zeros((1, 1, 8, 16), np.float32)
    u[0, 0, 3, 2] = 2.0**-25

    def loss(initial_state):
        return jnp.sum(u * op(x | {"initial_state": initial_state})[1])

    dS = jax.grad(loss)(x["initial_state"].astype(jnp.float32))
    exact = u * np.exp(np.asarray(x["g"], np.float64).sum(1))[:, :, None, :]
    np.testing.assert_allclose(dS, exact, rtol=1e-5)


@pytest.mark.parametrize("name", ["g", "beta"])
def test_float32_gates_and_beta_are_never_rounded(platform: Platform, name):
    """1 - 2^-10 is 1 in bfloat16."""
    x = draw(platform, T=8, H=1)
    x["g"] = -np.ones(x["g"].shape, np.float32)
    x["beta"][:] = 1
    whole = run(platform, x)
    x[name] = x[name] * np.float32(1 - 2**-10)
    _, state = expect(platform, x)
    assert not np.array_equal(state, whole[1])
    rounded = x | {name: x[name].astype(jnp.bfloat16)}
    for a, b in zip(run(platform, rounded), whole, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("beta_dtype", [np.float32, jnp.bfloat16], ids=["beta_f32", "beta_bf16"])
@pytest.mark.parametrize("g_dtype", [np.float32, jnp.bfloat16], ids=["g_f32", "g_bf16"])
def test_gate_and_beta_come_in_either_precision(platform: Platform, g_dtype, beta_dtype):
    x = draw(platform, T=70, H=2, state=True)
    x["g"], x["beta"] = x["g"].astype(g_dtype), x["beta"].astype(beta_dtype)
    expect(platform, x)


# --- lengths, head sizes, heads -------------------------------------------------------------------


@pytest.mark.parametrize("T", LENGTHS)
def test_every_length_is_right_and_reads_nothing_past_its_end(platform: Platform, T):
    """The inputs are slices of arrays that hold NaN elsewhere."""
    x = draw(platform, T=T, H=2, state=T % 2 == 1)
    expected = expect(platform, x)
    padded = {
        name: np.pad(a.astype(np.float32), [(0, 0), (3, 40)] + [(0, 0)] * (a.ndim - 2),
                     constant_values=np.nan).astype(a.dtype)
        for name, a in x.items() if name != "initial_state"
    }  # fmt: skip

    @jax.jit
    def sliced(padded, initial_state):
        inner = {name: a[:, 3 : 3 + T] for name, a in padded.items()}
        return op(inner, initial_state=initial_state)

    actual = sliced(padded, x.get("initial_state"))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


HEAD_SIZES = [
    (32, 32),
    (64, 64),
    (64, 128),
    (128, 64),
    (96, 96),
    (192, 256),
    (256, 192),
    (100, 100),
]
HEAD_SIZES += [(1, 1), (3, 5), (256, 256), (128, 1)]


@pytest.mark.parametrize("K, V", HEAD_SIZES)
def test_every_head_size_up_to_256_runs_on_the_cpu(K, V):
    expect(CPU_F32, draw(CPU_F32, T=70, H=2, HV=4, K=K, V=V, state=True), **NORMED)


def test_grouped_value_heads_are_consecutive(platform: Platform):
    x = draw(platform, T=70, H=2, HV=4, state=True)
    grouped = expect(platform, x)
    repeated = x | {name: np.repeat(x[name], 2, axis=2) for name in "qk"}
    for a, b in zip(run(platform, repeated), grouped, strict=True):
        assert rms_ratio(a, b) <= platform.tolerance


def test_gradient_of_grouped_query_and_key_heads_is_the_sum_over_the_group():
    x = draw(CPU_F32, T=20, H=2, HV=4, K=16, V=8)

    def loss(q, k):
        o, _ = op(x | {"q": q, "k": k})
        return jnp.sum(o * o)

    grouped = jax.grad(loss, (0, 1))(x["q"], x["k"])
    repeated = jax.grad(loss, (0, 1))(*(np.repeat(x[name], 2, axis=2) for name in "qk"))
    for a, b in zip(grouped, repeated, strict=True):
        np.testing.assert_allclose(a, b.reshape(1, 20, 2, 2, 16).sum(3), rtol=1e-4, atol=1e-5)


# --- NaN and infinity in one row ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_bad_row_leaves_other_rows_and_later_calls_alone(platform: Platform, name, bad):
    x = draw(platform, B=3, T=130, H=2, state=True)
    clean = run(platform, x)
    y = x | {name: x[name].copy()}
    if name == "initial_state":
        y[name][1] = bad
    else:
        y[name][1, 100] = bad
    o, state = run(platform, y)
    assert not np.isfinite(o[1]).all()
    for row in (0, 2):
        np.testing.assert_array_equal(o[row], clean[0][row])
        np.testing.assert_array_equal(state[row], clean[1][row])
    if name != "initial_state":  # earlier chunks of the same row
        np.testing.assert_array_equal(o[1, :64], clean[0][1, :64])
    for a, b in zip(run(platform, x), clean, strict=True):
        np.testing.assert_array_equal(a, b)
