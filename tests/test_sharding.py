"""The op on meshes and in shard_map, on the CPU: conftest.py pretends 8 devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import FORMS, assert_same, gradient, loop, make, op, ops, reference, step
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.usefixtures("on_the_cpu")


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


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_gradients_of_replicated_parameters_are_summed_once(where, check_vma):
    """Two devices with rows of their own and the same A_log and dt_bias, as in data parallelism."""
    x = make(B=4)
    devices = jax.local_devices(backend="cpu")[:2]
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=devices)
    specs = dict.fromkeys(x, P("rows")) | dict.fromkeys(("A_log", "dt_bias"), P())
    sharded = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), check_vma=check_vma)

    def loss(x, f=op):  # of these rows: that of all is the sum
        o, state = f(x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(state**2)

    def gradients(x):
        own = jax.grad(loss)(x)
        if check_vma:  # JAX knows what is replicated, and has summed its gradients
            return own
        summed = {name: jax.lax.psum(own[name], "rows") for name in ("A_log", "dt_bias")}
        return own | summed

    if where == "inside":
        f = sharded(gradients, out_specs=specs)
    else:
        f = jax.grad(sharded(lambda x: jax.lax.psum(loss(x), "rows"), out_specs=P()))
    actual, collectives = compile_and_run(f, x)
    assert_same(actual, jax.grad(loss)(x, reference))
    assert collectives == {"all-reduce"}


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
