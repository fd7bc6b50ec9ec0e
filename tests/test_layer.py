"""`jax_kda.layers`: caches, padding, packing, dtypes, Flax's transforms, sharding, errors."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax", reason="needs jax_kda[flax]")

from flax import linen, nnx
from layer_calls import SMALL, VARIANTS, cache_of, call, extend, inputs, small, variables

import jax_kda
from jax_kda import layers
from jax_kda.layers import KimiDeltaAttention

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ---- Caches --------------------------------------------------------------------------------------


def tolerance(layer: KimiDeltaAttention) -> float:
    return 2e-3 if layer.dtype == jnp.bfloat16 else 1e-5


def sequence(cache: Any, n: int) -> Any:
    """One of a cache's sequences; None is the beginning of any."""
    return jax.tree.map(lambda a: a[n : n + 1], cache)


def assert_same_cache(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for name in layers.LayerCache._fields:
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, tolerance, name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_are_the_whole(variant: str):
    layer = small(**VARIANTS[variant])
    x = inputs(2, 40)
    y, cache = extend(layer, x)
    assert_close(call(layer, x), y, tolerance(layer))
    layer.init_cache(2)
    ys = [call(layer, part) for part in np.split(x, [0, 20, 25, 26, 27, 28, 29], axis=1)]
    assert_close(np.concatenate(ys, axis=1), y, tolerance(layer), "y")
    if layer.use_short_conv:
        assert_same_cache(cache_of(layer), cache, tolerance(layer))


@pytest.mark.parametrize("T", [0, 1, 15, 64, 65, 200])
def test_prefill_of_any_length(T: int):
    layer, n = small(), 5
    x = inputs(2, T + n)
    whole, end = extend(layer, x)
    y, cache = extend(layer, x[:, :T])
    assert y.shape == (2, T, 24)
    assert_close(y, whole[:, :T], 1e-5, "prefill")
    for t in range(T, T + n):
        y, cache = extend(layer, x[:, t : t + 1], cache)
        assert_close(y, whole[:, t : t + 1], 1e-5, f"token {t}")
    assert_same_cache(cache, end)


@pytest.mark.parametrize("split", [(64,), (64, 128, 192), (1, 30, 47, 130)])
def test_prefill_in_parts(split: tuple[int, ...]):
    layer = small(lower_bound=-5.0)
    x = inputs(2, 230)
    y, end = extend(layer, x)
    ys, cache = [], None
    for part in np.split(x, split, axis=1):
        part, cache = extend(layer, part, cache)
        ys.append(part)
    assert_close(np.concatenate(ys, axis=1), y, 1e-5, "y")
    assert_same_cache(cache, end)


def test_decode_calls_the_recurrent_op(monkeypatch: pytest.MonkeyPatch):
    called = []
    for name in ("chunk_kda", "recurrent_kda"):
        op = getattr(layers, name)
        record = lambda *args, op=op, name=name, **options: (
            called.append(name) or op(*args, **options)
        )
        monkeypatch.setattr(layers, name, record)
    layer = small()
    jax.eval_shape(layer, inputs(1, 16))  # no cache: for training
    for T in (0, 1, 16, 17):
        jax.eval_shape(layer.extend, inputs(1, T))
    assert called == ["chunk_kda", *["recurrent_kda"] * 3, "chunk_kda"]


def test_a_decode_step_copies_no_state():
    """Of three layers, as functions of their caches."""
    model = nnx.List(small(seed) for seed in range(3))
    caches = [layer.empty_cache(3) for layer in model]
    graphdef, parameters = nnx.split(model)

    def step(parameters, caches, x):
        new = []
        for layer, cache in zip(nnx.merge(graphdef, parameters), caches, strict=True):
            x, cache = layer.extend(x, cache)
            new.append(cache)
        return x, new

    step = jax.jit(step, donate_argnums=1).lower(parameters, caches, inputs(3, 1)).compile()
    shape = ",".join(map(str, caches[0].state.shape))
    assert not re.search(rf"f32\[{shape}\]\S* copy\(", str(step.as_text()))
    where = lambda caches: [cache.state.unsafe_buffer_pointer() for cache in caches]
    pointers = where(caches)
    for t in range(3):
        _, caches = step(parameters, caches, inputs(3, 1, seed=t))
        assert where(caches) == pointers


def test_a_donated_module_stays_where_it_is():
    layer = small()
    layer.init_cache(3)
    step = nnx.jit(lambda layer, x: layer(x), donate_argnums=0)
    kept = [layer.cached_state, layer.q_proj.kernel, layer.A_log]
    pointers = [variable[...].unsafe_buffer_pointer() for variable in kept]
    for t in range(3):
        step(layer, inputs(3, 1, seed=t))
        assert [variable[...].unsafe_buffer_pointer() for variable in kept] == pointers


def test_cache_goes_away():
    layer, x = small(), inputs(2, 5)
    y = call(layer, x)
    layer.init_cache(2)
    call(layer, x)
    assert set(nnx.pop(layer, nnx.Cache)) == {"cached_q", "cached_k", "cached_v", "cached_state"}
    np.testing.assert_array_equal(call(layer, x), y)


def test_cache_of_bfloat16_states():
    layer, x = small(), inputs(2, 20)
    layer.init_cache(2, state_dtype=jnp.bfloat16)
    y = call(layer, x[:, :18])
    y = np.concatenate([y, call(layer, x[:, 18:])], axis=1)
    assert cache_of(layer).state.dtype == jnp.bfloat16
    assert_close(y, call(small(), x), 2e-3)


# ---- Padding and packing -------------------------------------------------------------------------


MASKS = {
    "left": [[0] * 7 + [1] * 13, [0] * 20, [1] * 20],
    "right": [[1] * 13 + [0] * 7, [1] * 2 + [0] * 18, [0] * 20],
    "hole": [[1] * 5 + [0] * 4 + [1] * 11, [0] * 3 + [1, 0] * 8 + [1], [1] * 18 + [0] * 2],
}
CONTENTS = {"zeros": 0.0, "large": 1e4, "nan": np.nan}


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("where", MASKS)
def test_padding_leaves_no_trace(where: str, B: int):
    layer = small(g_bias=True, conv_bias=True)
    mask = np.array(MASKS[where][:B], bool if where == "left" else np.int32)
    x, after = inputs(B, 20), inputs(B, 3, seed=2)
    _, past = extend(layer, inputs(B, 9, seed=3))
    for before in (None, past):
        y, cache = extend(layer, x, before, padding_mask=mask)
        assert not np.any(y[mask == 0])
        for content in CONTENTS.values():
            other = np.where(mask[..., None], x, np.float32(content))
            results = extend(layer, other, before, padding_mask=mask)
            jax.tree.map(np.testing.assert_array_equal, results, (y, cache))

        z, _ = extend(layer, after, cache)
        for b, row in enumerate(mask.astype(bool)):  # each row by itself, without padding
            row_before = sequence(before, b)
            row_y, row_cache = extend(layer, x[b : b + 1, row], row_before)
            assert_close(y[b, row], row_y[0], 1e-5, "y")
            assert_same_cache(sequence(cache, b), row_cache)
            assert_close(z[b], extend(layer, after[b : b + 1], row_cache)[0][0], 1e-5, "after")


def test_padding_in_a_decode_step():
    layer = small()
    _, cache = extend(layer, inputs(3, 9))
    x, mask = inputs(3, 1, seed=2), np.array([[1], [0], [1]])
    y, new = extend(layer, x, cache, padding_mask=mask)
    whole, all_new = extend(layer, x, cache)
    for b in range(3):
        expected = (whole, all_new) if mask[b] else (np.zeros_like(whole), cache)
        jax.tree.map(
            functools.partial(assert_close, tolerance=1e-6),
            sequence((y, new), b),
            sequence(expected, b),
        )


@pytest.mark.parametrize("packing", ["rows", "padding_mask", "segment_ids"])
def test_no_tokens(packing: str):
    layer, nothing = small(), np.zeros((2, 0), np.int32)
    options = {} if packing == "rows" else {packing: nothing}
    options |= {"max_segments": 1} if packing == "segment_ids" else {}
    _, cache = extend(layer, inputs(2, 9))
    y, same = extend(layer, inputs(2, 0), cache, **options)
    assert y.shape == (2, 0, 24)
    jax.tree.map(np.testing.assert_array_equal, same, cache)


def test_padding_has_no_gradient():
    layer, mask = small(), np.array(MASKS["hole"])
    x = np.where(mask[..., None], inputs(3, 20), np.float32(np.nan))
    loss = lambda x: jnp.sum(layer(x, padding_mask=mask) ** 2)
    dx = jax.jit(jax.grad(loss))(x)
    assert np.all(np.isfinite(dx)) and not np.any(dx[mask == 0]) and np.all(dx[mask == 1])


IDS = np.array([[1] * 40 + [2] * 60 + [0] * 28, [0] * 2 + [7] + [3] * 2 + [0] * 20 + [3] * 103])


def runs(row: np.ndarray) -> list[tuple[int, int]]:
    """Where the segments of a row are."""
    edges = [0, *np.flatnonzero(np.diff(row)) + 1, len(row)]
    return [(i, j) for i, j in itertools.pairwise(edges) if row[i] != 0]


@pytest.mark.parametrize("variant", ["plain", "conv_bias", "one_tap"])
def test_packed_sequences_are_alone(variant: str):
    layer, x = small(**VARIANTS[variant]), inputs(2, 128)
    y, cache = extend(layer, x, segment_ids=IDS, max_segments=4)
    assert_close(call(layer, x, segment_ids=IDS, max_segments=4), y, 1e-6)
    assert not np.any(y[IDS == 0])
    for b, row in enumerate(IDS):
        for m, (begin, end) in enumerate(runs(row)):
            alone, alone_cache = extend(layer, x[b : b + 1, begin:end])
            assert_close(y[b, begin:end], alone[0], 1e-5, "y")
            assert_same_cache(sequence(cache, 4 * b + m), alone_cache)


def test_packed_sequences_continue():
    """Two calls with the same sequences in each, of other lengths; unused ones stay as they are."""
    layer, x = small(), inputs(1, 30)
    first = np.array([[1] * 2 + [2] * 20 + [0] * 2 + [3] * 6])
    second = np.array([[9] * 7 + [4] * 1 + [5] * 9 + [0] * 13])
    _, start = extend(layer, inputs(4, 5, seed=4))
    _, cache = extend(layer, x, start, segment_ids=first, max_segments=4)
    y, cache = extend(layer, x, cache, segment_ids=second, max_segments=4)
    for m, ((i, j), (k, l)) in enumerate(zip(runs(first[0]), runs(second[0]), strict=True)):
        both = np.concatenate([x[:, i:j], x[:, k:l]], axis=1)
        alone, alone_cache = extend(layer, both, sequence(start, m))
        assert_close(y[:, k:l], alone[:, j - i :], 1e-5, "y")
        assert_same_cache(sequence(cache, m), alone_cache)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[3], b[3]), cache, start)


