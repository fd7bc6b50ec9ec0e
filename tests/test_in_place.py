"""Results are written into the caller's memory, where the caller gives it away, and only there.

On the CPU. tests/test_h200_compile.py has what can be seen of the same on a GPU without one.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kda

STATIC = {"scale": None, "lower_bound": None}
fwd = functools.partial(jax_kda.fwd, **STATIC)


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def make(seed=0, *, B=2, T=70, H=2, HV=4, K=16, V=8, N=None):
    """Tokens and gate parameters by name, and states for `initial_state`."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    x = {"q": draw(B, T, H, K), "k": draw(B, T, H, K), "v": draw(B, T, HV, V)}
    x |= {"g": draw(B, T, HV, K), "beta": draw(B, T, HV)}
    x |= {"A_log": draw(HV) / 2, "dt_bias": draw(HV, K)}
    if N is not None:
        x["cu_seqlens"] = jnp.linspace(0, T, N + 1, dtype=jnp.int32)
    return x, draw(N or B, HV, V, K)


def buffers(x, state):
    """An out and a final state full of NaN: nothing of them may remain."""
    return jnp.full_like(x["v"], jnp.nan), jnp.full_like(state, jnp.nan)


@functools.partial(jax.jit, static_argnames="implementation")
def chunk_kda(x, state, implementation=None):
    return jax_kda.chunk_kda(
        **x,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        implementation=implementation,
    )


reference = functools.partial(chunk_kda, implementation="reference")


@functools.partial(jax.jit, static_argnames="implementation")
def recurrent_kda(x, state, state_indices=None, implementation=None):
    return jax_kda.recurrent_kda(
        **x,
        state=state,
        state_indices=state_indices,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        implementation=implementation,
    )


def assert_same(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, tolerance)


def pointers(*arrays):
    return [a.unsafe_buffer_pointer() for a in arrays]


def entry(compiled):
    """The opcodes of XLA's entry computation, in order."""
    text = compiled.as_text()
    body = text[text.index("\nENTRY ") :].splitlines()[2:]
    lines = body[: body.index("}")]
    opcode = re.compile(r" +(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(")
    return [found[1] if (found := opcode.match(line)) else line for line in lines]


def assert_in_place(compiled, *aliased):
    """One call, nothing around it, and results that are the caller's memory."""
    opcodes = entry(compiled)
    assert opcodes.count("custom-call") == 1
    assert set(opcodes) <= {"parameter", "custom-call", "get-tuple-element", "tuple"}
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(a.nbytes for a in aliased)
    assert memory.temp_size_in_bytes <= 1024


def with_buffers(x, state, out, final_state):
    return fwd(**x, out=out, initial_state=state, final_state=final_state)


# ---- Arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [None, 3])
def test_donated_buffers_are_the_results(N):
    x, state = make(B=1, N=N)
    out, final_state = buffers(x, state)
    f = jax.jit(with_buffers, donate_argnums=(2, 3))
    assert_in_place(f.lower(x, state, out, final_state).compile(), out, final_state)
    before = pointers(out, final_state)
    results = f(x, state, out, final_state)
    assert pointers(*results) == before
    assert out.is_deleted() and final_state.is_deleted() and not state.is_deleted()
    assert_same(results, reference(x, state))


@pytest.mark.parametrize("call", [with_buffers, jax.jit(with_buffers)], ids=["eager", "jit"])
def test_buffers_that_are_not_donated_keep_their_values(call):
    x, state = make()
    out, final_state = jnp.full_like(x["v"], 7), jnp.full_like(state, 8)
    before = pointers(out, final_state, state)
    kept = np.array(state)
    results = call(x, state, out, final_state)
    assert_same(results, reference(x, state))
    assert not set(pointers(*results)) & set(before)
    np.testing.assert_array_equal(out, jnp.full_like(out, 7))
    np.testing.assert_array_equal(final_state, jnp.full_like(state, 8))
    np.testing.assert_array_equal(state, kept)


def test_numpy_buffers_keep_their_values():
    x, state = make()
    out = np.full(x["v"].shape, 7, np.float32)
    o = jax.jit(lambda x, out: fwd(**x, out=out), donate_argnums=1)(x, out)
    np.testing.assert_array_equal(out, np.full_like(out, 7))
    assert_same([o], reference(x, 0 * state)[:1])


def test_no_buffer_means_no_operand_and_no_fill():
    x, _ = make()
    compiled = jax.jit(lambda x: fwd(**x, out=None)).lower(x).compile()
    assert_in_place(compiled)
    assert entry(compiled).count("parameter") == len(x)


