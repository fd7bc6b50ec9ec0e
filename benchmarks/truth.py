"""The judge: one head's token recurrence and its gradients in float64, written for clarity."""

from pathlib import Path
from typing import Any

import numpy as np
from cases import CASES, DIFFERENTIABLE, HEAD_AXIS, Case, head_inputs


def judged_heads(case: Case) -> list[int]:
    return sorted({0, case.H - 1})


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def activate(case: Case, x: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """q, k, v, log decay and write strength of B * T tokens, as the recurrence takes them."""
    q, k, v, g = (x[name].reshape(case.B * case.T, -1) for name in "qkvg")
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    if case.lower_bound is None:
        g = -np.exp(x["A_log"]) * np.logaddexp(0, g + x["dt_bias"])
    else:
        g = case.lower_bound * sigmoid(np.exp(x["A_log"]) * (g + x["dt_bias"]))
    return q, k, v, g, sigmoid(x["beta"].reshape(-1))


def recurrence(case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """o [B * T, V] and the final states [N, V, K]."""
    q, k, v, g, beta = activate(case, x)
    o, states = np.zeros_like(v), x["h0"].copy()
    for S, begin, end in zip(states, case.offsets, case.offsets[1:], strict=False):  # S is a view
        for t in range(begin, end):
            S *= np.exp(g[t])
            S += np.outer(beta[t] * (v[t] - S @ k[t]), k[t])
            o[t] = case.scale * (S @ q[t])
    return {"o": o, "state": states}


def gradients(case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of all inputs, from the cotangents do and dstate: the same lines, backwards."""
    q, k, v, g, beta = activate(case, x)
    dq, dk, dv, dg, dbeta = (np.zeros_like(a) for a in (q, k, v, g, beta))
    do, dstates = x["do"].reshape(v.shape), x["dstate"].copy()
    spans = zip(case.offsets, case.offsets[1:], strict=False)
    for S, dS, (begin, end) in zip(x["h0"], dstates, spans, strict=True):  # dS is a view
        decayed, states = np.empty((2, end - begin, *S.shape))
        for i, t in enumerate(range(begin, end)):
            decayed[i] = S * np.exp(g[t])
            S = decayed[i] + np.outer(beta[t] * (v[t] - decayed[i] @ k[t]), k[t])
            states[i] = S
        for i, t in reversed([*enumerate(range(begin, end))]):
            error = v[t] - decayed[i] @ k[t]
            dS += case.scale * np.outer(do[t], q[t])
            dq[t] = case.scale * (do[t] @ states[i])
            dbeta[t] = dS @ k[t] @ error
            dv[t] = beta[t] * (dS @ k[t])
            dk[t] = beta[t] * (error @ dS) - dv[t] @ decayed[i]
            dS -= np.outer(dv[t], k[t])
            dg[t] = (decayed[i] * dS).sum(0)
            dS *= np.exp(g[t])

    def of_norm(name: str, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
        a = x[name].reshape(y.shape)
        dy = dy - y * (y * dy).sum(-1, keepdims=True)
        return dy / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6)

    z, slope = x["g"].reshape(g.shape) + x["dt_bias"], np.exp(x["A_log"])
    if case.lower_bound is None:
        dz, dA_log = -slope * sigmoid(z) * dg, (g * dg).sum()
    else:
        dz = slope * g * sigmoid(-slope * z) * dg
        dA_log = (z * dz).sum()
    results = {
        "q": of_norm("q", q, dq),
        "k": of_norm("k", k, dk),
        "v": dv,
        "g": dz,
        "beta": dbeta * beta * (1 - beta),
        "A_log": dA_log,
        "dt_bias": dz.sum(0),
        "h0": dstates,
    }
    return {name: results[name].reshape(x[name].shape) for name in DIFFERENTIABLE}


def save(name: str, head: int, folder: Path) -> None:
    case = CASES[name]
    x = {name: a.astype(np.float64) for name, a in head_inputs(case, head).items()}
    results: dict[str, Any] = recurrence(case, x)
    results["o"] = results["o"].reshape(x["v"].shape)
    if case.training:
        results |= gradients(case, x)
    np.savez(folder / f"{name}.{head}.npz", **results)


def rms_ratio(x: np.ndarray, true: np.ndarray) -> float:
    """|x - true| / |true| in the root-mean-square sense; NaN where x is not finite."""
    x = np.asarray(x, np.float64)
    if not np.isfinite(x).all():
        return float("nan")
    return float(np.sqrt(np.mean((x - true) ** 2) / np.mean(true**2)))


def errors(case: Case, judged: dict[str, np.ndarray], folder: Path) -> dict[str, float]:
    """RMS ratios over the judged heads, which are all that the arrays have."""
    saved = [np.load(folder / f"{case.name}.{head}.npz") for head in judged_heads(case)]
    axis = HEAD_AXIS | {"o": HEAD_AXIS["v"], "state": HEAD_AXIS["h0"]}
    true = {name: np.stack([s[name] for s in saved], axis=axis[name]) for name in judged}
    return {name: rms_ratio(a.reshape(true[name].shape), true[name]) for name, a in judged.items()}
