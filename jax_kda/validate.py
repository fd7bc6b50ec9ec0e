"""Argument checks: what is wrong is said here, at trace time, and everything below assumes it is
right.

Every message reads "`name` must <rule>; got <value>". ValueError: shapes and values. TypeError:
dtypes and kinds. The functions return arguments in the one form that `reference` and `primitive`
take.
"""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

MAX_HEAD_SIZE = 256  # of K and V; beyond it no platform has a kernel
MAX_LENGTH = 2**31 - 1  # offsets and slots are int32
MAX_STEPS = 16  # tokens a sequence of recurrent_kda
CHUNK = 64  # tokens a chunk, on every platform, and from one checkpoint to the next


class Operands(NamedTuple):
    """The arrays of one call, in the order that `reference.chunk_fwd` and `primitive.fwd` take
    them."""

    q: jax.Array  # [B, T, H, K]
    k: jax.Array  # [B, T, H, K]
    v: jax.Array  # [B, T, HV, V]
    g: jax.Array  # [B, T, HV, K]
    beta: jax.Array  # [B, T, HV]
    A_log: jax.Array | None  # [HV]
    dt_bias: jax.Array | None  # [HV, K]
    offsets: jax.Array | None  # [N + 1] int32, or [B, M, 2] int32
    initial_state: jax.Array | None  # [N, HV, V, K]; with indices the pool [slots, HV, V, K]
    state_indices: jax.Array | None  # [N] int32
    output_state_indices: jax.Array | None  # [N] int32
    checkpoint_indices: jax.Array | None  # [N, T // 64] int32


def recurrent_kda(
    q,
    k,
    v,
    g,
    beta,
    state,
    *,
    state_indices,
    output_state_indices,
    A_log,
    dt_bias,
    lower_bound,
    scale,
    cu_seqlens,
    segment_ids,
    max_segments,
    use_qk_l2norm_in_kernel,
    use_gate_in_kernel,
    use_beta_sigmoid_in_kernel,
    allow_neg_eigval,
    implementation,
) -> tuple[Operands, dict[str, Any]]:
    """Checks a call of `recurrent_kda`; returns its operands and its static options."""
    operands, options = call(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        initial_state=state,
        output_final_state=True,
        state_indices=state_indices,
        output_state_indices=output_state_indices,
        checkpoint_indices=None,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        max_segments=max_segments,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        implementation=implementation,
        state_name="state",
    )
    T = operands.q.shape[1]
    if operands.offsets is None and isinstance(T, int) and T > MAX_STEPS:
        raise ValueError(
            f"`q` must have at most {MAX_STEPS} tokens T a sequence where none are packed "
            f"(chunk_kda takes any number); got T = {T}"
        )
    return operands, options


