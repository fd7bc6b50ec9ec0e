"""Exported calls, and JAX's caches of traces and programs."""

import functools
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import FORMS, assert_same, make, op, ops, reference, step

import jax_kda

pytestmark = pytest.mark.usefixtures("on_the_cpu")


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
