"""What the CUDA kernels compute, on a Hopper GPU, against float64 on the host: `pytest -m gpu`.

Every row and head is also judged by itself: one that is right can't hide one that is not.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import GPU, OPERANDS, draw, judge, op, rms_ratio, run, truth

from jax_kda import hopper

pytestmark = pytest.mark.gpu

NORMED: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}


def some_columns(x: dict[str, Any], results: Any) -> tuple[dict[str, Any], Any]:
    """Every 8th value channel of a call: they don't depend on each other, and float64 is slow."""
    y = dict(x)
    for name in ("v", "initial_state"):
        if name in y:
            y[name] = y[name][..., 3::8] if name == "v" else y[name][..., 3::8, :]
    o, state = results
    return y, (o[..., 3::8], state[..., 3::8, :])


def expect(x: dict[str, Any], every_column: bool = True, **options: Any):
    results = run(GPU, x, **options)
    y, judged = (x, results) if every_column else some_columns(x, results)
    judge(GPU, judged, truth(y, **options))
    return results


# --- every option ---------------------------------------------------------------------------------

PACKINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "cu_seqlens": {"cu_seqlens": np.array([0, 0, 33, 97, 150, 150], np.int32)},
    "segment_ids": {
        "segment_ids": np.array(
            [[0] * 5 + [1] * 70 + [0] * 15 + [2] * 60, [4] * 64 + [5] + [6] * 64 + [0] * 21],
            np.int32,
        ),
        "max_segments": 4,
    },
}  # fmt: skip
GATES: dict[str, dict[str, Any]] = {
    "activated": {},
    "softplus": {"use_gate_in_kernel": True},
    "lower_bound": {"use_gate_in_kernel": True, "lower_bound": -5.0},
    "other_lower_bound": {"use_gate_in_kernel": True, "lower_bound": -0.3},
}
BETAS: dict[str, dict[str, Any]] = {
    "probability": {},
    "sigmoid": {"use_beta_sigmoid_in_kernel": True},
    "two_sigmoid": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
}
DTYPES = {"bf16": jnp.bfloat16, "f32": np.float32}
STATES = {"none": None} | DTYPES


def combinations() -> list[Any]:
    """Gates, types, norms and packings all with each other; the rest goes round at random."""
    rng = np.random.default_rng(0)
    pick = lambda table: list(table)[rng.integers(len(table))]
    choices = itertools.product(GATES, DTYPES, DTYPES, (True, False), PACKINGS)
    return [
        (gate, g, beta, l2norm, packing, pick(BETAS), pick(STATES), int(rng.choice([2, 4])))
        for gate, g, beta, l2norm, packing in choices
    ]


@pytest.mark.parametrize(
    "gate, g_dtype, beta_dtype, l2norm, packing, beta, state_dtype, HV", combinations()
)
def test_options(gate, g_dtype, beta_dtype, l2norm, packing, beta, state_dtype, HV):
    options = PACKINGS[packing] | GATES[gate] | BETAS[beta] | {"use_qk_l2norm_in_kernel": l2norm}
    B, N = {"dense": (2, 2), "cu_seqlens": (1, 5), "segment_ids": (2, 8)}[packing]
    made, raw = (
        draw(GPU, B=B, T=150, H=2, HV=HV, N=N, state=state_dtype != "none", raw=raw)
        for raw in (False, True)
    )
    x = made | ({"q": raw["q"], "k": raw["k"]} if l2norm else {})
    if beta != "probability":
        x["beta"] = raw["beta"]
    if gate != "activated":
        rng = np.random.default_rng(1)
        x |= {"g": raw["g"], "A_log": rng.standard_normal(HV, np.float32)}
        x |= {"dt_bias": rng.standard_normal((HV, 128), np.float32)}
    x["g"], x["beta"] = x["g"].astype(DTYPES[g_dtype]), x["beta"].astype(DTYPES[beta_dtype])
    if state_dtype != "none":
        x["initial_state"] = x["initial_state"].astype(STATES[state_dtype])
    _, state = expect(x, **options)
    assert state.dtype == (STATES[state_dtype] or np.float32)


