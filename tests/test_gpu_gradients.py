"""Gradients by the CUDA kernel, on a Hopper GPU, against plain JAX in float64: `pytest -m gpu`.

The cases are those of the CPU, at the head size that the kernel has.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CASES, Case, assert_close, make_inputs
from platforms import op, rms_ratio
from test_golden import load, vector_ids
from test_gradients import draw_cotangents, gradients

from jax_kda import hopper, primitive

pytestmark = pytest.mark.gpu

BOUND = 8e-3  # of RMS ratios
# Those of FLA 0.6.0 in bf16 on the golden vectors with heads of 128, by which ours are measured.
FLA_GOLDEN = {
    "a01_lower_bound": {
        "q": 0.0030, "k": 0.0033, "v": 0.0028, "g": 0.0033, "beta": 0.0033, "A_log": 0.0011,
        "dt_bias": 0.0031, "initial_state": 0.0024,
    },
    "a02_softplus": {
        "q": 0.0028, "k": 0.0037, "v": 0.0035, "g": 0.0041, "beta": 0.0033, "A_log": 0.0121,
        "dt_bias": 0.0032, "initial_state": 0.0016,
    },
}  # fmt: skip


def on_gpu(x: dict[str, Any], cotangents: Any, **options: Any) -> dict[str, Any]:
    with jax.default_device(jax.local_devices(backend="gpu")[0]):
        return gradients(x, cotangents, **options)


def true_gradients(x: dict[str, Any], cotangents: Any, **options: Any) -> dict[str, Any]:
    wide = {name: np.asarray(a, np.float64) for name, a in x.items()}
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return gradients(wide, cotangents, **options, implementation="reference")


def check_A_log(actual: Any, x: dict[str, Any], expected: dict[str, Any], **options: Any) -> None:
    """Against the size that such sums have: almost everything cancels in the one number of a head,
    and in few heads more than usual. Were channels independent, theirs would add up to that size.
    Never more than 3% of the sums themselves.
    """
    dz = np.asarray(expected["g"])
    z = x["g"].astype(np.float64) + x["dt_bias"].reshape(dz.shape[2:])
    if options["lower_bound"] is None:
        z = np.logaddexp(0, z) * (1 + np.exp(-z))  # softplus over its slope
    channels = np.sum(z * dz, axis=(0, 1))
    rms = lambda a: np.mean(a**2) ** 0.5
    own, error = rms(expected["A_log"]), rms(np.asarray(actual, np.float64) - expected["A_log"])
    size = max(np.mean(np.sum(channels**2, axis=-1)) ** 0.5, own)
    limit = min(BOUND * size, 0.03 * own)
    assert error <= limit, f"gradient of A_log is off by {error:.2e}, more than {limit:.2e}"


def check(x: dict[str, Any], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    # Cotangents have the dtypes of the results: rounded before, they are the same in both calls.
    state_dtype = x.get("initial_state", np.zeros(0, np.float32)).dtype
    dtypes = (jnp.bfloat16, state_dtype)
    cotangents = [
        c.astype(dtype).astype(np.float64)
        for c, dtype in zip(draw_cotangents(x, **options), dtypes, strict=True)
    ]
    actual = on_gpu(x, cotangents, **options)
    expected = true_gradients(x, cotangents, **options)
    for name, gradient in actual.items():
        assert gradient.dtype == x[name].dtype
        if name == "A_log":
            check_A_log(gradient, x, expected, **options)
        else:
            assert_close(gradient, expected[name], BOUND, f"gradient of {name}")
    return actual, expected


def wide(case: Case) -> Case:
    return dataclasses.replace(case, K=128, V=128)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str):
    x, options = make_inputs(wide(CASES[name]), jnp.bfloat16)
    check(x, **options)


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("g_dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize("gate", ["activated", "softplus", "lower_bound"])
def test_types(gate: str, g_dtype: Any, l2norm: bool):
    lower_bound = -5.0 if gate == "lower_bound" else None
    case = Case(T=150, B=2, HV=4, gate=gate, lower_bound=lower_bound, l2norm=l2norm)
    x, options = make_inputs(wide(case), jnp.bfloat16)
    x["g"], x["beta"] = x["g"].astype(g_dtype), x["beta"].astype(g_dtype)
    check(x, **options)


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -0.1, -1.0, -5.0, -20.0, -60.0, -1e4, -np.inf])
def test_constant_gates_of_any_strength(log_decay: float):
    """What has decayed to less than fp16 holds is 0, and so is its gradient."""
    x, options = make_inputs(
        wide(Case(T=200, H=1, gate="activated", log_decay=log_decay)), jnp.bfloat16
    )
    cotangents = [c.astype(jnp.bfloat16) for c in draw_cotangents(x, **options)]
    actual = on_gpu(x, cotangents, **options)
    expected = true_gradients(x, [c.astype(np.float64) for c in cotangents], **options)
    size = rms_ratio(expected["q"], np.ones_like(expected["q"]))  # of order 1
    for name in x:
        error = np.asarray(actual[name], np.float64) - np.asarray(expected[name])
        scale = max(np.sqrt(np.mean(expected[name] ** 2)), 1e-6 * size)
        assert np.sqrt(np.mean(error**2)) <= BOUND * scale, name
    if log_decay <= -1e4:
        assert not np.any(actual["g"]) and not np.any(actual["initial_state"])


def test_strong_gates_beside_weak_ones():
    x, options = make_inputs(wide(Case(T=130, H=1, gate="activated")), jnp.bfloat16)
    rng = np.random.default_rng(2)
    x["g"] = -(10.0 ** rng.integers(-4, 5, x["g"].shape)).astype(np.float32)
    check(x, **options)


def test_zero_queries_keys_and_betas():
    x, options = make_inputs(wide(Case(T=150, H=1, logits=False)), jnp.bfloat16)
    x["q"][:, 3:9] = x["k"][:, 5:20] = 0
    x["k"][:, 60:70] = x["beta"][:, 65:90] = 0
    check(x, **options)


def test_repeated_keys():
    case = Case(T=100, H=4, gate="activated", log_decay=-1e-3)
    x, options = make_inputs(wide(case), jnp.bfloat16)
    x["k"][:] = x["k"][:, :1]
    check(x, **options)


def test_tokens_of_no_sequence_are_not_read():
    x, options = make_inputs(wide(CASES["packed_with_tail"]), jnp.bfloat16)
    cotangents = draw_cotangents(x, **options)
    clean = on_gpu(x, cotangents, **options)
    end = options["cu_seqlens"][-1]
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, end:] = np.nan
    cotangents[0][:, end:] = np.nan
    for name, gradient in on_gpu(x, cotangents, **options).items():
        np.testing.assert_array_equal(gradient, clean[name])
        if name in ("q", "k", "v", "g", "beta"):
            assert not np.any(clean[name][:, end:])


def test_malformed_offsets_are_nan():
    x, options = make_inputs(wide(CASES["packed_with_tail"]), jnp.bfloat16)
    cotangents = draw_cotangents(x, **options)
    options["cu_seqlens"] = jnp.array([0, 30, 20, 91, 91], jnp.int32)
    for name, gradient in on_gpu(x, cotangents, **options).items():
        assert np.isnan(np.asarray(gradient, np.float32)).all(), name


def test_same_bits_every_time():
    x, options = make_inputs(wide(Case(T=700, B=2, H=8, HV=16)), jnp.bfloat16)
    cotangents = draw_cotangents(x, **options)
    first = on_gpu(x, cotangents, **options)
    for _ in range(3):
        for name, gradient in on_gpu(x, cotangents, **options).items():
            np.testing.assert_array_equal(gradient.view(np.uint8), first[name].view(np.uint8))


def test_many_chunks():
    """Every block takes several chunks, and the states come a long way."""
    x, options = make_inputs(wide(Case(T=4100, H=3, HV=6, gate="lower_bound", lower_bound=-5.0)))
    x = x | {name: x[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
    check(x, **options)


@pytest.mark.parametrize("T, H", [(512, 32), (8192, 8)])
@pytest.mark.parametrize("gate", ["strong", "weak"])
def test_many_heads(gate: str, T: int, H: int):
    """What the gradients are promised to be, A_log's as any other."""
    case = Case(T=T, H=H, gate="lower_bound", lower_bound=-5.0, gate_dtype="bfloat16")
    x, options = make_inputs(wide(case), jnp.bfloat16)
    if gate == "weak":  # decays of 0.99 to 0.9999 a token, small writes
        rng = np.random.default_rng(3)
        x["g"] = (-10.8 + 4.6 * rng.random(x["g"].shape)).astype(jnp.bfloat16)
        x["beta"] = (x["beta"] - 3).astype(jnp.bfloat16)
        x["A_log"] = np.zeros_like(x["A_log"])
        x["dt_bias"] = np.zeros_like(x["dt_bias"])
    actual, expected = check(x, **options)
    assert_close(actual["A_log"], expected["A_log"], BOUND, "gradient of A_log")


