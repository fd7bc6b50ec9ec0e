"""Results of other implementations on the same inputs; tests/data/README.md says whose."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close
from platforms import OPERANDS, Platform, op, step

from jax_kda import fwd, kda_gate, reference

DATA = Path(__file__).parent / "data"
FLAGS = (
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)
# Largest error over largest value, in float32. Gradients that are sums over all tokens cancel; a07
# has log decays of -60 beside -1e-3; in a08 the logits of beta are about 9: the sigmoid is flat.
SCAN, CHUNK = 1e-5, 2e-5
CHUNK_BOUNDS = {"A_log": 1e-4, "dt_bias": 1e-4}
CHUNK_BOUNDS_OF = {
    "a07_strong_gate": {"A_log": 2e-3},
    "a08_repeated_keys": {"beta": 2e-3},
    "a11_lengths": {"A_log": 3e-4},
}


class Vector(NamedTuple):
    """One call of chunk_kda, what it has to return, and the gradients for two cotangents."""

    file: str
    operands: dict[str, np.ndarray]
    options: dict[str, Any]
    results: tuple[np.ndarray, np.ndarray]
    cotangents: tuple[np.ndarray, np.ndarray]
    gradients: dict[str, np.ndarray]

    def check(self, name: str, actual: Any, expected: np.ndarray, bound: float) -> None:
        actual = np.asarray(actual, np.float64)
        assert actual.shape == expected.shape
        size = np.abs(expected).max()
        error = np.abs(actual - expected).max()  # NaN fails
        assert error <= (bound * size if size > 0 else 1e-6), f"{name}: {error:.2e} of {size:.2e}"

    def bound(self, name: str) -> float:
        bounds = CHUNK_BOUNDS | CHUNK_BOUNDS_OF.get(self.file, {})
        return bounds.get(name, 5e-4 if self.file == "a07_strong_gate" else CHUNK)


def vector_ids() -> list[tuple[str, str]]:
    ids = []
    for path in sorted(DATA.glob("a*.npz")):
        with np.load(path) as file:
            ids += [(path.stem, case) for case in json.loads(str(file["meta"])).get("cases", ())]
    assert len(ids) == 19
    return ids


@functools.cache
def load(file: str, case: str) -> Vector:
    with np.load(DATA / f"{file}.npz") as arrays:
        meta = json.loads(str(arrays["meta"]))["cases"][case]
        prefix = f"{case}/" if case else ""
        x = {n.removeprefix(prefix): arrays[n] for n in arrays.files if n.startswith(prefix)}
    for name in ("initial_state", "ht", "dht", "dh0"):
        if name in x:
            x[name] = x[name].swapaxes(-1, -2)  # they are stored [N, HV, K, V]
    if "dh0" in x:
        x["dinitial_state"] = x.pop("dh0")
    names = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"]
    operands = {name: x[name] for name in names if name in x}
    options = {name: meta[name] for name in ("scale", "lower_bound", *FLAGS)}
    options["cu_seqlens"] = x.get("cu_seqlens")
    gradients = {name: x[f"d{name}"] for name in operands}
    return Vector(file, operands, options, (x["o"], x["ht"]), (x["do"], x["dht"]), gradients)


vectors = pytest.mark.parametrize(
    "vector_id", [pytest.param(i, id="-".join(filter(None, i))) for i in vector_ids()]
)


@vectors
def test_reference(vector_id: tuple[str, str]):
    vector = load(*vector_id)
    options = vector.options | {"output_final_state": True}
    results = jax.jit(functools.partial(reference.chunk_kda, **options))(**vector.operands)
    for name, actual, expected in zip(("o", "ht"), results, vector.results, strict=True):
        vector.check(name, actual, expected, SCAN)


@vectors
def test_values_and_gradients(vector_id: tuple[str, str]):
    vector = load(*vector_id)

    @jax.jit
    def vjp(x, cotangents):
        results, pullback = jax.vjp(functools.partial(op, **vector.options), x)
        return results, pullback(cotangents)[0]

    results, gradients = vjp(vector.operands, vector.cotangents)
    for name, actual, expected in zip(("o", "ht"), results, vector.results, strict=True):
        vector.check(name, actual, expected, vector.bound(name))
    for name, expected in vector.gradients.items():
        vector.check(f"d{name}", gradients[name], expected, vector.bound(name))


@vectors
def test_token_by_token(vector_id: tuple[str, str]):
    """Decoding has the results of the whole; packed sequences are decoded in one call."""
    vector = load(*vector_id)
    x, options = dict(vector.operands), dict(vector.options)
    tokens = {name: x.pop(name) for name in OPERANDS}
    if options["cu_seqlens"] is not None:
        o, state = step(x | tokens, **options)
    else:

        def token(state, one):
            one = {name: a[:, None] for name, a in one.items()}
            o, state = step(x | one | {"initial_state": state}, **options)
            return state, o[:, 0]

        by_token = {name: jnp.moveaxis(a, 1, 0) for name, a in tokens.items()}
        state = jnp.asarray(x.get("initial_state", np.zeros_like(vector.results[1])))
        state, o = jax.jit(lambda state, tokens: jax.lax.scan(token, state, tokens))(
            state, by_token
        )
        o = jnp.moveaxis(o, 0, 1)
    for name, actual, expected in zip(("o", "ht"), (o, state), vector.results, strict=True):
        vector.check(name, actual, expected, SCAN)


@vectors
def test_values_from_bfloat16(vector_id: tuple[str, str], platform: Platform):
    """The inputs are bfloat16 numbers, so nothing is lost before the op."""
    vector = load(*vector_id)
    tokens = {name: vector.operands[name].astype(jnp.bfloat16) for name in OPERANDS}
    operands = vector.operands | tokens
    with jax.default_device(jax.local_devices(backend=platform.name)[0]):
        o, state = op(operands, **vector.options)
    gpu = platform.name == "gpu"
    assert_close(o, vector.results[0], platform.tolerance if gpu else 2e-3, "o")
    assert_close(state, vector.results[1], platform.tolerance if gpu else 1e-5, "state")


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("flashkda_*.npz")))
def test_flashkda(name: str, platform: Platform):
    with np.load(DATA / f"{name}.npz") as file:
        x = {n: a.view(jnp.bfloat16) if a.dtype == np.uint16 else a for n, a in dict(file).items()}
    q, k, v = (x[name].astype(platform.dtype) for name in ("q", "k", "v"))
    cu_seqlens = x["cu_seqlens"] if x["cu_seqlens"].size else None
    state = x["initial_state"]
    with jax.default_device(jax.local_devices(backend=platform.name)[0]):
        results: Any = fwd(
            q, k, v, x["g"], x["beta"], q.shape[-1] ** -0.5, jnp.zeros_like(v), x["A_log"],
            x["dt_bias"], float(x["lower_bound"]), state, jnp.zeros_like(state), cu_seqlens,
        )  # fmt: skip
    truth = x["f64_out"], x["f64_final"]
    for name, actual, expected in zip(("out", "final_state"), results, truth, strict=True):
        exact = platform.name == "cpu" and actual.dtype == jnp.float32
        bound = 1e-5 if exact else max(platform.tolerance, 2e-3)
        assert_close(actual, expected, bound, name)
    # The system this call comes from rounds its state to bfloat16; we are nearer to the truth.
    theirs = x["flashkda_out"].astype(np.float64) - x["f64_out"]
    ours = np.asarray(results[0], np.float64) - x["f64_out"]
    assert np.linalg.norm(ours) < np.linalg.norm(theirs)


@pytest.mark.parametrize("name", ["flashkda_fixed_weak_fp32", "flashkda_packed_fp32"])
def test_flashkda_token_by_token(name: str, platform: Platform):
    """The vectors with float32 states. The other two round the state once; decoding would often."""
    with np.load(DATA / f"{name}.npz") as file:
        x = {n: a.view(jnp.bfloat16) if a.dtype == np.uint16 else a for n, a in dict(file).items()}
    cu_seqlens = x["cu_seqlens"] if x["cu_seqlens"].size else [0, x["q"].shape[1]]
    flags = dict.fromkeys(FLAGS[:3], True)
    operands = {name: x[name] for name in ("A_log", "dt_bias")}

    @jax.jit
    def token(state, one):
        one = {name: a[:, None] for name, a in one.items()}
        return step(
            operands | one | {"initial_state": state}, lower_bound=float(x["lower_bound"]), **flags
        )

    with jax.default_device(jax.local_devices(backend=platform.name)[0]):
        for n, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
            rows = slice(None) if x["cu_seqlens"].size == 0 else slice(n, n + 1)
            state, outputs = jnp.asarray(x["initial_state"][rows]), []
            for t in range(begin, end):
                one = {name: x[name][:, t] for name in OPERANDS}
                one |= {name: one[name].astype(platform.dtype) for name in ("q", "k", "v")}
                o, state = token(state, one)
                outputs.append(o)
            o = np.concatenate(outputs, axis=1)
            assert_close(state, x["f64_final"][rows], 1e-5, "state")
            assert_close(
                o, x["f64_out"][:, begin:end], 1e-5 if o.dtype == np.float32 else 2e-3, "o"
            )


GATES = {
    "softplus": (True, True, None),
    "softplus_nobias": (True, False, None),
    "lower_bound_m5": (True, True, -5.0),
    "lower_bound_m2p5": (True, True, -2.5),
    "lower_bound_m5_noA": (False, True, -5.0),
}


@pytest.mark.parametrize("kind", GATES)
def test_gate(kind: str):
    with np.load(DATA / "a13_gate_l2norm_unit.npz") as file:
        prefix = f"gate/{kind}/"
        expected = {n.removeprefix(prefix): file[n] for n in file.files if n.startswith(prefix)}
        has_A_log, has_dt_bias, lower_bound = GATES[kind]
        x = {"x": file["gate/x"]}
        x |= {"A_log": file["gate/A_log"]} if has_A_log else {}
        x |= {"dt_bias": file["gate/dt_bias"]} if has_dt_bias else {}
        dg = file["gate/dg"]
    g, pullback = jax.vjp(lambda x: kda_gate(**x, lower_bound=lower_bound), x)
    compare = lambda a, b, bound: np.testing.assert_allclose(
        a, b, rtol=0, atol=bound * abs(b).max()
    )
    compare(g, expected["g"], 1e-6)
    for name, gradient in pullback(jnp.asarray(dg))[0].items():
        compare(gradient, expected[f"d{name}"], 1e-5)


def test_l2norm():
    """Through the op: one token of beta = 1 and v = 1 leaves the normalised key in the state."""
    with np.load(DATA / "a13_gate_l2norm_unit.npz") as file:
        x, dy, y, dx = (file[f"l2norm/{name}"] for name in ("x", "dy", "y", "dx"))
    T, K = x.shape

    def normalise(k):  # every row as a sequence of one token
        k = k[:, None, None, :]
        one = jnp.ones((T, 1, 1, 1))
        x = {"q": k, "k": k, "v": one, "g": jnp.zeros_like(k), "beta": one[..., 0]}
        return op(x, use_qk_l2norm_in_kernel=True)[1].reshape(T, K)

    actual, pullback = jax.vjp(normalise, x)
    np.testing.assert_allclose(actual, y, rtol=0, atol=1e-6 * abs(y).max())
    np.testing.assert_allclose(pullback(jnp.asarray(dy))[0], dx, rtol=0, atol=1e-5 * abs(dx).max())