def test_one_array_as_both_states_is_one_operand():
    x, state = make()
    f = jax.jit(lambda x, s: fwd(**x, out=None, initial_state=s, final_state=s), donate_argnums=1)
    compiled = f.lower(x, state).compile()
    assert_in_place(compiled, state)
    assert entry(compiled).count("parameter") == len(x) + 1
    expected, before = reference(x, state), pointers(state)
    o, final_state = f(x, state)
    assert pointers(final_state) == before
    assert_same((o, final_state), expected)


def test_a_donated_state_is_the_returned_state_of_chunk_kda():
    x, state = make()
    expected, before = reference(x, state), pointers(state)
    f = jax.jit(chunk_kda, donate_argnums=1)
    assert_in_place(f.lower(x, state).compile(), state)
    results = f(x, state)
    assert pointers(results[1]) == before
    assert_same(results, expected)


def test_gradient_reads_the_state_from_before():
    x, state = make(T=9)

    def loss(f, x, state):
        o, final_state = f(x, state)
        return jnp.sum(o * o) + jnp.sum(final_state**3), final_state

    def gradient(f):
        return jax.value_and_grad(functools.partial(loss, f), argnums=(0, 1), has_aux=True)

    (_, final_state), (dx, dstate) = gradient(reference)(x, state)
    results = jax.jit(gradient(chunk_kda), donate_argnums=1)(x, jnp.copy(state))
    assert_same([results[0][1]], [final_state])
    assert_same(jax.tree.leaves(results[1]), jax.tree.leaves((dx, dstate)), 1e-4)