def test_packed_sequences_do_not_see_each_other():
    layer, x = small(), inputs(2, 128)
    other = np.where((IDS == 1)[..., None], inputs(2, 128, seed=5), x)
    other = np.where((IDS == 0)[..., None], np.float32(np.nan), other)
    y, z = (call(layer, x, segment_ids=IDS, max_segments=4) for x in (x, other))
    np.testing.assert_array_equal(y[IDS != 1], z[IDS != 1])
    assert np.any(y[IDS == 1] != z[IDS == 1])


def test_packed_decode_of_short_rows():
    layer, x = small(), inputs(1, 8)
    ids = np.array([[1, 1, 2, 0, 3, 3, 3, 3]])
    _, start = extend(layer, inputs(3, 5, seed=4))
    y, cache = extend(layer, x, start, segment_ids=ids, max_segments=3)
    for m, (i, j) in enumerate(runs(ids[0])):
        alone = extend(layer, x[:, i:j], sequence(start, m))
        assert_close(y[:, i:j], alone[0], 1e-5, "y")
        assert_same_cache(sequence(cache, m), alone[1])


# ---- Parameters and dtypes -----------------------------------------------------------------------


def test_initialisation():
    """Of a layer large enough for statistics; the ranges are those of docs/layer.md."""
    make: Any = nnx.jit(
        lambda key: KimiDeltaAttention(64, 64, 4, lower_bound=None, rngs=nnx.Rngs(key))
    )
    seen = []
    for seed in range(5):
        layer = make(jax.random.key(seed))
        for kernel in (layer.q_proj.kernel, layer.v_conv1d.kernel, layer.g_b_proj.kernel):
            assert abs(float(jnp.std(kernel[...])) / 0.02 - 1) < 0.1
        slope, step = jnp.exp(layer.A_log[...]), jax.nn.softplus(layer.dt_bias[...])
        assert 1 <= slope.min() < 3 and 13 < slope.max() <= 16
        assert 1e-3 * (1 - 1e-4) <= step.min() < 2e-3 and 5e-2 < step.max() <= 1e-1 * (1 + 1e-4)
        assert np.all(layer.o_norm.scale[...] == 1)
        seen.append(np.asarray(layer.A_log[...]))
        for x in (-1e4, 1e4):  # what the gate does to the largest of inputs
            g = jax_kda.kda_gate(jnp.full((64, 4), x), layer.A_log[...], layer.dt_bias[...])
            assert np.all(np.isfinite(g)) and np.all(g <= 0)
    assert len(np.unique(seen)) == 5 * 64


