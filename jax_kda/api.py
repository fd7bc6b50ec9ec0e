"""What users call: `validate` checks it, `primitive` runs it, `reference` defines it."""

from collections.abc import Sequence

import jax
from jax.typing import ArrayLike

from . import primitive, validate
from .reference import kda_gate as kda_gate


def fwd(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    scale: float | None,
    out: ArrayLike | jax.Ref | None,
    A_log: ArrayLike | None,
    dt_bias: ArrayLike | None,
    lower_bound: float | None,
    initial_state: ArrayLike | jax.Ref | None = None,
    final_state: ArrayLike | jax.Ref | None = None,
    cu_seqlens: ArrayLike | Sequence[int] | None = None,
    state_indices: ArrayLike | Sequence[int] | None = None,
    output_state_indices: ArrayLike | Sequence[int] | None = None,
    checkpoint_indices: ArrayLike | Sequence[Sequence[int]] | None = None,
) -> jax.Array | tuple[jax.Array | None, jax.Array | None] | None:
    """FlashKDA's call: gate, l2norm and sigmoid inside, written into buffers the caller gives.

        S <- S diag(exp(g_t));  S <- S + beta_t (v_t - S k_t) k_tᵀ;  o_t = scale S q_t

    with q and k normalised over K (`x rsqrt(sum x² + 1e-6)`), beta = sigmoid(beta), and g the log
    decay of `kda_gate` (Kimi Linear, arXiv:2510.26692, equation 1).

    JAX arrays are immutable, so what is written comes back as the result. Under

        jax.jit(
            fwd, static_argnames=("scale", "lower_bound"), donate_argnames=("out", "final_state")
        )

    the result is the donated memory: same pointer, no copy. An array that is not donated is copied
    first and keeps its values. A `jax.Ref`, under jit, is written in place, and its slot of the
    result is None.

    Args:
      q, k: queries and keys [B, T, H, K], bfloat16 or float32; K from 1 to 256.
      v: values [B, T, HV, V], of q's dtype; HV is a multiple of H, V from 1 to 256. Value head i
        reads query and key head i // (HV // H).
      g: gate projection [B, T, HV, K], bfloat16 or float32.
      beta: logits of the write strength [B, T, HV], bfloat16 or float32.
      scale: multiplies q after its normalisation, a Python float. None: K ** -0.5.
      out: buffer for the output, of v's shape and dtype. None: the output is a new array and
        nothing is copied, which is the right form when nothing is donated.
      A_log: log of the gate's slope [HV]. None: slope 1 (only with `lower_bound`).
      dt_bias: gate bias [HV, K] or [HV * K]. None: 0.
      lower_bound: the most negative log decay of a token, a Python float in [-5, 0). None: the
        softplus gate.
      initial_state: states to start from [N, HV, V, K], float32 or bfloat16. None: zeros.
      final_state: buffer for the states at the end [N, HV, V, K], of initial_state's dtype. None:
        they are not returned. The same array (or Ref) as `initial_state`: the states are updated in
        place.
      cu_seqlens: cumulative lengths [N + 1], int32 or int64, of N sequences packed into one row
        (B = 1); they start at 0 and never decrease. Tokens past the last one get 0. None: N = B
        sequences of T tokens.
      state_indices, output_state_indices, checkpoint_indices: slots of a pool of states, as in
        `chunk_kda`. The pool [slots, HV, V, K] is `final_state`, and `initial_state` None or that
        same array (or Ref); to only read the pool, it is `initial_state` alone.

    Returns:
      The output [B, T, HV, V], or (output, final states) when a `final_state` buffer is given.

    Raises:
      ValueError: for shapes and values; TypeError: for dtypes and for a traced `scale` or
        `lower_bound`. Malformed values in `cu_seqlens` are an error on the CPU and NaN results on
        the GPU.
      NotImplementedError: where it is differentiated, in either mode: `chunk_kda` has gradients.
    """
    state_name = "initial_state"
    pooled = state_indices is not None or output_state_indices is not None
    if pooled and initial_state is None and final_state is not None:
        initial_state, state_name = final_state, "final_state"
    in_place = final_state is not None and final_state is initial_state
    operands, options = validate.call(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        initial_state=_read(initial_state),
        output_final_state=final_state is not None,
        state_indices=state_indices,
        output_state_indices=output_state_indices,
        checkpoint_indices=checkpoint_indices,
        cu_seqlens=cu_seqlens,
        segment_ids=None,
        max_segments=None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=False,
        implementation=None,
        state_name=state_name,
    )
    out_buffer, state_buffer = validate.buffers(
        operands, _read(out), None if in_place else _read(final_state)
    )
    config = primitive.Config(
        "chunk", state_name, **options, implementation=None, differentiable=False
    )
    o, S = primitive.fwd(config, *operands, out=out_buffer, final_state=state_buffer)
    o = _write(out, o)
    return o if final_state is None else (o, _write(final_state, S))