def test_buffers_of_a_batched_call():
    x, state = make()
    y, other = make(1)
    gate = {name: x[name] for name in ("A_log", "dt_bias")}
    expected = jax.tree.map(lambda *a: np.stack(a), reference(x, state), reference(y | gate, other))
    stack = lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
    arguments = stack((x, state, *buffers(x, state)), (y, other, *buffers(y, other)))
    arguments[0].update(gate)
    axes = {name: None if name in gate else 0 for name in x}
    f = jax.jit(jax.vmap(with_buffers, (axes, 0, 0, 0)), donate_argnums=(2, 3))
    assert_in_place(f.lower(*arguments).compile(), *arguments[2:])
    before = pointers(*arguments[2:])
    results = f(*arguments)
    assert pointers(*results) == before
    assert_same(results, expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_buffers_on_a_mesh(axis_type):
    x, state = make()
    devices = jax.local_devices(backend="cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(axis_type,) * 2, devices=devices)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    specs = dict.fromkeys(x, ("rows", None, "heads")) | dict.fromkeys(
        ("A_log", "dt_bias"), ("heads",)
    )
    sharded = {name: put(a, *specs[name]) for name, a in x.items()}
    state = put(state, "rows", "heads")
    out, final_state = buffers(sharded, state)
    f = jax.jit(with_buffers, donate_argnums=(2, 3))
    with jax.set_mesh(mesh):
        compiled = f.lower(sharded, state, out, final_state).compile()
        assert_in_place(
            compiled, *(s.data for a in (out, final_state) for s in a.addressable_shards[:1])
        )
        before = [s.data.unsafe_buffer_pointer() for s in out.addressable_shards]
        o, final_state = f(sharded, state, out, final_state)
    assert [s.data.unsafe_buffer_pointer() for s in o.addressable_shards] == before
    assert_same((o, final_state), reference(x, state))


@pytest.mark.parametrize("how", ["constant", "empty", "transposed", "sliced", "computed"])
def test_out_from_any_expression(how):
    x, state = make()
    make_out = {
        "constant": lambda v: jnp.full_like(v, 3),
        "empty": jnp.empty_like,
        "transposed": lambda v: jnp.swapaxes(jnp.zeros_like(v, shape=(2, 4, 70, 8)), 1, 2),
        "sliced": lambda v: jnp.concatenate([v, v])[1:3],
        "computed": lambda v: jnp.tanh(v),
    }[how]
    o = jax.jit(lambda x, s: fwd(**x, out=make_out(x["v"]), initial_state=s))(x, state)
    assert_same([o], reference(x, state)[:1])


def test_an_operand_as_out():
    x, state = make()
    expected, kept = reference(x, state), np.array(x["v"])
    assert_same([fwd(**x, out=x["v"], initial_state=state)], expected[:1])
    np.testing.assert_array_equal(x["v"], kept)
    f = jax.jit(lambda v, x: fwd(**x, v=v, out=v, initial_state=state), donate_argnums=0)
    rest = {name: a for name, a in x.items() if name != "v"}
    assert_same([f(x["v"], rest)], expected[:1])


def test_out_read_after_the_call():
    x, state = make()
    out = jnp.full_like(x["v"], 3)
    f = jax.jit(lambda out: (fwd(**x, out=out, initial_state=state), out + 1), donate_argnums=0)
    o, after = f(out)
    assert_same([o], reference(x, state)[:1])
    np.testing.assert_array_equal(after, jnp.full_like(after, 4))


def test_one_buffer_for_two_calls():
    x, state = make()
    y, _ = make(1)
    f = jax.jit(lambda out: (fwd(**x, out=out), fwd(**y, out=out)), donate_argnums=0)
    expected = [reference(a, 0 * state)[0] for a in (x, y)]
    assert_same(f(jnp.zeros_like(x["v"])), expected)


def test_a_buffer_used_twice_or_donated_twice_is_refused_by_jax():
    x, state = make()
    out = jnp.zeros_like(x["v"])
    f = jax.jit(lambda out, v: fwd(**x | {"v": v}, out=out), donate_argnums=0)
    with pytest.raises(Exception, match=r"[Dd]onate"):
        jax.block_until_ready(f(out, out))
    f = jax.jit(lambda out: fwd(**x, out=out), donate_argnums=0)
    f(out)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        f(out)
    assert_same([f(jnp.zeros_like(x["v"]))], reference(x, 0 * state)[:1])


def test_a_call_that_fails_its_checks_consumes_nothing():
    x, state = make()
    out, final_state = buffers(x, state)
    f = jax.jit(with_buffers, donate_argnums=(0, 1, 2, 3))
    with pytest.raises(ValueError, match="`out` must"):
        f(x, state, out[:, 1:], final_state)
    assert not any(a.is_deleted() for a in jax.tree.leaves((x, state, final_state)))


# ---- Decoding and pools --------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 3])
def test_a_donated_state_is_the_returned_state_of_recurrent_kda(T):
    x, state = make(T=T)
    expected, before = reference(x, state), pointers(state)
    f = jax.jit(recurrent_kda, donate_argnums=1)
    assert_in_place(f.lower(x, state).compile(), state)
    results = f(x, state)
    assert pointers(results[1]) == before
    assert state.is_deleted()
    assert_same(results, expected)


def chunk_pool(x, pool, slots):
    return fwd(**x, out=None, initial_state=pool, final_state=pool, state_indices=slots)


@pytest.mark.parametrize("f", [chunk_pool, recurrent_kda], ids=["chunk", "recurrent"])
def test_a_donated_pool_is_the_returned_pool(f):
    x, _ = make(T=3)
    _, pool = make(N=7)
    slots = jnp.array([4, 1])
    expected = recurrent_kda(x, pool, slots, implementation="reference")
    kept, before = np.array(pool), pointers(pool)
    results = f(x, pool, slots)  # not donated: it is copied first
    np.testing.assert_array_equal(pool, kept)
    assert_same(results, expected)
    donating = jax.jit(f, donate_argnums=1)
    assert_in_place(donating.lower(x, pool, slots).compile(), pool)
    results = donating(x, pool, slots)
    assert pointers(results[1]) == before
    assert_same(results, expected)


def test_a_pool_that_is_only_read_is_not_copied():
    x, _ = make()
    _, pool = make(N=7)
    f = lambda x, pool, slots: fwd(**x, out=None, initial_state=pool, state_indices=slots)
    compiled = jax.jit(f).lower(x, pool, jnp.array([4, 1])).compile()
    assert_in_place(compiled)


def test_a_ref_as_the_pool():
    x, _ = make()
    _, pool = make(N=7)
    slots = jnp.array([4, -1])
    expected = jax.jit(chunk_pool)(x, pool, slots)
    ref = jax.new_ref(pool)
    f: Any = jax.jit(lambda x, ref, slots: jax.tree.leaves(chunk_pool(x, ref, slots))[0])
    assert_in_place(f.lower(x, ref, slots).compile(), pool)
    before = ref.unsafe_buffer_pointer()
    o = f(x, ref, slots)
    assert ref.unsafe_buffer_pointer() == before
    assert_same((o, ref[...]), expected)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_step_of_20_layers_copies_no_state(pooled):
    """The layers of a model in one jitted step, and the steps in one loop."""
    x, state = make(B=4, T=1, K=32, V=64)
    shape = (16, *state.shape[1:]) if pooled else state.shape
    slots = jnp.array([3, 15, -1, 8]) if pooled else None
    states = [jnp.full(shape, i, jnp.float32) for i in range(20)]
    before = pointers(*states)

    def step(v, states):
        states = list(states)
        for i, state in enumerate(states):
            v, states[i] = recurrent_kda(x | {"v": v}, state, slots)
        return v, states

    def loop(v, states):
        return jax.lax.fori_loop(0, 3, lambda _, carry: step(*carry), (v, states))

    for f in (step, loop):
        compiled = jax.jit(f, donate_argnums=1).lower(x["v"], states).compile()
        copied = re.findall(r"f32\[(\S+?)\]\S* (?:copy|copy-start)\(", str(compiled.as_text()))
        assert ",".join(map(str, shape)) not in copied
        memory: Any = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(s.nbytes for s in states)
        assert memory.temp_size_in_bytes < states[0].nbytes
        _, states = jax.jit(f, donate_argnums=1)(x["v"], states)
        assert pointers(*states) == before


# ---- Refs ----------------------------------------------------------------------------------------


def test_refs_are_written_in_place():
    x, state = make()
    expected = reference(x, state)
    out, final_state = (jax.new_ref(a) for a in buffers(x, state))
    f = jax.jit(with_buffers)
    before = out.unsafe_buffer_pointer(), final_state.unsafe_buffer_pointer()
    assert f(x, state, out, final_state) == (None, None)
    assert (out.unsafe_buffer_pointer(), final_state.unsafe_buffer_pointer()) == before
    assert_same((out[...], final_state[...]), expected)
    assert_in_place(f.lower(x, state, out, final_state).compile(), x["v"], state)


def test_one_ref_as_both_states():
    x, state = make()
    expected = reference(x, state)
    ref = jax.new_ref(state)
    f = jax.jit(lambda x, ref: fwd(**x, out=None, initial_state=ref, final_state=ref))
    assert_in_place(f.lower(x, ref).compile(), state)
    before = ref.unsafe_buffer_pointer()
    o, nothing = f(x, ref)
    assert nothing is None
    assert ref.unsafe_buffer_pointer() == before
    assert_same((o, ref[...]), expected)


def test_ref_and_array_buffers_together():
    x, state = make()
    expected = reference(x, state)
    out, final_state = buffers(x, state)
    ref = jax.new_ref(final_state)
    f = jax.jit(with_buffers, donate_argnums=2)
    before = pointers(out)
    o, nothing = f(x, state, out, ref)
    assert nothing is None and pointers(o) == before
    assert_same((o, ref[...]), expected)


def test_refs_outside_of_jit():
    x, state = make()
    out, final_state = (jax.new_ref(a) for a in buffers(x, state))
    assert with_buffers(x, state, out, final_state) == (None, None)
    assert_same((out[...], final_state[...]), reference(x, state))


# ---- Loops ---------------------------------------------------------------------------------------


def test_state_carried_by_a_loop_stays_in_place():
    x, state = make(T=5)

    @functools.partial(jax.jit, donate_argnums=1)
    def f(x, state):
        return jax.lax.fori_loop(0, 4, lambda _, state: chunk_kda(x, state)[1], state)

    memory: Any = f.lower(x, state).compile().memory_analysis()
    assert memory.alias_size_in_bytes == state.nbytes
    assert memory.temp_size_in_bytes < x["v"].nbytes + state.nbytes  # o, which nobody wants
    expected = state
    for _ in range(4):
        expected = reference(x, expected)[1]
    before = pointers(state)
    result = f(x, jnp.copy(state))
    assert_same([result], [expected])
    result = f(x, state)
    assert pointers(result) == before


def test_scan_over_stacked_buffers():
    x, state = make(T=5)
    states = jnp.stack([state, -state, 2 * state])
    outs = jnp.full((3, *x["v"].shape), jnp.nan)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def f(x, states, outs):
        def layer(v, buffers):
            state, out = buffers
            o, state = jax.tree.leaves(with_buffers(x | {"v": v}, state, out, state))
            return o, (state, o)

        return jax.lax.scan(layer, x["v"], (states, outs))

    expected_states, expected_outs, v = [], [], x["v"]
    for s in states:
        v, s = reference(x | {"v": v}, s)
        expected_outs.append(v)
        expected_states.append(s)
    results = jax.tree.leaves(f(x, states, outs))
    assert_same(results, (v, np.stack(expected_states), np.stack(expected_outs)))
