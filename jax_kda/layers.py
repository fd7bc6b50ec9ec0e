"""Kimi Delta Attention as a Flax NNX layer. `import jax_kda` leaves it out: Flax is optional.

    q, k, v = silu(conv(x W_q)), silu(conv(x W_k)), silu(conv(x W_v))
    o = KDA(q, k, v, decay gate of x W_f, write strength sigmoid(x W_b))
    y = (RMSNorm(o) * sigmoid(x W_g)) W_o

Parameters have the names of Kimi Linear's checkpoints, except that a weight is a `kernel` and is
transposed. docs/layer.md tells the rest.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from . import validate
from .api import chunk_kda, recurrent_kda

MAX_RECURRENT_LENGTH = 16  # tokens a call: what keeps a cache uses `recurrent_kda` up to here
KERNEL_INIT = nnx.initializers.normal(0.02)
BIAS_INIT = nnx.initializers.zeros_init()


class LayerCache(NamedTuple):
    """What a layer keeps of the N sequences it has read so far."""

    q: jax.Array | None  # [N, conv_size - 1, H K]   last inputs of the convolution, oldest first
    k: jax.Array | None  # [N, conv_size - 1, H K]
    v: jax.Array | None  # [N, conv_size - 1, HV V]
    state: jax.Array  # [N, HV, V, K]


class KimiDeltaAttention(nnx.Module):
    """Kimi Delta Attention with its projections, short convolutions, gates and norm.

    Args:
      hidden_size: features of the input and of the output.
      num_heads: query and key heads, H.
      head_dim: size of a query or key head, K.
      num_v_heads: value heads HV, a multiple of num_heads; decay, write strength and output gate
        are per value head. None: num_heads.
      head_v_dim: size of a value head, V. None: head_dim.
      conv_size: taps of the short convolutions.
      use_short_conv: whether there are any.
      conv_bias: whether they have a bias.
      f_rank: inner size of the decay gate's projection; "head_v_dim": V; None: one full matrix.
      g_rank: inner size of the output gate's projection, likewise.
      g_bias: whether the output gate's projection has a bias.
      lower_bound: the most negative log decay of a token, in [-5, 0). None: the softplus gate.
      allow_neg_eigval: the write strength is in (0, 2) instead of (0, 1).
      norm_eps: epsilon of the norm before the output projection.
      dtype: bfloat16 or float32, of the matrix products and what is between them. None: that of
        input and parameters together. The convolutions, both gates' activations, write strength,
        norm and state are float32 always.
      param_dtype: of the projections. What is used in float32 is stored in float32: the
        convolutions, A_log, dt_bias and the norm's scale.
      precision: of the matrix products, as in `jax.lax.dot`.
      kernel_init: initialises projections and convolutions.
      bias_init: initialises biases.
      embed_axis, heads_axis: names for the axes of hidden features and of heads in the parameters'
        sharding metadata, mesh axes or logical ones. None: not sharded.
      implementation: as in `jax_kda.chunk_kda`.
      rngs: keys for the initialisation.
    """

    cached_q: nnx.Cache
    cached_k: nnx.Cache
    cached_v: nnx.Cache
    cached_state: nnx.Cache

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        use_short_conv: bool = True,
        conv_bias: bool = False,
        f_rank: int | Literal["head_v_dim"] | None = "head_v_dim",
        g_rank: int | Literal["head_v_dim"] | None = "head_v_dim",
        g_bias: bool = False,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        embed_axis: str | None = None,
        heads_axis: str | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        H, K = num_heads, head_dim
        HV = H if num_v_heads is None else num_v_heads
        V = K if head_v_dim is None else head_v_dim
        if H < 1 or HV < 1 or HV % H:
            raise ValueError(
                f"`num_v_heads` must be a positive multiple of num_heads = {H}; got {HV}"
            )
        if dtype is not None and jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
            raise TypeError(f"`dtype` must be bfloat16, float32 or None; got {jnp.dtype(dtype)}")
        self.hidden_size = hidden_size
        self.num_heads = H
        self.num_v_heads = HV
        self.head_dim = K
        self.head_v_dim = V
        self.conv_size = conv_size
        self.use_short_conv = use_short_conv
        self.f_rank = V if f_rank == "head_v_dim" else f_rank
        self.g_rank = V if g_rank == "head_v_dim" else g_rank
        self.lower_bound = lower_bound
        self.allow_neg_eigval = allow_neg_eigval
        self.dtype = dtype
        self.heads_axis = heads_axis
        self.implementation = implementation

        def linear(inputs, outputs, axes, *, use_bias=False, preferred_element_type=None):
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                preferred_element_type=preferred_element_type,
                kernel_init=_partitioned(kernel_init, axes),
                bias_init=_partitioned(bias_init, axes[1:]),
                rngs=rngs,
            )

        def convolution(channels):
            if not use_short_conv:
                return None
            return ShortConvolution(
                channels,
                conv_size,
                use_bias=conv_bias,
                kernel_init=_partitioned(kernel_init, (None, heads_axis)),
                bias_init=_partitioned(bias_init, (heads_axis,)),
                rngs=rngs,
            )

        def parameter(init, shape, axes):
            return nnx.Param(_partitioned(init, axes)(rngs.params(), shape, jnp.float32))

        into_heads = (embed_axis, heads_axis)
        self.q_proj = linear(hidden_size, H * K, into_heads)
        self.k_proj = linear(hidden_size, H * K, into_heads)
        self.v_proj = linear(hidden_size, HV * V, into_heads)
        self.q_conv1d = convolution(H * K)
        self.k_conv1d = convolution(H * K)
        self.v_conv1d = convolution(HV * V)

        if self.f_rank is None:
            self.f_proj = linear(hidden_size, HV * K, into_heads)
        else:
            self.f_a_proj = linear(hidden_size, self.f_rank, (embed_axis, None))
            self.f_b_proj = linear(self.f_rank, HV * K, (None, heads_axis))
        self.A_log = parameter(
            _log_uniform_slope if lower_bound is None else nnx.initializers.zeros_init(),
            (HV,),
            (heads_axis,),
        )
        self.dt_bias = parameter(_inverse_softplus_step, (HV, K), (heads_axis, None))
        # Its results are few and go through a sigmoid: they are not rounded to bfloat16.
        self.b_proj = linear(hidden_size, HV, into_heads, preferred_element_type=jnp.float32)

        if self.g_rank is None:
            self.g_proj = linear(hidden_size, HV * V, into_heads, use_bias=g_bias)
        else:
            self.g_a_proj = linear(hidden_size, self.g_rank, (embed_axis, None))
            self.g_b_proj = linear(self.g_rank, HV * V, (None, heads_axis), use_bias=g_bias)
        self.o_norm = GatedRMSNorm(V, epsilon=norm_eps)
        self.o_proj = linear(HV * V, hidden_size, (heads_axis, embed_axis))

    def __call__(
        self,
        x: ArrayLike,
        *,
        segment_ids: ArrayLike | None = None,
        max_segments: int | None = None,
        padding_mask: ArrayLike | None = None,
    ) -> jax.Array:
        """Applies the layer; with a cache (`init_cache`), continues its sequences and updates it.

        Args:
          x: hidden states [B, T, hidden_size].
          segment_ids: integers [B, T] for packed rows: a sequence begins wherever the id changes,
            and id 0 is padding. Convolutions and state begin anew with every sequence.
          max_segments: the most sequences a row can have, a Python int.
          padding_mask: [B, T], bool or integer, instead of segment_ids: 0 where there is no token.
            Wherever the padding is, the row is what remains without it.

        Returns:
          [B, T, hidden_size]; zeros at padding.

        Raises:
          ValueError: for shapes and values; TypeError: for dtypes.
        """
        cache = self._cache()
        y, cache = self._apply(x, cache, cache is not None, segment_ids, max_segments, padding_mask)
        if cache is not None:
            if self.use_short_conv:
                self.cached_q.set_value(cache.q)
                self.cached_k.set_value(cache.k)
                self.cached_v.set_value(cache.v)
            self.cached_state.set_value(cache.state)
        return y

    def extend(
        self,
        x: ArrayLike,
        cache: LayerCache | None = None,
        *,
        segment_ids: ArrayLike | None = None,
        max_segments: int | None = None,
        padding_mask: ArrayLike | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """The layer as a function of the past: what `__call__` does, cache in and cache out.

        The sequences are one per row, N = B, or with `segment_ids` N = B * max_segments, row by
        row; those that get no tokens keep their cache. The new state is aliased to the old one:
        donate it, or XLA copies it first.

        Args:
          x, segment_ids, max_segments, padding_mask: as in `__call__`.
          cache: of the N sequences. None: they begin here.

        Returns:
          (y, cache): the new cache has the dtypes of the old one; without one, a float32 state.
        """
        y, cache = self._apply(x, cache, True, segment_ids, max_segments, padding_mask)
        assert cache is not None
        return y, cache

    def init_cache(
        self,
        batch_size: int,
        *,
        state_dtype: Dtype = jnp.float32,
        batch_axis: str | None = None,
    ) -> None:
        """Gives the layer an empty cache of `batch_size` sequences, as `nnx.Cache` variables.

        From then on every call continues these sequences. `nnx.pop(layer, nnx.Cache)` takes the
        cache away.

        Args:
          batch_size: sequences; with `segment_ids`, B * max_segments.
          state_dtype: float32 or bfloat16, of the recurrent state.
          batch_axis: the batch's name in the cache's sharding metadata.
        """
        empty = self.empty_cache(batch_size, state_dtype=state_dtype)

        def variable(value, axes):
            return nnx.Cache(_partitioned(lambda: value, axes)())

        if self.use_short_conv:
            axes = (batch_axis, None, self.heads_axis)
            self.cached_q = variable(empty.q, axes)
            self.cached_k = variable(empty.k, axes)
            self.cached_v = variable(empty.v, axes)
        self.cached_state = variable(empty.state, (batch_axis, self.heads_axis, None, None))

    def empty_cache(self, batch_size: int, *, state_dtype: Dtype = jnp.float32) -> LayerCache:
        """The cache of sequences without tokens, for `extend`."""
        HV, V, K = self.num_v_heads, self.head_v_dim, self.head_dim
        conv_dtype = self.dtype or jnp.float32  # holds every input of the convolutions exactly
        convolution = lambda channels: (
            jnp.zeros((batch_size, self.conv_size - 1, channels), conv_dtype)
            if self.use_short_conv
            else None
        )
        return LayerCache(
            q=convolution(self.num_heads * K),
            k=convolution(self.num_heads * K),
            v=convolution(HV * V),
            state=jnp.zeros((batch_size, HV, V, K), state_dtype),
        )

    def _cache(self) -> LayerCache | None:
        if not hasattr(self, "cached_state"):
            return None
        state = self.cached_state[...]
        if not self.use_short_conv:
            return LayerCache(None, None, None, state)
        return LayerCache(self.cached_q[...], self.cached_k[...], self.cached_v[...], state)

    def _apply(self, x, cache, output_cache, segment_ids, max_segments, padding_mask):
        x = jnp.asarray(x)
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"`x` must have shape [B, T, hidden_size] = [B, T, {self.hidden_size}]; "
                f"got {list(x.shape)}"
            )
        x, packing = _pack(x, segment_ids, max_segments, padding_mask)
        B, T, _ = x.shape
        H, HV, K, V = self.num_heads, self.num_v_heads, self.head_dim, self.head_v_dim
        M = None if packing is None else packing.spans.shape[1]
        if cache is not None and cache.state.shape[0] != B * (M or 1):
            raise ValueError(
                f"`cache` must have N = {B * (M or 1)} sequences; got {cache.state.shape[0]}"
            )
        past_q, past_k, past_v, state = cache or (None, None, None, None)

        def heads(u, conv1d, past):
            if conv1d is None:
                return jax.nn.silu(u.astype(jnp.float32)).astype(u.dtype), None
            return conv1d(u, past, packing, output_cache)

        q, past_q = heads(self.q_proj(x), self.q_conv1d, past_q)
        k, past_k = heads(self.k_proj(x), self.k_conv1d, past_k)
        v, past_v = heads(self.v_proj(x), self.v_conv1d, past_v)
        g = self.f_proj(x) if self.f_rank is None else self.f_b_proj(self.f_a_proj(x))
        z = self.g_proj(x) if self.g_rank is None else self.g_b_proj(self.g_a_proj(x))
        operands = (
            q.reshape(B, T, H, K),
            k.reshape(B, T, H, K),
            v.reshape(B, T, HV, V),
            g.reshape(B, T, HV, K),
            self.b_proj(x),
        )
        options: dict[str, Any] = {
            "A_log": self.A_log[...],
            "dt_bias": self.dt_bias[...],
            "lower_bound": self.lower_bound,
            "segment_ids": None if packing is None else packing.segment_ids,
            "max_segments": M,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "implementation": self.implementation,
        }
        if output_cache and T <= MAX_RECURRENT_LENGTH:
            o, state = recurrent_kda(*operands, state, **options)
        else:
            options |= {"initial_state": state, "output_final_state": output_cache}
            o, state = chunk_kda(*operands, **options)
        o = self.o_norm(o, z.reshape(B, T, HV, V)).reshape(B, T, HV * V)
        y = self.o_proj(o, out_sharding=_explicit_sharding(x, o))
        if packing is not None and packing.place is not None:
            y = _take(y, packing.place)
        return y, None if state is None else LayerCache(past_q, past_k, past_v, state)


class ShortConvolution(nnx.Module):
    """Depthwise causal convolution and silu, in float32.

        y[t] = silu(bias + sum over w of kernel[w] u[t - (W - 1) + w])

    Taps stay inside the sequence; before its beginning they see its past, or zeros.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        use_bias: bool = False,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (width, channels), jnp.float32))
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (channels,), jnp.float32))

    def __call__(
        self,
        u: jax.Array,
        past: jax.Array | None = None,
        packing: "_Packing | None" = None,
        output_past: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """u [B, T, C] gives [B, T, C]; the past is the last W - 1 inputs [N, W - 1, C]."""
        W = self.kernel.shape[0]

        @jax.checkpoint  # of all its intermediate results the gradient keeps u alone
        def convolve(u, kernel, bias):
            taps = _taps(u, past, packing, W)
            kernel = kernel.astype(jnp.float32)[:, None, None, :]
            y = sum(w * tap.astype(jnp.float32) for w, tap in zip(kernel, taps, strict=True))
            if bias is not None:
                y = y + bias.astype(jnp.float32)[None, None, :]
            return jax.nn.silu(y).astype(u.dtype)

        y = convolve(u, self.kernel[...], None if self.bias is None else self.bias[...])
        return y, _newest(u, past, packing, W) if output_past else None


class GatedRMSNorm(nnx.Module):
    """`x rsqrt(mean(x²) + epsilon) scale sigmoid(z)` over the last axis, in float32."""

    def __init__(self, features: int, *, epsilon: float = 1e-5):
        self.scale = nnx.Param(jnp.ones(features, jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array, z: jax.Array) -> jax.Array:
        @jax.checkpoint
        def norm(x, z, scale):
            x, gate = x.astype(jnp.float32), jax.nn.sigmoid(z.astype(jnp.float32))
            x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
            scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
            return (x * scale * gate).astype(z.dtype)

        return norm(x, z, self.scale[...])


class _Packing(NamedTuple):
    """Where the M sequences of each row lie."""

    segment_ids: jax.Array  # [B, T]  0: no sequence
    spans: jax.Array  # [B, M, 2]     where a sequence begins and ends
    since: jax.Array  # [B, T]        tokens since the beginning of the sequence
    sequence: jax.Array  # [B, T]     which sequence of the row it is
    place: jax.Array | None  # [B, T] where a token was moved to, T for padding; None: nothing moved


def _pack(x, segment_ids, max_segments, padding_mask):
    """x with zeros where there is no token, and the packing, None if rows are sequences.

    Under a `padding_mask` tokens move to the beginning of their row.
    """
    if padding_mask is not None and segment_ids is not None:
        raise ValueError(
            "`padding_mask` must be None when segment_ids is given (id 0 is padding); got both"
        )
    B, T, _ = x.shape
    t = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    if padding_mask is not None:
        if max_segments is not None:
            raise ValueError(f"`max_segments` must be None without segment_ids; got {max_segments}")
        present = _present(padding_mask, B, T)
        place = jnp.where(present, jnp.cumsum(present, axis=1, dtype=jnp.int32) - 1, T)
        token = jax.vmap(lambda row: jnp.nonzero(row, size=T, fill_value=T)[0])(present)
        length = jnp.sum(present, axis=1, keepdims=True, dtype=jnp.int32)
        spans = jnp.stack([jnp.zeros_like(length), length], axis=-1)
        one_segment = (t < length).astype(jnp.int32)
        return _take(x, token), _Packing(one_segment, spans, t, jnp.zeros_like(t), place)

    offsets, _ = validate.sequence_offsets(None, segment_ids, max_segments, B, T)
    if offsets is None:
        return x, None
    segment_ids = jnp.asarray(segment_ids)
    change = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))[:, :T]
    begin = jax.lax.cummax(jnp.where(change, t, 0), axis=1)
    first = (t == begin) & (segment_ids != 0)
    sequence = jnp.cumsum(first, axis=1, dtype=jnp.int32) - 1
    x = jnp.where((segment_ids != 0)[..., None], x, jnp.zeros_like(x))
    return x, _Packing(segment_ids, offsets, t - begin, sequence, None)