def call(
    q,
    k,
    v,
    g,
    beta,
    *,
    A_log,
    dt_bias,
    lower_bound,
    scale,
    initial_state,
    output_final_state,
    state_indices,
    output_state_indices,
    checkpoint_indices,
    cu_seqlens,
    segment_ids,
    max_segments,
    use_qk_l2norm_in_kernel,
    use_gate_in_kernel,
    use_beta_sigmoid_in_kernel,
    allow_neg_eigval,
    implementation,
    state_name="initial_state",
) -> tuple[Operands, dict[str, Any]]:
    """Checks a call of any op, in the names of `chunk_kda`; returns its operands and its static
    options. `state_name` is what the caller calls `initial_state`."""
    flags = {
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"`{name}` must be a Python bool; got {_describe(flag)}")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "`allow_neg_eigval` must be False unless use_beta_sigmoid_in_kernel=True; got True"
        )
    reference = implementation == "reference"

    q, k, v, g, beta = (
        _array(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))
    )
    for name, x, letters in (("q", q, "B T H K"), ("v", v, "B T HV V")):
        if x.ndim != 4:
            raise ValueError(
                f"`{name}` must have shape [{letters.replace(' ', ', ')}]; got {_list(x.shape)}"
            )
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    sizes = {"B": B, "T": T, "H": H, "K": K, "HV": HV, "V": V}
    _check_shape("k", k, "B T H K", sizes)
    _check_shape("v", v, "B T HV V", sizes)
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(
            "`v` must have a number of heads HV that is a positive multiple of q's H; "
            f"got HV = {HV}, H = {H}"
        )
    _check_shape("g", g, "B T HV K", sizes)
    _check_shape("beta", beta, "B T HV", sizes)
    for name, letter, size in (("q", "K", K), ("v", "V", V)):
        if size < 1 or (size > MAX_HEAD_SIZE and not reference):
            raise ValueError(
                f"`{name}` must have a head size {letter} from 1 to {MAX_HEAD_SIZE} "
                f'(implementation="reference" takes larger ones); got {letter} = {size}'
            )

    _check_float("q", q, reference)
    for name, x in (("k", k), ("v", v)):
        _check_float(name, x, reference)
        if x.dtype != q.dtype:
            raise TypeError(f"`{name}` must have q's dtype, {q.dtype}; got {x.dtype}")
    _check_float("g", g, reference)
    _check_float("beta", beta, reference)

    if use_gate_in_kernel:
        A_log, dt_bias, lower_bound = _gate_parameters(
            A_log, dt_bias, lower_bound, HV, K, reference
        )
        gate = "softplus" if lower_bound is None else "lower_bound"
    else:
        gate_arguments = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
        for name, x in gate_arguments.items():
            if x is not None:
                raise ValueError(
                    f"`{name}` must be None unless use_gate_in_kernel=True; got {_describe(x)}"
                )
        gate = "activated"

    offsets, M = sequence_offsets(cu_seqlens, segment_ids, max_segments, B, T)
    indices = _indices(
        state_indices, output_state_indices, checkpoint_indices, B * M, T, output_final_state
    )
    pooled = any(index is not None for index in indices)
    if pooled and initial_state is None:
        raise ValueError(
            f"`{state_name}` must be the pool that indices choose slots of, [slots, HV, V, K]; "
            "got None"
        )
    if initial_state is not None:
        initial_state = _array(state_name, initial_state)
        if not pooled:
            _check_shape(state_name, initial_state, "N HV V K", sizes | {"N": B * M})
        elif initial_state.shape[1:] != (HV, V, K) or initial_state.shape[0] < 1:
            raise ValueError(
                f"`{state_name}` must have shape [slots, HV, V, K] = [slots, {HV}, {V}, {K}] with "
                f"at least one slot; got {_list(initial_state.shape)}"
            )
        _check_float(state_name, initial_state, reference)

    beta_mode = "probability"
    if use_beta_sigmoid_in_kernel:
        beta_mode = "two_sigmoid" if allow_neg_eigval else "sigmoid"
    options = {
        "scale": K**-0.5 if scale is None else _static_float("scale", scale),
        "lower_bound": lower_bound,
        "gate": gate,
        "beta_mode": beta_mode,
        "l2norm": bool(use_qk_l2norm_in_kernel),
        "output_final_state": bool(output_final_state),
    }
    return Operands(q, k, v, g, beta, A_log, dt_bias, offsets, initial_state, *indices), options


def buffers(operands: Operands, out, final_state):
    """Checks the buffers that `fwd` writes into, other than `initial_state`; each may be None."""
    v, initial_state = operands.v, operands.initial_state
    B, T, HV, V = v.shape
    N = B if operands.offsets is None else operands.offsets.shape[0] - 1
    sizes = {"B": B, "T": T, "HV": HV, "V": V, "K": operands.q.shape[-1], "N": N}
    if out is not None:
        out = _array("out", out)
        _check_shape("out", out, "B T HV V", sizes)
        if out.dtype != v.dtype:
            raise TypeError(f"`out` must have v's dtype, {v.dtype}; got {out.dtype}")
    if final_state is not None:
        if operands.state_indices is not None or operands.output_state_indices is not None:
            raise ValueError(
                "`final_state` must be the same array or Ref as initial_state, the pool, when "
                "there are indices; got another one"
            )
        final_state = _array("final_state", final_state)
        _check_shape("final_state", final_state, "N HV V K", sizes)
        _check_float("final_state", final_state, reference=False)
        if initial_state is not None and final_state.dtype != initial_state.dtype:
            raise TypeError(
                f"`final_state` must have initial_state's dtype, {initial_state.dtype}; "
                f"got {final_state.dtype}"
            )
    return out, final_state


