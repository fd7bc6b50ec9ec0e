"""Where one test body runs: on the CPU handler and, on a GPU machine, on the CUDA handler.

The `platform` fixture of conftest.py goes through PLATFORMS. Inputs are NumPy arrays by name,
results are judged on the host in float64.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kda import chunk_kda, recurrent_kda

OPERANDS = ("q", "k", "v", "g", "beta")


class Platform(NamedTuple):
    name: str
    dtype: Any  # of q, k, v
    tolerance: float  # RMS ratio to float64


CPU_F32 = Platform("cpu", np.float32, 1e-5)
CPU_BF16 = Platform("cpu", jnp.bfloat16, 2e-3)
GPU = Platform("gpu", jnp.bfloat16, 5.5e-3)
PLATFORMS = [
    pytest.param(CPU_F32, id="cpu-f32"),
    pytest.param(CPU_BF16, id="cpu-bf16"),
    pytest.param(GPU, id="gpu", marks=pytest.mark.gpu),
]


def draw(
    platform: Platform,
    *,
    B: int = 1,
    T: int,
    H: int,
    HV: int | None = None,
    K: int = 128,
    V: int = 128,
    N: int | None = None,
    state: bool = False,
    raw: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments: unit keys, log decays and probabilities; `raw`: what becomes them."""
    rng = np.random.default_rng(seed)
    HV = HV or H
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    x: dict[str, Any] = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    x |= {"g": normal(B, T, HV, K), "beta": normal(B, T, HV)}
    if not raw:
        for name in "qk":
            x[name] = x[name] / np.float32(np.linalg.norm(x[name], axis=-1, keepdims=True))
        x["g"] = -np.log1p(np.exp(x["g"] - 2))
        x["beta"] = 1 / (1 + np.exp(-x["beta"]))
    for name in ("q", "k", "v"):
        x[name] = x[name].astype(platform.dtype)
    if state:
        x["initial_state"] = normal(N or B, HV, V, K)
    return x


def op(x: dict[str, Any], **options: Any) -> Any:
    """`chunk_kda` on arguments by name; both results unless told otherwise."""
    arguments: dict[str, Any] = {"output_final_state": True, **x, **options}
    return chunk_kda(**arguments)


def step(x: dict[str, Any], **options: Any) -> tuple[jax.Array, jax.Array]:
    """`recurrent_kda` on the same arguments as `op`."""
    arguments: dict[str, Any] = {**x, **options}
    state = arguments.pop("initial_state", None)
    return recurrent_kda(**arguments, state=state)


def run(
    platform: Platform, x: dict[str, Any], f: Callable[..., Any] = op, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Output and final state of the compiled kernel."""
    with jax.default_device(jax.local_devices(backend=platform.name)[0]):
        o, state = f(x, **options, implementation="ffi")
    return np.asarray(o), np.asarray(state)


def rms_ratio(actual: Any, expected: Any) -> float:
    """Root mean square of the error over that of the truth; infinite if either is not finite."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error, size = (
        np.sqrt(np.mean(np.square(a))) if a.size else 0.0 for a in (actual - expected, expected)
    )
    if not np.isfinite(error):
        return np.inf
    return float(error / size) if size > 0 else (0.0 if error == 0 else np.inf)


def judge(
    platform: Platform, actual: Any, expected: Any, tolerance: float | None = None, name: str = ""
) -> None:
    """Output [B, T, HV, V] and state [N, HV, V, K]: as a whole, and every head of every row.

    A head by itself may be off by half as much again: the rounding of a few bfloat16 numbers is no
    average. But none can hide behind the others.
    """
    for what, a, b in zip(("o", "state"), actual, expected, strict=True):
        limit = tolerance or platform.tolerance
        if a.dtype == jnp.bfloat16:
            limit = max(limit, CPU_BF16.tolerance)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        ratio = rms_ratio(a, b)
        assert ratio <= limit, f"{name}{what} is off by {ratio:.3g}"
        for row, head in np.ndindex(a.shape[0], a.shape[2 if what == "o" else 1]):
            index = (row, slice(None), head) if what == "o" else (row, head)
            ratio = rms_ratio(a[index], b[index])
            assert ratio <= 1.5 * limit, f"{name}{what} of row {row}, head {head}: {ratio:.3g}"


def truth(
    x: dict[str, Any],
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    max_segments: int = 1,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The definition, token by token in float64: output and final state."""
    q, k, v, g, beta = (np.asarray(x[name], np.float64) for name in OPERANDS)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if use_qk_l2norm_in_kernel:
        q, k = (a / np.sqrt(np.sum(a * a, -1, keepdims=True) + 1e-6) for a in (q, k))
    q, k = (np.repeat(a, HV // H, axis=2) for a in (q, k))
    if use_gate_in_kernel:
        slope = np.exp(np.asarray(x.get("A_log", np.zeros(HV)), np.float64))[:, None]
        g = g + np.asarray(x.get("dt_bias", np.zeros((HV, K))), np.float64).reshape(HV, K)
        softplus = lower_bound is None
        g = -slope * np.logaddexp(0, g) if softplus else lower_bound * expit(slope * g)
    if use_beta_sigmoid_in_kernel:
        beta = expit(beta) * (2 if allow_neg_eigval else 1)
    q = q * (K**-0.5 if scale is None else scale)

    def scan(rows: slice, begin: int, end: int, S: np.ndarray) -> None:
        for t in range(begin, end):
            q_t, k_t, v_t, g_t, beta_t = (a[rows, t] for a in (q, k, v, g, beta))
            S *= np.exp(g_t)[:, :, None, :]
            error = v_t - np.squeeze(S @ k_t[..., None], -1)
            S += (beta_t[..., None] * error)[..., None] * k_t[:, :, None, :]
            o[rows, t] = np.squeeze(S @ q_t[..., None], -1)

    if cu_seqlens is not None:
        spans = [list(itertools.pairwise(np.asarray(cu_seqlens).tolist()))]
    elif segment_ids is not None:
        spans = [segments(row, max_segments) for row in np.asarray(segment_ids)]
    else:
        spans = []
    N = sum(map(len, spans)) or B
    o, state = np.zeros((B, T, HV, V)), np.zeros((N, HV, V, K))
    if "initial_state" in x:
        state[:] = np.asarray(x["initial_state"], np.float64)
    if not spans:
        scan(slice(None), 0, T, state)
    for row, row_spans in enumerate(spans):
        for n, (begin, end) in enumerate(row_spans, start=row * len(row_spans)):
            scan(slice(row, row + 1), begin, end, state[n : n + 1])
    return o, state


def segments(ids: np.ndarray, max_segments: int) -> list[tuple[int, int]]:
    """Where runs of one id other than 0 begin and end; empty ones up to `max_segments`."""
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    runs = [(begin, end) for begin, end in itertools.pairwise(edges) if ids[begin] != 0]
    assert len(runs) <= max_segments
    return runs + [(len(ids), len(ids))] * (max_segments - len(runs))


def expit(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))