def _present(mask, B, T):
    mask = jnp.asarray(mask)
    if mask.shape != (B, T):
        raise ValueError(
            f"`padding_mask` must have shape [B, T] = {list((B, T))}; got {list(mask.shape)}"
        )
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise TypeError(f"`padding_mask` must have dtype bool or an integer one; got {mask.dtype}")
    return mask.astype(bool)


def _taps(u, past, packing, W):
    """What each tap of the convolution sees [B, T, C], the oldest first."""
    B, T, C = u.shape
    if packing is None:
        inputs = _after(past, u, W)
        return [inputs[:, w : w + T] for w in range(W)]
    M = packing.spans.shape[1]
    taps = [u]
    for lag in range(1, W):
        before = jnp.zeros_like(u)
        if past is not None:
            index = (W - 1) * packing.sequence + W - 1 - lag + packing.since
            before = _take(past.astype(u.dtype).reshape(B, M * (W - 1), C), index)
        earlier = jnp.pad(u, ((0, 0), (lag, 0), (0, 0)))[:, :T]
        taps.append(jnp.where((packing.since >= lag)[..., None], earlier, before))
    return taps[::-1]


def _newest(u, past, packing, W):
    """The last W - 1 inputs of every sequence [N, W - 1, C]."""
    T, C = u.shape[1:]
    if packing is None:
        return _after(past, u, W)[:, T:].astype(u.dtype if past is None else past.dtype)
    begin, end = packing.spans[..., :1], packing.spans[..., 1:]
    B, M = begin.shape[:2]
    w = jnp.arange(W - 1, dtype=jnp.int32)[None, None, :]
    token = end - (W - 1) + w  # [B, M, W - 1]
    inside = token >= begin
    newest = _take(u, jnp.where(inside, token, T).reshape(B, M * (W - 1)))
    newest = newest.reshape(B * M, W - 1, C)
    if past is None:
        return newest
    kept = _take(past, (end - begin + w).reshape(B * M, W - 1))
    return jnp.where(inside.reshape(B * M, W - 1, 1), newest.astype(past.dtype), kept)