CUTS = {
    "dense": Case(T=2500, B=2, H=1, HV=2),
    "weak": Case(T=2500, gate="activated", log_decay=-1e-3),
    "packed": Case(T=8000, H=1, gate="lower_bound", lower_bound=-5.0, lengths=(0, 100, 6500)),
}


@pytest.mark.parametrize("name", CUTS)
def test_scans_in_segments(name: str):
    case = CUTS[name]
    M, HV = len(case.lengths) or 1, case.HV or case.H
    assert hopper.gradient_segment_chunks(case.B, case.T, HV, M, bool(case.lengths)) > 0
    x, options = make_inputs(wide(case), jnp.bfloat16)
    check(x, **options)


@pytest.mark.parametrize(
    "vector_id", [pytest.param(i, id="-".join(filter(None, i))) for i in vector_ids()]
)
def test_golden(vector_id: tuple[str, str]):
    vector = load(*vector_id)
    if vector.operands["q"].shape[-1] != 128 or vector.operands["v"].shape[-1] != 128:
        pytest.skip("the kernel has K = V = 128; the CPU's takes this vector")
    narrow = ("q", "k", "v", "g", "beta")
    x = {n: a.astype(jnp.bfloat16) if n in narrow else a for n, a in vector.operands.items()}
    actual = on_gpu(x, vector.cotangents, **vector.options)
    for name, expected in vector.gradients.items():
        limit = 1.5 * FLA_GOLDEN[vector.file][name]
        assert_close(actual[name], expected, limit, f"gradient of {name}")


