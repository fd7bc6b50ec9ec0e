"""States in a pool: which slots are read and written, and that no other one ever changes.

The truth runs sequence by sequence in float64. Slots that nothing may write have to keep every bit.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import (
    CPU_F32,
    OPERANDS,
    Platform,
    draw,
    op,
    rms_ratio,
    run,
    segments,
    step,
    truth,
)

import jax_kda
from jax_kda import reference

SLOTS = 8
HV = 2
PADDED = [3, 0, 5, -1, -1, 8]  # six rows of which three are padding
OPS = pytest.mark.parametrize(
    "f, T",
    [(op, 70), (op, 1), (step, 1), (step, 3)],
    ids=["chunk-70", "chunk-1", "recurrent-1", "recurrent-3"],
)
STATE_DTYPES = pytest.mark.parametrize(
    "state_dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"]
)


def make(
    platform: Platform, *, B: int, T: int, state_dtype: Any = np.float32, seed: int = 0
) -> dict[str, Any]:
    """Arguments with a pool as `initial_state`, every number of it another."""
    x = draw(platform, B=B, T=T, H=1, HV=HV, N=SLOTS, state=True, seed=seed)
    x["initial_state"] = x["initial_state"].astype(state_dtype)
    return x


def pool_truth(
    x: dict[str, Any],
    *,
    state_indices: Any = None,
    output_state_indices: Any = None,
    checkpoint_indices: Any = None,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    max_segments: int = 1,
) -> tuple[np.ndarray, np.ndarray, set[int]]:
    """The output and the pool in float64, and which slots were written."""
    pool = np.asarray(x["initial_state"], np.float64)
    result, written = pool.copy(), set()
    B, T = x["q"].shape[:2]
    spans = [(row, 0, T) for row in range(B)]
    if cu_seqlens is not None:
        spans = [(0, *span) for span in itertools.pairwise(cu_seqlens)]
    if segment_ids is not None:
        spans = [(b, *s) for b in range(B) for s in segments(segment_ids[b], max_segments)]
    o = np.zeros(x["v"].shape)
    first: Any = output_state_indices if state_indices is None else state_indices
    last: Any = state_indices if output_state_indices is None else output_state_indices

    def write(slot: int, state: np.ndarray) -> None:
        if 0 <= slot < len(pool):
            assert slot not in written
            written.add(slot)
            result[slot] = state[0]

    for n, (row, begin, end) in enumerate(spans):
        if not 0 <= first[n] < len(pool):
            continue
        start = np.zeros_like(pool[:1]) if state_indices is None else pool[first[n]][None]

        def alone(length: int, row=row, begin=begin, start=start) -> tuple[np.ndarray, np.ndarray]:
            part = {name: x[name][row : row + 1, begin : begin + length] for name in OPERANDS}
            return truth(part | {"initial_state": start})

        o[row, begin:end], state = alone(end - begin)
        write(last[n], state)
        if checkpoint_indices is not None:
            for j in range((end - begin) // 64):
                write(checkpoint_indices[n][j], alone(64 * (j + 1))[1])
    return o, result, written


def check(
    platform: Platform, x: dict[str, Any], f: Callable[..., Any], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Runs the kernel, judges every row and slot, and returns what it made."""
    o, pool = run(platform, x, f, **options)
    expected_o, expected, written = pool_truth(x, **options)
    before = x["initial_state"]
    assert o.dtype == x["v"].dtype and pool.dtype == before.dtype and pool.shape == before.shape
    assert rms_ratio(o, expected_o) <= max(platform.tolerance, 2e-3 if o.dtype != np.float32 else 0)
    for row in range(len(o)):
        assert rms_ratio(o[row], expected_o[row]) <= 1.5 * max(platform.tolerance, 1e-5)
    limit = max(platform.tolerance, 2e-3 if pool.dtype != np.float32 else 0)
    for slot in range(len(pool)):
        if slot in written:
            assert rms_ratio(pool[slot], expected[slot]) <= limit, f"slot {slot}"
        else:
            np.testing.assert_array_equal(pool[slot], before[slot], f"slot {slot}")
    return o, pool


# ---- Which slots ---------------------------------------------------------------------------------


@OPS
@STATE_DTYPES
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64, list])
def test_padding_rows(platform: Platform, f: Any, T: int, state_dtype: Any, index_dtype: Any):
    x = make(platform, B=6, T=T, state_dtype=state_dtype)
    for name in OPERANDS:
        x[name][3:] = np.nan  # of padding nothing is read
    indices = PADDED if index_dtype is list else np.array(PADDED, index_dtype)
    o, _ = check(platform, x, f, state_indices=indices)
    assert not np.any(o[3:])


