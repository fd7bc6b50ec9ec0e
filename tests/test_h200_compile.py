"""What XLA makes of the op for an H200, on a machine without a GPU: compiled, never run.

Needs the package built with CUDA, and JAX's CUDA plugin without CUDA itself, in an environment of
its own:

    pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt    # of jax's version
    pytest tests/test_h200_compile.py

The first tests lower only, and run anywhere.
"""

import functools
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_kda
from jax_kda import hopper, primitive

# The plugin registers without CUDA's libraries; JAX looks for it when devices are first asked for.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

TARGET_CONFIG = Path(__file__).parent / "data" / "h200.txtpb"


def fwd(x, out, state):
    """FlashKDA's call, everything in place."""
    return jax_kda.fwd(
        **x, scale=None, lower_bound=-5.0, out=out, initial_state=state, final_state=state
    )


def chunk_kda(x, state, implementation=None):
    return jax_kda.chunk_kda(
        **x,
        initial_state=state,
        output_final_state=True,
        use_gate_in_kernel=True,
        implementation=implementation,
    )


def decode(x, state, implementation=None):
    return jax_kda.recurrent_kda(
        **x, state=state, use_gate_in_kernel=True, implementation=implementation
    )


def types(B=2, T=256, H=4, HV=4, K=128, V=128, N=None, dtype=jnp.bfloat16):
    """Tokens and gate parameters by name; out; state."""
    shapes = {
        "q": (B, T, H, K),
        "k": (B, T, H, K),
        "v": (B, T, HV, V),
        "g": (B, T, HV, K),
        "beta": (B, T, HV),
        "A_log": (HV,),
        "dt_bias": (HV, K),
    }
    f32 = ("A_log", "dt_bias")
    x = {n: jax.ShapeDtypeStruct(s, jnp.float32 if n in f32 else dtype) for n, s in shapes.items()}
    if N is not None:
        x["cu_seqlens"] = jax.ShapeDtypeStruct((N + 1,), jnp.int32)
    return x, x["v"], jax.ShapeDtypeStruct((N or B, HV, V, K), jnp.float32)


def nbytes(*arrays):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


# ---- Lowering ------------------------------------------------------------------------------------


def lower_for_cuda(f, *arguments):
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text):
    return re.findall(r"stablehlo\.custom_call @(\w+)\(([^)]*)\)", text)


@pytest.mark.parametrize("N, operands", [(None, 8), (3, 9)])
def test_lowering_has_one_call_of_the_contract(N, operands):
    x, _, state = types(B=1, N=N)
    text = lower_for_cuda(functools.partial(chunk_kda, implementation="ffi"), x, state)
    ((target, arguments),) = custom_calls(text)
    assert target == "kda_chunk_fwd"
    assert arguments.count("%") == operands
    workspace = hopper.chunk_fwd_workspace_bytes(1, 256, 4, N or 1, N is not None)
    assert f"tensor<{workspace}xui8>" in text


def test_attributes_have_the_types_of_the_contract():
    x, _, state = types()
    text = lower_for_cuda(functools.partial(chunk_kda, implementation="ffi"), x, state)
    (attributes,) = re.findall(r"mhlo.backend_config = \{(.*?)\}", text)
    types_of = {
        name: value.split(" : ")[-1] for name, value in re.findall(r"(\w+) = ([^,]+)", attributes)
    }
    flags = ("has_A_log", "has_dt_bias", "has_initial_state", "has_final_state")
    absent = ("l2norm", "has_state_indices", "has_output_state_indices", "has_checkpoint_indices")
    integers = ("gate", "beta_mode", "offsets_step", "segment_chunks", "slice_chunks")
    assert types_of == {
        "scale": "f32",
        "lower_bound": "f32",
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(flags, "true"),
        **dict.fromkeys(absent, "false"),
    }


@pytest.mark.parametrize("pooled", [False, True])
def test_lowering_of_decoding_has_one_call_and_no_workspace(pooled):
    x, _, state = types(T=1)
    if pooled:
        x["state_indices"] = jax.ShapeDtypeStruct((2,), jnp.int32)
        state = jax.ShapeDtypeStruct((9, *state.shape[1:]), state.dtype)
    text = lower_for_cuda(functools.partial(decode, implementation="ffi"), x, state)
    ((target, arguments),) = custom_calls(text)
    assert target == "kda_recurrent_fwd"
    assert arguments.count("%") == 8 + pooled
    assert "ui8" not in text
    assert f"has_state_indices = {str(pooled).lower()}" in text


@pytest.mark.parametrize("sizes", [{"K": 32}, {"K": 192}])
def test_decoding_that_the_kernel_lacks_is_plain_jax(sizes):
    x, _, state = types(**sizes, T=1)
    assert not custom_calls(lower_for_cuda(decode, x, state))