@pytest.mark.parametrize("refused", ["q", "dfinal_state"])
def test_dtypes_that_python_never_gives_are_refused(refused: str):
    """By the handler. A cotangent has its primal's dtype, and float32 goes to plain JAX."""
    bf16, f32, state = jnp.bfloat16, jnp.float32, (1, 2, 128, 128)
    wide = f32 if refused == "q" else bf16
    x = {name: jnp.zeros((1, 70, 2, 128), wide) for name in ("q", "k", "v", "g")}
    x |= {"beta": jnp.zeros((1, 70, 2)), "initial_state": jnp.zeros(state)}
    x |= {"do": jnp.zeros((1, 70, 2, 128), wide), "dfinal_state": jnp.zeros(state, wide)}
    config = primitive.Config(
        "chunk", "initial_state", 1.0, None, "activated", "probability", False, True, "ffi"
    )
    sig = primitive.Signature(config, tuple(x), 0)
    rules = {
        "q": "`q`, `k` and `v` of dtype bfloat16; got float32",
        "dfinal_state": "`dfinal_state` of the dtype of `initial_state`, float32; got bfloat16",
    }
    call = jax.jit(lambda *operands: primitive._ffi_call(sig, "cuda", *operands))
    gpu = jax.local_devices(backend="gpu")[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"needs {rules[refused]}"):
        jax.block_until_ready(call(*jax.device_put(tuple(x.values()), gpu)))


def test_the_kernel_runs():
    x, options = make_inputs(wide(CASES["one_token"]), jnp.bfloat16)
    loss = lambda x: jnp.sum(op(x, **options)[0].astype(jnp.float32))
    with jax.default_device(jax.local_devices(backend="gpu")[0]):
        text = jax.jit(jax.grad(loss)).lower(x).as_text()
    assert "kda_chunk_bwd" in text
