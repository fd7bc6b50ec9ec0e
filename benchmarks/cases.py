"""What is measured: named shapes, their inputs, the bytes they must move and the FLOPs they need.

A training case is the forward pass and all gradients, from cotangents of both results.

Every head's inputs come from seeds of their own, so each process draws the same arrays in parallel
and the judge (truth.py) draws only the heads it looks at.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np

SEED = 20260529


@dataclass(frozen=True)
class Case:
    """One call with initial and final state in float32; K = V = 128."""

    name: str
    B: int
    T: int
    H: int
    lens: tuple[int, ...] = ()  # lengths of the packed sequences; empty: B rows of T
    gate: str = "strong"  # strong, weak: the lower-bound gate; softplus: the other one
    dtype: str = "bfloat16"  # of q k v g beta o
    device: str = "gpu"
    training: bool = False
    K: int = 128
    V: int = 128

    @property
    def lower_bound(self) -> float | None:
        return None if self.gate == "softplus" else -5.0

    @property
    def scale(self) -> float:
        return self.K**-0.5

    @property
    def offsets(self) -> list[int]:
        """Sequence boundaries over the B * T tokens laid end to end."""
        return [0, *np.cumsum(self.lens or [self.T] * self.B).tolist()]

    @property
    def N(self) -> int:
        return len(self.offsets) - 1

    def bytes(self) -> int:
        """q k v g beta in, o out, the state in and out: each once, and so their cotangents."""
        per_token = 3 * self.K + 2 * self.V + 1
        itemsize = 2 if self.dtype == "bfloat16" else 4
        states = 2 * 4 * self.N * self.H * self.K * self.V
        forward = self.B * self.T * self.H * per_token * itemsize + states
        return 2 * forward if self.training else forward

    def flops(self, C: int = 64) -> int:
        """Multiplies and adds of the forward's products in chunks, triangles counted as half.

        Per chunk of C tokens and head: Akk and Aqk (2 K C^2), the triangular solve for v_new and
        Aqk v_new (2 V C^2), and three products with the state: k S, q S and k^T v_new (6 C K V).
        """
        return self.B * self.T * self.H * (2 * C * (self.K + self.V) + 6 * self.K * self.V)


MIXED = (1300, 547, 2048, 963, 271, 3063)

_CASES = (
    *(Case(f"fixed-H{H}", 1, 8192, H) for H in (96, 64, 32, 16, 8, 4)),
    *(Case(f"mixed-H{H}", 1, 8192, H, MIXED) for H in (96, 64, 32)),
    *(Case(f"8x1024-H{H}", 1, 8192, H, (1024,) * 8) for H in (96, 64, 32)),
    Case("B8-T2048-H32", 8, 2048, 32),
    Case("B32-T128-H32", 32, 128, 32),
    *(Case(f"weak-H{H}", 1, 8192, H, gate="weak") for H in (96, 8)),
    *(Case(f"softplus-H{H}", 1, 8192, H, gate="softplus") for H in (96, 32)),
    Case("T65536-H32", 1, 65536, 32),
    Case("T65536-H8", 1, 65536, 8),
    Case("T131072-H16", 1, 131072, 16),
    *(Case(f"train-H{H}", 1, 8192, H, training=True) for H in (96, 64, 32, 8)),
    Case("train-B8-T2048-H32", 8, 2048, 32, training=True),
    Case("cpu-bf16", 1, 2048, 8, device="cpu"),
    Case("cpu-f32", 1, 2048, 8, dtype="float32", device="cpu"),
    Case("cpu-packed", 1, 2048, 8, (1300, 548, 200), device="cpu"),
    Case("cpu-tiny", 2, 100, 2, device="cpu"),
    Case("cpu-train-bf16", 1, 2048, 8, device="cpu", training=True),
    Case("cpu-train-f32", 1, 2048, 8, dtype="float32", device="cpu", training=True),
    Case("cpu-train-tiny", 2, 100, 2, device="cpu", training=True),
)
CASES = {case.name: case for case in _CASES}

# The axis of heads in what `inputs` has.
HEAD_AXIS = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "h0": 1}
DIFFERENTIABLE = tuple(HEAD_AXIS)
HEAD_AXIS |= {"do": 2, "dstate": 1}


def head_inputs(case: Case, head: int) -> dict[str, np.ndarray]:
    """One head's arrays: q k v g [B, T, D], beta [B, T], A_log [], dt_bias [K], h0 [N, V, K]; of a
    training case also cotangents, do [B, T, V] and dstate [N, V, K].
    """
    rng = np.random.default_rng([SEED, head])
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.float32
    tokens = (case.B, case.T)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    q, k = (normal(*tokens, case.K).astype(dtype) for _ in "qk")
    v = normal(*tokens, case.V).astype(dtype)
    if case.gate == "weak":  # decays of 0.99 to 0.9999 a token, small writes
        g = -10.8 + 4.6 * rng.random((*tokens, case.K), np.float32)
        beta, A_log, dt_bias = normal(*tokens) - 3, np.float32(0), np.zeros(case.K, np.float32)
    else:
        g = normal(*tokens, case.K)
        beta, A_log = normal(*tokens), np.float32(rng.random())
        dt_bias = rng.random(case.K, np.float32)
    x = {
        "q": q,
        "k": k,
        "v": v,
        "g": g.astype(dtype),
        "beta": beta.astype(dtype),
        "A_log": np.asarray(A_log),
        "dt_bias": dt_bias,
        "h0": normal(case.N, case.V, case.K),
    }
    if case.training:
        do = normal(*tokens, case.V).astype(dtype)
        x |= {"do": do, "dstate": normal(case.N, case.V, case.K)}
    return x


def inputs(case: Case) -> dict[str, np.ndarray]:
    """All heads of `head_inputs`, at the axes named H in q [B, T, H, K] and h0 [N, H, V, K]."""
    first = head_inputs(case, 0)

    def empty(name: str, x: np.ndarray) -> np.ndarray:
        axis = HEAD_AXIS[name]
        return np.empty((*x.shape[:axis], case.H, *x.shape[axis:]), x.dtype)

    arrays = {name: empty(name, x) for name, x in first.items()}

    def fill(head: int) -> None:
        for name, x in (head_inputs(case, head) if head else first).items():
            np.moveaxis(arrays[name], HEAD_AXIS[name], 0)[head] = x

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(case.H)))
    return arrays
