"""The named cases, and how results are compared: everything the tests of the op share.

A case is a call of `chunk_kda`; its name is the test's id: `pytest -k ragged` runs it everywhere.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from platforms import rms_ratio


@dataclasses.dataclass(frozen=True)
class Case:
    T: int
    B: int = 1
    H: int = 2
    HV: int | None = None  # None: H
    K: int = 32
    V: int = 16
    gate: str = "softplus"  # or "lower_bound", or "activated": g is the log decay
    lower_bound: float | None = None
    log_decay: float | None = None  # every g of an activated gate; None: random
    logits: bool = True  # beta goes through a sigmoid
    beta: float | None = None  # every beta; None: random
    neg_eigval: bool = False
    l2norm: bool = True
    gate_dtype: str = "float32"  # of g and beta
    state: str | None = "float32"  # dtype of initial_state; None: there is none
    lengths: tuple[int, ...] = ()  # of packed sequences, by cu_seqlens; tokens beyond are in none
    segments: tuple[tuple[int, ...], ...] = ()  # of each row, by segment_ids; negative: padding
    max_segments: int = 1
    scale: float | None = None


CASES = {
    "whole_chunks": Case(T=128, B=2, gate="lower_bound", lower_bound=-5.0),
    "ragged_tail": Case(T=77, B=2, K=128, V=128, state=None),
    "short": Case(T=7, H=1, K=128, V=128, gate="lower_bound", lower_bound=-0.5, state="bfloat16"),
    "one_token": Case(T=1, B=3, HV=4),
    "no_tokens": Case(T=0, B=2),
    "no_rows": Case(T=5, B=0),
    "odd_heads": Case(T=70, H=1, K=5, V=3, gate="activated", logits=False, l2norm=False),
    "wide_keys": Case(T=66, H=1, K=256, V=8),
    "wide_values": Case(T=66, H=1, K=8, V=256, state=None),
    "grouped_heads": Case(T=65, H=2, HV=6, K=64, V=32, gate_dtype="bfloat16"),
    "other_scale": Case(T=40, scale=0.3, gate="activated", logits=False),
    "no_decay": Case(T=100, gate="activated", log_decay=0.0),
    "hard_reset": Case(T=100, gate="activated", log_decay=-np.inf),
    "beta_zero": Case(T=70, logits=False, beta=0.0),
    "beta_one": Case(T=70, logits=False, beta=1.0),
    "beta_beyond_one": Case(T=77, neg_eigval=True),
    "packed": Case(T=200, K=128, V=128, lengths=(1, 15, 0, 17, 64, 63, 40)),
    "packed_with_tail": Case(T=90, HV=4, lengths=(0, 30, 33, 0), state=None),
    "packed_all_empty": Case(T=9, lengths=(0, 0), state="bfloat16"),
    "packed_no_tokens": Case(T=0, lengths=(0, 0, 0)),
    "packed_short": Case(T=60, lengths=(1, 2, 1, 0, 3) * 8, state="bfloat16"),
    "segments": Case(
        T=100, B=2, segments=((40, -3, 57), (-20, 1, 1, 70, -8)), max_segments=4,
        gate="lower_bound", lower_bound=-5.0,
    ),
    "one_segment": Case(T=66, B=3, segments=((66,), (-66,), (65, -1)), max_segments=1, state=None),
}  # fmt: skip


def make_inputs(case: Case, dtype: Any = np.float32, seed: int = 0) -> tuple[dict, dict]:
    """Arrays, as NumPy, and options of one call of `chunk_kda`; q, k and v are of the dtype."""
    rng = np.random.default_rng(seed)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    HV = case.HV or H
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)

    x = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    if not case.l2norm:
        x["q"], x["k"] = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (x["q"], x["k"]))
    x = {name: a.astype(dtype) for name, a in x.items()}
    gate_dtype = jnp.dtype(case.gate_dtype)
    g, beta = normal(B, T, HV, K), normal(B, T, HV)
    if case.gate == "activated":
        g = -np.exp(2 * g - 2) if case.log_decay is None else np.full_like(g, case.log_decay)
    else:
        x |= {"A_log": 0.5 * normal(HV), "dt_bias": normal(HV, K) - 1}
    if not case.logits:
        beta = 1 / (1 + np.exp(-beta)) if case.beta is None else np.full_like(beta, case.beta)
    x |= {"g": g.astype(gate_dtype), "beta": beta.astype(gate_dtype)}

    options: dict[str, Any] = {
        "scale": case.scale,
        "lower_bound": case.lower_bound,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_gate_in_kernel": case.gate != "activated",
        "use_beta_sigmoid_in_kernel": case.logits,
        "allow_neg_eigval": case.neg_eigval,
    }
    N = B
    if case.lengths:
        N = len(case.lengths)
        options["cu_seqlens"] = np.cumsum((0, *case.lengths), dtype=np.int32)
    if case.segments:
        N = B * case.max_segments
        options |= {"segment_ids": _segment_ids(case), "max_segments": case.max_segments}
    if case.state is not None:
        x["initial_state"] = normal(N, HV, V, K).astype(jnp.dtype(case.state))
    return x, options


def _segment_ids(case: Case) -> np.ndarray:
    rows = []
    for runs in case.segments:
        ids = itertools.count(1)
        rows.append([i for n in runs for i in [next(ids) if n > 0 else 0] * abs(n)])
    return np.array(rows, np.int32).reshape(case.B, case.T)


def assert_close(actual: Any, expected: Any, tolerance: float, name: str = "result") -> None:
    """Same shape, same places of NaN, and at most the tolerance as a ratio of root mean squares."""
    actual, expected = (np.asarray(a).astype(np.float64) for a in (actual, expected))
    assert actual.shape == expected.shape, f"{name} has shape {actual.shape}, not {expected.shape}"
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), f"NaN in {name}")
    actual, expected = np.nan_to_num(actual, nan=0), np.nan_to_num(expected, nan=0)
    ratio = rms_ratio(actual, expected)
    if ratio > tolerance:
        worst = np.unravel_index(np.argmax(np.abs(actual - expected)), actual.shape)
        at = tuple(map(int, worst))
        raise AssertionError(
            f"{name} is off by {ratio:.2e} (RMS ratio), more than {tolerance:.1e}; "
            f"worst at {at}: {actual[at]:.9g}, expected {expected[at]:.9g}"
        )