def test_every_length_at_once():
    """Sequences of every awkward length, packed; too many chains for V to be split."""
    lengths = [
        1,
        2,
        3,
        7,
        15,
        16,
        17,
        0,
        *range(31, 34),
        47,
        48,
        49,
        63,
        64,
        65,
        127,
        128,
        129,
        191,
    ]
    lengths += [192, 193, 200, 0, 255, 256, 257, 513, 1]
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    x = draw(GPU, T=int(cu_seqlens[-1]), H=3, N=len(lengths), state=True)
    expect(x, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("T", [1, 17, 63, 64, 65, 200, 513])
def test_length(T):
    expect(draw(GPU, T=T, H=2, state=True))


# --- gates ----------------------------------------------------------------------------------------

CONSTANT_GATES = [
    -1e-6,
    -1e-5,
    -1e-4,
    -1e-3,
    -0.01,
    -0.05,
    -0.1,
    -0.2,
    -0.5,
    -1,
    -1.4,
    -2,
    -3,
    -4.9,
]
CONSTANT_GATES += [-5, -5.5, -5.9, -6, -8, -11, -12, -20, -40, -50, -60, -88, -104, -1e3, -1e4]


def test_constant_gates():
    x = draw(GPU, B=len(CONSTANT_GATES), T=2048, H=1, state=True)
    gates = np.array(CONSTANT_GATES, np.float32)[:, None, None, None]
    x["g"] = np.broadcast_to(gates, x["g"].shape).copy()
    expect(x, every_column=False, **NORMED)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower_bound"])
def test_constant_raw_gates(lower_bound):
    """From the gate's floor to its ceiling, the parameters zero."""
    raw = np.array([-1e4, -20, -9, -4, -1, 0, 1, 4, 9, 20, 1e3, 1e4], np.float32)
    x = draw(GPU, B=len(raw), T=1024, H=1, state=True)
    x["g"] = np.broadcast_to(raw[:, None, None, None], x["g"].shape).copy()
    x |= {"A_log": np.zeros(1, np.float32), "dt_bias": np.zeros((1, 128), np.float32)}
    expect(x, every_column=False, **NORMED, use_gate_in_kernel=True, lower_bound=lower_bound)


def test_infinite_gates_among_mild_ones():
    x = draw(GPU, T=300, H=2, state=True)
    x["g"] = np.full(x["g"].shape, -0.01, np.float32)
    x["g"][:, [0, 17, 63, 64, 200]] = -np.inf
    x["g"][:, 100, :, 5] = x["g"][:, 101, 0] = -np.inf
    expect(x, **NORMED)
    x["g"][:] = -np.inf
    expect(x, **NORMED)


def test_strong_and_weak_channels_in_one_token():
    x = draw(GPU, T=500, H=2, state=True)
    rng = np.random.default_rng(4)
    x["g"] = -(10 ** rng.uniform(-6, 4, x["g"].shape)).astype(np.float32)
    expect(x, **NORMED)


@pytest.mark.parametrize("l2norm", [True, False], ids=["fp16", "bf16"])
@pytest.mark.parametrize("g_dtype", DTYPES)
def test_a_strong_gate_at_every_place_of_eight_tokens(g_dtype, l2norm):
    """Head r forgets channel 7 r at token r of every eight, more than TF32 has range for."""
    x = draw(GPU, T=77, H=4, HV=8, state=True)
    x["g"] = 0.1 * x["g"]
    for r in range(8):
        x["g"][:, r::8, r, 7 * r] = -60 - 10 * r
    x["g"] = x["g"].astype(DTYPES[g_dtype])
    expect(x, use_qk_l2norm_in_kernel=l2norm)


def test_decays_that_add_up_beyond_the_range_of_tf32():
    """Eight tokens of -5 to -12 each: within its range, at its border and beyond."""
    x = draw(GPU, T=130, H=2, state=True)
    rng = np.random.default_rng(5)
    x["g"] = -rng.uniform(5, 12, x["g"].shape).astype(np.float32)
    expect(x, **NORMED)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.5, 0.9999, 1.0])
