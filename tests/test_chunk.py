"""The op against the definition in float64, by whatever the platform runs.

By default that is the kernel; the GPU has none for most of these head sizes and runs plain JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import CASES, assert_close, make_inputs
from platforms import Platform, op, truth


def run(platform: Platform, x: dict[str, Any], **options: Any) -> tuple[jax.Array, jax.Array]:
    with jax.default_device(jax.local_devices(backend=platform.name)[0]):
        return op(x, **options)


def tolerance(platform: Platform, result: jax.Array) -> float:
    if platform.name == "gpu":
        return platform.tolerance
    return 1e-5 if result.dtype == jnp.float32 else 2e-3


def check(platform: Platform, results: Any, expected: Any) -> None:
    for name, result, true in zip(("o", "final_state"), results, expected, strict=True):
        assert_close(result, true, tolerance(platform, result), name)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, platform: Platform):
    x, options = make_inputs(CASES[name], platform.dtype)
    o, state = run(platform, x, **options)
    assert o.dtype == x["v"].dtype
    assert state.dtype == (x["initial_state"].dtype if "initial_state" in x else jnp.float32)
    check(platform, (o, state), truth(x, **options))


def test_weak_gates_lose_nothing_over_8192_tokens(platform: Platform):
    """Nothing is forgotten and little is written: rounding the state would accumulate."""
    rng = np.random.default_rng(0)
    T, K = 8192, 128
    q, k, v = (rng.standard_normal((1, T, 1, K)).astype(platform.dtype) for _ in range(3))
    x = {"q": q, "k": k, "v": v}
    x["g"] = np.log(rng.uniform(0.99985, 0.99995, (1, T, 1, K))).astype(np.float32)
    x["beta"] = rng.uniform(0.01, 0.03, (1, T, 1)).astype(np.float32)
    x["initial_state"] = rng.standard_normal((1, 1, K, K)).astype(np.float32)
    results = run(platform, x, use_qk_l2norm_in_kernel=True)
    expected = truth(x, use_qk_l2norm_in_kernel=True)
    check(platform, results, expected)
    for end in (256, T):  # and no later than at the beginning
        part = slice(end - 256, end)
        error = tolerance(platform, results[0])
        assert_close(results[0][:, part], expected[0][:, part], error, f"o up to {end}")


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_constant_gates_of_any_strength(implementation: str | None, platform: Platform):
    gates = np.array([0, *-np.logspace(-6, 4, 21), -5.5, -5.9, -6, -88, -104, -np.inf], np.float32)
    rng = np.random.default_rng(1)
    B, T, H, K = gates.size, 130, 1, 128
    q, k, v = (rng.standard_normal((B, T, H, K)).astype(platform.dtype) for _ in range(3))
    x = {"q": q, "k": k, "v": v, "g": np.broadcast_to(gates[:, None, None, None], (B, T, H, K))}
    x["beta"] = np.full((B, T, H), 0.5, np.float32)
    x["initial_state"] = rng.standard_normal((B, H, K, K)).astype(np.float32)
    results = run(platform, x, use_qk_l2norm_in_kernel=True, implementation=implementation)
    expected = truth(x, use_qk_l2norm_in_kernel=True)
    for gate, *row in zip(gates, *results, *expected, strict=True):
        for name, actual, true in zip(("o", "state"), row[:2], row[2:], strict=True):
            assert_close(actual, true, tolerance(platform, actual), f"{name} at g = {gate}")
