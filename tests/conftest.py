"""Every test runs under JAX's strict settings; `gpu` tests are skipped where there is no GPU."""

from collections.abc import Iterator

import jax
import pytest
from platforms import PLATFORMS, Platform

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # sharding is tested on the CPU


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    """Where the test runs and what it may be off by: the CPU in float32 and bfloat16, the GPU."""
    with jax.default_device(jax.local_devices(backend=request.param.name)[0]):
        yield request.param


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    try:
        jax.local_devices(backend="gpu")
    except RuntimeError as error:
        return f"no GPU: {error}".splitlines()[0]
    return None