def chunk_kda(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    output_final_state: bool = False,
    state_indices: ArrayLike | Sequence[int] | None = None,
    output_state_indices: ArrayLike | Sequence[int] | None = None,
    checkpoint_indices: ArrayLike | Sequence[Sequence[int]] | None = None,
    cu_seqlens: ArrayLike | Sequence[int] | None = None,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi Delta Attention over whole sequences: functional, and differentiable in reverse mode.

        S <- S diag(exp(g_t));  S <- S + beta_t (v_t - S k_t) k_tᵀ;  o_t = scale S q_t

    for each sequence and value head, with S of shape [V, K] (Kimi Linear, arXiv:2510.26692,
    equation 1). The state is float32 throughout; g and beta are used as given, never rounded.

    The kernels have gradients: `jax.grad`, `jax.vjp` and `jax.jacrev`, of any order. Forward mode
    (`jax.jvp`, `jax.jacfwd`, `jax.linearize`, `jax.hessian`) is a TypeError of JAX but with
    implementation="reference". For `jax.checkpoint` each argument and result has the name "kda_"
    and its own: "kda_q", "kda_o", "kda_final_state".

    Args:
      q, k: queries and keys [B, T, H, K], bfloat16 or float32; K from 1 to 256.
      v: values [B, T, HV, V], of q's dtype; HV is a multiple of H, V from 1 to 256. Value head i
        reads query and key head i // (HV // H).
      g: log decay per key channel [B, T, HV, K], natural log, at most 0 (-inf resets the channel);
        with `use_gate_in_kernel`, the gate projection that `kda_gate` turns into it. bfloat16 or
        float32.
      beta: write strength [B, T, HV], in (0, 1); with `use_beta_sigmoid_in_kernel`, its logits.
        bfloat16 or float32.
      A_log, dt_bias, lower_bound: parameters of the gate, as in `kda_gate`; only with
        `use_gate_in_kernel`.
      scale: multiplies q, after its normalisation if any; a Python float. None: K ** -0.5.
      initial_state: states to start from [N, HV, V, K], float32 or bfloat16. None: zeros. When the
        states are returned it is aliased to them: donate it, or XLA copies it first.
      output_final_state: whether to return the states at the end.
      state_indices: slots of the pool that initial_state then is, [slots, HV, V, K], int32 or int64
        [N]: sequence n starts from slot state_indices[n]. A negative index, or one past the end, is
        no slot and marks padding: the sequence's tokens get o = 0 and it writes nothing.
      output_state_indices: slots for the states at the end [N]. None: where they came from. Without
        state_indices, sequences start from zeros, and these mark padding. A sequence that is not
        padding writes nothing where this is no slot.
      checkpoint_indices: slots for the states after 64 (j + 1) tokens of a sequence, [N, T // 64];
        where one is no slot, or the sequence is shorter, nothing is written.
      cu_seqlens: cumulative lengths [N + 1], int32 or int64, of N sequences packed into one row (B
        = 1); they start at 0 and never decrease. Tokens past the last one get o = 0.
      segment_ids: integers [B, T], instead of cu_seqlens: a sequence begins wherever the id
        changes, and id 0 is padding (o = 0, no state changes). Then N = B * max_segments, the
        states of a row are consecutive, and unused ones keep their initial value.
      max_segments: the most sequences a row can have, a Python int. A row with more is an error on
        the CPU and NaN on the GPU.
      use_qk_l2norm_in_kernel: normalise q and k over K: `x rsqrt(sum x² + 1e-6)`.
      use_gate_in_kernel: `g` is the gate projection.
      use_beta_sigmoid_in_kernel: `beta` holds logits.
      allow_neg_eigval: the write strength is twice the sigmoid, in (0, 2).
      implementation: None: the kernel of the platform the code is compiled for if it covers the
        call, else plain JAX. "ffi": the kernel, or its error. "reference": plain JAX, which also
        takes float64 and any head size.

    Returns:
      (o, final_state): o [B, T, HV, V] in v's dtype; final_state [N, HV, V, K] in initial_state's
      dtype, float32 when there is none, or None without `output_final_state`. With indices it is
      the whole pool: all slots that are not written keep every bit. Where a slot is written twice,
      or written by one sequence and read by another, what it holds is undefined.

    Raises:
      ValueError: for shapes and values; TypeError: for dtypes and for traced options. Malformed
        values in `cu_seqlens` are an error on the CPU and NaN results on the GPU.
      NotImplementedError: under `jax.vmap` where the pool is not mapped, and where its axis of
        slots is sharded (outside of `jax.shard_map`). Over automatic mesh axes only XLA sees that,
        and the words are in its error.
    """
    validate.implementation(implementation)
    operands, options = validate.call(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_indices=state_indices,
        output_state_indices=output_state_indices,
        checkpoint_indices=checkpoint_indices,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        max_segments=max_segments,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        implementation=implementation,
    )
    config = primitive.Config("chunk", "initial_state", **options, implementation=implementation)
    return primitive.fwd(config, *operands)


def recurrent_kda(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike | None = None,
    *,
    state_indices: ArrayLike | Sequence[int] | None = None,
    output_state_indices: ArrayLike | Sequence[int] | None = None,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    cu_seqlens: ArrayLike | Sequence[int] | None = None,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Decoding: `chunk_kda` over one or a few tokens a sequence, the states updated in place.

        o, state = recurrent_kda(q, k, v, g, beta, state)                      # a state a row
        o, pool = recurrent_kda(q, k, v, g, beta, pool, state_indices=slots)   # a slot a row

    Each state is read once and written once. Under jit with `state` donated, or as the carry of a
    loop, it never moves; not donated, XLA copies it first and the caller's array keeps its values.

    Args:
      q, k, v, g, beta: as for `chunk_kda`, with T from 0 to 16 (any T where sequences are packed).
      state: states before these tokens [N, HV, V, K], float32 or bfloat16; with indices a pool
        [slots, HV, V, K]. None: zeros. A bfloat16 state is rounded after every call: a decay
        closer to 1 than 2⁻⁹ is lost, and the state of a long text is off by up to 2% (float32:
        1e-5).
      state_indices, output_state_indices: slots of the pool, int32 or int64 [N], as for
        `chunk_kda`. A negative index, or one past the end, marks a row of padding.
      A_log, dt_bias, lower_bound, scale, cu_seqlens, segment_ids, max_segments,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        implementation: as for `chunk_kda`.

    Returns:
      (o, state): o [B, T, HV, V] in v's dtype; the states after these tokens, or the whole pool, in
      state's shape and dtype: float32 [N, HV, V, K] when there is none.

    Raises:
      As `chunk_kda`.
    """
    validate.implementation(implementation)
    operands, options = validate.recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices=state_indices,
        output_state_indices=output_state_indices,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        max_segments=max_segments,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        implementation=implementation,
    )
    config = primitive.Config("recurrent", "state", **options, implementation=implementation)
    o, final_state = primitive.fwd(config, *operands)
    assert final_state is not None
    return o, final_state


def _read(x):
    return x[...] if isinstance(x, jax.Ref) else x


def _write(buffer, result):
    """Stores a result in the Ref it is meant for, if any; it is not returned as well."""
    if not isinstance(buffer, jax.Ref):
        return result
    buffer[...] = result
    return None
