"""Faults that users reported of in-place calls: shared, donated and oddly laid out buffers."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from platforms import OPERANDS, Platform, draw, op, run

from jax_kda import fwd

SCALE, LOWER_BOUND = 128**-0.5, -5.0


def arguments(platform: Platform, T: int = 70, H: int = 2, seed: int = 0) -> dict[str, jax.Array]:
    """Arrays for `fwd`: raw gates, logits and an initial state."""
    x = draw(platform, T=T, H=H, state=True, seed=seed)
    x |= {"A_log": np.zeros(H, np.float32), "dt_bias": np.zeros((H, 128), np.float32)}
    return {name: jnp.array(a) for name, a in x.items()}  # copies: what JAX owns can be donated


def call(x: dict[str, Any], out: Any = None, **states: Any) -> Any:
    q, k, v, g, beta = (x[name] for name in OPERANDS)
    A_log, dt_bias = x["A_log"], x["dt_bias"]
    return fwd(q, k, v, g, beta, SCALE, out, A_log, dt_bias, LOWER_BOUND, **states)


def with_states(x: dict[str, Any], out: Any, final_state: Any):
    return call(x, out, initial_state=x["initial_state"], final_state=final_state)


def assert_same(actual: Any, expected: Any) -> None:
    """Bitwise, by JAX: an array that NumPy has a view of can't be donated on the CPU."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert jnp.array_equal(a, b)


# --- one array in two places ----------------------------------------------------------------------


def test_one_array_read_as_several_operands(platform: Platform):
    x = arguments(platform)
    shared = x | {name: x["q"] for name in "qkv"}
    copies = x | {name: jnp.copy(x["q"]) for name in "qkv"}
    assert_same(jax.jit(call)(shared), jax.jit(call)(copies))


def test_value_buffer_as_out_gives_the_right_numbers(platform: Platform):
    """`out=v` in one call, not donated: v is read whole before it would be overwritten."""
    x = arguments(platform)
    kept = np.asarray(x["v"])
    assert_same(jax.jit(lambda x: call(x, x["v"]))(x), call(x))
    assert_same(x["v"], kept)


def test_value_buffer_donated_as_out_inside_one_argument(platform: Platform):
    x = arguments(platform)
    expected = np.asarray(call(x))
    f = jax.jit(lambda v, rest: call(rest | {"v": v}, v), donate_argnums=0)
    assert_same(f(jnp.copy(x["v"]), {name: a for name, a in x.items() if name != "v"}), expected)


def test_buffer_donated_and_read_in_one_call_is_refused(platform: Platform):
    x = arguments(platform)
    f = jax.jit(call, donate_argnums=1)
    with pytest.raises(Exception, match=r"(?i)donate"):
        jax.block_until_ready(f(x, x["v"]))
    assert_same(f(x, jnp.zeros_like(x["v"])), call(x))  # and the process goes on


def test_one_buffer_for_two_outputs_is_copied_not_shared(platform: Platform):
    x = arguments(platform)
    buffer = jnp.zeros_like(x["v"])
    two = jax.jit(lambda x, y, out: (call(x, out), call(y, out)), donate_argnums=2)
    y = arguments(platform, seed=1)
    expected = call(x), call(y)
    assert_same(two(x, y, buffer), expected)


# --- what the caller keeps ------------------------------------------------------------------------


def test_initial_state_is_never_written_unless_donated(platform: Platform):
    x = arguments(platform)
    tokens, state = {name: x[name] for name in OPERANDS}, x["initial_state"]
    kept = jnp.copy(state)
    f = lambda tokens, state: op(tokens | {"initial_state": state})
    for g in (f, jax.jit(f)):
        first = g(tokens, state)
        assert_same(g(tokens, state), first)
        assert_same(state, kept)
        assert not state.is_deleted()
    donating = jax.jit(f, donate_argnums=1)
    expected = f(tokens, state)
    assert_same(donating(tokens, state), expected)
    assert state.is_deleted()


def test_failed_call_leaves_donated_buffers_with_the_caller(platform: Platform):
    x = arguments(platform)
    out, state = jnp.full_like(x["v"], 2), jnp.full_like(x["initial_state"], 3)
    f = jax.jit(with_states, donate_argnums=(1, 2))
    with pytest.raises(ValueError, match="`k` must"):
        f(x | {"k": x["k"][:, :-1]}, out, state)
    assert jnp.all(out == 2) and jnp.all(state == 3)
    o, final_state = f(x, out, state)
    assert out.is_deleted() and state.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)deleted|donated"):
        np.asarray(out)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)deleted|donated"):
        f(x, out, state)
    assert_same(f(x, jnp.zeros_like(o), jnp.zeros_like(final_state)), (o, final_state))


def test_donated_buffer_full_of_nan_is_written_throughout(platform: Platform):
    """Where tokens belong to no sequence, with zeros."""
    x = arguments(platform, T=200)
    offsets = np.array([0, 190], np.int32)
    packed = lambda x, out: call(x, out, initial_state=x["initial_state"], cu_seqlens=offsets)
    out = jnp.full_like(x["v"], jnp.nan)
    o = np.asarray(jax.jit(packed, donate_argnums=1)(x, out), np.float32)
    assert out.is_deleted()
    assert np.isfinite(o).all() and not o[:, 190:].any()
    assert_same(o[:, :190], np.asarray(packed(x, None), np.float32)[:, :190])