def test_repeated_keys(beta):
    """Identical, alternating and nearly parallel keys with almost no decay: the hardest inverse."""
    x = draw(GPU, B=3, T=300, H=1, state=True)
    k = x["k"].astype(np.float32)
    k[0] = k[0, :1]
    k[1] = k[1, np.arange(300) % 2]
    k[2] = k[2, :1] + 0.02 * k[2]
    x["k"] = k.astype(jnp.bfloat16)
    x["g"] = np.full(x["g"].shape, -1e-3, np.float32)
    x["beta"] = np.full(x["beta"].shape, beta, np.float32)
    expect(x, **NORMED)


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e4, 1e12])
def test_scale_of_values_and_state(scale):
    x = draw(GPU, T=200, H=2, state=True)
    for name in ("v", "initial_state"):
        x[name] = (x[name].astype(np.float32) * scale).astype(x[name].dtype)
    expect(x, **NORMED)


def test_values_that_grow_and_shrink_over_time():
    growth = np.exp(np.linspace(0, 20, 300))[:, None, None]
    for factor in (growth, growth[::-1]):
        x = draw(GPU, T=300, H=2)
        x["v"] = (x["v"].astype(np.float64) * factor).astype(jnp.bfloat16)
        o, _ = expect(x, **NORMED)
        true_o, _ = truth(x, **NORMED)
        for t in range(0, 300, 50):  # a large end must not hide a small beginning
            assert rms_ratio(o[:, t : t + 50], true_o[:, t : t + 50]) <= GPU.tolerance


@pytest.mark.parametrize("outlier", [1e3, 1e6])
def test_outlier_among_the_values_spoils_no_token_before_it(outlier):
    x = draw(GPU, T=130, H=2, state=True)
    for t in (40, 100):
        x["v"][:, t] = (x["v"][:, t].astype(np.float32) * outlier).astype(jnp.bfloat16)
    o, _ = expect(x, **NORMED)
    true_o, _ = truth(x, **NORMED)
    assert rms_ratio(o[:, :40], true_o[:, :40]) <= GPU.tolerance


def test_state_far_larger_than_the_values():
    x = draw(GPU, T=200, H=2, state=True)
    x["initial_state"] = 1e4 * x["initial_state"]
    expect(x, **NORMED)


# --- who sees whom --------------------------------------------------------------------------------


def test_earlier_outputs_do_not_depend_on_later_tokens():
    x, other = draw(GPU, T=300, H=2, state=True), draw(GPU, T=300, H=2, seed=9)
    o, _ = run(GPU, x, **NORMED)
    for t in (1, 17, 63, 64, 100, 130, 299):
        y = {n: np.concatenate([x[n][:, :t], other[n][:, t:]], axis=1) for n in OPERANDS}
        y["g"][:, t:] *= 40
        changed, _ = run(GPU, y | {"initial_state": x["initial_state"]}, **NORMED)
        np.testing.assert_array_equal(changed[:, :t], o[:, :t])


@pytest.mark.parametrize("split", [64, 128, 448])
def test_split_at_a_chunk_border_is_bitwise_the_whole(split):
    x = draw(GPU, T=512, H=2, state=True)
    o, state = run(GPU, x, **NORMED)
    first = {n: a if n == "initial_state" else a[:, :split] for n, a in x.items()}
    first_o, middle = run(GPU, first, **NORMED)
    second = {n: middle if n == "initial_state" else a[:, split:] for n, a in x.items()}
    second_o, final = run(GPU, second, **NORMED)
    np.testing.assert_array_equal(np.concatenate([first_o, second_o], axis=1), o)
    np.testing.assert_array_equal(final, state)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_bad_sequence_leaves_its_neighbours_alone(bad):
    offsets = [0, 9, 70, 75, 200]
    x = draw(GPU, T=200, H=2, N=4, state=True)
    options: dict[str, Any] = NORMED | {"cu_seqlens": np.array(offsets, np.int32)}
    clean_o, clean_state = run(GPU, x, **options)
    for n in range(4):
        begin, end = offsets[n : n + 2]
        y = {name: a.copy() for name, a in x.items()}
        for name in OPERANDS:
            y[name][:, begin:end] = bad
        y["initial_state"][n] = bad
        o, state = run(GPU, y, **options)
        assert not np.isfinite(o[:, begin:end]).any()
        others = [m for m in range(4) if m != n]
        np.testing.assert_array_equal(state[others], clean_state[others])
        np.testing.assert_array_equal(o[:, :begin], clean_o[:, :begin])
        np.testing.assert_array_equal(o[:, end:], clean_o[:, end:])


