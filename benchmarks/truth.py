"""The judge: the token recurrence of one head in float64, written for nothing but clarity."""

from pathlib import Path

import numpy as np
from cases import CASES, Case, head_inputs


def judged_heads(case: Case) -> list[int]:
    return sorted({0, case.H - 1})


def recurrence(case: Case, head: int) -> tuple[np.ndarray, np.ndarray]:
    """o [B * T, V] and the final states [N, V, K] of one head."""
    x = {name: a.astype(np.float64) for name, a in head_inputs(case, head).items()}
    q, k, v, g = (x[name].reshape(case.B * case.T, -1) for name in "qkvg")
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    beta = 1 / (1 + np.exp(-x["beta"].reshape(-1)))
    if case.lower_bound is None:
        g = -np.exp(x["A_log"]) * np.logaddexp(0, g + x["dt_bias"])
    else:
        g = case.lower_bound / (1 + np.exp(-np.exp(x["A_log"]) * (g + x["dt_bias"])))
    o, states = np.zeros_like(v), x["h0"]
    for S, begin, end in zip(states, case.offsets, case.offsets[1:], strict=False):  # S is a view
        for t in range(begin, end):
            S *= np.exp(g[t])
            S += np.outer(beta[t] * (v[t] - S @ k[t]), k[t])
            o[t] = case.scale * (S @ q[t])
    return o, states


def save(name: str, head: int, folder: Path) -> None:
    o, states = recurrence(CASES[name], head)
    np.savez(folder / f"{name}.{head}.npz", o=o, state=states)


def rms_ratio(x: np.ndarray, true: np.ndarray) -> float:
    """|x - true| / |true| in the root-mean-square sense; NaN where x is not finite."""
    x = np.asarray(x, np.float64)
    if not np.isfinite(x).all():
        return float("nan")
    return float(np.sqrt(np.mean((x - true) ** 2) / np.mean(true**2)))


def errors(case: Case, o: np.ndarray, state: np.ndarray, folder: Path) -> tuple[float, float]:
    """RMS ratios of o [B, T, judged, V] and state [N, judged, V, K] over the judged heads."""
    saved = [np.load(folder / f"{case.name}.{head}.npz") for head in judged_heads(case)]
    true_o = np.stack([s["o"] for s in saved], axis=1)
    true_state = np.stack([s["state"] for s in saved], axis=1)
    return rms_ratio(o.reshape(true_o.shape), true_o), rms_ratio(state, true_state)
