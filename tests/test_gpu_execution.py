"""How the CUDA call runs on a Hopper GPU: buffers, graphs, loops, threads: `pytest -m gpu`."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from platforms import GPU, OPERANDS, draw, judge, op, truth

from jax_kda import fwd

pytestmark = pytest.mark.gpu

SCALE, LOWER_BOUND = 128**-0.5, -5.0


def arguments(B: int = 1, T: int = 200, H: int = 2, seed: int = 0) -> dict[str, jax.Array]:
    x = draw(GPU, B=B, T=T, H=H, state=True, seed=seed)
    x |= {"A_log": np.zeros(H, np.float32), "dt_bias": np.zeros((H, 128), np.float32)}
    return {n: jnp.array(a, jnp.bfloat16 if n in OPERANDS else None) for n, a in x.items()}


def call(
    x: dict[str, Any], out: Any = None, initial_state: Any = None, final_state: Any = None
) -> Any:
    q, k, v, g, beta = (x[name] for name in OPERANDS)
    A_log, dt_bias = x["A_log"], x["dt_bias"]
    return fwd(
        q, k, v, g, beta, SCALE, out, A_log, dt_bias, LOWER_BOUND, initial_state, final_state
    )


def assert_same(actual: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def poison() -> None:
    """Leaves NaN in the memory that the next calls get."""
    for size in (1 << 28, 1 << 24, 1 << 20, 1 << 14):
        jnp.full(size, jnp.nan, jnp.float32).block_until_ready().delete()


# --- in place -------------------------------------------------------------------------------------


def test_donated_buffers_are_the_results():
    x = arguments()
    expected = call(x, None, x["initial_state"], jnp.zeros_like(x["initial_state"]))
    out, final_state = jnp.full_like(x["v"], jnp.nan), jnp.full_like(x["initial_state"], jnp.nan)
    pointers = out.unsafe_buffer_pointer(), final_state.unsafe_buffer_pointer()
    f = jax.jit(call, donate_argnums=(1, 3))
    result = f(x, out, x["initial_state"], final_state)
    assert tuple(a.unsafe_buffer_pointer() for a in result) == pointers
    assert out.is_deleted() and final_state.is_deleted()
    assert_same(result, expected)


def test_state_is_updated_in_its_own_buffer():
    x = arguments()
    expected = call(x, None, x["initial_state"], jnp.zeros_like(x["initial_state"]))
    state = jnp.copy(x["initial_state"])
    pointer = state.unsafe_buffer_pointer()
    f = jax.jit(lambda x, state: call(x, None, state, state), donate_argnums=1)
    result = f(x, state)
    assert result[1].unsafe_buffer_pointer() == pointer
    assert_same(result, expected)


def test_refs_are_written_in_place():
    x = arguments()
    expected = call(x, None, x["initial_state"], jnp.zeros_like(x["initial_state"]))
    out, state = jax.new_ref(jnp.zeros_like(x["v"])), jax.new_ref(jnp.copy(x["initial_state"]))
    assert jax.jit(lambda x, out, state: call(x, out, state, state))(x, out, state) == (None, None)
    assert_same((out[...], state[...]), expected)


def test_buffers_that_are_not_donated_stay_as_they_were():
    x = arguments()
    out = jnp.full_like(x["v"], 2)
    o = jax.jit(call)(x, out)
    assert_same(out, np.full(out.shape, 2, out.dtype))
    assert_same(o, call(x))


def test_nothing_that_is_not_written_is_read():
    """Outputs and workspace come from memory full of NaN."""
    x = arguments(T=60)
    offsets = np.array([0, 9, 17, 25, 37, 45, 57], np.int32)
    states = jnp.zeros((6, 2, 128, 128))
    tokens = {name: x[name] for name in OPERANDS} | {"initial_state": states}
    f = jax.jit(lambda tokens: op(tokens, cu_seqlens=offsets))
    clean = f(tokens)
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in clean)
    for _ in range(20):
        poison()
        assert_same(f(tokens), clean)


# --- loops and graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize("T", [64, 512, 2048])
def test_scan_over_stacked_buffers(T):
    """XLA fuses the slices into the call: operand and result pointers of an aliased pair differ."""
    layers = 6
    x = arguments(T=T, H=4)
    states = jnp.stack([x["initial_state"] * (i + 1) for i in range(layers)])
    values = jnp.stack([x["v"] * (i + 1) for i in range(layers)])
    outs = jnp.full((layers, *x["v"].shape), jnp.nan, jnp.bfloat16)

    def layer(_, slices):
        v, out, state = slices
        return None, call(x | {"v": v}, out, state, state)

    scanned = jax.jit(lambda *stacks: jax.lax.scan(layer, None, stacks)[1], donate_argnums=(1, 2))
    expected = [
        jax.jit(lambda v, state: call(x | {"v": v}, None, state, state))(v, state)
        for v, state in zip(values, states, strict=True)
    ]
    o, final_states = scanned(values, outs, states)
    assert_same(o, jnp.stack([o for o, _ in expected]))
    assert_same(final_states, jnp.stack([state for _, state in expected]))


def test_loop_that_updates_slices_of_a_stack():
    layers = 5
    x = arguments(T=512, H=4)
    expected = call(x, None, x["initial_state"], jnp.zeros_like(x["initial_state"]))
    outs = jnp.full((layers, *x["v"].shape), jnp.nan, jnp.bfloat16)
    states = jnp.stack([x["initial_state"]] * layers)

    def body(i, carry):
        outs, states = carry
        o, state = call(x, outs[i], states[i], states[i])
        return outs.at[i].set(o), states.at[i].set(state)

    outs, states = jax.jit(lambda *carry: jax.lax.fori_loop(0, layers, body, carry))(outs, states)
    for i in range(layers):
        assert_same((outs[i], states[i]), expected)


GRAPH_SCRIPT = """
import hashlib, jax, jax.numpy as jnp
from jax_kda import fwd
keys = jax.random.split(jax.random.key(0), 4)
q, k, v, g = (jax.random.normal(key, (1, 300, 4, 128), jnp.bfloat16) for key in keys)
beta, state = q[..., 0], jnp.ones((1, 4, 128, 128))
A_log, dt_bias = jnp.zeros(4), jnp.zeros((4, 128))