def test_packed_sequences_are_the_sequences_alone():
    offsets = [0, 64, 192, 200, 400]
    x = draw(GPU, T=400, H=2, N=4, state=True)
    o, state = run(GPU, x, cu_seqlens=np.array(offsets, np.int32), **NORMED)
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        alone = {name: x[name][:, begin:end] for name in OPERANDS}
        alone_o, alone_state = run(
            GPU, alone | {"initial_state": x["initial_state"][n : n + 1]}, **NORMED
        )
        np.testing.assert_array_equal(o[:, begin:end], alone_o)
        np.testing.assert_array_equal(state[n : n + 1], alone_state)


# --- head sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("gate", ["activated", "softplus"])
@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (128, 64)])
def test_head_sizes(K, V, gate, packing):
    options = NORMED | GATES[gate] | PACKINGS[packing]
    B = 1 if packing == "cu_seqlens" else 2
    N = {"dense": None, "cu_seqlens": 5, "segment_ids": 8}[packing]
    x = draw(GPU, B=B, T=150, H=2, HV=4, K=K, V=V, N=N, state=True, raw=gate != "activated")
    if gate != "activated":
        x["A_log"] = np.linspace(-1, 1, 4, dtype=np.float32)
        x["dt_bias"] = np.linspace(-2, 2, 4 * K, dtype=np.float32).reshape(4, K)
        x["beta"] = 1 / (1 + np.exp(-x["beta"]))
    expect(x, every_column=True, **options)


@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (128, 64)])
def test_head_sizes_of_segments_and_of_many_chains(K, V):
    x = draw(GPU, T=2600, H=2, K=K, V=V, state=True)
    assert hopper.segment_chunks(1, 2600, 2, 1, False) > 0
    expect(x, **NORMED)
    expect(draw(GPU, B=2, T=130, H=70, K=K, V=V, state=True), **NORMED)


# --- scans in segments ----------------------------------------------------------------------------

CUTS: dict[str, dict[str, Any]] = {
    "dense": dict(B=1, T=2500, H=2),
    "rows": dict(B=3, T=2500, H=1, HV=2),
    "packed": dict(B=1, T=8000, H=2, cu_seqlens=[0, 0, 100, 6500, 8000]),
    "gaps": dict(B=1, T=6000, H=1, cu_seqlens=[0, 3, 64, 5999]),
}


