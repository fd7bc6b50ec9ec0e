"""Faults that users reported of packed rows: empty sequences, tails, offsets that lie, padding."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import CPU_F32, OPERANDS, Platform, draw, judge, op, run, truth


def pack(platform: Platform, offsets: list[int], T: int | None = None, H: int = 2, **sizes: Any):
    """A packed row of `T` tokens (default: up to the last offset) with a state a sequence."""
    x = draw(
        platform, T=offsets[-1] if T is None else T, H=H, N=len(offsets) - 1, state=True, **sizes
    )
    return x, np.array(offsets, np.int32)


def alone(x: dict[str, Any], offsets: np.ndarray, n: int) -> dict[str, Any]:
    """Sequence n of a packed row as a call of its own."""
    tokens = {name: x[name][:, offsets[n] : offsets[n + 1]] for name in OPERANDS}
    return tokens | {"initial_state": x["initial_state"][n : n + 1]}


# --- empty sequences ------------------------------------------------------------------------------

EMPTIES = [[0, 0, 5, 5, 70], [0, 70, 70], [0, 0, 1, 1, 2], [0, 0, 0, 64, 64, 65, 65]]


@pytest.mark.parametrize("state_dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("offsets", EMPTIES, ids=str)
def test_empty_sequence_keeps_its_state_and_disturbs_no_other(
    platform: Platform, offsets, state_dtype
):
    x, cu_seqlens = pack(platform, offsets)
    x["initial_state"] = x["initial_state"].astype(state_dtype)
    o, state = run(platform, x, cu_seqlens=cu_seqlens)
    assert state.dtype == state_dtype
    without = {name: a for name, a in x.items() if name != "initial_state"}
    _, state_from_zeros = run(platform, without, cu_seqlens=cu_seqlens)
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if begin == end:
            np.testing.assert_array_equal(state[n], x["initial_state"][n])
            assert not state_from_zeros[n].any()
        else:
            true_o, true_state = truth(alone(x, cu_seqlens, n))
            judge(platform, (o[:, begin:end], state[n : n + 1]), (true_o, true_state))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_no_tokens_at_all_hand_the_state_on(platform: Platform, packed):
    x = draw(platform, B=1 if packed else 2, T=0, H=2, N=2, state=True)
    options: dict[str, Any] = {"cu_seqlens": np.zeros(3, np.int32)} if packed else {}
    o, state = run(platform, x, **options)
    assert o.shape == x["v"].shape
    np.testing.assert_array_equal(state, x["initial_state"])
    _, zeros = run(platform, {name: x[name] for name in OPERANDS}, **options)
    assert zeros.shape == state.shape and not zeros.any()


def test_no_rows_at_all(platform: Platform):
    o, state = run(platform, draw(platform, B=0, T=5, H=2, state=True))
    assert o.shape == (0, 5, 2, 128) and state.shape == (0, 2, 128, 128)


@pytest.mark.parametrize("offsets", [[0, 0, 5, 5, 70], [0, 0, 1, 1, 2], [0, 0, 0]], ids=str)
def test_gradient_around_empty_sequences(offsets):
    """An empty sequence passes its state's cotangent through, and the others see nothing of it."""
    x, cu_seqlens = pack(CPU_F32, offsets, H=1, K=16, V=8)
    cotangents = np.random.default_rng(1).standard_normal(x["initial_state"].shape, np.float32)

    def loss(x, u, **options):
        o, state = op(x, **options)
        return jnp.sum(o * o) + jnp.sum(u * state)

    whole = jax.grad(loss)(x, cotangents, cu_seqlens=cu_seqlens)
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if begin == end:
            np.testing.assert_array_equal(whole["initial_state"][n], cotangents[n])
            continue
        single = jax.grad(loss)(alone(x, cu_seqlens, n), cotangents[n : n + 1])
        for name in OPERANDS:
            actual = whole[name][:, begin:end]
            np.testing.assert_allclose(actual, single[name], rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            whole["initial_state"][n : n + 1], single["initial_state"], rtol=1e-4, atol=1e-5
        )


def test_gradient_of_long_sequences_between_empty_ones():
    offsets = [0, 0, 1208, 2048, 2048]
    x, cu_seqlens = pack(CPU_F32, offsets, H=1, K=8, V=8)

    def loss(x):
        o, state = op(x, cu_seqlens=cu_seqlens)
        return jnp.sum(o[:, 1208:] ** 2) + jnp.sum(state)

    gradients = jax.grad(loss)(x)
    for name, dx in gradients.items():
        assert dx.shape == x[name].shape and np.isfinite(dx).all(), name
    for n in (0, 3):
        np.testing.assert_array_equal(gradients["initial_state"][n], np.ones((1, 8, 8)))
    assert not np.any(gradients["q"][:, :1208])


# --- tokens past the last offset ------------------------------------------------------------------


def test_tail_of_no_sequence_is_zero_and_never_read(platform: Platform):
    x, cu_seqlens = pack(platform, [0, 144, 432, 944], T=946)
    clean = run(platform, x, cu_seqlens=cu_seqlens)
    for name in OPERANDS:
        x[name][:, 944:] = np.nan
    o, state = run(platform, x, cu_seqlens=cu_seqlens)
    assert not o[:, 944:].any()
    np.testing.assert_array_equal(o, clean[0])
    np.testing.assert_array_equal(state, clean[1])
    judge(platform, (o, state), truth(x, cu_seqlens=cu_seqlens))


def test_gradient_of_the_tail_is_zero():
    x, cu_seqlens = pack(CPU_F32, [0, 14, 43], T=50, H=1, K=16, V=8)
    for name in OPERANDS:
        x[name][:, 43:] = np.nan

    def loss(x):
        o, state = op(x, cu_seqlens=cu_seqlens)
        return jnp.sum(o[:, :43] ** 2) + jnp.sum(state)

    gradients = jax.grad(loss)(x)
    for name in OPERANDS:
        assert np.isfinite(gradients[name]).all(), name
        assert not np.any(gradients[name][:, 43:]), name


