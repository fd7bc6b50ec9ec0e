"""Kimi Delta Attention in plain JAX: what every kernel is judged by, and what runs where none does.

Per sequence and value head, with a state S of shape [V, K] that begins as `initial_state` or zeros:

    S <- S diag(exp(g_t))                 every key channel decays
    S <- S + beta_t (v_t - S k_t) k_tᵀ    what the decayed state recalls for k_t is corrected
    o_t = scale S q_t                     the updated state is read

This is equation 1 of Kimi Linear (arXiv:2510.26692). `token` below is these three lines; all else
brings the arguments to that form. Sums are in float32, or in float64 when an input is float64.
Nothing here has a custom derivative, so all orders and both modes work.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import validate

# The gradient stores the state at chunk borders and recomputes what is inside.
CHUNK = validate.CHUNK


def kda_gate(
    x: ArrayLike,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    lower_bound: float | None = None,
) -> jax.Array:
    """The log decay `g` (natural log, at most 0) from the gate projection `x`.

        lower_bound is None:   g = -exp(A_log) softplus(x + dt_bias)
        lower_bound in [-5, 0): g = lower_bound sigmoid(exp(A_log) (x + dt_bias))

    Args:
      x: gate projection [..., HV, K].
      A_log: log of the gate's slope, one per value head [HV]. It may be None (slope 1) when
        `lower_bound` is given.
      dt_bias: gate bias [HV, K], or flat [HV * K]. None: 0.
      lower_bound: the most negative log decay a token can have, a Python float in [-5, 0). None:
        unbounded.

    Returns:
      [..., HV, K] in float32 (float64 when an input is float64).

    Raises:
      TypeError, ValueError: naming the argument, the rule and what was given.
    """
    x, A_log, dt_bias, lower_bound = validate.kda_gate(x, A_log, dt_bias, lower_bound)
    return _log_decay(x, A_log, dt_bias, lower_bound, _accumulator(x, A_log, dt_bias))


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
    implementation: str | None = "reference",
) -> tuple[jax.Array, jax.Array | None]:
    """`jax_kda.chunk_kda` in plain JAX: the same, whatever the implementation asked for."""
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
        implementation="reference",
    )
    return chunk_fwd(*operands, **options)


def chunk_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    offsets: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    output_state_indices: jax.Array | None = None,
    checkpoint_indices: jax.Array | None = None,
    *,
    scale: float,
    lower_bound: float | None,
    gate: str,
    beta_mode: str,
    l2norm: bool,
    output_final_state: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """The op on validated arguments with any number of leading axes: q and k are [..., T, H, K].

    `A_log` and `dt_bias` are shared ([HV], [HV, K]) or one per row ([..., HV], [..., HV, K]).
    `offsets` says where the M sequences of a row lie: [..., M + 1] cumulative lengths (the row axis
    may be left out when it is 1) or [..., M, 2] pairs of begin and end; None: a row is a sequence.
    In states, [..., N, HV, V, K], the axes before HV hold one state per row and sequence. A token
    in no sequence is never read and gets o = 0. A row with malformed offsets gets NaN.

    With indices, [..., N], `initial_state` is a pool [..., slots, HV, V, K], and so is the state
    that is returned. A sequence starts from slot `state_indices`, or zeros without them, and ends
    in slot `output_state_indices`, or that same one; its state after 64 (j + 1) tokens goes to slot
    `checkpoint_indices[..., n, j]`. Where the first index is no slot the sequence is padding: o = 0
    and nothing is written. Where another one is no slot, that one state is not written.
    """
    options = scale, lower_bound, gate, beta_mode, l2norm, output_final_state
    run = functools.partial(_sequences, q, k, v, g, beta, A_log, dt_bias, offsets)
    first = output_state_indices if state_indices is None else state_indices
    if first is None:
        o, S, _ = run(initial_state, None, None, *options)
        return o, S

    pool = initial_state
    assert pool is not None
    take, put = _take, _put
    for _ in pool.shape[:-4]:
        take, put = jax.vmap(take), jax.vmap(put)
    padding = (first < 0) | (first >= pool.shape[-4])
    S0 = None if state_indices is None else take(pool, state_indices)
    o, S, checkpoints = run(S0, padding, checkpoint_indices, *options)
    if S is None:
        return o, None
    last = first if output_state_indices is None else output_state_indices
    pool = put(pool, jnp.where(padding, -1, last), S)
    if checkpoints is not None:
        pool = put(pool, *checkpoints)
    return o, pool


def _sequences(
    q, k, v, g, beta, A_log, dt_bias, offsets, initial_state, padding, checkpoint_indices,
    scale, lower_bound, gate, beta_mode, l2norm, output_final_state,
):  # fmt: skip
    """o, the last states, and the slots and states of checkpoints, [..., n] and [..., n, HV, V, K].

    `padding` [..., N]: sequences that are not run; their tokens get o = 0, their states are
    anything.
    """
    *rows, T, _, K = q.shape
    HV, V = v.shape[-2:]
    dtype = _accumulator(q, k, v, g, beta, A_log, dt_bias, initial_state)
    o_dtype = v.dtype
    state_dtype = dtype if initial_state is None else initial_state.dtype

    def activate(tokens, A_log, dt_bias):
        q, k, v, g, beta = tokens
        q, k, v, beta = (x.astype(dtype) for x in (q, k, v, beta))
        if l2norm:
            q, k = _l2norm(q), _l2norm(k)
        q, k = (jnp.repeat(x, HV // x.shape[-2], axis=-2) for x in (scale * q, k))
        if gate == "activated":
            g = g.astype(dtype)
        else:
            g = _log_decay(g, A_log, dt_bias, lower_bound, dtype)
        if beta_mode != "probability":
            beta = jax.nn.sigmoid(beta) * (2.0 if beta_mode == "two_sigmoid" else 1.0)
        return q, k, v, jnp.exp(g), beta

    def scan(S, chunks, A_log, dt_bias, keep_states=False):
        """The last state; o [NT, C, HV, V]; if kept, the state after each chunk [NT, HV, V, K]."""

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def chunk(S, xs):
            tokens, inside, first, S_first = xs
            if first is not None:
                S = jnp.where(first, 0.0 if S_first is None else S_first.astype(dtype), S)
            q, k, v, decay, beta = activate(tokens, A_log, dt_bias)
            decay = jnp.where(inside[:, None, None], decay, 1.0)  # k = 0 writes nothing there
            S, o = jax.lax.scan(token, S, (q, k, v, decay, beta))
            return S, (o.astype(o_dtype), S if keep_states else None)

        S, (o, states) = jax.lax.scan(chunk, _varying_like(S, (chunks, A_log, dt_bias)), chunks)
        return S, o, states

    def whole_row(tokens, A_log, dt_bias, spans, S0, checkpoint_indices):
        S = jnp.zeros((HV, V, K), dtype) if S0 is None else S0[0].astype(dtype)
        keep = checkpoint_indices is not None
        chunks = (*_split(tokens, T, whole_chunks=keep), None, None)
        S, o, states = scan(S, chunks, A_log, dt_bias, keep)
        checkpoints = (checkpoint_indices[0], states[: T // CHUNK]) if keep else None
        return o.reshape(-1, HV, V)[:T], S[None].astype(state_dtype), checkpoints

    def packed_row(tokens, A_log, dt_bias, spans, S0, checkpoint_indices):
        untouched = jnp.zeros((M, HV, V, K), state_dtype) if S0 is None else S0
        if T == 0:  # there is nothing to take chunks from
            return tokens[2], untouched, None
        table = _chunk_table(spans, T, whole_chunks=checkpoint_indices is not None)
        tokens = jax.tree.map(lambda x: _take(x, table.token), tokens)
        S_first = None if S0 is None else _take(S0, table.sequence)
        chunks = tokens, table.inside, table.first, S_first
        S = jnp.zeros((HV, V, K), dtype)
        _, o, states = scan(S, chunks, A_log, dt_bias, keep_states=output_final_state)
        o = _take(o.reshape(-1, HV, V), table.place)
        if states is None:
            return o, None, None
        S = _take(states, table.last).astype(state_dtype)
        S = jnp.where(table.empty[:, None, None, None], untouched, S)
        if checkpoint_indices is None:
            return o, S, None
        none = jnp.full_like(checkpoint_indices[:, :0], -1, shape=(M, 1))  # if there are no others
        slots = jnp.concatenate([checkpoint_indices, none], axis=1)
        slots = _take(slots, (table.sequence, table.number))
        return o, S, (jnp.where(jnp.all(table.inside, axis=1), slots, -1), states)

    row = whole_row if offsets is None else packed_row
    tokens = q, k, v, g, beta
    spans, malformed = (None, None) if offsets is None else _spans(offsets, rows, T)
    M = 1 if spans is None else spans.shape[-2]
    if padding is not None:
        padding = padding.reshape(*rows, M)
        if spans is None:  # tokens of zeros read and write nothing
            tokens = jax.tree.map(lambda x: _where_rows(padding[..., 0], 0, x), tokens)
        else:
            spans = jnp.where(padding[..., None], spans[..., :1], spans)
    S0 = None if initial_state is None else initial_state.reshape(*rows, M, HV, V, K)
    if checkpoint_indices is not None:
        checkpoint_indices = checkpoint_indices.reshape(*rows, M, checkpoint_indices.shape[-1])
        checkpoint_indices = _where_rows(padding, -1, checkpoint_indices)
    for _ in rows:
        parameters = _row_axis(A_log, 1), _row_axis(dt_bias, 2)
        row = jax.vmap(row, in_axes=(0, *parameters, 0, 0, 0))
    o, S, checkpoints = row(tokens, A_log, dt_bias, spans, S0, checkpoint_indices)
    if malformed is not None:
        o, S = jax.tree.map(lambda x: _where_rows(malformed, jnp.nan, x), (o, S))
    if S is None or not output_final_state:
        return o, None, None

    def merge(x):  # [*rows, n, ...]: what all rows of a pool, or of a call, have
        n, *shape = x.shape[len(rows) :]
        return x.reshape(*rows[:-1], rows[-1] * n, *shape)

    return o, merge(S), jax.tree.map(merge, checkpoints)


@functools.partial(jax.checkpoint, prevent_cse=False)
def token(S, x):
    """One step for all heads: S [HV, V, K]; q, k, decay [HV, K]; v [HV, V]; beta [HV]."""
    q, k, v, decay, beta = x
    S = S * decay[:, None, :]
    v_new = beta[:, None] * (v - _einsum("hvk,hk->hv", S, k))
    S = S + _einsum("hv,hk->hvk", v_new, k)
    return S, _einsum("hvk,hk->hv", S, q)


# The default on a GPU would round float32 operands to TF32.
_einsum = functools.partial(jnp.einsum, precision="highest")


def _l2norm(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _log_decay(x, A_log, dt_bias, lower_bound, dtype):
    x = x.astype(dtype)
    if dt_bias is not None:
        x = x + jnp.expand_dims(dt_bias.astype(dtype), range(x.ndim - 2))
    slope = 1.0
    if A_log is not None:
        slope = jnp.expand_dims(jnp.exp(A_log.astype(dtype)), (*range(x.ndim - 2), x.ndim - 1))
    if lower_bound is None:
        return -slope * jax.nn.softplus(x)
    return lower_bound * jax.nn.sigmoid(slope * x)


def _split(tokens, T, whole_chunks):
    """One sequence in chunks: arrays [NT, C, ...], zeros beyond T; where tokens are [NT, C].

    Chunks are shorter than CHUNK where that leaves less to fill up, unless `whole_chunks`.
    """
    NT = -(-T // CHUNK)
    C = CHUNK  # the only choice for a symbolic T
    if isinstance(T, int) and not whole_chunks:
        C = -(-T // max(NT, 1))

    def split(x):
        padding = [(0, NT * C - T), *[(0, 0)] * (x.ndim - 1)]
        return jnp.pad(x, padding).reshape(NT, C, *x.shape[1:])

    return jax.tree.map(split, tokens), split(jnp.ones(T, bool))


class _Chunks(NamedTuple):
    """A packed row cut into P chunks of C tokens, none of which crosses a sequence border."""

    token: jax.Array  # [P, C]    its position in the row, T where there is none
    inside: jax.Array  # [P, C]   whether there is one
    first: jax.Array  # [P]       whether a sequence begins here
    sequence: jax.Array  # [P]    which sequence it belongs to, M for chunks left over
    number: jax.Array  # [P]      which of that sequence's chunks it is
    place: jax.Array  # [T]       where in [P C] a token of the row is, P C if it is in no sequence
    last: jax.Array  # [M]        the chunk a sequence ends in
    empty: jax.Array  # [M]       whether a sequence has no tokens


def _chunk_table(spans, T, whole_chunks):
    begin, end = spans[:, 0], spans[:, 1]
    M = begin.shape[0]
    C = CHUNK
    if isinstance(T, int) and not whole_chunks:  # short ones for short sequences: P C <= 2 T
        C = max(1, min(CHUNK, T // M))
    P = T // C + M

    stop = jnp.cumsum((end - begin + C - 1) // C, dtype=jnp.int32)  # chunks to a sequence's end
    start = jnp.concatenate([jnp.zeros_like(stop[:1]), stop[:-1]])
    p = jnp.arange(P, dtype=jnp.int32)
    sequence = _count_up_to(stop, P)
    number = p - _take(start, sequence)
    first_token = _take(begin, sequence) + C * number
    token = first_token[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]
    inside = token < _take(end, sequence)[:, None]

    t = jnp.arange(T, dtype=jnp.int32)
    owner = _count_up_to(end, T)
    since = t - _take(begin, owner)
    return _Chunks(
        token=jnp.where(inside, token, T),
        inside=inside,
        first=number == 0,
        sequence=sequence,
        number=number,
        place=jnp.where((owner < M) & (since >= 0), C * _take(start, owner) + since, P * C),
        last=stop - 1,
        empty=begin == end,
    )


def _count_up_to(values, n):
    """How many of the values are at most i, for each i < n."""
    # jnp.searchsorted takes no symbolic sizes, nor partially manual axes, in JAX 0.10.2.
    return jnp.cumsum(jnp.zeros(n, jnp.int32).at[values].add(1, mode="drop"), dtype=jnp.int32)


def _spans(offsets, rows, T):
    """Begin and end of every sequence [..., M, 2], 0 in malformed rows; which those are [...]."""
    if offsets.ndim == len(rows) + 2:
        begin, end = offsets[..., 0], offsets[..., 1]
        malformed = jnp.zeros(rows, bool)
    else:
        offsets = offsets.reshape(*rows, offsets.shape[-1])
        begin, end = offsets[..., :-1], offsets[..., 1:]
        malformed = offsets[..., 0] != 0
    wrong = (begin < 0) | (end < begin) | (end > T)
    overlap = begin[..., 1:] < end[..., :-1]
    malformed = malformed | jnp.any(wrong, axis=-1) | jnp.any(overlap, axis=-1)
    return _where_rows(malformed, 0, jnp.stack([begin, end], axis=-1)), malformed


def _where_rows(condition, x, y):
    return jnp.where(jnp.expand_dims(condition, range(condition.ndim, y.ndim)), x, y)


def _take(x, index):
    """x[index], and 0 where the index is out of bounds."""
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _put(pool, slots, states):
    """The pool with states in slots of it; what would be out of bounds is dropped."""
    states = states.astype(pool.dtype)
    return pool.at[slots].set(states, mode="drop", wrap_negative_indices=False)


def _row_axis(parameter, ndim):
    return None if parameter is None or parameter.ndim == ndim else 0


def _accumulator(*arrays):
    wide = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    return jnp.float64 if wide else jnp.float32


def _varying_like(x, arrays):
    """x, varying over the mesh axes that the arrays vary over: shard_map wants it of a carry."""
    for a in jax.tree.leaves(arrays):
        x = jnp.where(jnp.any(a[:0].astype(bool)), 0.0, x)  # `any` of nothing is False
    return x
