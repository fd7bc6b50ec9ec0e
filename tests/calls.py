"""Small calls in every form, for the tests of JAX's transforms.

Expected values come from the reference, on arrays that are neither batched nor sharded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close

import jax_kda

FORMS = {
    "rows": {"B": 2},
    "cu_seqlens": {"B": 1, "lengths": (3, 0, 2)},
    "segment_ids": {"B": 2, "segments": (0, 7, 7, 7, 2, 0, 3)},
    "pool": {"B": 3, "slots": 7},
    "packed_pool": {"B": 1, "lengths": (3, 0, 2), "slots": 7},
}
forms = pytest.mark.parametrize("form", FORMS)
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


# T, H, HV, K and V all differ, so that no two axes can be confused.
def make(seed=0, *, B=2, T=7, H=3, HV=6, K=4, V=5, lengths=(), segments=(), slots=None):
    """The arrays of one call; packing and slots, too, differ from seed to seed."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    N, packing = B, {}
    if lengths:
        starts = np.cumsum((0, *np.roll(lengths, seed)), dtype=np.int32)
        N, packing = len(lengths), {"cu_seqlens": starts}
    if segments:
        ids = [np.roll(segments, seed + row) for row in range(B)]
        N, packing = 4 * B, {"segment_ids": np.array(ids, np.int32)}
    if slots is not None:
        chosen = rng.permutation(slots)[: 2 * N].astype(np.int32)
        chosen[seed % N] = -1  # a row of padding
        packing |= {"state_indices": chosen[:N], "output_state_indices": chosen[N:]}
        N = slots
    return {
        "q": draw(B, T, H, K),
        "k": draw(B, T, H, K),
        "v": draw(B, T, HV, V),
        "g": draw(B, T, HV, K),
        "beta": draw(B, T, HV),
        "A_log": draw(HV) / 2,
        "dt_bias": draw(HV, K),
        "initial_state": draw(N, HV, V, K),
    } | packing


def op(x, implementation=None):
    """`chunk_kda` with everything inside, as a function of one dictionary."""
    return jax_kda.chunk_kda(
        **x,
        output_final_state=True,
        max_segments=4 if "segment_ids" in x else None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        implementation=implementation,
    )


def step(x, implementation=None):
    """The same by `recurrent_kda`."""
    x = dict(x)
    return jax_kda.recurrent_kda(
        state=x.pop("initial_state"),
        **x,
        max_segments=4 if "segment_ids" in x else None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        implementation=implementation,
    )


kernel = functools.partial(op, implementation="ffi")
ops = pytest.mark.parametrize("f", [op, step], ids=["chunk", "recurrent"])
reference = jax.jit(functools.partial(op, implementation="reference"))


def loss(f, x):
    """A scalar to which no two elements of the results contribute alike."""
    weigh = lambda a: jnp.sum(a * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape))
    return sum(map(weigh, f(x)))


@functools.partial(jax.jit, static_argnums=0)
def gradient(f, x):
    """Of everything that has one."""
    inputs = {name: x[name] for name in DIFFERENTIABLE if name in x}
    return jax.grad(lambda inputs: loss(f, x | inputs))(inputs)


def assert_same(actual, expected, tolerance=1e-5):
    actual, tree = jax.tree.flatten_with_path(actual)
    expected, expected_tree = jax.tree.flatten(expected)
    assert tree == expected_tree
    for (path, a), b in zip(actual, expected, strict=True):
        assert_close(a, b, tolerance, jax.tree_util.keystr(path))


def grid(inner, outer, sizes, form):
    """Arguments with an axis in front for `inner` and one before that for `outer` names, and the
    calls that they stand for: calls[j][i].
    """

    def argument(name, i, j):
        seed = (i if name in inner else 0) + 10 * (j if name in outer else 0)
        return make(seed, **FORMS[form])[name]

    names = make(**FORMS[form])
    cells = [
        [{n: argument(n, i, j) for n in names} for i in range(sizes[0])] for j in range(sizes[1])
    ]
    x = {n: np.array([[cell[n] for cell in row] for row in cells]) for n in names}
    x = {n: a if n in inner else a[:, 0] for n, a in x.items()}
    return {n: a if n in outer else a[0] for n, a in x.items()}, cells


def stack(names, size, form):
    """The same with one axis, and the in_axes of it."""
    x, (calls,) = grid(names, (), (size, 1), form)
    return x, {name: 0 if name in names else None for name in x}, calls


def loop(f, calls):
    return jax.tree.map(lambda *results: np.stack(results), *map(f, calls))
