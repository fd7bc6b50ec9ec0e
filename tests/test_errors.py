"""What is wrong is said at trace time: the argument's name, the rule, and what was given.

Each row of a table is one message. B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6 everywhere.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kda import chunk_kda, fwd, kda_gate, primitive, recurrent_kda, reference

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6
FLOATS = 'must have dtype bfloat16 or float32 (float64 only with implementation="reference")'
STATIC = (
    "must be a Python float, known when the function is traced "
    '(under jax.jit list it in static_argnames=("scale", "lower_bound"))'
)
GATE: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": np.zeros(HV, np.float32)}


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    x = {"q": zeros(B, T, H, K), "k": zeros(B, T, H, K), "v": zeros(B, T, HV, V)}
    return x | {"g": zeros(B, T, HV, K), "beta": zeros(B, T, HV)} | changes


def packed(**changes: Any) -> dict[str, Any]:
    return {name: a[:1] for name, a in arguments().items()} | changes


def pooled(**changes: Any) -> dict[str, Any]:
    x = arguments(initial_state=zeros(7, HV, V, K), output_final_state=True)
    return x | {"state_indices": np.array([3, -1])} | changes


SHAPES = [
    (arguments(q=zeros(B, T, K)), "`q` must have shape [B, T, H, K]; got [2, 5, 8]"),
    (arguments(v=zeros(B, T, HV * V)), "`v` must have shape [B, T, HV, V]; got [2, 5, 24]"),
    (
        arguments(k=zeros(B, T, H, K + 1)),
        "`k` must have shape [B, T, H, K] = [2, 5, 2, 8]; got [2, 5, 2, 9]",
    ),
    (
        arguments(v=zeros(B, T + 1, HV, V)),
        "`v` must have shape [B, T, HV, V] = [2, 5, 4, 6]; got [2, 6, 4, 6]",
    ),
    (
        arguments(v=zeros(B, T, 3, V)),
        "`v` must have a number of heads HV that is a positive multiple of q's H; "
        "got HV = 3, H = 2",
    ),
    (
        arguments(v=zeros(B, T, 1, V)),
        "`v` must have a number of heads HV that is a positive multiple of q's H; "
        "got HV = 1, H = 2",
    ),
    (
        arguments(g=zeros(B, T, HV)),
        "`g` must have shape [B, T, HV, K] = [2, 5, 4, 8]; got [2, 5, 4]",
    ),
    (
        arguments(g=zeros(B, T, H, K)),
        "`g` must have shape [B, T, HV, K] = [2, 5, 4, 8]; got [2, 5, 2, 8]",
    ),
    (
        arguments(beta=zeros(B, T, H)),
        "`beta` must have shape [B, T, HV] = [2, 5, 4]; got [2, 5, 2]",
    ),
    (
        arguments(beta=zeros(B, HV, T)),
        "`beta` must have shape [B, T, HV] = [2, 5, 4]; got [2, 4, 5]",
    ),
    (
        {name: zeros(1, 3, 1, 257) for name in ("q", "k", "v", "g")} | {"beta": zeros(1, 3, 1)},
        "`q` must have a head size K from 1 to 256 "
        '(implementation="reference" takes larger ones); got K = 257',
    ),
    (
        arguments(v=zeros(B, T, HV, 512)),
        "`v` must have a head size V from 1 to 256 "
        '(implementation="reference" takes larger ones); got V = 512',
    ),
    (
        arguments(v=zeros(B, T, HV, 0)),
        "`v` must have a head size V from 1 to 256 "
        '(implementation="reference" takes larger ones); got V = 0',
    ),
    (
        arguments(initial_state=zeros(B, HV, K, V)),
        "`initial_state` must have shape [N, HV, V, K] = [2, 4, 6, 8]; got [2, 4, 8, 6]",
    ),
    (
        packed(initial_state=zeros(2, HV, V, K), cu_seqlens=[0, 2, 4, 5]),
        "`initial_state` must have shape [N, HV, V, K] = [3, 4, 6, 8]; got [2, 4, 6, 8]",
    ),
    (
        arguments(
            initial_state=zeros(B, HV, V, K), segment_ids=np.ones((B, T), int), max_segments=3
        ),
        "`initial_state` must have shape [N, HV, V, K] = [6, 4, 6, 8]; got [2, 4, 6, 8]",
    ),
    (
        arguments(**GATE | {"A_log": zeros(H)}),
        "`A_log` must have shape [HV] = [4]; got [2]",
    ),
    (
        arguments(**GATE, dt_bias=zeros(H * K)),
        "`dt_bias` must have shape [HV, K] = [4, 8] or [HV * K] = [32]; got [16]",
    ),
    (
        packed(cu_seqlens=np.array([[0, 5]])),
        "`cu_seqlens` must have shape [N + 1] with N at least 1; got [1, 2]",
    ),
    (
        packed(cu_seqlens=np.array([0])),
        "`cu_seqlens` must have shape [N + 1] with N at least 1; got [1]",
    ),
    (
        arguments(segment_ids=np.ones((B, T + 1), int), max_segments=2),
        "`segment_ids` must have shape [B, T] = [2, 5]; got [2, 6]",
    ),
    (
        pooled(initial_state=zeros(7, HV, K, V)),
        "`initial_state` must have shape [slots, HV, V, K] = [slots, 4, 6, 8] with at least one "
        "slot; got [7, 4, 8, 6]",
    ),
    (
        pooled(initial_state=zeros(0, HV, V, K)),
        "`initial_state` must have shape [slots, HV, V, K] = [slots, 4, 6, 8] with at least one "
        "slot; got [0, 4, 6, 8]",
    ),
    (
        pooled(state_indices=[1, 2, 3]),
        "`state_indices` must have shape [N] = [2]; got [3]",
    ),
    (
        pooled(output_state_indices=np.zeros((2, 1), int)),
        "`output_state_indices` must have shape [N] = [2]; got [2, 1]",
    ),
    (
        pooled(segment_ids=np.ones((B, T), int), max_segments=3),
        "`state_indices` must have shape [N] = [6]; got [2]",
    ),
    (
        pooled(checkpoint_indices=[[1], [2]]),
        "`checkpoint_indices` must have shape [N, T//64] = [2, 0]; got [2, 1]",
    ),
]

VALUES = [
    (
        arguments(cu_seqlens=[0, 5]),
        "`cu_seqlens` must come with B = 1 (one packed row); got B = 2",
    ),
    (
        packed(cu_seqlens=[0, 5], segment_ids=np.ones((1, T), int), max_segments=1),
        "`segment_ids` must be None when cu_seqlens is given; got both",
    ),
    (
        arguments(segment_ids=np.ones((B, T), int)),
        "`max_segments` must be given with segment_ids; got None",
    ),
    (
        arguments(segment_ids=np.ones((B, T), int), max_segments=0),
        "`max_segments` must be at least 1; got 0",
    ),
    (arguments(max_segments=2), "`max_segments` must be None without segment_ids; got 2"),
    (
        arguments(A_log=zeros(HV)),
        "`A_log` must be None unless use_gate_in_kernel=True; "
        "got an array of shape [4] and dtype float32",
    ),
    (
        arguments(dt_bias=zeros(HV, K)),
        "`dt_bias` must be None unless use_gate_in_kernel=True; "
        "got an array of shape [4, 8] and dtype float32",
    ),
    (
        arguments(lower_bound=-5.0),
        "`lower_bound` must be None unless use_gate_in_kernel=True; got -5.0",
    ),
    (
        arguments(use_gate_in_kernel=True),
        "`A_log` must be given when the gate has no lower_bound; got None",
    ),
    (arguments(**GATE, lower_bound=-5.1), "`lower_bound` must be in [-5, 0); got -5.1"),
    (arguments(**GATE, lower_bound=0.0), "`lower_bound` must be in [-5, 0); got 0.0"),
    (arguments(**GATE, lower_bound=1), "`lower_bound` must be in [-5, 0); got 1.0"),
    (
        arguments(allow_neg_eigval=True),
        "`allow_neg_eigval` must be False unless use_beta_sigmoid_in_kernel=True; got True",
    ),
    (
        pooled(initial_state=None),
        "`initial_state` must be the pool that indices choose slots of, [slots, HV, V, K]; "
        "got None",
    ),
    (
        pooled(output_state_indices=[1, 2], output_final_state=False),
        "`output_state_indices` must be None where no state is returned; got [1, 2]",
    ),
    (
        pooled(checkpoint_indices=np.zeros((B, 0), np.int32), output_final_state=False),
        "`checkpoint_indices` must be None where no state is returned; "
        "got an array of shape [2, 0] and dtype int32",
    ),
    (
        pooled(state_indices=None, checkpoint_indices=np.zeros((B, 0), np.int32)),
        "`checkpoint_indices` must come with state_indices or output_state_indices; "
        "got an array of shape [2, 0] and dtype int32 alone",
    ),
    (arguments(scale=float("nan")), "`scale` must be finite; got nan"),
    (
        arguments(implementation="cuda"),
        '`implementation` must be None, "ffi" or "reference"; got \'cuda\'',
    ),
]

HALF, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
TYPES = [
    (arguments(q=None), "`q` must be an array; got None"),
    (arguments(q=zeros(B, T, H, K, dtype=HALF)), f"`q` {FLOATS}; got float16"),
    (arguments(k=zeros(B, T, H, K, dtype=BF16)), "`k` must have q's dtype, float32; got bfloat16"),
    (arguments(v=zeros(B, T, HV, V, dtype=BF16)), "`v` must have q's dtype, float32; got bfloat16"),
    (arguments(g=zeros(B, T, HV, K, dtype=HALF)), f"`g` {FLOATS}; got float16"),
    (arguments(beta=np.ones((B, T, HV), np.int32)), f"`beta` {FLOATS}; got int32"),
    (
        arguments(initial_state=zeros(B, HV, V, K, dtype=HALF)),
        f"`initial_state` {FLOATS}; got float16",
    ),
    (arguments(**GATE | {"A_log": zeros(HV, dtype=HALF)}), f"`A_log` {FLOATS}; got float16"),
    (arguments(**GATE, dt_bias=zeros(HV, K, dtype=HALF)), f"`dt_bias` {FLOATS}; got float16"),
    (
        packed(cu_seqlens=np.array([0.0, 5.0], np.float32)),
        "`cu_seqlens` must have dtype int32 or int64; got float32",
    ),
    (
        packed(cu_seqlens=np.array([0, 5], np.uint32)),
        "`cu_seqlens` must have dtype int32 or int64; got uint32",
    ),
    (
        packed(cu_seqlens=np.array([0, 5], np.int16)),
        "`cu_seqlens` must have dtype int32 or int64; got int16",
    ),
    (
        arguments(segment_ids=zeros(B, T), max_segments=1),
        "`segment_ids` must have an integer dtype; got float32",
    ),
    (
        arguments(segment_ids=np.ones((B, T), int), max_segments=1.0),
        "`max_segments` must be a Python int; got 1.0",
    ),
    (
        pooled(initial_state=zeros(7, HV, V, K, dtype=HALF)),
        f"`initial_state` {FLOATS}; got float16",
    ),
    (
        pooled(state_indices=np.zeros(B, np.float32)),
        "`state_indices` must have dtype int32 or int64; got float32",
    ),
    (
        pooled(output_state_indices=np.zeros(B, np.uint32)),
        "`output_state_indices` must have dtype int32 or int64; got uint32",
    ),
    (
        pooled(checkpoint_indices=np.zeros((B, 0), bool)),
        "`checkpoint_indices` must have dtype int32 or int64; got bool",
    ),
    (arguments(scale="0.1"), f"`scale` {STATIC}; got '0.1'"),
    (arguments(scale=True), f"`scale` {STATIC}; got True"),
    (arguments(scale=zeros()), f"`scale` {STATIC}; got an array of shape [] and dtype float32"),
    (
        arguments(**GATE, lower_bound=zeros()),
        f"`lower_bound` {STATIC}; got an array of shape [] and dtype float32",
    ),
    (
        arguments(output_final_state=zeros()),
        "`output_final_state` must be a Python bool; got an array of shape [] and dtype float32",
    ),
    (arguments(use_gate_in_kernel=1), "`use_gate_in_kernel` must be a Python bool; got 1"),
]

ERRORS = [(ValueError, *row) for row in SHAPES + VALUES] + [(TypeError, *row) for row in TYPES]
NAMES = [re.sub(r"\W+", "_", message)[1:60] for _, _, message in ERRORS]


def raises(error: type[Exception], message: str):
    return pytest.raises(error, match=rf"^{re.escape(message)}(\n|$)")  # jit adds lines


@pytest.mark.parametrize(("error", "x", "message"), ERRORS, ids=NAMES)
def test_chunk_kda(error: type[Exception], x: dict[str, Any], message: str):
    with raises(error, message):
        chunk_kda(**x)


@pytest.mark.parametrize(("error", "x", "message"), ERRORS, ids=NAMES)
def test_reference(error: type[Exception], x: dict[str, Any], message: str):
    """The same errors, but that it runs any head size."""
    if "takes larger ones" in message and "= 0" not in message:
        jax.eval_shape(lambda x: reference.chunk_kda(**x), x)
        return
    with raises(error, message):
        reference.chunk_kda(**x)


def test_only_the_reference_takes_float64():
    with jax.enable_x64(True):
        x = arguments(q=zeros(B, T, H, K, dtype=jnp.float64))
        for implementation in (None, "ffi"):
            with raises(TypeError, f"`q` {FLOATS}; got float64"):
                chunk_kda(**x, implementation=implementation)
        x = arguments(g=zeros(B, T, HV, K, dtype=jnp.float64))
        with raises(TypeError, f"`g` {FLOATS}; got float64"):
            chunk_kda(**x)
        wide = {name: a.astype(jnp.float64) for name, a in arguments().items()}
        o, state = chunk_kda(**wide, output_final_state=True, implementation="reference")
    assert o.dtype == jnp.float64
    assert state is not None
    assert state.dtype == jnp.float64


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_static_arguments_of_chunk_kda_cannot_be_traced(name: str):
    options = GATE if name == "lower_bound" else {}
    with raises(TypeError, f"`{name}` {STATIC}; got a traced array of shape [] and dtype float32"):
        jax.jit(lambda value: chunk_kda(**arguments(), **options, **{name: value}))(-0.5)


# ---- recurrent_kda -------------------------------------------------------------------------------

RECURRENT_ERRORS = [
    (
        ValueError,
        {n: zeros(B, 17, *a.shape[2:]) for n, a in arguments().items()},
        "`q` must have at most 16 tokens T a sequence where none are packed (chunk_kda takes any "
        "number); got T = 17",
    ),
    (
        ValueError,
        arguments(state=zeros(B, HV, K, V)),
        "`state` must have shape [N, HV, V, K] = [2, 4, 6, 8]; got [2, 4, 8, 6]",
    ),
    (
        ValueError,
        arguments(state=zeros(7, HV, V, K)),
        "`state` must have shape [N, HV, V, K] = [2, 4, 6, 8]; got [7, 4, 6, 8]",
    ),
    (
        ValueError,
        arguments(state=zeros(7, HV, K, V), state_indices=[1, 2]),
        "`state` must have shape [slots, HV, V, K] = [slots, 4, 6, 8] with at least one slot; "
        "got [7, 4, 8, 6]",
    ),
    (
        ValueError,
        arguments(output_state_indices=[1, 2]),
        "`state` must be the pool that indices choose slots of, [slots, HV, V, K]; got None",
    ),
    (
        ValueError,
        arguments(state=zeros(7, HV, V, K), state_indices=[1]),
        "`state_indices` must have shape [N] = [2]; got [1]",
    ),
    (
        TypeError,
        arguments(state=zeros(B, HV, V, K, dtype=HALF)),
        f"`state` {FLOATS}; got float16",
    ),
    (
        TypeError,
        arguments(k=zeros(B, T, H, K, dtype=BF16)),
        "`k` must have q's dtype, float32; got bfloat16",
    ),
    (
        ValueError,
        arguments(implementation="cuda"),
        '`implementation` must be None, "ffi" or "reference"; got \'cuda\'',
    ),
]


@pytest.mark.parametrize(
    ("error", "x", "message"),
    RECURRENT_ERRORS,
    ids=[re.sub(r"\W+", "_", message)[1:60] for *_, message in RECURRENT_ERRORS],
)
def test_recurrent_kda(error: type[Exception], x: dict[str, Any], message: str):
    with raises(error, message):
        recurrent_kda(**x)


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_static_arguments_of_recurrent_kda_cannot_be_traced(name: str):
    options = GATE if name == "lower_bound" else {}
    with raises(TypeError, f"`{name}` {STATIC}; got a traced array of shape [] and dtype float32"):
        jax.jit(lambda value: recurrent_kda(**arguments(), **options, **{name: value}))(-0.5)


# ---- fwd -----------------------------------------------------------------------------------------


def fwd_arguments(**changes: Any) -> dict[str, Any]:
    x = arguments() | {"scale": 1.0, "out": None, "A_log": zeros(HV), "dt_bias": zeros(HV, K)}
    return x | {"lower_bound": None} | changes


def packed_fwd_arguments(**changes: Any) -> dict[str, Any]:
    return fwd_arguments(**packed()) | changes


POOL = zeros(7, HV, V, K)
OTHER_POOL = (
    "`final_state` must be the same array or Ref as initial_state, the pool, when there are "
    "indices; got another one"
)
FWD_ERRORS = [
    (
        ValueError,
        fwd_arguments(initial_state=POOL, final_state=zeros(7, HV, V, K), state_indices=[1, 2]),
        OTHER_POOL,
    ),
    (
        ValueError,
        fwd_arguments(initial_state=POOL, final_state=zeros(B, HV, V, K), state_indices=[1, 2]),
        OTHER_POOL,
    ),
    (
        ValueError,
        fwd_arguments(state_indices=[1, 2]),
        "`initial_state` must be the pool that indices choose slots of, [slots, HV, V, K]; "
        "got None",
    ),
    (
        ValueError,
        fwd_arguments(final_state=zeros(7, HV, K, V), output_state_indices=[1, 2]),
        "`final_state` must have shape [slots, HV, V, K] = [slots, 4, 6, 8] with at least one "
        "slot; got [7, 4, 8, 6]",
    ),
    (
        ValueError,
        fwd_arguments(initial_state=POOL, output_state_indices=[1, 2]),
        "`output_state_indices` must be None where no state is returned; got [1, 2]",
    ),
    (
        ValueError,
        fwd_arguments(output_state_indices=[1, 2]),
        "`output_state_indices` must be None where no state is returned; got [1, 2]",
    ),
    (
        ValueError,
        fwd_arguments(out=zeros(B, T, HV, K)),
        "`out` must have shape [B, T, HV, V] = [2, 5, 4, 6]; got [2, 5, 4, 8]",
    ),
    (
        TypeError,
        fwd_arguments(out=zeros(B, T, HV, V, dtype=BF16)),
        "`out` must have v's dtype, float32; got bfloat16",
    ),
    (
        ValueError,
        fwd_arguments(final_state=zeros(B, HV, K, V)),
        "`final_state` must have shape [N, HV, V, K] = [2, 4, 6, 8]; got [2, 4, 8, 6]",
    ),
    (
        ValueError,
        packed_fwd_arguments(final_state=zeros(1, HV, V, K), cu_seqlens=[0, 2, 5]),
        "`final_state` must have shape [N, HV, V, K] = [2, 4, 6, 8]; got [1, 4, 6, 8]",
    ),
    (
        TypeError,
        fwd_arguments(final_state=zeros(B, HV, V, K, dtype=HALF)),
        f"`final_state` {FLOATS}; got float16",
    ),
    (
        TypeError,
        fwd_arguments(initial_state=zeros(B, HV, V, K), final_state=zeros(B, HV, V, K, dtype=BF16)),
        "`final_state` must have initial_state's dtype, float32; got bfloat16",
    ),
    (
        ValueError,
        fwd_arguments(A_log=None),
        "`A_log` must be given when the gate has no lower_bound; got None",
    ),
    (ValueError, fwd_arguments(lower_bound=-6), "`lower_bound` must be in [-5, 0); got -6.0"),
    (
        ValueError,
        fwd_arguments(cu_seqlens=[0, 5]),
        "`cu_seqlens` must come with B = 1 (one packed row); got B = 2",
    ),
]


@pytest.mark.parametrize(
    ("error", "x", "message"), FWD_ERRORS, ids=[message[1:40] for *_, message in FWD_ERRORS]
)
def test_fwd(error: type[Exception], x: dict[str, Any], message: str):
    with raises(error, message):
        fwd(**x)


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_static_arguments_of_fwd_cannot_be_traced(name: str):
    other = {"scale": "lower_bound", "lower_bound": "scale"}[name]
    jitted = jax.jit(fwd, static_argnames=other)
    with raises(TypeError, f"`{name}` {STATIC}; got a traced array of shape [] and dtype float32"):
        jitted(**fwd_arguments(**{"scale": 1.0, "lower_bound": -1.0}))


def test_a_refused_call_consumes_no_donated_buffer():
    jitted = jax.jit(
        fwd, static_argnames=("scale", "lower_bound"), donate_argnames=("out", "final_state")
    )
    out, final_state = zeros(B, T, HV, V), zeros(B, HV, V, K)
    wrong = fwd_arguments(out=out, final_state=final_state, beta=zeros(B, T, H))
    with pytest.raises(ValueError, match="`beta` must have shape"):
        jitted(**wrong)
    assert not out.is_deleted()
    assert not final_state.is_deleted()
    o, S = jitted(**fwd_arguments(out=out, final_state=final_state))
    assert np.isfinite(o).all()
    assert np.isfinite(S).all()


# ---- kda_gate ------------------------------------------------------------------------------------

GATE_ERRORS = [
    (ValueError, {"x": zeros(K)}, "`x` must have shape [..., HV, K]; got [8]"),
    (TypeError, {"x": zeros(HV, K, dtype=HALF)}, f"`x` {FLOATS}; got float16"),
    (
        ValueError,
        {"x": zeros(HV, K)},
        "`A_log` must be given when the gate has no lower_bound; got None",
    ),
    (
        ValueError,
        {"x": zeros(HV, K), "A_log": zeros(H)},
        "`A_log` must have shape [HV] = [4]; got [2]",
    ),
    (
        ValueError,
        {"x": zeros(HV, K), "dt_bias": zeros(K), "lower_bound": -1.0},
        "`dt_bias` must have shape [HV, K] = [4, 8] or [HV * K] = [32]; got [8]",
    ),
    (
        ValueError,
        {"x": zeros(HV, K), "lower_bound": -8.0},
        "`lower_bound` must be in [-5, 0); got -8.0",
    ),
]


@pytest.mark.parametrize(
    ("error", "x", "message"), GATE_ERRORS, ids=[message[1:40] for *_, message in GATE_ERRORS]
)
def test_kda_gate(error: type[Exception], x: dict[str, Any], message: str):
    with raises(error, message):
        kda_gate(**x)


# ---- what is not an error ------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.float64(0.5), 1, np.int64(1), None])
def test_scale_may_be_any_static_number(scale: Any):
    o, _ = chunk_kda(**arguments(), scale=scale)
    assert o.shape == (B, T, HV, V)


def test_parameters_of_the_gate_may_be_bfloat16_and_flat():
    A_log, dt_bias = np.linspace(-1, 1, HV), np.linspace(-2, 2, HV * K)
    x = arguments(
        **GATE | {"A_log": jnp.asarray(A_log, BF16), "dt_bias": jnp.asarray(dt_bias, BF16)}
    )
    flat, _ = chunk_kda(**x)
    x |= {"A_log": x["A_log"].astype(F32), "dt_bias": x["dt_bias"].astype(F32).reshape(HV, K)}
    np.testing.assert_array_equal(flat, chunk_kda(**x)[0])


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("kind", [np.int32, np.int64, list, jnp.int32, jnp.int64])
def test_offsets_of_either_width(kind: Any, x64: bool):
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal(a.shape).astype(np.float32) for name, a in packed().items()}
    x["g"] = -np.abs(x["g"])
    expected = chunk_kda(**x, cu_seqlens=np.array([0, 2, 5], np.int32))[0]
    with jax.enable_x64(x64):
        if kind is list:
            offsets = [0, 2, 5]
        elif kind in (np.int32, np.int64):
            offsets = np.array([0, 2, 5], kind)
        else:
            offsets = jnp.array([0, 2, 5], kind if x64 else jnp.int32)
        np.testing.assert_array_equal(chunk_kda(**x, cu_seqlens=offsets)[0], expected)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("kind", [np.int32, np.int64, list, jnp.int32, jnp.int64])
def test_indices_of_either_width(kind: Any, x64: bool):
    rng = np.random.default_rng(0)
    x = pooled(initial_state=rng.standard_normal((7, HV, V, K)).astype(np.float32))
    expected = chunk_kda(**x)
    with jax.enable_x64(x64):
        if kind is list:
            x["state_indices"] = [3, -1]
        elif kind in (np.int32, np.int64):
            x["state_indices"] = np.array([3, -1], kind)
        else:
            x["state_indices"] = jnp.array([3, -1], kind if x64 else jnp.int32)
        jax.tree.map(np.testing.assert_array_equal, chunk_kda(**x), expected)


def test_offsets_beyond_32_bits_do_not_wrap():
    wrapping = np.array([0, 2, 2**32 + 5])  # would be [0, 2, 5]
    o, _ = chunk_kda(**packed(), cu_seqlens=wrapping, implementation="reference")
    assert np.isnan(o).all()


def test_results_have_one_structure_for_every_length():
    def structure(T, **options):
        x = {name: a[:, :T] for name, a in arguments().items()}
        return jax.tree.structure(jax.eval_shape(lambda x: chunk_kda(**x, **options), x))

    for options in ({}, {"output_final_state": True}):
        assert len({structure(T, **options) for T in (0, 1, 5)}) == 1


# ---- The handlers --------------------------------------------------------------------------------

# What Python refuses before, or never does: a handler trusts nobody.


def handler_raises(message: str, x: dict[str, Any], output_final_state: bool = False) -> None:
    config = primitive.Config(
        "chunk", "initial_state", 1.0, None, "activated", "probability", False,
        output_final_state, "ffi",
    )  # fmt: skip
    sig = primitive.Signature(config, tuple(x), 0)
    call = jax.jit(lambda *operands: primitive._ffi_call(sig, "cpu", *operands))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*x.values()))


@pytest.mark.parametrize(
    ("indices", "output_final_state", "got"),
    [(("state_indices",), False, "no final state"), ((), True, "no pool")],
)
def test_handler_keeps_checkpoints_only_in_a_pool_that_it_returns(indices, output_final_state, got):
    x = arguments(initial_state=zeros(B, HV, V, K))
    x |= {name: jnp.zeros(B, jnp.int32) for name in indices}
    x["checkpoint_indices"] = jnp.zeros((B, T // 64), jnp.int32)
    message = f"`checkpoint_indices` must come with .* and with a final state; got {got}"
    handler_raises(message, x, output_final_state)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ({"segment_chunks": -1}, "`segment_chunks` must not be negative; got -1"),
        ({"slice_chunks": -1}, "`slice_chunks` must not be negative; got -1"),
        *(
            (
                other | {"slice_chunks": 2},
                "`slice_chunks` must be 0 with segments or offsets; got 2",
            )
            for other in ({"segment_chunks": 1}, {"offsets_step": 1})
        ),
    ],
)
def test_handler_cuts_no_scan_into_less_than_nothing(monkeypatch, cut, message):
    attributes, cut = primitive._attributes, {name: np.int32(n) for name, n in cut.items()}
    monkeypatch.setattr(primitive, "_attributes", lambda sig: attributes(sig) | cut)
    handler_raises(message, arguments())


@pytest.mark.parametrize(
    ("name", "dtype", "rule"),
    [
        ("q", jnp.float16, "BF16 or F32; got F16"),
        ("k", jnp.bfloat16, "F32; got BF16"),
        ("v", jnp.bfloat16, "F32; got BF16"),
        ("g", jnp.float16, "BF16 or F32; got F16"),
        ("beta", jnp.int32, "BF16 or F32; got S32"),
        ("initial_state", jnp.float16, "BF16 or F32; got F16"),
        ("do", jnp.bfloat16, "F32; got BF16"),
        ("dfinal_state", jnp.float16, "BF16 or F32; got F16"),
    ],
)
def test_handler_of_the_gradient_refuses_dtypes(name: str, dtype: Any, rule: str):
    state = zeros(B, HV, V, K)
    x = arguments(initial_state=state, do=zeros(B, T, HV, V), dfinal_state=state)
    x[name] = x[name].astype(dtype)
    handler_raises(f"`{name}` must have dtype {rule}", x, output_final_state=True)


def test_handler_of_the_gradient_refuses_pools():
    x = arguments(initial_state=zeros(B, HV, V, K), state_indices=jnp.zeros(B, jnp.int32))
    handler_raises("`state_indices`.* must not be given", x | {"do": zeros(B, T, HV, V)})