@OPS
def test_indices_far_out_of_range(platform: Platform, f: Any, T: int):
    x = make(platform, B=6, T=T)
    far = np.array([2**31 - 1, -(2**31), SLOTS, 2**32 + 3, -(2**32) + 3, 2**62])
    for name in ("state_indices", "output_state_indices"):
        o, pool = run(platform, x, f, **{name: far})
        np.testing.assert_array_equal(o, np.zeros_like(o))
        np.testing.assert_array_equal(pool, x["initial_state"])


@OPS
def test_slots_to_read_and_others_to_write(platform: Platform, f: Any, T: int):
    x = make(platform, B=6, T=T)
    check(platform, x, f, state_indices=PADDED, output_state_indices=[1, -1, 5, 2, 4, 6])
    shared = [7, 7, 7, 7, 7, 7]  # as beams that leave one prompt
    check(platform, x, f, state_indices=shared, output_state_indices=[0, 1, 2, 3, 4, 8])


@OPS
@STATE_DTYPES
def test_fresh_sequences(platform: Platform, f: Any, T: int, state_dtype: Any):
    x = make(platform, B=6, T=T, state_dtype=state_dtype)
    x["initial_state"][PADDED[:3]] = np.nan  # what was there is not read
    check(platform, x, f, output_state_indices=PADDED)


@pytest.mark.parametrize("T", [1, 70])
def test_read_only(platform: Platform, T: int):
    x = make(platform, B=6, T=T)
    with jax.default_device(jax.local_devices(backend=platform.name)[0]):
        o, nothing = op(x, state_indices=PADDED, output_final_state=False, implementation="ffi")
    assert nothing is None
    np.testing.assert_array_equal(o, run(platform, x, state_indices=PADDED)[0])


@pytest.mark.parametrize("f", [op, step], ids=["chunk", "recurrent"])
def test_packed_sequences(platform: Platform, f: Any):
    x = make(platform, B=1, T=200)
    starts = np.cumsum([0, 1, 15, 0, 17, 64, 0, 63, 30], dtype=np.int32)  # and ten tokens in none
    slots = [3, 0, 5, -1, 1, 9, 2, 7]
    check(platform, x, f, cu_seqlens=starts, state_indices=slots)
    others = [4, -1, 6, 3, 1, 0, -1, 7]
    check(platform, x, f, cu_seqlens=starts, state_indices=slots, output_state_indices=others)
    check(platform, x, f, cu_seqlens=starts, output_state_indices=others)


@pytest.mark.parametrize("f", [op, step], ids=["chunk", "recurrent"])
def test_segments(platform: Platform, f: Any):
    """The unused ones, too, have an index: their states go from slot to slot."""
    x = make(platform, B=2, T=70)
    ids = np.repeat([[1, 0, 2, 3], [0, 1, 2, 0]], [1, 3, 65, 1], axis=1)
    options = {"segment_ids": ids, "max_segments": 4}
    slots = [3, -1, 0, 2, 5, 6, 8, 1]
    check(platform, x, f, **options, state_indices=slots)
    others = [-1, 5, 4, 2, 7, 9, 0, 1]
    check(platform, x, f, **options, state_indices=slots, output_state_indices=others)


@OPS
def test_two_rows_with_one_slot_touch_no_other(platform: Platform, f: Any, T: int):
    x = make(platform, B=6, T=T)
    o, pool = run(platform, x, f, state_indices=[2, 2, 2, 5, 5, 2])
    kept = [0, 1, 3, 4, 6, 7]
    np.testing.assert_array_equal(pool[kept], x["initial_state"][kept])
    assert np.isfinite(o.astype(np.float32)).all() and np.isfinite(pool).all()


@OPS
def test_no_decay_and_no_write_leave_a_slot_bitwise(platform: Platform, f: Any, T: int):
    for state_dtype in (np.float32, jnp.bfloat16):
        x = make(platform, B=6, T=T, state_dtype=state_dtype)
        x["g"][:], x["beta"][:] = 0, 0
        _, pool = run(platform, x, f, state_indices=PADDED)
        np.testing.assert_array_equal(pool, x["initial_state"])


@OPS
def test_one_slot_and_no_rows(platform: Platform, f: Any, T: int):
    x = make(platform, B=2, T=T)
    x["initial_state"] = x["initial_state"][:1]
    check(platform, x, f, state_indices=[1, 0])
    none = {name: x[name][:0] for name in OPERANDS} | {"initial_state": x["initial_state"]}
    o, pool = run(platform, none, f, state_indices=np.zeros(0, np.int32))
    assert o.shape[0] == 0
    np.testing.assert_array_equal(pool, x["initial_state"])