def implementation(name) -> None:
    if name not in (None, "ffi", "reference"):
        raise ValueError(f'`implementation` must be None, "ffi" or "reference"; got {name!r}')


def kda_gate(x, A_log, dt_bias, lower_bound):
    """Checks a call of `kda_gate`."""
    x = _array("x", x)
    if x.ndim < 2:
        raise ValueError(f"`x` must have shape [..., HV, K]; got {_list(x.shape)}")
    _check_float("x", x, reference=True)
    HV, K = x.shape[-2:]
    return x, *_gate_parameters(A_log, dt_bias, lower_bound, HV, K, reference=True)


def _gate_parameters(A_log, dt_bias, lower_bound, HV, K, reference):
    if lower_bound is not None:
        lower_bound = _static_float("lower_bound", lower_bound)
        if not -5.0 <= lower_bound < 0.0:
            raise ValueError(f"`lower_bound` must be in [-5, 0); got {lower_bound}")
    elif A_log is None:
        raise ValueError("`A_log` must be given when the gate has no lower_bound; got None")
    if A_log is not None:
        A_log = _array("A_log", A_log)
        _check_shape("A_log", A_log, "HV", {"HV": HV})
        _check_float("A_log", A_log, reference)
        A_log = _at_least_float32(A_log)
    if dt_bias is not None:
        dt_bias = _array("dt_bias", dt_bias)
        if dt_bias.shape not in ((HV, K), (HV * K,)):
            raise ValueError(
                f"`dt_bias` must have shape [HV, K] = [{HV}, {K}] or [HV * K] = [{HV * K}]; "
                f"got {_list(dt_bias.shape)}"
            )
        _check_float("dt_bias", dt_bias, reference)
        dt_bias = _at_least_float32(dt_bias).reshape(HV, K)
    return A_log, dt_bias, lower_bound


def sequence_offsets(cu_seqlens, segment_ids, max_segments, B, T):
    """The offsets operand and M, the sequences a row."""
    if segment_ids is None:
        if max_segments is not None:
            raise ValueError(f"`max_segments` must be None without segment_ids; got {max_segments}")
        if cu_seqlens is None:
            return None, 1
        if B != 1:
            raise ValueError(f"`cu_seqlens` must come with B = 1 (one packed row); got B = {B}")
        offsets = _cumulative_lengths(cu_seqlens)
        return offsets, offsets.shape[0] - 1

    if cu_seqlens is not None:
        raise ValueError("`segment_ids` must be None when cu_seqlens is given; got both")
    if max_segments is None:
        raise ValueError("`max_segments` must be given with segment_ids; got None")
    if not isinstance(max_segments, numbers.Integral) or isinstance(max_segments, bool):
        raise TypeError(f"`max_segments` must be a Python int; got {_describe(max_segments)}")
    if max_segments < 1:
        raise ValueError(f"`max_segments` must be at least 1; got {max_segments}")
    segment_ids = _array("segment_ids", segment_ids)
    _check_shape("segment_ids", segment_ids, "B T", {"B": B, "T": T})
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"`segment_ids` must have an integer dtype; got {segment_ids.dtype}")
    return segment_offsets(segment_ids, int(max_segments)), int(max_segments)


