"""What JAX's transforms do with the op, on the CPU: 8 devices are pretended by conftest.py.

Expected values come from the reference, on arrays that are neither batched nor sharded.
"""

import functools
import itertools
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kda

FORMS = {
    "rows": {"B": 2},
    "cu_seqlens": {"B": 1, "lengths": (3, 0, 2)},
    "segment_ids": {"B": 2, "segments": (0, 7, 7, 7, 2, 0, 3)},
    "pool": {"B": 3, "slots": 7},
    "packed_pool": {"B": 1, "lengths": (3, 0, 2), "slots": 7},
}
forms = pytest.mark.parametrize("form", FORMS)
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


# T, H, HV, K and V all differ, so that no two axes can be confused.
def make(seed=0, *, B=2, T=7, H=3, HV=6, K=4, V=5, lengths=(), segments=(), slots=None):
    """The arrays of one call; packing and slots, too, differ from seed to seed."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    N, packing = B, {}
    if lengths:
        starts = np.cumsum((0, *np.roll(lengths, seed)), dtype=np.int32)
        N, packing = len(lengths), {"cu_seqlens": starts}
    if segments:
        ids = [np.roll(segments, seed + row) for row in range(B)]
        N, packing = 4 * B, {"segment_ids": np.array(ids, np.int32)}
    if slots is not None:
        chosen = rng.permutation(slots)[: 2 * N].astype(np.int32)
        chosen[seed % N] = -1  # a row of padding
        packing |= {"state_indices": chosen[:N], "output_state_indices": chosen[N:]}
        N = slots
    return {
        "q": draw(B, T, H, K),
        "k": draw(B, T, H, K),
        "v": draw(B, T, HV, V),
        "g": draw(B, T, HV, K),
        "beta": draw(B, T, HV),
        "A_log": draw(HV) / 2,
        "dt_bias": draw(HV, K),
        "initial_state": draw(N, HV, V, K),
    } | packing


def op(x, implementation=None):
    """`chunk_kda` with everything inside, as a function of one dictionary."""
    return jax_kda.chunk_kda(
        **x,
        output_final_state=True,
        max_segments=4 if "segment_ids" in x else None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        implementation=implementation,
    )


def step(x, implementation=None):
    """The same by `recurrent_kda`."""
    x = dict(x)
    return jax_kda.recurrent_kda(
        state=x.pop("initial_state"),
        **x,
        max_segments=4 if "segment_ids" in x else None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        implementation=implementation,
    )


kernel = functools.partial(op, implementation="ffi")
ops = pytest.mark.parametrize("f", [op, step], ids=["chunk", "recurrent"])
reference = jax.jit(functools.partial(op, implementation="reference"))


def loss(f, x):
    """A scalar to which no two elements of the results contribute alike."""
    weigh = lambda a: jnp.sum(a * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape))
    return sum(map(weigh, f(x)))


@functools.partial(jax.jit, static_argnums=0)
def gradient(f, x):
    """Of everything that has one."""
    inputs = {name: x[name] for name in DIFFERENTIABLE if name in x}
    return jax.grad(lambda inputs: loss(f, x | inputs))(inputs)


def assert_same(actual, expected, tolerance=1e-5):
    actual, tree = jax.tree.flatten_with_path(actual)
    expected, expected_tree = jax.tree.flatten(expected)
    assert tree == expected_tree
    for (path, a), b in zip(actual, expected, strict=True):
        assert_close(a, b, tolerance, jax.tree_util.keystr(path))


# ---- vmap ----------------------------------------------------------------------------------------


def grid(inner, outer, sizes, form):
    """Arguments with an axis in front for `inner` and one before that for `outer` names, and the
    calls that they stand for: calls[j][i].
    """

    def argument(name, i, j):
        seed = (i if name in inner else 0) + 10 * (j if name in outer else 0)
        return make(seed, **FORMS[form])[name]

    names = make(**FORMS[form])
    cells = [
        [{n: argument(n, i, j) for n in names} for i in range(sizes[0])] for j in range(sizes[1])
    ]
    x = {n: np.array([[cell[n] for cell in row] for row in cells]) for n in names}
    x = {n: a if n in inner else a[:, 0] for n, a in x.items()}
    return {n: a if n in outer else a[0] for n, a in x.items()}, cells


def stack(names, size, form):
    """The same with one axis, and the in_axes of it."""
    x, (calls,) = grid(names, (), (size, 1), form)
    return x, {name: 0 if name in names else None for name in x}, calls


def loop(f, calls):
    return jax.tree.map(lambda *results: np.stack(results), *map(f, calls))


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


# ---- grad ----------------------------------------------------------------------------------------


@forms
def test_gradient(form):
    x = make(**FORMS[form])
    assert_same(gradient(op, x), gradient(reference, x))


@pytest.mark.parametrize("result", [0, 1])
def test_gradient_of_one_result(result):
    only = lambda f: lambda x: (f(x)[result],)
    assert_same(gradient(only(op), make()), gradient(only(reference), make()))


def test_gradient_without_optional_arguments():
    x = {name: a for name, a in make().items() if name not in ("A_log", "dt_bias", "initial_state")}
    f = lambda implementation: lambda x: jax_kda.chunk_kda(**x, implementation=implementation)[:1]
    assert_same(gradient(f(None), x), gradient(f("reference"), x))


@forms
def test_vmap_of_gradient_and_gradient_of_vmap(form):
    x, axes, calls = stack(["q", "A_log", "initial_state"], 3, form)
    per_call: dict = loop(functools.partial(gradient, reference), calls)
    assert_same(jax.vmap(functools.partial(gradient, kernel), (axes,))(x), per_call)

    # What is not batched feeds every call, so its gradient is a sum; the loss weighs calls alike.
    losses = jax.vmap(functools.partial(loss, kernel), (axes,))
    total = jax.jit(jax.grad(lambda inputs: jnp.sum(losses(x | inputs))))
    expected = {name: a if axes[name] == 0 else a.sum(0) for name, a in per_call.items()}
    assert_same(total({name: x[name] for name in expected}), expected)


def test_gradient_of_nested_vmap():
    x, cells = grid(["q", "A_log"], ["dt_bias", "A_log"], (3, 2), "rows")
    inner = {name: 0 if name in ("q", "A_log") else None for name in x}
    outer = {name: 0 if name in ("dt_bias", "A_log") else None for name in x}
    nested = jax.vmap(jax.vmap(functools.partial(gradient, kernel), (inner,)), (outer,))
    per_call = functools.partial(gradient, reference)
    assert_same(nested(x), loop(functools.partial(loop, per_call), cells))


def test_second_derivative_in_reverse_mode():
    def twice(f):
        slope = lambda q: jax.grad(lambda x: loss(f, x))(x | {"q": q})
        size = lambda q: sum((jnp.sum(a * a) for a in slope(q).values()), jnp.float32(0))
        return jax.jit(jax.grad(size))(x["q"])

    x = make(T=3)
    assert_same(twice(op), twice(reference), 1e-4)


def test_forward_mode_is_refused():
    x = make()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: op(x | {"q": q}), (x["q"],), (x["q"],))


@pytest.mark.parametrize(
    "policy", [None, "everything_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable"]
)
def test_remat_changes_no_bit_of_the_gradient(policy):
    x = make()
    if policy is not None:
        policy = getattr(jax.checkpoint_policies, policy)
    f = lambda x: op(x | {"q": jnp.sin(x["q"])})
    plain, again = jax.jit(
        lambda x: (gradient(f, x), gradient(jax.checkpoint(f, policy=policy), x))
    )(x)
    jax.tree.map(np.testing.assert_array_equal, plain, again)


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


# ---- Meshes --------------------------------------------------------------------------------------

# A mesh of 2 x 2: rows of tokens over one of its axes, heads over the other.
ROWS_AND_HEADS = {
    "q": P("rows", None, "heads"),
    "k": P("rows", None, "heads"),
    "v": P("rows", None, "heads"),
    "g": P("rows", None, "heads"),
    "beta": P("rows", None, "heads"),
    "A_log": P("heads"),
    "dt_bias": P("heads"),
    "segment_ids": P("rows"),
    "initial_state": P("rows", "heads"),
}
ONLY_HEADS = {
    name: P(*(None if a == "rows" else a for a in s)) for name, s in ROWS_AND_HEADS.items()
}
ONLY_HEADS |= {"cu_seqlens": P()}
TOKENS = {name: P("rows", "heads") for name in ("q", "k", "v", "g", "beta", "segment_ids")}
TOKENS |= {"A_log": P(), "dt_bias": P(), "initial_state": P("rows")}


def make_mesh(axis_type=AxisType.Auto):
    devices = jax.local_devices(backend="cpu")[:4]
    return jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(axis_type,) * 2, devices=devices)


def place(x, mesh, specs):
    return {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in x.items()}


def compile_and_run(f, *x):
    """The results, and the collectives in XLA's program."""
    compiled = jax.jit(f).lower(*x).compile()
    names = r"all-gather|all-reduce|all-to-all|collective-\w+|reduce-scatter"
    return compiled(*x), set(re.findall(rf"({names})(?:-start)?\(", str(compiled.as_text())))


axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


@axis_types
@pytest.mark.parametrize(
    "H, HV, query_heads",
    [(4, 4, "heads"), (4, 8, "heads"), (4, 8, None), (2, 8, "heads"), (2, 8, None)],
)
def test_rows_and_heads_shard_without_collectives(axis_type, H, HV, query_heads):
    x = make(B=4, H=H, HV=HV)
    specs = ROWS_AND_HEADS | dict.fromkeys(("q", "k"), P("rows", None, query_heads))
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        results, collectives = compile_and_run(op, place(x, mesh, specs))
    assert not collectives
    assert_same(results, reference(x))
    for a, spec in zip(results, (specs["v"], specs["initial_state"]), strict=True):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)


@axis_types
@pytest.mark.parametrize("form", ["cu_seqlens", "segment_ids"])
def test_packed_rows_shard_without_collectives(axis_type, form):
    x = make(**FORMS[form], H=2, HV=4)
    mesh = make_mesh(axis_type)
    specs = ONLY_HEADS if form == "cu_seqlens" else ROWS_AND_HEADS
    with jax.set_mesh(mesh):
        results, collectives = compile_and_run(op, place(x, mesh, specs))
    assert not collectives
    assert_same(results, reference(x))


@pytest.mark.parametrize("sizes", [{"B": 4, "T": 0}, {"B": 0}, {"B": 1, "segments": (1,) * 7}])
def test_sizes_of_zero_and_one_on_a_mesh(sizes):
    x = make(**sizes, H=2, HV=4)
    specs = ONLY_HEADS if "segments" in sizes else ROWS_AND_HEADS
    results, collectives = compile_and_run(op, place(x, make_mesh(), specs))
    assert not collectives
    assert_same(results, reference(x))