def draw_cut(name: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands whose scan is cut, and options."""
    sizes: dict[str, Any] = CUTS[name].copy()
    offsets = sizes.pop("cu_seqlens", None)
    M = len(offsets) - 1 if offsets else 1
    HV = sizes.get("HV", sizes["H"])
    assert hopper.segment_chunks(sizes["B"], sizes["T"], HV, M, offsets is not None) > 0
    x = draw(GPU, **sizes, N=M if offsets else None, state=True, **more)
    return x, NORMED | ({"cu_seqlens": np.array(offsets, np.int32)} if offsets else {})


@pytest.mark.parametrize("gate", ["weak", "random", "strong", "none", "reset"])
@pytest.mark.parametrize("name", CUTS)
def test_segments(name, gate):
    x, options = draw_cut(name)
    g = x["g"]
    if gate == "weak":
        g = 0.01 * g
    elif gate == "strong":
        g = 30 * g
    elif gate == "none":
        g = 0 * g
    elif gate == "reset":
        g = np.where(np.arange(g.shape[1])[:, None, None] % 300 == 299, -np.inf, g)
    expect(x | {"g": g.astype(x["g"].dtype)}, **options)


def test_segments_with_beta_beyond_one_and_unnormalised_keys():
    x, options = draw_cut("dense")
    del options["use_qk_l2norm_in_kernel"]
    x["beta"] = (2 * x["beta"]).astype(x["beta"].dtype)
    x["k"] = (0.09 * np.asarray(x["k"], np.float32)).astype(x["k"].dtype)
    expect(x, **options)


def test_segments_in_place_are_those_of_a_copy():
    x, options = draw_cut("rows")
    arrays = {name: jnp.asarray(a) for name, a in x.items()}
    expected = jax.jit(functools.partial(op, **options))(arrays)
    state = arrays.pop("initial_state")
    f = lambda state, x: op(x | {"initial_state": state}, **options)
    in_place = jax.jit(f, donate_argnums=0)
    for _ in range(20):
        actual = in_place(jnp.copy(state), arrays)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_checkpoints_of_segments_are_the_states_of_prefixes():
    x, options = draw_cut("dense")
    T, slots = x["q"].shape[1], 42
    pool = jnp.zeros((slots, *x["initial_state"].shape[1:])).at[0].set(x["initial_state"][0])
    indices = jnp.arange(2, 2 + T // 64, dtype=jnp.int32)[None]
    pooled = {
        "initial_state": pool,
        "state_indices": jnp.array([0], jnp.int32),
        "output_state_indices": jnp.array([1], jnp.int32),
        "checkpoint_indices": indices,
    }
    o, after = run(GPU, x | pooled, **options)
    y, judged = some_columns(x, (o, after[1:2]))
    judge(GPU, judged, truth(y, **options))
    for tokens in (64, 640, 2496):
        prefix = {n: a if n == "initial_state" else a[:, :tokens] for n, a in x.items()}
        y, (_, state) = some_columns(prefix, (o[:, :tokens], after[1 + tokens // 64][None]))
        judge(GPU, (o[:, :tokens, :, 3::8], state), truth(y, **options))


# --- slices ---------------------------------------------------------------------------------------


def run_slices(
    monkeypatch: pytest.MonkeyPatch, chunks: int, x: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """As `run`, in slices of so many chunks; 0: whole rows."""
    asked = []  # the answer is looked up where the call is lowered, and else nowhere
    monkeypatch.setattr(hopper, "slice_chunks", lambda *sizes: asked.append(sizes) or chunks)
    jax.clear_caches()
    results = run(GPU, x, **NORMED)
    assert asked
    return results


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_slices_leave_the_bits_of_whole_rows(monkeypatch, chunks):
    x = draw(GPU, B=2, T=330, H=2, HV=4, state=True)
    expected = run_slices(monkeypatch, 0, x)
    jax.tree.map(np.testing.assert_array_equal, run_slices(monkeypatch, chunks, x), expected)


@pytest.mark.parametrize("H", [32, 68], ids=["pairs", "whole"])
def test_long_rows_are_sliced_without_a_trace(monkeypatch, H):
    chunks = hopper.slice_chunks(1, 8192, H, 1, False)
    assert chunks > 0
    x = draw(GPU, T=8192, H=H, state=True)
    expected = run_slices(monkeypatch, 0, x)
    jax.tree.map(np.testing.assert_array_equal, run_slices(monkeypatch, chunks, x), expected)


def test_slices_of_a_pool_with_checkpoints(monkeypatch):
    x = draw(GPU, B=3, T=330, H=2, state=True)
    pool = np.zeros((13, 2, 128, 128), np.float32)
    pool[:3] = x["initial_state"]
    x |= {"initial_state": pool, "state_indices": np.array([1, -1, 0], np.int32)}
    x["checkpoint_indices"] = np.array([range(3, 8), [2] * 5, range(8, 13)], np.int32)
    expected = run_slices(monkeypatch, 0, x)
    assert np.any(expected[1], (1, 2, 3)).all()
    assert not expected[0][1].any()
    np.testing.assert_array_equal(expected[1][2], pool[2])
    jax.tree.map(np.testing.assert_array_equal, run_slices(monkeypatch, 2, x), expected)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("B, H", [(70000, 1), (1, 70000)])
def test_more_rows_or_heads_than_a_grid_axis_has(B, H):
    """Rows and heads that are all the same give one result, many times."""
    x = draw(GPU, T=1, H=1)
    expected, _ = run(GPU, x)
    x = {name: jnp.broadcast_to(a, (B, 1, H, *a.shape[3:])) for name, a in x.items()}
    o, _ = op(x, output_final_state=False, implementation="ffi")
    assert jnp.array_equal(o, jnp.broadcast_to(expected, o.shape))


def test_more_sequences_than_a_grid_axis_has():
    """2100 sequences of one token, 32 heads."""
    x = draw(GPU, T=2100, H=1)
    packed = {name: jnp.repeat(a, 32, axis=2) for name, a in x.items()}
    offsets = np.arange(2101, dtype=np.int32)
    o, state = op(packed, cu_seqlens=offsets, implementation="ffi")
    rows = {name: np.swapaxes(a, 0, 1) for name, a in x.items()}
    row_o, row_state = run(GPU, rows)
    assert jnp.array_equal(o, jnp.broadcast_to(row_o.swapaxes(0, 1), o.shape))
    assert jnp.array_equal(state, jnp.broadcast_to(row_state, state.shape))


@functools.partial(jax.jit, static_argnames=("B", "T"))
def between(first: dict[str, Any], last: dict[str, Any], B: int, T: int) -> dict[str, Any]:
    """The first tokens of the first row and the last of the last row, a strong gate between."""

    def row_major(name: str) -> jax.Array:
        head, tail = first[name], last[name]
        a = jnp.full((B, T, *head.shape[2:]), -50 if name == "g" else 0, head.dtype)
        return a.at[:1, : head.shape[1]].set(head).at[-1:, T - tail.shape[1] :].set(tail)

    return {name: row_major(name) for name in OPERANDS}


BEYOND_INT32 = {
    "elements": {"B": 1, "T": 524288 + 192, "H": 32},
    "elements_packed": {"B": 1, "T": 524288 + 192, "H": 32},
    "elements_of_many_rows": {"B": 1025, "T": 512, "H": 32},
    "chunks": {"B": 1, "T": 64 * 65536 + 192, "H": 1},  # more of them than a grid axis has
}


@pytest.mark.parametrize("name", BEYOND_INT32)
def test_sizes_beyond_32_bits(name):
    B, T, H = (BEYOND_INT32[name][size] for size in "BTH")
    bf16 = lambda x: {n: a.astype(jnp.bfloat16) for n, a in x.items()}
    first, last = bf16(draw(GPU, T=64, H=H, seed=1)), bf16(draw(GPU, T=256, H=H, seed=2))
    first_o, _ = run(GPU, first)
    last_o, last_state = run(GPU, last)
    packed = {"cu_seqlens": np.array([0, 64, T - 256, T], np.int32)} if "packed" in name else {}
    o, state = op(between(first, last, B=B, T=T), **packed, implementation="ffi")
    assert o.size > 2**31 or name == "chunks"
    np.testing.assert_array_equal(np.asarray(o[:1, :64]), first_o)
    np.testing.assert_array_equal(np.asarray(o[-1:, -256:]), last_o)
    np.testing.assert_array_equal(np.asarray(state[-1:]), last_state)
    assert not jnp.any(o[:1, 64:128]) and not jnp.any(o[-1:, -300:-256])


@pytest.mark.parametrize(
    "T, H", [(16224, 1), (16384, 3), (8191, 96), (8193, 128), (131073, 1), (192, 200)]
)
def test_zeros_finish_and_give_zeros(T, H):
    zeros = jnp.zeros((1, T, H, 128), jnp.bfloat16)
    x = {"q": zeros, "k": zeros, "v": zeros, "g": zeros, "beta": 1 + zeros[..., 0]}
    o, state = op(x, implementation="ffi")
    assert not jnp.any(o) and not jnp.any(state)