def test_initialisation_of_the_lower_bound_gate():
    layer: Any = KimiDeltaAttention(8, 2, 4, lower_bound=-5.0, g_bias=True, rngs=nnx.Rngs(0))
    assert not np.any(layer.A_log[...]) and not np.any(layer.g_b_proj.bias[...])


def test_parameters_have_the_names_of_the_checkpoint():
    names = {"/".join(path) for path in variables(small())}
    projections = ("q", "k", "v", "f_a", "f_b", "b", "g_a", "g_b", "o")
    assert names == {
        *(f"{n}_proj/kernel" for n in projections),
        *(f"{n}_conv1d/kernel" for n in "qkv"),
        *("A_log", "dt_bias", "o_norm/scale"),
    }
    options = {"f_rank": None, "g_rank": None, "g_bias": True, "use_short_conv": False}
    names = {"/".join(path) for path in variables(small(**options))}
    assert names == {
        *(f"{n}_proj/kernel" for n in "qkvfbgo"),
        *("g_proj/bias", "A_log", "dt_bias", "o_norm/scale"),
    }


def test_bfloat16_keeps_gate_strength_norm_and_state_in_float32(monkeypatch: pytest.MonkeyPatch):
    seen = {}

    def recorded(*operands, **options):
        seen.update(zip("qkvgb", operands, strict=True), **options)
        return jax_kda.chunk_kda(*operands, **options)

    monkeypatch.setattr(layers, "chunk_kda", recorded)
    layer = small(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, conv_bias=True, g_bias=True)
    for path, parameter in variables(layer).items():
        narrow = path[0].endswith("_proj")
        assert parameter.dtype == (jnp.bfloat16 if narrow else jnp.float32), path
    cache = layer.empty_cache(2)
    y, cache = jax.eval_shape(layer.extend, inputs(2, 20).astype(jnp.bfloat16), cache)
    assert y.dtype == cache.q.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32
    narrow, wide = ("q", "k", "v", "g"), ("b", "A_log", "dt_bias", "initial_state")
    assert {seen[name].dtype for name in narrow} == {jnp.dtype(jnp.bfloat16)}
    assert {seen[name].dtype for name in wide} == {jnp.dtype(jnp.float32)}