def _after(past, u, W):
    """u after its past, or after zeros [B, W - 1 + T, C]."""
    if past is None:
        return jnp.pad(u, ((0, 0), (W - 1, 0), (0, 0)))
    return jnp.concatenate([past.astype(u.dtype), u], axis=1)


def _take(x, index):
    """Tokens of x [B, T, C] by index [B, I], and zeros where it is out of bounds."""
    return jnp.take_along_axis(x, index[..., None], axis=1, mode="fill", fill_value=0)


def _explicit_sharding(x, o):
    """x's sharding on o's mesh if that has explicit axes, where a sum over heads has to name it."""
    mesh = jax.typeof(o).sharding.mesh
    return NamedSharding(mesh, jax.typeof(x).sharding.spec) if mesh.explicit_axes else None


def _partitioned(init, axes: Sequence[str | None]):
    return init if all(axis is None for axis in axes) else nnx.with_partitioning(init, tuple(axes))


def _log_uniform_slope(key, shape, dtype):
    return jnp.log(jax.random.uniform(key, shape, dtype, minval=1.0, maxval=16.0))


def _inverse_softplus_step(key, shape, dtype):
    """softplus of it is log-uniform in [1e-3, 1e-1]."""
    low, high = jnp.log(1e-3), jnp.log(1e-1)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, minval=low, maxval=high))
    return step + jnp.log(-jnp.expm1(-step))