# --- malformed offsets ----------------------------------------------------------------------------

MALFORMED = [
    [2, 10, 20],
    [0, 15, 10, 20],
    [0, 10, 25],
    [-1, 20],
    [0, 2**31 - 1],
    [0, -5, 20],
    [0, 21],
]


@pytest.mark.parametrize("traced", [False, True], ids=["concrete", "traced"])
@pytest.mark.parametrize("offsets", MALFORMED, ids=str)
def test_malformed_offsets_are_an_error_or_nan_and_never_an_address(
    platform: Platform, offsets, traced
):
    x, cu_seqlens = pack(platform, offsets, T=20)
    call = lambda x, cu_seqlens: op(x, cu_seqlens=cu_seqlens)
    if traced:
        call = jax.jit(call)
    if platform.name == "cpu":
        with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*row 0 must .*; got"):
            jax.block_until_ready(call(x, cu_seqlens))
    else:
        guards = [jnp.full((4096,), i, jnp.float32) for i in range(4)]
        for result in call(x, cu_seqlens):
            assert np.isnan(np.asarray(result, np.float32)).all()
        for i, guard in enumerate(guards):
            assert np.all(np.asarray(guard) == i)
    ok = np.linspace(0, 20, len(offsets)).astype(np.int32)
    for result in call(x, ok):  # and the process goes on
        assert np.isfinite(np.asarray(result, np.float32)).all()


def test_too_many_segments_are_an_error_or_nan_and_never_merged(platform: Platform):
    x = draw(platform, B=2, T=20, H=2, N=4, state=True)
    segment_ids = np.array([[1] * 5 + [2] * 5 + [3] * 10, [1] * 10 + [2] * 10], np.int32)
    options: dict[str, Any] = {"segment_ids": segment_ids, "max_segments": 2}
    if platform.name == "cpu":
        with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*max_segments"):
            run(platform, x, **options)
        return
    o, state = run(platform, x, **options)
    assert np.isnan(o[0]).all() and np.isnan(state[:2]).all()
    fitting = {name: a[2:] if name == "initial_state" else a[1:] for name, a in x.items()}
    exact = truth(fitting, segment_ids=segment_ids[1:], max_segments=2)
    judge(platform, (o[1:], state[2:]), exact)


# --- integer widths -------------------------------------------------------------------------------


def test_offsets_of_any_integer_width_mean_the_same(platform: Platform):
    x, cu_seqlens = pack(platform, [0, 3, 50, 70])
    expected = run(platform, x, cu_seqlens=cu_seqlens)
    for offsets in (cu_seqlens.astype(np.int64), jnp.asarray(cu_seqlens)):
        for a, b in zip(run(platform, x, cu_seqlens=offsets), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    with jax.enable_x64(True):
        wide = jnp.asarray(cu_seqlens, jnp.int64)
        assert wide.dtype == jnp.int64
        actual = run(platform, x, cu_seqlens=wide)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_x64_changes_nothing_for_float32_inputs(platform: Platform):
    x = draw(platform, T=70, H=2, state=True)
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "scale": 0.3}
    expected = run(platform, x, **options)
    with jax.enable_x64(True):
        actual = run(platform, x, **options)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# --- segments and padding -------------------------------------------------------------------------

SEGMENTS = np.array([[1] * 40 + [2] * 60 + [0] * 28], np.int32)


def test_segments_do_not_see_each_other(platform: Platform):
    x = draw(platform, T=128, H=2)
    options: dict[str, Any] = {"segment_ids": SEGMENTS, "max_segments": 2}
    o, state = run(platform, x, **options)
    judge(platform, (o, state), truth(x, **options))
    assert not o[:, 100:].any()
    other = draw(platform, T=128, H=2, seed=5)
    for name in OPERANDS:
        x[name][:, :40] = other[name][:, :40]
    changed_o, changed_state = run(platform, x, **options)
    np.testing.assert_array_equal(changed_o[:, 40:], o[:, 40:])
    np.testing.assert_array_equal(changed_state[1], state[1])
    assert not np.array_equal(changed_o[:, :40], o[:, :40])


def test_segments_and_offsets_say_the_same(platform: Platform):
    x = draw(platform, T=128, H=2)
    by_segments = run(platform, x, segment_ids=SEGMENTS, max_segments=2)
    by_offsets = run(platform, x, cu_seqlens=np.array([0, 40, 100], np.int32))
    for a, b in zip(by_segments, by_offsets, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("B", [1, 3])
def test_padding_never_reaches_results(platform: Platform, B):
    """Left, right and interior padding: whatever it holds, the rest is bitwise the same."""
    T = 90
    real = np.ones((B, T), bool)
    real[0, :7] = real[0, 80:] = False
    real[0, 40:45] = False
    if B > 1:
        real[1, 70:] = False
    segment_ids = np.cumsum(np.diff(real, axis=1, prepend=False), axis=1) * real
    options: dict[str, Any] = {"segment_ids": segment_ids.astype(np.int32), "max_segments": 2}
    x = draw(platform, B=B, T=T, H=2, N=2 * B, state=True)
    o, state = run(platform, x, **options)
    assert not o[~real].any()
    judge(platform, (o, state), truth(x, **options))
    for fill in (0, 1e4, np.nan):
        padded = {name: a.copy() for name, a in x.items()}
        for name in OPERANDS:
            padded[name][~real] = fill
        for a, b in zip(run(platform, padded, **options), (o, state), strict=True):
            np.testing.assert_array_equal(a, b)