@pytest.mark.parametrize("sizes", [{"K": 32}, {"V": 96}, {"dtype": jnp.float32}])
def test_what_the_kernel_lacks_is_plain_jax(sizes):
    x, _, state = types(**sizes)
    assert not custom_calls(lower_for_cuda(chunk_kda, x, state))


def test_workspace_is_the_size_that_the_handler_wants():
    if primitive._cuda is None:
        pytest.skip("jax_kda was built without CUDA")
    shapes = [(1, 0, 1, 1), (1, 64, 2, 1), (3, 65, 5, 1), (2, 8192, 96, 7), (1, 3, 1, 9)]
    long = [(1, 8192, 8, 1), (1, 65536, 4, 3), (2, 8191, 1, 2), (1, 8192, 64, 1)]
    for B, T, HV, M in [*shapes, *long]:
        for packed in (False, True):
            sizes = B, T, HV, M, packed
            cut = hopper.segment_chunks(*sizes)
            slices = hopper.slice_chunks(*sizes)
            expected = primitive._cuda.chunk_fwd_workspace_bytes(*sizes, cut, slices)
            assert hopper.chunk_fwd_workspace_bytes(*sizes) == expected
            cut = hopper.gradient_segment_chunks(*sizes)
            for H in {1, HV}:
                expected = primitive._cuda.chunk_bwd_workspace_bytes(B, T, H, HV, M, packed, cut)
                assert hopper.chunk_bwd_workspace_bytes(B, T, H, HV, M, packed) == expected


@pytest.mark.parametrize(
    "B, T, HV, M, packed, chunks",
    [
        (1, 8192, 96, 1, False, 0),  # many chains
        (1, 8192, 32, 1, False, 0),  # few, but memory is the limit
        (1, 8192, 16, 1, False, 26),
        (1, 8192, 8, 1, False, 16),
        (1, 65536, 8, 1, False, 114),
        (8, 2048, 8, 1, False, 0),
        (1, 256, 1, 1, False, 0),  # short
        (1, 0, 1, 1, False, 0),
        (1, 8000, 2, 4, True, 4),
    ],
)
def test_few_long_chains_are_cut(B, T, HV, M, packed, chunks):
    assert hopper.segment_chunks(B, T, HV, M, packed) == chunks


@pytest.mark.parametrize(
    "B, T, HV, packed, chunks",
    [
        (1, 8192, 96, False, 64),
        (1, 8200, 96, False, 43),
        (1, 8192, 96, True, 0),
        (1, 8191, 96, False, 0),  # short
        (1, 8192, 64, False, 0),  # two SMs a chain leave none
        (1, 8192, 32, False, 43),
        (1, 65536, 32, False, 43),
        (1, 8192, 8, False, 0),  # cut into segments
        (8, 8192, 32, False, 0),  # no SM is left
    ],
)
def test_long_rows_are_sliced(B, T, HV, packed, chunks):
    assert hopper.slice_chunks(B, T, HV, 1, packed) == chunks


@pytest.mark.parametrize(
    "B, T, HV, chunks", [(1, 8192, 32, 0), (1, 8192, 16, 0), (1, 8192, 8, 22), (8, 2048, 32, 0)]
)
def test_few_long_chains_of_the_gradient_are_cut(B, T, HV, chunks):
    assert hopper.gradient_segment_chunks(B, T, HV, 1, False) == chunks


def gradient(f, x, state):
    return jax.grad(lambda x, state: jnp.sum(f(x, state)[0].astype(jnp.float32)), (0, 1))(x, state)


@pytest.mark.parametrize("HV", [4, 8])
def test_gradient_is_one_call_with_a_workspace(HV):
    if primitive._cuda is None:  # then gradients are plain JAX
        pytest.skip("jax_kda was built without CUDA")
    x, _, state = types(HV=HV)
    text = lower_for_cuda(functools.partial(gradient, chunk_kda), x, state)
    targets = dict(custom_calls(text))
    assert targets["kda_chunk_bwd"].count("%") == 8 + 2  # and the cotangents
    assert f"tensor<{hopper.chunk_bwd_workspace_bytes(2, 256, 4, HV, 1, False)}xui8>" in text


@pytest.mark.parametrize("sizes", [{"K": 64}, {"V": 64}, {"dtype": jnp.float32}])
def test_gradient_that_the_kernel_lacks_is_plain_jax(sizes):
    x, _, state = types(**sizes)
    assert not custom_calls(lower_for_cuda(functools.partial(gradient, chunk_kda), x, state))