def test_parts_that_do_not_divide_are_gathered_not_wrong():
    # 8 value heads in 4 parts, of which each would need half a query head.
    x = make(B=4, H=2, HV=8)
    mesh = jax.make_mesh(
        (4,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.local_devices(backend="cpu")[:4]
    )
    specs = ONLY_HEADS | dict.fromkeys(("q", "k"), P())
    results, collectives = compile_and_run(op, place(x, mesh, specs))
    assert collectives == {"all-gather"}
    assert_same(results, reference(x))


@axis_types
def test_sharded_tokens_are_gathered_not_wrong(axis_type):
    x = make(B=2, T=8)
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        results, collectives = compile_and_run(op, place(x, mesh, TOKENS))
    assert collectives == {"all-gather"}
    assert_same(results, reference(x))


def test_eager_call_on_sharded_arrays_is_partitioned():
    x = make(B=4, H=2, HV=4)
    mesh = make_mesh()
    o, state = op(place(x, mesh, ROWS_AND_HEADS))
    assert o.sharding.is_equivalent_to(NamedSharding(mesh, ROWS_AND_HEADS["v"]), 4)
    assert_same((o, state), reference(x))


@axis_types
def test_sharded_vmap(axis_type):
    calls = [make(seed, H=2, HV=4) for seed in range(4)]
    x = {name: np.stack([call[name] for call in calls]) for name in calls[0]}
    mesh = make_mesh(axis_type)
    specs = {name: P("rows", *ONLY_HEADS[name]) for name in x}
    with jax.set_mesh(mesh):
        results, collectives = compile_and_run(jax.vmap(op), place(x, mesh, specs))
    assert not collectives
    assert_same(results, loop(reference, calls))


@axis_types
def test_gradient_on_a_mesh(axis_type):
    x = make(B=4, H=2, HV=4)
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        result = gradient(op, place(x, mesh, ROWS_AND_HEADS))
    assert_same(result, gradient(reference, x))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", ["rows", "segment_ids"])
def test_shard_map(form, check_vma):
    x = make(**FORMS[form], H=2, HV=4)
    mesh = make_mesh()
    specs = {name: ROWS_AND_HEADS[name] for name in x}
    f = jax.shard_map(
        op,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(specs["v"], specs["initial_state"]),
        check_vma=check_vma,
    )
    results, collectives = compile_and_run(f, x)
    assert not collectives
    assert_same(results, reference(x))


def test_shard_map_with_replicated_operands_and_gradient():
    # Only v and its gate are split, the rest is the same on all devices: results vary with v.
    x = make(H=1, HV=4)
    del x["initial_state"]
    mesh = make_mesh()
    specs = {name: P(None, None, "heads") if name in ("v", "g", "beta") else P() for name in x}
    specs |= {"A_log": P("heads"), "dt_bias": P("heads")}
    f = jax.shard_map(op, mesh=mesh, in_specs=(specs,), out_specs=(specs["v"], P(None, "heads")))
    assert_same(jax.jit(f)(x), reference(x))
    assert_same(gradient(f, x), gradient(reference, x))


def only(axis, x):
    """ROWS_AND_HEADS without the other axis of the mesh."""
    return {name: P(*(a if a == axis else None for a in ROWS_AND_HEADS[name])) for name in x}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", ["rows", "segment_ids"])
@axis_types
def test_partially_manual_shard_map(axis_type, form, check_vma):
    x = make(**FORMS[form], H=2, HV=4)
    mesh = make_mesh(axis_type)
    f = jax.shard_map(
        op,
        mesh=mesh,
        in_specs=(only("rows", x),),
        out_specs=P("rows"),
        axis_names={"rows"},
        check_vma=check_vma,
    )
    with jax.set_mesh(mesh):
        assert_same(jax.jit(f)(place(x, mesh, ROWS_AND_HEADS)), reference(x))


def test_gradient_in_a_partially_manual_shard_map():
    x = make(H=2, HV=4)
    mesh = make_mesh()
    specs = only("rows", x)
    f = jax.shard_map(op, mesh=mesh, in_specs=(specs,), out_specs=P("rows"), axis_names={"rows"})
    with jax.set_mesh(mesh):
        assert_same(gradient(f, x), gradient(reference, x))


def test_nested_shard_map():
    x = make(H=2, HV=4)
    mesh = make_mesh()
    rows, heads = only("rows", x), only("heads", x)
    results = heads["v"], heads["initial_state"]
    f = jax.shard_map(op, in_specs=(heads,), out_specs=results, axis_names={"heads"})
    f = jax.shard_map(f, mesh=mesh, in_specs=(rows,), out_specs=P("rows"), axis_names={"rows"})
    with jax.set_mesh(mesh):
        results, collectives = compile_and_run(f, x)
    assert not collectives
    assert_same(results, reference(x))


# A pool: heads may shard, slots may not.
POOL = ONLY_HEADS | {"initial_state": P(None, "heads")}
POOL |= dict.fromkeys(("state_indices", "output_state_indices"), P())


@ops
@axis_types
@pytest.mark.parametrize("H, HV", [(4, 4), (2, 8)])
def test_heads_of_a_pool_shard_without_collectives(f, axis_type, H, HV):
    x = make(**FORMS["pool"], H=H, HV=HV)
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        results, collectives = compile_and_run(f, place(x, mesh, POOL))
    assert not collectives
    assert_same(results, reference(x))
    sharding = NamedSharding(mesh, POOL["initial_state"])
    assert results[1].sharding.is_equivalent_to(sharding, 4)


@axis_types
def test_decoding_shards_rows_and_heads_without_collectives(axis_type):
    x = make(B=4, T=1, H=2, HV=4)
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        results, collectives = compile_and_run(step, place(x, mesh, ROWS_AND_HEADS))
    assert not collectives
    assert_same(results, reference(x))


@ops
@axis_types
@pytest.mark.parametrize("form", ["pool", "packed_pool"])
def test_rows_with_a_pool_are_gathered_not_wrong(f, axis_type, form):
    x = make(**FORMS[form] | ({"B": 4, "slots": 9} if form == "pool" else {}), H=2, HV=4)
    mesh = make_mesh(axis_type)
    specs = POOL | {n: P("rows", None, "heads") for n in ("q", "k", "v", "g", "beta")}
    if form == "packed_pool":
        specs = POOL
    with jax.set_mesh(mesh):
        results, collectives = compile_and_run(f, place(x, mesh, specs))
    assert collectives == ({"all-gather"} if form == "pool" else set())
    assert_same(results, reference(x))


@ops
@axis_types
def test_sharded_slots_are_refused_not_gathered(f, axis_type):
    x = make(B=3, slots=8, H=2, HV=4)
    mesh = make_mesh(axis_type)
    name = "state" if f is step else "initial_state"
    message = rf"`{name}` must have its axis of slots on every device.*\[8, 4, 5, 4\].*rows"
    arguments = place(x, mesh, POOL | {"initial_state": P("rows", "heads")})
    with jax.set_mesh(mesh):
        for call in (f, jax.jit(f)):
            # Automatic axes are known to XLA alone, whose error has ours in it.
            with pytest.raises((NotImplementedError, RuntimeError), match=message):
                call(arguments)


@axis_types
def test_slots_on_a_mesh_axis_of_one_device_are_whole(axis_type):
    x = make(B=3, slots=8, H=2, HV=4)
    devices = jax.local_devices(backend="cpu")[:2]
    mesh = jax.make_mesh((1, 2), ("rows", "heads"), axis_types=(axis_type,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        arguments = place(x, mesh, POOL | {"initial_state": P("rows", "heads")})
        results, collectives = compile_and_run(step, arguments)
    assert not collectives
    assert_same(results, reference(x))


@ops
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_pools(f, check_vma):
    """Every device has slots and rows of its own."""
    parts = [make(seed, **FORMS["pool"], H=2, HV=4) for seed in range(2)]
    shared = ("A_log", "dt_bias")
    x = {n: np.concatenate([p[n] for p in parts]) for n in parts[0] if n not in shared}
    x |= {n: parts[0][n] for n in shared}
    mesh = make_mesh()
    tokens, state = P("rows", None, "heads"), P("rows", "heads")
    specs = dict.fromkeys(x, tokens) | dict.fromkeys(shared, P("heads")) | {"initial_state": state}
    specs |= dict.fromkeys(("state_indices", "output_state_indices"), P("rows"))
    f = jax.shard_map(
        f, mesh=mesh, in_specs=(specs,), out_specs=(tokens, state), check_vma=check_vma
    )
    results, collectives = compile_and_run(f, place(x, mesh, specs))
    assert not collectives
    expected = [reference(p | {n: parts[0][n] for n in shared}) for p in parts]
    assert_same(results, jax.tree.map(lambda *a: np.concatenate(a), *expected))


def test_sharded_vmap_of_pools():
    calls = [make(seed, **FORMS["pool"], H=2, HV=4) for seed in range(4)]
    x = {name: np.stack([call[name] for call in calls]) for name in calls[0]}
    mesh = make_mesh()
    specs = {name: P("rows", *POOL[name]) for name in x}
    results, collectives = compile_and_run(jax.vmap(step), place(x, mesh, specs))
    assert not collectives
    assert_same(results, loop(reference, calls))


# ---- Export and caches ---------------------------------------------------------------------------

CHECKS = [jax.export.DisabledSafetyCheck.custom_call(t) for t in jax_kda.FFI_TARGETS]


def run_python(code, *arguments, **environment):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_export_round_trip_in_a_fresh_process(tmp_path):
    x = make()
    exported = jax.export.export(jax.jit(op), disabled_checks=CHECKS)(x)
    (tmp_path / "op").write_bytes(exported.serialize())
    np.savez(tmp_path / "x.npz", allow_pickle=False, **x)
    code = """
        import sys, jax, numpy as np
        if sys.argv[2]: import jax_kda
        f = jax.export.deserialize(open(sys.argv[1] + "/op", "rb").read())
        o, state = f.call(dict(np.load(sys.argv[1] + "/x.npz")))
        np.savez(sys.argv[1] + "/y.npz", o, state)
    """
    process = run_python(code, tmp_path, "import")
    assert process.returncode == 0, process.stderr
    assert_same(tuple(np.load(tmp_path / "y.npz").values()), reference(x))
    process = run_python(code, tmp_path, "")
    assert process.returncode != 0
    assert "kda_chunk_fwd" in process.stderr


@ops
@pytest.mark.parametrize("form", ["rows", "cu_seqlens", "pool", "packed_pool"])
def test_export_with_symbolic_sizes(form, f):
    B, T, N, slots = jax.export.symbolic_shape("B, T, N, slots")
    packed = form in ("cu_seqlens", "packed_pool")
    tokens, states = ((1, T), (N,)) if packed else ((B, T), (B,))
    if f is step and not packed:
        tokens = (B, 7)
    leading = dict.fromkeys(("q", "k", "v", "g", "beta"), tokens)
    leading |= {"initial_state": (slots,) if "pool" in form else states}
    leading |= {"cu_seqlens": (N + 1,), "A_log": (), "dt_bias": ()}
    leading |= {"state_indices": states, "output_state_indices": states}

    def symbolic(name, a):
        return jax.ShapeDtypeStruct((*leading[name], *a.shape[len(leading[name]) :]), a.dtype)

    x = make(**FORMS[form])
    types = {name: symbolic(name, a) for name, a in x.items()}
    f = jax.export.export(jax.jit(f), disabled_checks=CHECKS, platforms=("cpu", "cuda"))(types)
    f = jax.export.deserialize(f.serialize())
    longer = {"B": 1, "lengths": (70, 3, 0, 9)} if packed else {"B": 3}
    longer |= {"slots": 10} if "pool" in form else {}
    for arrays in (x, make(1, T=90 if T in tokens else 7, **longer)):
        assert_same(f.call(arrays), reference(arrays))


def test_export_of_a_pool_with_checkpoints():
    T, slots = jax.export.symbolic_shape("T, slots")

    def arguments(T, slots):
        x = make(T=1, **FORMS["pool"])
        shapes = {n: (3, T, *x[n].shape[2:]) for n in ("q", "k", "v", "g", "beta")}
        shapes |= {"initial_state": (slots, 6, 5, 4), "checkpoint_indices": (3, T // 64)}
        return {n: jax.ShapeDtypeStruct(shapes.get(n, a.shape), a.dtype) for n, a in x.items()} | {
            "checkpoint_indices": jax.ShapeDtypeStruct(shapes["checkpoint_indices"], np.int32)
        }

    for f in (op, functools.partial(op, implementation="reference")):
        exported = jax.export.export(jax.jit(f), disabled_checks=CHECKS)(arguments(T, slots))
        exported = jax.export.deserialize(exported.serialize())
        for length in (1, 130):
            x = make(T=length, B=3, slots=12)
            free = np.setdiff1d(np.arange(12), [*x["state_indices"], *x["output_state_indices"]])
            x["checkpoint_indices"] = np.resize(free, (3, length // 64)).astype(np.int32)
            assert_same(exported.call(x), reference(x))


def test_donation_through_export():
    x = make()
    buffer = jnp.zeros_like(x["v"])
    f = lambda x, out: jax_kda.fwd(**x, out=out, scale=None, lower_bound=None)
    exported = jax.export.export(jax.jit(f), disabled_checks=CHECKS)(x, buffer)
    f = jax.jit(jax.export.deserialize(exported.serialize()).call, donate_argnums=1)
    pointer = buffer.unsafe_buffer_pointer()
    o = f(x, buffer)
    assert o.unsafe_buffer_pointer() == pointer
    assert_same(o, reference(x)[0])


def test_persistent_compilation_cache(tmp_path):
    code = """
        import logging, sys
        logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
        import jax, jax.numpy as jnp, jax_kda
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        x = [jnp.ones((1, 5, 2, 4))] * 4
        jax_kda.chunk_kda(*x, jnp.ones((1, 5, 2)))
    """
    hit = re.compile(r"cache hit for '?jit_kda_chunk_fwd", re.IGNORECASE)
    runs = [run_python(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert [r.returncode for r in runs] == [0, 0], runs[0].stderr
    assert [bool(hit.search(r.stdout)) for r in runs] == [False, True]