@jax.jit
def chain(v, state):
    def step(_, carry):
        v, state = carry
        return fwd(q, k, v, g, beta, 128**-0.5, None, A_log, dt_bias, -5.0, state, state)
    for _ in range(8):
        v, state = step(0, (v, state))
    return jax.lax.fori_loop(0, 8, step, (v, state))

for _ in range(3):
    results = chain(v, state)
    print(*(hashlib.sha256(a.tobytes()).hexdigest() for a in jax.device_get(results)))
"""


def test_command_buffers_change_nothing(tmp_path: Path):
    flags = {
        "forced": f"--xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}",
        "off": "--xla_gpu_enable_command_buffer=",
    }
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", GRAPH_SCRIPT],
            env=os.environ | {"XLA_FLAGS": value, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, value in flags.items()
    }
    lines = {
        name: process.communicate(timeout=120)[0].split("\n") for name, process in processes.items()
    }
    assert all(process.returncode == 0 for process in processes.values())
    assert len(lines["forced"]) == 4 and len(set(lines["forced"][:3])) == 1
    assert lines["forced"] == lines["off"]
    thunks = [p.read_text() for p in tmp_path.glob("*chain*thunk_sequence*")]
    assert any("kCommandBuffer" in text for text in thunks)


# --- the same bits every time ---------------------------------------------------------------------


@pytest.mark.parametrize("T, H", [(8192, 16), (8192, 32), (200, 2)])  # segments, slices
def test_a_hundred_runs_are_bitwise_equal(T, H):
    """Beside another kernel that keeps some of the multiprocessors busy."""
    x = arguments(T=T, H=H)
    f = jax.jit(lambda x: call(x, None, x["initial_state"], jnp.zeros_like(x["initial_state"])))
    expected = jax.tree.map(np.asarray, f(x))
    square = jnp.ones((4096, 4096), jnp.bfloat16)
    stop = threading.Event()

    def occupy() -> None:
        while not stop.is_set():
            (square @ square).block_until_ready()

    thread = threading.Thread(target=occupy)
    thread.start()
    try:
        for _ in range(100):
            assert_same(f(x), expected)
    finally:
        stop.set()
        thread.join()


def test_a_hundred_thousand_iterations_do_not_differ():
    x = arguments(T=130, H=2)

    @jax.jit
    def differences(x: dict[str, jax.Array]) -> jax.Array:
        expected = call(x, None, x["initial_state"], jnp.zeros_like(x["initial_state"]))

        def again(i: jax.Array, count: jax.Array) -> jax.Array:
            # What is overwritten differs, so that XLA does not take the call out of the loop.
            out = jnp.full(x["v"].shape, i, x["v"].dtype)
            results = call(x, out, x["initial_state"], jnp.zeros_like(x["initial_state"]))
            pairs = zip(results, expected, strict=True)
            return count + sum(jnp.sum(a != b, dtype=jnp.int32) for a, b in pairs)

        return jax.lax.fori_loop(0, x["iterations"], again, jnp.int32(0))

    assert differences(x | {"iterations": jnp.int32(100_000)}) == 0


def test_threads_do_not_disturb_each_other():
    inputs = [arguments(T=T, H=H, seed=T) for T, H in ((70, 2), (513, 4), (2048, 8))]
    f = jax.jit(lambda x: call(x, None, x["initial_state"], jnp.zeros_like(x["initial_state"])))
    expected = [jax.tree.map(np.asarray, f(x)) for x in inputs]
    results: list[list[Any]] = [[] for _ in inputs]

    def work(i: int) -> None:
        results[i] = [f(inputs[i]) for _ in range(100)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(results, expected, strict=True):
        assert len(got) == 100
        for result in got:
            assert all(jnp.array_equal(a, b) for a, b in zip(result, want, strict=True))


def test_dispatch_does_not_wait_for_the_device():
    """Offsets and everything else on the device stay there."""
    x = arguments(T=200)
    offsets = jnp.array([0, 50, 200])
    f = jax.jit(lambda tokens, offsets: op(tokens, cu_seqlens=offsets)[0])
    tokens = {name: x[name] for name in OPERANDS}
    f(tokens, offsets).block_until_ready()
    square = jnp.ones((16384, 16384), jnp.bfloat16)
    busy = jax.jit(lambda a: jax.lax.fori_loop(0, 40, lambda _, b: (a @ b) * 1e-5, a))
    busy(square).block_until_ready()
    running = busy(square)
    begin = time.perf_counter()
    o = f(tokens, offsets)
    elapsed = time.perf_counter() - begin
    assert not running.is_ready()
    assert elapsed < 0.02
    o.block_until_ready()


@pytest.mark.skipif(
    "gpu" not in jax.default_backend() or jax.local_device_count() < 2, reason="needs two GPUs"
)
def test_a_call_runs_where_its_arguments_are():
    """Whatever device is the thread's current one."""
    x = arguments(T=200)
    expected = call(x)
    first, second = jax.local_devices()[:2]
    for current, device in ((first, second), (second, first)):
        with jax.default_device(current):
            o = jax.jit(call)(jax.device_put(x, device))
        assert o.devices() == {device}
        assert_same(o, expected)