def test_gradient_of_the_recurrence_is_plain_jax():
    """Which runs on any GPU, as the recurrence's own kernel does."""
    x, _, state = types(T=2)
    f = lambda x, state: jax_kda.recurrent_kda(**x, state=state, use_gate_in_kernel=True)
    text = lower_for_cuda(functools.partial(gradient, f), x, state)
    assert "kda_chunk_bwd" not in text


# ---- Compilation ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def h200s():
    """Four H200s of one host, none of which is here."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("JAX's CUDA plugin is not installed; it needs an environment of its own")
    if primitive._cuda is None:
        pytest.skip("jax_kda was built without CUDA")
    return topologies.get_topology_desc(
        platform="cuda", target_config=TARGET_CONFIG.read_text(), topology="1x1x4"
    )


def place(sharding, types):
    put = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return jax.tree.map(put, types)


def compile_on_one(h200s, f, types, **options):
    """With all arguments donated but the first."""
    donated = tuple(range(1, len(types)))
    types = place(SingleDeviceSharding(h200s.devices[0]), types)
    return jax.jit(f, donate_argnums=donated).lower(*types).compile(compiler_options=options)


def entry(compiled):
    """The opcodes of XLA's entry computation, in order."""
    text = compiled.as_text()
    body = text[text.index("\nENTRY ") :].splitlines()[2:]
    lines = body[: body.index("}")]
    opcode = re.compile(r" +(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(")
    return [found[1] if (found := opcode.match(line)) else line for line in lines]


def assert_in_place(compiled, aliased, workspace=0):
    """One call, nothing around it, and results that are the caller's memory."""
    opcodes = entry(compiled)
    assert opcodes.count("custom-call") == 1
    assert set(opcodes) <= {"parameter", "custom-call", "get-tuple-element", "tuple"}
    target = "kda_chunk_fwd" if workspace else "kda_recurrent_fwd"
    assert f'custom_call_target="{target}"' in compiled.as_text()
    assert not workspace or f"u8[{workspace}]" in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == aliased
    assert memory.temp_size_in_bytes <= workspace + 1024


@pytest.mark.parametrize("N", [None, 3])
def test_out_and_state_are_written_in_place(h200s, N):
    x, out, state = types(B=1, N=N)
    workspace = hopper.chunk_fwd_workspace_bytes(1, 256, 4, N or 1, N is not None)
    compiled = compile_on_one(h200s, fwd, (x, out, state))
    assert_in_place(compiled, nbytes(out, state), workspace)


def test_state_of_chunk_kda_is_written_in_place(h200s):
    x, _, state = types()
    workspace = hopper.chunk_fwd_workspace_bytes(2, 256, 4, 1, False)
    assert_in_place(compile_on_one(h200s, chunk_kda, (x, state)), nbytes(state), workspace)


@pytest.mark.parametrize("sizes", [{}, {"K": 64, "V": 256, "dtype": jnp.float32}])
def test_state_of_decoding_is_written_in_place(h200s, sizes):
    x, _, state = types(**sizes, T=1)
    assert_in_place(compile_on_one(h200s, decode, (x, state)), nbytes(state))