# --- what XLA has to copy -------------------------------------------------------------------------


def test_out_made_in_the_same_program(platform: Platform):
    """A constant, a transpose, a sum used again, another call's result: each as `out`."""
    x = arguments(platform)
    expected = call(x)
    ones = jnp.ones_like(x["v"])

    @jax.jit
    def program(x, ones):
        constant = call(x, jnp.zeros((1, 70, 2, 128), x["v"].dtype))
        transposed = call(x, ones.swapaxes(1, 2).reshape(ones.shape))
        before = ones + 1
        o = call(x, before)
        chained = call(x, call(x, before))
        return constant, transposed, o, chained, before + o

    *results, total = program(x, ones)
    for o in results:
        assert_same(o, expected)
    assert_same(total, 2 + expected)


def test_state_carried_through_a_scan(platform: Platform):
    """The carry is updated in place: no copy of it a step, and the numbers of the unrolled loop."""
    x = arguments(platform, T=16)

    def scanned(x, state):
        def body(state, _):
            return call(x, initial_state=state, final_state=state)[::-1]

        return jax.lax.scan(body, state, length=100)

    state = x["initial_state"]
    compiled = jax.jit(scanned, donate_argnums=1).lower(x, state).compile()
    analysis: Any = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == state.nbytes
    if platform.name == "cpu":  # on a GPU the workspace is larger than the state
        assert analysis.temp_size_in_bytes < state.nbytes
    final, outputs = compiled(x, jnp.copy(state))
    step = jax.jit(lambda x, state: call(x, initial_state=state, final_state=state))
    for i in range(100):
        o, state = step(x, state)
        if i % 33 == 0:
            assert_same(outputs[i], o)
    assert_same(final, state)


def test_constant_of_a_scan_body_keeps_its_value(platform: Platform):
    """Two different calls, one of them in the loop, beside a closed-over constant."""
    x, y = arguments(platform), arguments(platform, T=16, seed=1)
    constant = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)

    def body(state, _):
        _, state = call(y, initial_state=state, final_state=state)
        return state, jnp.asarray(constant) + 0 * state[0, 0]

    @jax.jit
    def program(x):
        _, state = call(x, initial_state=x["initial_state"], final_state=x["initial_state"])
        return jax.lax.scan(body, state, length=50)

    final, constants = program(x)
    np.testing.assert_array_equal(constants, np.broadcast_to(constant, constants.shape))
    _, state = call(x, initial_state=x["initial_state"], final_state=x["initial_state"])
    unrolled = jax.jit(lambda state: body(state, None)[0])
    for _ in range(50):
        state = unrolled(state)
    assert_same(final, state)


# --- layouts --------------------------------------------------------------------------------------


def test_transposed_sliced_and_broadcast_inputs(platform: Platform):
    x = arguments(platform)
    expected = run(platform, {name: x[name] for name in OPERANDS} | {"g": x["g"] * 0 - 0.5})
    head_first = x["q"].swapaxes(1, 2)
    nan = lambda columns: jnp.full((1, 70, columns), jnp.nan)
    projection = jnp.concatenate([nan(5), x["beta"], nan(3)], axis=-1)

    @jax.jit
    def fused(head_first, k, v, projection):
        g = jnp.broadcast_to(jnp.full((1, 70, 2, 1), -0.5), k.shape)
        q, beta = head_first.swapaxes(1, 2), projection[:, :, 5:7]
        return op({"q": q, "k": k, "v": v, "g": g, "beta": beta})

    assert_same(fused(head_first, x["k"], x["v"], projection), expected)


def test_arrays_of_another_memory_layout(platform: Platform):
    x = {name: arguments(platform)[name] for name in OPERANDS}
    expected = run(platform, x)
    head_major = Format(Layout(major_to_minor=(0, 2, 1, 3)), x["q"].sharding)
    strided: dict[str, Any] = {
        name: jax.device_put(a, head_major) if a.ndim == 4 else a for name, a in x.items()
    }
    assert strided["q"].format.layout.major_to_minor == (0, 2, 1, 3)
    assert_same(run(platform, strided), expected)
    fortran = {name: np.asfortranarray(np.asarray(a)) for name, a in x.items()}
    assert_same(run(platform, fortran), expected)


# --- several at once ------------------------------------------------------------------------------


def test_calls_from_several_threads_do_not_share_scratch(platform: Platform):
    """Different shapes in flight together, dispatched without waiting."""
    inputs = [
        {n: arguments(platform, T=T, seed=i)[n] for n in OPERANDS} for i, T in enumerate((70, 200))
    ]
    f = jax.jit(op)
    expected = [jax.tree.map(np.asarray, f(x)) for x in inputs]
    results: list[list[Any]] = [[], []]
    device = inputs[0]["q"].device  # threads don't inherit the default device

    def work(i: int) -> None:
        with jax.default_device(device):
            results[i] = [f(inputs[i]) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(results, expected, strict=True):
        for result in got:
            assert_same(result, want)