# --- what the kernels don't run -------------------------------------------------------------------

UNSUPPORTED = {
    "float32": {"dtype": np.float32},
    "K": {"K": 32},
    "V": {"V": 96},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_shapes_without_a_kernel_use_plain_jax(name):
    sizes: dict[str, Any] = dict(UNSUPPORTED[name])
    dtype = sizes.pop("dtype", jnp.bfloat16)
    x = draw(GPU, T=70, H=2, state=True, **sizes)
    x = {n: a.astype(dtype) if n in ("q", "k", "v") else a for n, a in x.items()}
    results = op(x)
    judge(GPU, tuple(np.asarray(a) for a in results), truth(x))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r'UNIMPLEMENTED.*implementation="reference"'
    ):
        jax.block_until_ready(op(x, implementation="ffi"))
    jax.block_until_ready(op(x))  # and the process goes on


# --- transforms -----------------------------------------------------------------------------------


def test_vmap_is_the_loop():
    rows = [arguments(T=100, seed=i) for i in range(3)]
    x = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
    axes = {name: None if name in ("A_log", "dt_bias", "k") else 0 for name in x}
    shared = x | {name: x[name][0] for name, axis in axes.items() if axis is None}
    f = lambda x: call(x, None, x["initial_state"], jnp.zeros_like(x["initial_state"]))
    batched = jax.jit(jax.vmap(f, in_axes=(axes,)))(shared)
    for i, row in enumerate(rows):
        expected = f(row | {"k": rows[0]["k"]})
        assert_same(jax.tree.map(lambda a, i=i: a[i], batched), expected)


def test_vmap_over_offsets():
    x = arguments(T=100)
    tokens = {name: x[name] for name in OPERANDS}
    offsets = jnp.array([[0, 30, 100], [0, 64, 70]])
    f = lambda offsets: op(tokens, cu_seqlens=offsets)
    batched = jax.vmap(f)(offsets)
    for i in range(2):
        assert_same(jax.tree.map(lambda a, i=i: a[i], batched), f(offsets[i]))


def test_gradient_is_the_reference_gradient():
    x = arguments(T=70)
    tokens = {name: x[name] for name in OPERANDS}

    def gradient(implementation):
        def loss(tokens):
            o, state = op(tokens, implementation=implementation)
            return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(state)

        return jax.jit(jax.grad(loss))(tokens)

    actual, expected = gradient("ffi"), gradient("reference")
    for name in OPERANDS:
        a, b = (np.asarray(dx[name], np.float64) for dx in (actual, expected))
        assert np.isfinite(a).all()
        assert np.sqrt(np.mean((a - b) ** 2)) <= 0.02 * np.sqrt(np.mean(b**2)), name


def test_shard_map_and_sharded_jit():
    x = arguments(B=2, T=100)
    tokens = {name: x[name] for name in OPERANDS}
    expected = op(tokens, implementation="ffi")[0]
    mesh = Mesh(np.array(jax.devices("gpu")[:1]).reshape(1, 1), ("b", "h"))
    f = lambda tokens: op(tokens)[0]
    spec = {name: P("b", None, "h") for name in OPERANDS}
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec,), out_specs=P("b", None, "h"))
    assert_same(jax.jit(mapped)(tokens), expected)
    placed = {
        name: jax.device_put(a, jax.NamedSharding(mesh, P("b", None, "h")))
        for name, a in tokens.items()
    }
    assert_same(jax.jit(f)(placed), expected)