def test_bfloat16_is_near_float32():
    x = inputs(2, 100)
    expected = call(small(), x)
    y = call(small(dtype=jnp.bfloat16), x)
    assert y.dtype == jnp.bfloat16
    assert_close(y, expected, 1.2e-2)


def test_parameters_that_a_policy_has_rounded():
    layer = small(conv_bias=True)
    for parameter in variables(layer).values():
        parameter.set_value(parameter[...].astype(jnp.bfloat16))
    x = inputs(2, 40)
    y = call(layer, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert_close(y, call(small(conv_bias=True), x), 1.2e-2)


@pytest.mark.gpu
def test_gpu_is_near_the_cpu():
    """Prefill with padding, then decoding, where a CUDA kernel covers the call."""
    sizes = {"num_v_heads": None, "head_dim": 128, "head_v_dim": 128}
    x, new = inputs(3, 150), inputs(3, 1, seed=2)
    mask = np.arange(150)[None, :] >= np.array([[0], [40], [149]])
    y, cache = extend(small(**sizes), x, padding_mask=mask)
    z, cache = extend(small(**sizes), new, cache)
    with jax.default_device(jax.local_devices(backend="gpu")[0]):
        layer = small(**sizes, dtype=jnp.bfloat16)
        gpu_y, gpu_cache = extend(layer, x, padding_mask=mask)
        gpu_z, gpu_cache = extend(layer, new, gpu_cache)
    assert_close(gpu_y, y, 1e-2, "y")
    assert_close(gpu_z, z, 1e-2, "decoded")
    assert_same_cache(gpu_cache, cache, 1e-2)


def test_reference_is_near_the_kernel():
    x = inputs(2, 100)
    assert_close(call(small(implementation="reference"), x), call(small(), x), 1e-5)


def test_decoding_does_not_drift():
    """2,000 steps, one token at a time, end where one call ends."""
    layer, x = small(), inputs(1, 2000)
    y, cache = extend(layer, x)

    @nnx.jit
    def decode(layer, cache, x):
        step = lambda cache, x: layer.extend(x[:, None], cache)[::-1]
        cache, y = jax.lax.scan(step, cache, x.swapaxes(0, 1))
        return y[:, :, 0].swapaxes(0, 1), cache

    step_y, step_cache = decode(layer, layer.empty_cache(1), x)
    assert_close(step_y[:, -100:], y[:, -100:], 1e-5, "y")
    assert_same_cache(step_cache, cache)


# ---- Flax's transforms ---------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(24, rngs=rngs)
        initialise = nnx.initializers.normal(0.2)
        self.attention = KimiDeltaAttention(24, 2, 8, kernel_init=initialise, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + self.attention(self.norm(h))


class Stack(nnx.Module):
    """Four blocks, their parameters and caches stacked, run by a scan."""

    def __init__(self, rngs: nnx.Rngs, *, remat: bool):
        self.remat = remat
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(Block))(rngs)

    def init_cache(self, batch_size: int) -> None:
        nnx.vmap(lambda block: block.attention.init_cache(batch_size))(self.blocks)

    def __call__(self, h: jax.Array) -> jax.Array:
        run = lambda h, block: block(h)
        if self.remat:
            run = nnx.remat(run)
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(h, self.blocks)

    def unrolled(self) -> list[Block]:
        graphdef, state = nnx.split(self.blocks)
        take = lambda i: jax.tree.map(lambda a: a[i], state)
        return [nnx.merge(graphdef, take(i)) for i in range(4)]


@pytest.mark.parametrize("remat", [False, True])
def test_scan_of_stacked_layers(remat: bool):
    model, x = Stack(nnx.Rngs(0), remat=remat), inputs(2, 26)
    expected = functools.reduce(lambda h, block: call(block, h), model.unrolled(), x)
    assert_close(call(model, x), expected, 1e-5, "y")

    model.init_cache(2)
    y = call(model, x[:, :16])

    def step(carry):
        t, model, y = carry
        token = jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1)
        return t + 1, model, jax.lax.dynamic_update_slice_in_dim(y, model(token), t, axis=1)

    y = jnp.pad(y, ((0, 0), (0, 10), (0, 0)))
    _, model, y = nnx.while_loop(lambda carry: carry[0] < 26, step, (jnp.int32(16), model, y))
    assert_close(y, expected, 1e-5, "decoded")