@pytest.mark.parametrize("f", [op, step], ids=["chunk", "recurrent"])
def test_no_tokens_move_states(platform: Platform, f: Any):
    x = make(platform, B=3, T=0)
    _, pool = run(platform, x, f, state_indices=[0, 1, -1], output_state_indices=[4, 1, 5])
    expected = x["initial_state"].copy()
    expected[4] = expected[0]
    np.testing.assert_array_equal(pool, expected)


@OPS
def test_equals_states_in_order(platform: Platform, f: Any, T: int):
    """Bitwise: a pool changes where states are, not what is done to them."""
    x = make(platform, B=3, T=T)
    slots = [6, 1, 4]
    o, pool = run(platform, x, f, state_indices=slots)
    in_order = x | {"initial_state": x["initial_state"][slots]}
    expected_o, states = run(platform, in_order, f)
    np.testing.assert_array_equal(o, expected_o)
    np.testing.assert_array_equal(pool[slots], states)


@OPS
def test_reference(f: Any, T: int):
    """Plain JAX, eager and in float64: the same rules, exactly."""
    with jax.enable_x64(True):
        x = make(CPU_F32, B=6, T=T, seed=1)
        x = {name: a.astype(np.float64) for name, a in x.items()}
        options: dict[str, Any]
        for options in (
            {"state_indices": PADDED},
            {"state_indices": PADDED, "output_state_indices": [1, -1, 5, 2, 4, 6]},
            {"output_state_indices": PADDED},
        ):
            o, pool = f(x, **options, implementation="reference")
            expected_o, expected, _ = pool_truth(x, **options)
            np.testing.assert_allclose(o, expected_o, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(pool, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_nan_of_padding_has_no_gradient(packed: bool):
    x = make(CPU_F32, B=6, T=3)
    options: dict[str, Any] = {"state_indices": PADDED}
    if packed:
        x = {n: a.reshape(1, 18, *a.shape[2:]) if n in OPERANDS else a for n, a in x.items()}
        options["cu_seqlens"] = np.arange(0, 19, 3)
    x["A_log"] = np.zeros(HV, np.float32)

    @jax.jit
    @jax.grad
    def gradient(x: Any) -> Any:
        o, pool = op(x, **options, use_gate_in_kernel=True, implementation="reference")
        return jnp.sum(o * o) + jnp.sum(pool * pool)

    clean = gradient(x)
    for name in OPERANDS:
        tokens = x[name].reshape(6, 3, *x[name].shape[2:])  # a view
        tokens[3:] = np.nan
    for name, actual in gradient(x).items():
        np.testing.assert_array_equal(actual, clean[name], name)


@OPS
def test_gradient_is_that_of_gathering_and_scattering(f: Any, T: int):
    x = make(CPU_F32, B=3, T=T)
    read, written = np.array([3, 0, 5]), np.array([3, 6, 5])
    weights = np.random.default_rng(1).standard_normal(x["initial_state"].shape, np.float32)

    def by_hand(x: Any) -> Any:
        pool = x["initial_state"]
        o, states = op(x | {"initial_state": pool[read]}, implementation="reference")
        return o, pool.at[written].set(states)

    def gradient(call: Any) -> Any:
        def loss(x: Any) -> Any:
            o, pool = call(x)
            return jnp.sum(o * o) + jnp.sum(pool * weights)

        return jax.jit(jax.grad(loss))({name: jnp.asarray(a) for name, a in x.items()})

    expected = gradient(by_hand)
    actual = gradient(lambda x: f(x, state_indices=read, output_state_indices=written))
    for name, true in expected.items():
        np.testing.assert_allclose(actual[name], true, rtol=1e-5, atol=1e-6, err_msg=name)
    untouched = np.array([1, 2, 4, 7])
    np.testing.assert_array_equal(actual["initial_state"][untouched], weights[untouched])


def test_malformed_offsets_reach_only_the_slots_of_their_row():
    """In plain JAX, as on a GPU; the CPU's kernel has an error instead."""
    x = make(CPU_F32, B=1, T=20)
    options = {"cu_seqlens": np.array([0, 15, 10]), "state_indices": [2, 5]}
    o, pool = op(x, **options, implementation="reference")
    assert np.isnan(o).all() and np.isnan(pool[np.array([2, 5])]).all()
    kept = np.array([0, 1, 3, 4, 6, 7])
    np.testing.assert_array_equal(pool[kept], x["initial_state"][kept])
    with pytest.raises(RuntimeError, match="`cu_seqlens` of row 0 must not decrease"):
        run(CPU_F32, x, **options)


# ---- Checkpoints ---------------------------------------------------------------------------------


@STATE_DTYPES
@pytest.mark.parametrize("T, rows", [(63, [[]] * 4), (64, [[4], [-1], [6], [7]]), (130, None)])
def test_checkpoints(platform: Platform, T: int, rows: Any, state_dtype: Any):
    x = make(platform, B=4, T=T, state_dtype=state_dtype)
    if rows is None:
        rows = [[4, 6], [8, 5], [-1, 9], [7, -1]]
    checkpoints = np.array(rows, np.int32).reshape(4, T // 64)
    options = {"state_indices": [3, 0, 1, -1], "checkpoint_indices": checkpoints}
    check(platform, x, op, **options)
    check(platform, x, op, **options, output_state_indices=[-1, 2, 1, 0])
    check(platform, x, op, output_state_indices=[-1, 2, 1, 0], checkpoint_indices=checkpoints)


def test_checkpoints_of_packed_sequences(platform: Platform):
    """A sequence counts its own tokens; where it is shorter nothing is written."""
    x = make(platform, B=1, T=400)
    starts = np.cumsum([0, 63, 64, 0, 129, 70, 64], dtype=np.int32)
    checkpoints = np.full((6, 6), 7, np.int32)  # were one written that must not be, 7 would change
    checkpoints[1, 0], checkpoints[3, :2], checkpoints[4, 0] = 0, (1, -1), 2
    options = {"cu_seqlens": starts, "checkpoint_indices": checkpoints}
    check(platform, x, op, **options, state_indices=[3, 4, 5, 6, 8, 10])


def test_checkpoints_of_segments(platform: Platform):
    x = make(platform, B=2, T=140)
    ids = np.repeat([[1, 0, 2], [0, 3, 4]], [66, 4, 70], axis=1)
    checkpoints = np.array([[0, 7], [1, 7], [7, 7], [2, 7]], np.int32)
    options = {"segment_ids": ids, "max_segments": 2, "checkpoint_indices": checkpoints}
    check(platform, x, op, **options, state_indices=[3, 4, 8, 6])


def test_a_checkpoint_is_the_state_of_a_shorter_prompt(platform: Platform):
    """Bitwise; and to go on from it is to have the prefix cached."""
    x = make(platform, B=2, T=200)
    prefix = lambda n: {name: x[name][:, :n] for name in OPERANDS}
    checkpoints = np.array([[2, 3, 4], [5, 6, 7]], np.int32)
    _, pool = run(platform, x, output_state_indices=[0, 1], checkpoint_indices=checkpoints)
    for j in range(3):
        _, states = run(platform, prefix(64 * (j + 1)))
        np.testing.assert_array_equal(pool[checkpoints[:, j]], states)

    # Other prompts that begin with the same 128 tokens.
    y = make(platform, B=2, T=72, seed=3)
    full = {n: np.concatenate([a, y[n]], axis=1) for n, a in prefix(128).items()}
    full_o, full_states = run(platform, full)
    go_on = functools.partial(run, platform, y | {"initial_state": pool})
    o, after = go_on(state_indices=[3, 6], output_state_indices=[0, 1])
    np.testing.assert_array_equal(o, full_o[:, 128:])
    np.testing.assert_array_equal(after[:2], full_states)
    np.testing.assert_array_equal(after[2:], pool[2:])
    wrong_o, _ = go_on(state_indices=[0, 1])  # the ends of the first prompts
    assert rms_ratio(wrong_o, full_o[:, 128:]) > 0.05


# ---- A server's life -----------------------------------------------------------------------------


@pytest.mark.parametrize("borders", [(0, 64, 320, 640), (0, 128, 640), (0, 37, 640), (0, 639, 640)])
def test_a_prompt_in_parts(platform: Platform, borders: tuple[int, ...]):
    T = borders[-1]
    x = make(platform, B=2, T=T)
    slots = [5, 2]
    whole_o, whole = run(platform, x, state_indices=slots)
    outputs, pool = [], x["initial_state"]
    for begin, end in itertools.pairwise(borders):
        part = {name: x[name][:, begin:end] for name in OPERANDS}
        o, pool = run(platform, part | {"initial_state": pool}, state_indices=slots)
        outputs.append(o)
    o = np.concatenate(outputs, axis=1)
    if all(border % 64 == 0 for border in borders):
        np.testing.assert_array_equal(o, whole_o)
        np.testing.assert_array_equal(pool, whole)
    for a, b in ((o, whole_o), (pool[slots], whole[slots])):
        assert rms_ratio(a, b) <= 2 * platform.tolerance


@pytest.mark.parametrize("T", [0, 1, 15, 64, 65, 200])
def test_prefill_then_decode_equals_prefill_of_all(T: int, platform: Platform):
    n, slots = 5, np.array([6, -1, 3])
    x = make(platform, B=3, T=T + n)
    part = lambda begin, end: {name: x[name][:, begin:end] for name in OPERANDS}
    expected_o, expected, written = pool_truth(x, output_state_indices=slots)
    fresh = part(0, T) | {"initial_state": x["initial_state"]}
    o, pool = run(platform, fresh, output_state_indices=slots)
    outputs = [o]
    for t in range(T, T + n):
        o, pool = run(platform, part(t, t + 1) | {"initial_state": pool}, step, state_indices=slots)
        outputs.append(o)
    o = np.concatenate(outputs, axis=1)
    assert written == {6, 3}
    assert rms_ratio(o, expected_o) <= platform.tolerance
    assert not np.any(o[1])
    for slot in range(SLOTS):
        if slot in written:
            assert rms_ratio(pool[slot], expected[slot]) <= platform.tolerance
        else:
            np.testing.assert_array_equal(pool[slot], x["initial_state"][slot])


@pytest.mark.parametrize("f", [op, step], ids=["chunk", "recurrent"])
def test_stacked_pools_in_a_scan_over_layers(platform: Platform, f: Any):
    """Where XLA fuses the slicing into the call, the pool that comes back is other memory."""
    layers, rows = 3, np.array([4, -1, 2])
    x = make(platform, B=3, T=2)
    pools = np.stack([x["initial_state"] * (i + 1) for i in range(layers)])
    tokens = {name: x[name] for name in OPERANDS}

    @functools.partial(jax.jit, donate_argnums=1)
    def all_layers(tokens, pools):
        def layer(v, pool):
            x = tokens | {"v": v, "initial_state": pool}
            o, pool = f(x, state_indices=rows, implementation="ffi")
            return o, pool

        return jax.lax.scan(layer, tokens["v"], pools)

    o, result = all_layers(tokens, jnp.asarray(pools))
    v, limit = tokens["v"], 3 * platform.tolerance
    for pool, after in zip(pools, np.asarray(result), strict=True):
        v, expected = run(platform, tokens | {"v": v, "initial_state": pool}, f, state_indices=rows)
        assert rms_ratio(after[[4, 2]], expected[[4, 2]]) <= limit
        kept = [0, 1, 3, 5, 6, 7]
        np.testing.assert_array_equal(after[kept], pool[kept])
    assert rms_ratio(o, v) <= limit


def test_fwd_with_a_pool(platform: Platform):
    """The in-place call: an array, a Ref, only reading, and fresh sequences."""
    x = draw(platform, B=3, T=70, H=HV, N=SLOTS, state=True, raw=True)
    x["A_log"] = np.zeros(HV, np.float32)
    tokens = {name: a for name, a in x.items() if name != "initial_state"}
    fwd: Any = functools.partial(
        jax_kda.fwd, **tokens, scale=None, lower_bound=-5.0, out=None, dt_bias=None
    )
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    functional = functools.partial(run, platform, x, lower_bound=-5.0, **dict.fromkeys(flags, True))

    def equal(actual: Any, expected: Any) -> None:
        jax.tree.map(np.testing.assert_array_equal, actual, expected)

    read, write = {"state_indices": [6, -1, 3]}, {"output_state_indices": [0, 1, 2]}
    for indices in (read, write, read | write):
        expected = functional(**indices)
        pool = jnp.asarray(x["initial_state"])
        equal(fwd(initial_state=pool, final_state=pool, **indices), expected)
        equal(fwd(final_state=pool, **indices), expected)
        ref = jax.new_ref(pool)
        in_place = lambda ref, indices=indices: fwd(initial_state=ref, final_state=ref, **indices)
        o, nothing = jax.jit(in_place)(ref)
        assert nothing is None
        equal((o, ref[...]), expected)
    equal(fwd(initial_state=x["initial_state"], **read), functional(**read)[0])


def test_reference_takes_pools():
    x = make(CPU_F32, B=2, T=2)
    expected = step(x, state_indices=[1, 0], implementation="reference")
    results = reference.chunk_kda(**x, output_final_state=True, state_indices=[1, 0])
    jax.tree.map(np.testing.assert_array_equal, results, expected)