@pytest.mark.parametrize("f", [decode, chunk_kda], ids=["recurrent", "chunk"])
def test_a_pool_is_written_in_place(h200s, f):
    """With nothing gathered before the call or scattered after it."""
    T = 1 if f is decode else 256
    x, _, _ = types(T=T)
    x["state_indices"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    pool = jax.ShapeDtypeStruct((9, 4, 128, 128), jnp.float32)
    workspace = 0 if f is decode else hopper.chunk_fwd_workspace_bytes(2, 256, 4, 1, False)
    assert_in_place(compile_on_one(h200s, f, (x, pool)), nbytes(pool), workspace)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_of_20_layers_copies_no_state(h200s, pooled, steps):
    x, _, state = types(T=1)
    if pooled:
        x["state_indices"] = jax.ShapeDtypeStruct((2,), jnp.int32)
        state = jax.ShapeDtypeStruct((9, *state.shape[1:]), state.dtype)

    def step(x, v, states):
        states = list(states)
        for i, layer_state in enumerate(states):
            v, states[i] = decode(x | {"v": v}, layer_state)
        return v, states

    def f(x, states):
        if steps == 1:
            return step(x, x["v"], states)
        return jax.lax.fori_loop(0, steps, lambda _, c: step(x, *c), (x["v"], states))

    compiled = compile_on_one(h200s, f, (x, [state] * 20))
    shape, text = ",".join(map(str, state.shape)), str(compiled.as_text())
    assert not re.search(rf"f32\[{shape}\]\S* (?:copy|copy-start|fusion)\(", text)
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 20 * nbytes(state)
    assert memory.temp_size_in_bytes < nbytes(state)


@pytest.mark.parametrize(
    "T, H, limit", [(1024, 4, 1e9), (2048, 4, 1e9), (8192, 96, 5e9), (131072, 32, 100e9)]
)
def test_memory_of_training_is_what_the_docs_say(h200s, T, H, limit):
    """docs/training.md: operands, results and the gradient's workspace, in the forward's place."""
    x, do, state = types(B=1, T=T, H=H, HV=H)

    def both(x, state, cotangents):
        results, pullback = jax.vjp(chunk_kda, x, state)
        return results, pullback(cotangents)

    arguments = place(SingleDeviceSharding(h200s.devices[0]), (x, state, (do, state)))
    memory: Any = jax.jit(both).lower(*arguments).compile().memory_analysis()
    workspaces = (
        hopper.chunk_fwd_workspace_bytes(1, T, H, 1, False),
        hopper.chunk_bwd_workspace_bytes(1, T, H, H, 1, False),
    )
    arrays = nbytes(*x.values(), do, state, state)
    assert arrays == T * H * (1026 + 256) + H * (129 + 2 * 128 * 128) * 4
    assert memory.argument_size_in_bytes == arrays
    assert arrays <= memory.output_size_in_bytes <= arrays + 1024
    assert memory.temp_size_in_bytes <= max(workspaces) + 1024
    assert 2 * arrays + memory.temp_size_in_bytes < limit


def test_heads_of_a_pool_shard_in_place_without_collectives(h200s):
    x, _, _ = types(B=4, T=1)
    mesh = topologies.make_mesh(h200s, (4,), ("heads",))
    put = lambda a, *spec: place(NamedSharding(mesh, P(*spec)), a)
    x = {n: put(a, "heads") if a.ndim < 3 else put(a, None, None, "heads") for n, a in x.items()}
    x["state_indices"] = put(jax.ShapeDtypeStruct((4,), jnp.int32))
    pool = put(jax.ShapeDtypeStruct((9, 4, 128, 128), jnp.float32), None, "heads")
    compiled = jax.jit(decode, donate_argnums=1).lower(x, pool).compile()
    assert_in_place(compiled, nbytes(pool) // 4)


def test_refs_are_written_in_place(h200s):
    x, out, state = types()

    def f(x, out, state):
        out, state = jax.new_ref(out), jax.new_ref(state)
        assert fwd(x, out, state) == (None, None)
        return jax.freeze(out), jax.freeze(state)

    workspace = hopper.chunk_fwd_workspace_bytes(2, 256, 4, 1, False)
    assert_in_place(compile_on_one(h200s, f, (x, out, state)), nbytes(out, state), workspace)


@pytest.mark.parametrize("H, HV", [(4, 4), (4, 8), (2, 8)])
def test_rows_and_heads_shard_in_place_without_collectives(h200s, H, HV):
    x, out, state = types(B=4, H=H, HV=HV)
    mesh = topologies.make_mesh(h200s, (2, 2), ("rows", "heads"))
    tokens = NamedSharding(mesh, P("rows", None, "heads"))
    gate = NamedSharding(mesh, P("heads"))
    x = {n: place(gate if n in ("A_log", "dt_bias") else tokens, a) for n, a in x.items()}
    arguments = x, place(tokens, out), place(NamedSharding(mesh, P("rows", "heads")), state)
    compiled = jax.jit(fwd, donate_argnums=(1, 2)).lower(*arguments).compile()
    workspace = hopper.chunk_fwd_workspace_bytes(2, 256, HV // 2, 1, False)
    assert_in_place(compiled, nbytes(out, state) // 4, workspace)  # so there is no collective


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
@pytest.mark.parametrize(
    "n, options, captured",
    [
        (5, {}, True),
        (1, {"xla_gpu_graph_min_graph_size": 1}, True),
        (5, {"xla_gpu_enable_command_buffer": ""}, False),
    ],
)
def test_calls_are_captured_in_one_command_buffer(h200s, tmp_path, op, n, options, captured):
    def f(x, out, state):
        for _ in range(n):
            if op == "chunk":
                out, state = jax.tree.leaves(fwd(x, out, state))
            else:
                out, state = decode(x, state)
                x = x | {"v": out}
        return out, state

    tokens = types(T=1 if op == "recurrent" else 256)
    compile_on_one(h200s, f, tokens, xla_dump_to=str(tmp_path), **options)
    dumps = sorted(path.read_text() for path in tmp_path.glob("*thunk_sequence*.txt"))
    (buffer,) = [dump for dump in dumps if "kCommandBuffer" in dump] or [None]
    assert (buffer is not None) == captured
    if buffer is not None:
        thunks = re.findall(r"^( *)\d+: (k\w+)", buffer, re.MULTILINE)
        assert thunks == [("", "kCommandBuffer"), *[("  " * 2, "kCustomCall")] * n]