def test_gradient_of_stacked_layers():
    model, x = Stack(nnx.Rngs(0), remat=True), inputs(2, 26)
    run_all = lambda blocks: functools.reduce(lambda h, block: block(h), blocks, x)

    @nnx.jit
    def gradients(model, blocks):
        return (
            nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)["blocks"],
            nnx.grad(lambda blocks: jnp.sum(run_all(blocks) ** 2))(blocks),
        )

    stacked, unrolled = gradients(model, nnx.List(model.unrolled()))
    for path, actual in variables(stacked).items():
        for i, of_block in unrolled.items():
            expected = functools.reduce(lambda node, name: node[name], path, of_block)
            assert_close(actual[...][i], expected[...], 1e-4, str(path))


def test_vmap_of_calls_and_caches():
    layer, x = small(), inputs(3, 2, 12)
    _, cache = jax.jit(jax.vmap(layer.extend))(x)
    y, cache = jax.jit(jax.vmap(layer.extend))(x[:, :, :1], cache)
    for i in range(3):
        _, alone = extend(layer, x[i])
        alone_y, alone = extend(layer, x[i, :, :1], alone)
        assert_close(y[i], alone_y, 1e-5, "y")
        assert_same_cache(jax.tree.map(lambda a, i=i: a[i], cache), alone)