def segment_offsets(segment_ids: jax.Array, max_segments: int) -> jax.Array:
    """Begin and end of every segment, int32 [B, max_segments, 2]; (T, T) for the unused ones.

    A row with more segments than `max_segments` becomes (-1, -1) throughout: malformed, never
    merged.
    """
    T = segment_ids.shape[1]
    edge = jnp.ones_like(segment_ids[:, :1], bool)
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.concatenate([edge, change], axis=1)[:, :T] & (segment_ids != 0)
    ends = jnp.concatenate([change, edge], axis=1)[:, :T] & (segment_ids != 0)

    def positions(flags):  # [B, max_segments]
        find = lambda row: jnp.nonzero(row, size=max_segments, fill_value=T)[0]
        return jax.vmap(find)(flags).astype(jnp.int32)

    begin, end = positions(begins), jnp.minimum(positions(ends) + 1, T)
    too_many = jnp.sum(begins, axis=1, dtype=jnp.int32) > max_segments
    return jnp.where(too_many[:, None, None], -1, jnp.stack([begin, end], axis=-1))


def _cumulative_lengths(cu_seqlens):
    cu_seqlens = _int32("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"`cu_seqlens` must have shape [N + 1] with N at least 1; got {_list(cu_seqlens.shape)}"
        )
    return cu_seqlens


def _indices(state_indices, output_state_indices, checkpoint_indices, N, T, output_final_state):
    """The operands that choose slots of a pool; each may be None."""
    written = {
        "output_state_indices": output_state_indices,
        "checkpoint_indices": checkpoint_indices,
    }
    for name, x in written.items():
        if x is not None and not output_final_state:
            raise ValueError(
                f"`{name}` must be None where no state is returned; got {_describe(x)}"
            )
    if checkpoint_indices is not None and state_indices is None and output_state_indices is None:
        raise ValueError(
            "`checkpoint_indices` must come with state_indices or output_state_indices; "
            f"got {_describe(checkpoint_indices)} alone"
        )

    def check(name, x, letters="N"):
        if x is not None:
            x = _int32(name, x)
            _check_shape(name, x, letters, {"N": N, "T//64": T // CHUNK})
        return x

    return (
        check("state_indices", state_indices),
        check("output_state_indices", output_state_indices),
        check("checkpoint_indices", checkpoint_indices, "N T//64"),
    )


def _int32(name, x):
    if not isinstance(x, jax.Array):
        x = np.asarray(x)  # keeps int64, which jnp.asarray would wrap
    if x.dtype not in (jnp.int32, jnp.int64):
        raise TypeError(f"`{name}` must have dtype int32 or int64; got {x.dtype}")
    if x.dtype == jnp.int64:
        x = x.clip(-1, MAX_LENGTH)  # out of range stays out of range
    return jnp.asarray(x, jnp.int32)


def _check_shape(name, x, letters, sizes):
    letters = letters.split()
    expected = tuple(sizes[letter] for letter in letters)
    if x.shape != expected:
        raise ValueError(
            f"`{name}` must have shape {_list(letters)} = {_list(expected)}; got {_list(x.shape)}"
        )


def _check_float(name, x, reference):
    allowed = (jnp.bfloat16, jnp.float32)
    if x.dtype in allowed or (reference and x.dtype == jnp.float64):
        return
    raise TypeError(
        f"`{name}` must have dtype bfloat16 or float32 "
        f'(float64 only with implementation="reference"); got {x.dtype}'
    )


def _static_float(name, value) -> float:
    if not isinstance(value, float | int | np.floating | np.integer) or isinstance(value, bool):
        raise TypeError(
            f"`{name}` must be a Python float, known when the function is traced (under jax.jit "
            f'list it in static_argnames=("scale", "lower_bound")); got {_describe(value)}'
        )
    if not np.isfinite(value):
        raise ValueError(f"`{name}` must be finite; got {value}")
    return float(value)


def _at_least_float32(x):
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _array(name, x):
    if isinstance(x, jax.Array):
        return x
    if not hasattr(x, "__array__") and not isinstance(x, list | tuple | numbers.Number):
        raise TypeError(f"`{name}` must be an array; got {_describe(x)}")
    return jnp.asarray(x)


def _describe(x):
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        kind = "a traced array" if isinstance(x, Tracer) else "an array"
        return f"{kind} of shape {_list(x.shape)} and dtype {x.dtype}"
    return repr(x)


def _list(items):
    return f"[{', '.join(map(str, items))}]"
