"""vmap, loops and conditionals around the op, on the CPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    FORMS,
    assert_same,
    forms,
    gradient,
    grid,
    kernel,
    loop,
    make,
    op,
    ops,
    reference,
    stack,
    step,
)

import jax_kda

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ---- vmap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form, size", [("rows", 3), ("rows", 1), ("cu_seqlens", 3), ("segment_ids", 3)]
)
def test_vmap_over_each_argument(form, size):
    for name in make(**FORMS[form]):
        x, axes, calls = stack([name], size, form)
        assert_same(jax.jit(jax.vmap(kernel, (axes,)))(x), loop(reference, calls))


def test_vmap_over_every_pair_of_arguments():
    for pair in itertools.combinations(["q", "v", "A_log", "dt_bias", "initial_state"], 2):
        x, axes, calls = stack(pair, 3, "rows")
        assert_same(jax.jit(jax.vmap(kernel, (axes,)))(x), loop(reference, calls))


@forms
def test_vmap_over_all_arguments(form):
    x, axes, calls = stack(make(**FORMS[form]), 3, form)
    assert_same(jax.vmap(op, (axes,))(x), loop(reference, calls))


def test_vmap_over_any_axes():
    x, axes, calls = stack(make(), 3, "rows")
    axes |= {"q": 2, "v": 1, "g": -1, "A_log": 1, "initial_state": 4}
    x = {name: np.moveaxis(a, 0, axes[name]) for name, a in x.items()}
    results = jax.vmap(kernel, (axes,), (2, -1))(x)
    results = map(functools.partial(jnp.moveaxis, destination=0), jax.tree.leaves(results), (2, -1))
    assert_same(tuple(results), loop(reference, calls))


@pytest.mark.parametrize(
    "form, sizes",
    [("rows", (3, 2)), ("rows", (1, 3)), ("cu_seqlens", (3, 1)), ("segment_ids", (2, 3))],
)
def test_nested_vmap(form, sizes):
    packing = list(make(**FORMS[form]))[-1]  # of rows, the initial state
    for inner, outer in [
        (["q"], ["A_log"]),
        (["A_log"], ["dt_bias"]),
        (["dt_bias", "initial_state"], ["A_log", "dt_bias", "beta"]),
        (["v"], [packing]),
        ([packing], [packing, "k"]),
    ]:
        x, cells = grid(inner, outer, sizes, form)
        axes = [{name: 0 if name in names else None for name in x} for names in (inner, outer)]
        result = jax.jit(jax.vmap(jax.vmap(kernel, (axes[0],)), (axes[1],)))(x)
        assert_same(result, loop(functools.partial(loop, reference), cells))


@pytest.mark.parametrize("names", [["out"], ["final_state"], ["out", "final_state", "q"]])
def test_vmap_over_buffers(names):
    x = make(T=5)
    x |= {
        "out": np.full_like(x["v"], np.nan),
        "final_state": np.full((2, 6, 5, 4), np.nan, np.float32),
    }
    axes = {name: 0 if name in names else None for name in x}
    x = {name: np.stack([a] * 3) if name in names else a for name, a in x.items()}
    f = lambda x: jax_kda.fwd(**x, scale=None, lower_bound=None)
    results = jax.vmap(f, (axes,))(x)
    expected = reference(make(T=5))
    for i in range(3):
        assert_same(jax.tree.map(lambda a, i=i: a[i], results), expected)


@pytest.mark.parametrize("form", ["rows", "cu_seqlens", "pool"])
def test_vmap_of_decoding(form):
    names = list(make(**FORMS[form]))
    for mapped in (["q"], ["initial_state"], ["A_log", "dt_bias"], names):
        if form == "pool" and "initial_state" not in mapped:
            mapped = [*mapped, "initial_state"]
        x, axes, calls = stack(mapped, 3, form)
        f = functools.partial(step, implementation="ffi")
        assert_same(jax.jit(jax.vmap(f, (axes,)))(x), loop(reference, calls))


def test_vmap_of_checkpoints():
    calls = [make(seed, T=130, B=2, slots=12) for seed in range(3)]
    for x in calls:
        used = {*x["state_indices"].tolist(), *x["output_state_indices"].tolist()}
        free = [slot for slot in range(12) if slot not in used]
        x["checkpoint_indices"] = np.array([free[:2], free[2:4]], np.int32)
    x = {name: np.stack([call[name] for call in calls]) for name in calls[0]}
    assert_same(jax.jit(jax.vmap(kernel))(x), loop(reference, calls))


@ops
def test_nested_vmap_of_a_pool(f):
    x, cells = grid(["q", "initial_state"], ["initial_state", "state_indices"], (2, 3), "pool")
    inner = {name: 0 if name in ("q", "initial_state") else None for name in x}
    outer = {name: 0 if name in ("initial_state", "state_indices") else None for name in x}
    result = jax.jit(jax.vmap(jax.vmap(f, (inner,)), (outer,)))(x)
    assert_same(result, loop(functools.partial(loop, reference), cells))


@ops
@pytest.mark.parametrize("form", ["pool", "packed_pool"])
@pytest.mark.parametrize("mapped", ["q", "A_log", "state_indices"])
def test_a_pool_that_is_not_mapped_is_refused(f, form, mapped):
    x, axes, _ = stack([mapped], 3, form)
    name = "state" if f is step else "initial_state"
    with pytest.raises(NotImplementedError, match=rf"^`{name}` must .* batch `state_indices`"):
        jax.vmap(f, (axes,))(x)


def test_a_pool_of_fwd_that_is_not_mapped_is_refused():
    x = make(T=5, **FORMS["pool"])
    pool, _, v = x.pop("initial_state"), x.pop("state_indices"), x.pop("v")
    f = lambda v: jax_kda.fwd(**x, v=v, scale=None, lower_bound=None, out=None, final_state=pool)
    with pytest.raises(NotImplementedError, match=r"^`final_state` must be mapped"):
        jax.vmap(f)(v[None])


# ---- Loops, conditionals, precision --------------------------------------------------------------


def test_state_as_a_carry():
    x = make()
    qs = jnp.stack([x["q"], x["k"], -x["q"]])

    def step(f):
        return lambda state, q: f(x | {"q": q, "initial_state": state})[::-1]

    def scan(f):
        return lambda x: jax.lax.scan(step(f), x["initial_state"], qs)

    def while_loop(i_and_state):
        i, state = i_and_state
        return i + 1, step(op)(state, qs[i])[0]

    assert_same(jax.jit(scan(op))(x), jax.jit(scan(reference))(x))
    last = jax.lax.while_loop(lambda c: c[0] < 3, while_loop, (0, jnp.asarray(x["initial_state"])))[
        1
    ]
    assert_same(last, scan(reference)(x)[0])
    assert_same(gradient(scan(op), x), gradient(scan(reference), x))


@pytest.mark.parametrize("form", ["rows", "pool"])
def test_decoding_in_a_loop(form):
    x = make(T=6, **FORMS[form])
    if form == "pool":
        del x["output_state_indices"]
    tokens = ("q", "k", "v", "g", "beta")
    at = lambda t: {name: jax.lax.dynamic_slice_in_dim(x[name], t, 2, axis=1) for name in tokens}

    @jax.jit
    def decode(state):
        def two_tokens(t_and_state):
            t, state = t_and_state
            return t + 2, step(x | at(t) | {"initial_state": state})[1]

        return jax.lax.while_loop(lambda carry: carry[0] < 6, two_tokens, (0, state))[1]

    def scanned(state, t):
        o, state = step(x | at(t) | {"initial_state": state})
        return state, o

    state = jnp.asarray(x["initial_state"])
    expected_o, expected = reference(x)
    assert_same(decode(state), expected)
    last, o = jax.lax.scan(scanned, state, jnp.arange(0, 6, 2))
    assert_same(last, expected)
    assert_same(jnp.concatenate(list(o), axis=1), expected_o)


@ops
def test_conditional_with_a_pool(f):
    x = make(**FORMS["pool"])
    g = lambda x: jax.lax.cond(x["A_log"][0] > 9, lambda x: (x["v"], x["initial_state"]), f, x)
    assert_same(jax.jit(g)(x), reference(x))


def test_conditional():
    x = make()
    f = lambda x: jax.lax.cond(x["A_log"][0] > 9, lambda x: (x["v"], x["initial_state"]), op, x)
    assert_same(jax.jit(f)(x), reference(x))


def test_x64():
    x = make(**FORMS["cu_seqlens"])
    with jax.enable_x64(True):
        results = op(x | {"cu_seqlens": x["cu_seqlens"].astype(np.int64)})
        assert [a.dtype for a in jax.tree.leaves(results)] == [jnp.float32, jnp.float32]
        assert_same(results, reference(x))


def test_one_trace_for_each_shape_and_configuration(monkeypatch):
    calls = []
    ffi_call = jax.ffi.ffi_call
    monkeypatch.setattr(jax.ffi, "ffi_call", lambda *a, **k: calls.append(a) or ffi_call(*a, **k))

    def traces(f):
        calls.clear()
        jax.block_until_ready(f())
        return len(calls)

    x = make(T=11)  # no other test has seen it
    once = traces(lambda: op(x))
    assert once > 0
    assert traces(lambda: op(x)) == 0
    assert traces(lambda: op(make(1, T=11))) == 0
    assert traces(lambda: jax.jit(op)(x)) == 0
    assert traces(lambda: [jax.jit(lambda x, i=i: op(x))(x) for i in range(3)]) == 0
    assert traces(lambda: op(make(T=12))) == once
    assert traces(lambda: op(x | {"dt_bias": None})) == once
    assert traces(lambda: jax.vmap(op)({n: a[None] for n, a in x.items()})) == once
    assert traces(lambda: jax.vmap(op)({n: a[None] for n, a in x.items()})) == 0
    x = make(T=11, **FORMS["pool"])
    assert traces(lambda: step(x)) == once
    assert traces(lambda: step(make(1, T=11, **FORMS["pool"]))) == 0  # other slots