@pytest.mark.parametrize("how", ["plain", "scan"])
def test_linen(how: str):
    """Through Flax's bridge: parameters and cache are Linen's collections, `init` uses no cache."""
    options: dict[str, Any] = {"hidden_size": 24, "num_heads": 2, "head_dim": 8}
    options["kernel_init"] = nnx.initializers.normal(0.2)

    def cached(batch_size, rngs):
        layer = KimiDeltaAttention(**options, rngs=rngs)
        layer.init_cache(batch_size)
        return layer

    class Residual(linen.Module):
        batch_size: int | None = None

        @linen.compact
        def __call__(self, h, _=None):
            if self.batch_size is None:
                attention = nnx.bridge.to_linen(KimiDeltaAttention, **options, name="attention")
            else:
                attention = nnx.bridge.to_linen(cached, self.batch_size, name="attention")
            return h + attention(h), None

    def make(batch_size=None):
        if how == "plain":
            return Residual(batch_size)
        axes: Any = {"params": 0, "cache": 0}
        body = linen.remat(Residual)
        return linen.scan(body, variable_axes=axes, split_rngs={"params": True}, length=4)(
            batch_size
        )

    x = jnp.asarray(inputs(2, 26))
    model = make(2)
    collections = jax.jit(model.init)(jax.random.key(0), x[:, :16], None)
    assert all(not np.any(a) for a in jax.tree.leaves(collections["cache"]))
    assert "A_log" in collections["params"]["attention"]
    expected, _ = jax.jit(make().apply)({"params": collections["params"]}, x, None)

    @jax.jit
    def step(cache, x):
        now = {"params": collections["params"], "cache": cache}
        (y, _), update = model.apply(now, x, None, mutable=["cache"])
        return update["cache"], y

    cache, y = step(collections["cache"], x[:, :16])
    decode = lambda cache, x: step(cache, x[:, None])
    _, ys = jax.lax.scan(decode, cache, x[:, 16:].swapaxes(0, 1))
    y = jnp.concatenate([y, ys[:, :, 0].swapaxes(0, 1)], axis=1)
    assert_close(y, expected, 1e-5)


# ---- Sharding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_tensor_parallel_heads(kind: AxisType):
    x, new, mask = inputs(4, 20), inputs(4, 1, seed=2), np.array([[0] * 3 + [1] * 17] * 4)
    graphdef, state = nnx.split(small())
    expected, cache = extend(nnx.merge(graphdef, state), x, padding_mask=mask)
    expected_new, cache = extend(nnx.merge(graphdef, state), new, cache)

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        layer = KimiDeltaAttention(**SMALL, heads_axis="model", rngs=nnx.Rngs(0))
        for path, parameter in variables(layer).items():
            sharding = parameter[...].sharding
            value = variables(state)[path][...]
            parameter.set_value(jax.device_put(np.asarray(value), sharding))
            assert ("model" in sharding.spec) == (path[0] not in ("f_a_proj", "g_a_proj", "o_norm"))
        shard = lambda a: jax.device_put(a, NamedSharding(mesh, P("data")))
        layer.init_cache(4, batch_axis="data")
        assert layer.cached_state[...].sharding.spec == P("data", "model", None, None)
        y = call(layer, shard(x), padding_mask=shard(mask))
        y_new = call(layer, shard(new))
        assert_close(y, expected, 1e-5, "y")
        assert_close(y_new, expected_new, 1e-5, "decoded")
        assert_same_cache(cache_of(layer), cache)
        assert layer.cached_state[...].sharding.spec[:2] == ("data", "model")

        graphdef, state = nnx.split(layer)
        run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
        text = run.lower(state, shard(x)).compile().as_text()
    collectives = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\S*\("
    assert re.findall(collectives, str(text)) == ["all-reduce"]


def test_no_metadata_without_axes():
    for parameter in variables(small()).values():
        assert parameter.get_metadata().get("out_sharding") is None


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"num_v_heads": 3}, ValueError, "`num_v_heads` must be a positive multiple of num_heads"),
        ({"num_v_heads": 0}, ValueError, "= 2; got 0"),
        ({"dtype": jnp.float16}, TypeError, "`dtype` must be bfloat16, float32 or None; got float"),
    ],
)
def test_constructor_errors(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=re.escape(message)):
        small(**options)


IDS_OK, MASK_OK = np.ones((2, 5), np.int32), np.ones((2, 5), bool)


@pytest.mark.parametrize(
    "shape, options, error, message",
    [
        ((2, 5, 23), {}, ValueError, "`x` must have shape [B, T, hidden_size] = [B, T, 24]; got"),
        ((5, 24), {}, ValueError, "got [5, 24]"),
        (
            (2, 5, 24),
            {"segment_ids": IDS_OK, "max_segments": 1, "padding_mask": MASK_OK},
            ValueError,
            "`padding_mask` must be None when segment_ids is given (id 0 is padding); got both",
        ),
        ((2, 5, 24), {"segment_ids": IDS_OK}, ValueError, "`max_segments` must be given"),
        ((2, 5, 24), {"max_segments": 2}, ValueError, "`max_segments` must be None without"),
        (
            (2, 5, 24),
            {"padding_mask": MASK_OK, "max_segments": 2},
            ValueError,
            "`max_segments` must be None without",
        ),
        (
            (2, 6, 24),
            {"padding_mask": MASK_OK},
            ValueError,
            "`padding_mask` must have shape [B, T] = [2, 6]; got [2, 5]",
        ),
        (
            (2, 5, 24),
            {"padding_mask": MASK_OK.astype(np.float32)},
            TypeError,
            "`padding_mask` must have dtype bool or an integer one; got float32",
        ),
        (
            (2, 5, 24),
            {"segment_ids": IDS_OK.astype(np.float32), "max_segments": 1},
            TypeError,
            "`segment_ids` must have an integer dtype",
        ),
    ],
)
def test_call_errors(shape: tuple[int, ...], options, error: type[Exception], message: str):
    layer = small()
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(functools.partial(layer, **options), jnp.ones(shape))


def test_cache_errors():
    layer = small()
    layer.init_cache(3)
    with pytest.raises(ValueError, match="`cache` must have N = 2 sequences; got 3"):
        jax.eval_shape(layer, jnp.ones((2, 5, 24)))
    with pytest.raises(ValueError, match="`cache` must have N = 4 sequences; got 3"):
        options = {"segment_ids": IDS_OK, "max_segments": 2}
        jax.eval_shape(functools.partial(layer, **options), jnp.ones((2, 5, 24)))
