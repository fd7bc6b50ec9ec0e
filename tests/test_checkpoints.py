"""Layers from safetensors files and back: names, shapes, values, and what is said when they do not
fit. The weights of tests/data are those of other implementations, in their names and shapes.
"""

import ctypes
import functools
import json
import os
import re
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx", reason="needs jax_kda[flax]")
pytest.importorskip("safetensors", reason="needs jax_kda[flax]")

from safetensors.numpy import load_file, save_file  # noqa: E402

from jax_kda import checkpoints  # noqa: E402
from jax_kda.checkpoints import FORMS  # noqa: E402
from jax_kda.layers import KimiDeltaAttention  # noqa: E402

DATA = Path(__file__).parent / "data"
VECTORS = {
    "kimi_linear": "b02_kimi_h96",
    "glm5_next": "b03_glm5_next_lb",
    "fla": "b05_fla_layer_gva_lb",
}
SMALL: dict[str, Any] = {"hidden_size": 12, "num_heads": 2, "head_dim": 8}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_v_heads": 4, "head_v_dim": 6, "lower_bound": -5.0},
    "full_rank": {"f_rank": None, "g_rank": None},
    "biases": {"g_bias": True, "conv_bias": True, "conv_size": 3},
    "no_convolution": {"use_short_conv": False, "f_rank": 5, "g_rank": 3},
    "bfloat16": {"param_dtype": jnp.bfloat16, "num_heads": 1},
}


@functools.cache
def abstract(**options: Any) -> KimiDeltaAttention:
    return nnx.eval_shape(lambda: KimiDeltaAttention(**options, rngs=nnx.Rngs(0)))


def make(seed: int = 0, /, **options: Any) -> KimiDeltaAttention:
    """A layer with random weights from NumPy, which compiles nothing."""
    layer = nnx.clone(abstract(**SMALL | options))
    rng = np.random.default_rng(seed)
    for _, node in nnx.iter_graph(layer):
        if isinstance(node, nnx.Param):
            node.set_value(jnp.asarray(rng.standard_normal(node.shape).astype(node.dtype)))
    return layer


def values(layer: KimiDeltaAttention) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return {".".join(map(str, path)): np.asarray(param.get_value()) for path, param in state}


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Same names, shapes, dtypes and bits."""
    describe = lambda x: {name: (a.shape, a.dtype, a.tobytes()) for name, a in x.items()}
    assert describe(actual) == describe(expected)


def vector(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """Weights by their original names, other arrays, and the layer's options."""
    with np.load(DATA / f"{name}.npz") as file:
        arrays = {name: file[name] for name in file.files if name != "meta"}
        meta = json.loads(str(file["meta"]))
    weights = {n.removeprefix("weights/"): a for n, a in arrays.items() if n.startswith("weights/")}
    fla = meta.get("config")
    options = {
        "hidden_size": fla["hidden_size"] if fla else meta["hidden"],
        "num_heads": fla["num_heads"] if fla else meta["num_heads"],
        "head_dim": fla["head_dim"] if fla else meta["head_dim"],
        "lower_bound": meta["lower_bound"],
        "norm_eps": meta.get("rms_norm_eps", 1e-5),
        "g_bias": bool(fla),
    }
    if fla:
        options["num_v_heads"] = fla.get("num_v_heads")
        options["head_v_dim"] = int(fla["head_dim"] * fla.get("expand_v", 1))
    return weights, arrays, options


def prefixed(prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {prefix + name: a for name, a in tensors.items()}


def save_shards(folder: Path, *shards: dict[str, np.ndarray]) -> Path:
    weight_map = {}
    folder.mkdir(exist_ok=True)
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"shard-{i}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, f"shard-{i}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# ---- other implementations' weights, and what their layers make of them ------------------------


def other_forms() -> dict[str, tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]]:
    """Each naming's weights; those that no file in tests/data has are made from one that has."""
    forms = {naming: vector(name) for naming, name in VECTORS.items()}
    weights, arrays, options = forms["kimi_linear"]
    joint = dict(weights)
    joint["conv1d.weight"] = np.concatenate([joint.pop(f"{x}_conv1d.weight") for x in "qkv"])
    for name in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"):
        joint[f"forget_gate.{name}"] = joint.pop(name)
    forms["transformers"] = joint, arrays, options

    weights, arrays, options = forms["glm5_next"]
    full = dict(weights)
    down, up = (full.pop(f"g_{x}_proj.weight").astype(np.float64) for x in "ab")
    full["g_proj.weight"] = (up @ down).astype(np.float32)
    full["A_log"] = np.pad(full["A_log"], (0, options["head_dim"] - full["A_log"].size))
    forms["kimi_k3"] = full, arrays, options | {"g_rank": None}
    return forms


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("naming", FORMS)
def test_layers_of_every_naming(naming: Any, explicit: bool, tmp_path: Path):
    weights, arrays, options = other_forms()[naming]
    prefix = FORMS[naming].prefix.replace("{layer}", "3")
    names = list(weights)
    half = prefixed(prefix, {name: weights[name] for name in names[::2]})
    rest = prefixed(prefix, {name: weights[name] for name in names[1::2]})
    other = {prefix.replace("3", "4") + "q_proj.weight": np.zeros((2, 2), np.float32)}
    save_shards(tmp_path / "model", half, other, rest)

    layer = make(1, **options)
    checkpoints.load(layer, tmp_path / "model", layer=3, naming=naming if explicit else None)
    y = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(arrays["x"]))
    expected = arrays["y_full"]
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5 * abs(expected).max())

    checkpoints.save(layer, tmp_path / "copy.safetensors", layer=3, naming=naming)
    assert_same(load_file(tmp_path / "copy.safetensors"), prefixed(prefix, weights))


def test_all_layers_of_a_model(tmp_path: Path):
    weights, _, options = vector("c01_packed_kimi")
    kda = {f"model.{name}": a for name, a in weights.items() if ".self_attn." in name}
    renumbered = {name.replace("layers.1.", "layers.12."): a for name, a in kda.items()}
    attention = {"model.layers.3.self_attn.q_proj.weight": np.zeros((3, 2), np.float32)}
    folder = save_shards(tmp_path, renumbered, attention)
    assert checkpoints.layers(folder) == {
        0: "model.layers.0.self_attn.",
        12: "model.layers.12.self_attn.",
    }

    layers = [make(seed, **options) for seed in (1, 2)]
    checkpoints.load(layers, folder)
    checkpoints.save({0: layers[0], 12: layers[1]}, tmp_path / "copy")
    assert_same(load_file(tmp_path / "copy/model.safetensors"), renumbered)

    swapped = [make(seed, **options) for seed in (3, 4)]
    checkpoints.load({12: swapped[0], 0: swapped[1]}, folder)
    assert_same(values(swapped[0]), values(layers[1]))
    assert_same(values(swapped[1]), values(layers[0]))


# ---- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("naming", FORMS)
def test_round_trip(naming: Any, kind: str, tmp_path: Path):
    layers = [make(seed, **LAYERS[kind]) for seed in (1, 2, 3)]
    expected = [values(layer) for layer in layers]
    for path in (tmp_path / "one.safetensors", tmp_path / "folder", tmp_path / "shards"):
        limit = 2000 if path.name == "shards" else 10**9
        checkpoints.save(layers, path, naming=naming, shard_bytes=limit)
        files = sorted(p.name for p in path.parent.glob(f"{path.name}/*"))
        assert len(files) > 2 if path.name == "shards" else len(files) < 2
        fresh = [make(9, **LAYERS[kind]) for _ in layers]
        checkpoints.load(fresh, path, naming=naming)
        for layer, x in zip(fresh, expected, strict=True):
            assert_same(values(layer), x)
        one = make(9, **LAYERS[kind])
        checkpoints.load(one, path, layer=1)
        assert_same(values(one), expected[1])


def test_without_a_prefix(tmp_path: Path):
    layer, copy = make(1), make(2)
    checkpoints.save(layer, tmp_path / "x.safetensors")
    assert checkpoints.layers(tmp_path / "x.safetensors") == {None: ""}
    checkpoints.load(copy, tmp_path / "x.safetensors")
    assert_same(values(copy), values(layer))


def test_own_prefix(tmp_path: Path):
    layers = [make(1), make(2)]
    checkpoints.save(layers, tmp_path, prefix="net.{layer}.mixer.", naming="fla")
    assert checkpoints.layers(tmp_path) == {0: "net.0.mixer.", 1: "net.1.mixer."}
    copy = make(3)
    checkpoints.load(copy, tmp_path, prefix="net.1.mixer.")
    assert_same(values(copy), values(layers[1]))
    checkpoints.load(copy, tmp_path, prefix="net.{layer}.mixer.", layer=0)
    assert_same(values(copy), values(layers[0]))


def test_prefix_tells_two_layers_of_one_number_apart(tmp_path: Path):
    main, draft = make(1), make(2)
    tensors = {}
    for layer, prefix in ((main, "model.layers.0.self_attn."), (draft, "mtp.layers.0.self_attn.")):
        checkpoints.save(layer, tmp_path / "one.safetensors", prefix=prefix)
        tensors |= load_file(tmp_path / "one.safetensors")
        (tmp_path / "one.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="`prefix` must be given where two layers have one number"):
        checkpoints.load(make(), tmp_path, layer=0)
    copy = make()
    checkpoints.load([copy], tmp_path, prefix="mtp.layers.{layer}.self_attn.")
    assert_same(values(copy), values(draft))


def test_dtypes_are_the_parameters(tmp_path: Path):
    source = make(1)
    checkpoints.save(source, tmp_path / "f32.safetensors")
    tensors = load_file(tmp_path / "f32.safetensors")
    bf16 = {n: a.astype(ml_dtypes.bfloat16) for n, a in tensors.items()}
    save_file(bf16, tmp_path / "bf16.safetensors")

    low = make(2, param_dtype=jnp.bfloat16)
    checkpoints.load(low, tmp_path / "bf16.safetensors")
    kernel = low.q_proj.kernel[...]
    assert kernel.dtype == jnp.bfloat16
    assert kernel.tobytes() == np.ascontiguousarray(bf16["q_proj.weight"].T).tobytes()
    assert low.A_log[...].dtype == jnp.float32

    high = make(3)
    checkpoints.load(high, tmp_path / "bf16.safetensors")
    np.testing.assert_array_equal(
        high.q_proj.kernel[...], bf16["q_proj.weight"].T.astype(np.float32)
    )
    rounded = make(4, param_dtype=jnp.bfloat16)
    checkpoints.load(rounded, tmp_path / "f32.safetensors")
    assert rounded.q_proj.kernel[...].tobytes() == kernel.tobytes()
    float64 = {n: a.astype(np.float64) for n, a in tensors.items()}
    save_file(float64, tmp_path / "f64.safetensors")
    checkpoints.load(high, tmp_path / "f64.safetensors")
    assert_same(values(high), values(source))


def test_abstract_layer_is_filled(tmp_path: Path):
    source = make(1)
    checkpoints.save(source, tmp_path)
    layer = nnx.clone(abstract(**SMALL))
    assert isinstance(layer.A_log.get_value(), jax.ShapeDtypeStruct)
    checkpoints.load(layer, tmp_path)
    assert_same(values(layer), values(source))
    x = jnp.ones((1, 3, 12))
    np.testing.assert_array_equal(layer(x), source(x))


@pytest.mark.parametrize("filled", [False, True])
def test_sharding_is_kept(filled: bool, tmp_path: Path):
    source = make(1)
    checkpoints.save(source, tmp_path)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "tp"))
    layer = make(2)
    kernel: Any = layer.q_proj.kernel
    if filled:
        kernel.set_value(jax.device_put(kernel.get_value(), sharding))
    else:
        kernel.set_value(jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=sharding))
    checkpoints.load(layer, tmp_path)
    assert layer.q_proj.kernel.get_value().sharding == sharding
    assert not layer.k_proj.kernel.get_value().committed
    assert_same(values(layer), values(source))


def test_layers_for_a_scan_are_stacked_after_loading(tmp_path: Path):
    source = [make(1), make(2)]
    checkpoints.save(source, tmp_path)
    layers = [make(3), make(4)]
    checkpoints.load(layers, tmp_path)
    graph, _ = nnx.split(layers[0])
    states = [nnx.state(layer) for layer in layers]
    stacked = nnx.merge(graph, jax.tree.map(lambda *x: jnp.stack(x), *states))
    both = {name: np.stack([values(layer)[name] for layer in source]) for name in values(source[0])}
    assert_same(values(stacked), both)
    message = "`layers` must be single layers, .* has shape \\[2, 2, 8\\]"
    with pytest.raises(ValueError, match=message):
        checkpoints.load(stacked, tmp_path, layer=0)


# ---- files -------------------------------------------------------------------------------------


class Opens:
    """Counts how often the kernel opens the files of a folder."""

    def __init__(self, folder: Path):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self.libc.inotify_init1(os.O_NONBLOCK)
        IN_OPEN = 0x20
        assert self.libc.inotify_add_watch(self.fd, os.fsencode(folder), IN_OPEN) >= 0

    def count(self) -> Counter[str]:
        """Since the last call."""
        opens: Counter[str] = Counter()
        try:
            while events := os.read(self.fd, 1 << 16):
                while events:
                    (length,) = struct.unpack_from("I", events, 12)
                    opens[events[16 : 16 + length].rstrip(b"\0").decode()] += 1
                    events = events[16 + length :]
        except BlockingIOError:
            return opens
        return opens

    def close(self) -> None:
        os.close(self.fd)


@pytest.mark.skipif(sys.platform != "linux", reason="inotify tells what is opened")
def test_each_shard_is_opened_once_and_only_those_needed(tmp_path: Path):
    layers = [make(seed) for seed in range(4)]
    checkpoints.save(layers, tmp_path, shard_bytes=3000)
    files = {path.name for path in tmp_path.iterdir()}
    assert len(files) > 4
    weight_map = json.loads((tmp_path / checkpoints.INDEX).read_text())["weight_map"]

    opens = Opens(tmp_path)
    checkpoints.load([make(9) for _ in layers], tmp_path)
    assert opens.count() == Counter(files)

    checkpoints.load(make(9), tmp_path, layer=2)
    of_layer_2 = {file for name, file in weight_map.items() if ".2." in name}
    assert opens.count() == Counter([*of_layer_2, checkpoints.INDEX])
    assert of_layer_2 < files

    with pytest.raises(ValueError, match="missing"):
        checkpoints.load(make(9, g_rank=None), tmp_path, layer=2)
    assert max(opens.count().values()) == 1
    assert set(checkpoints.layers(tmp_path)) == {0, 1, 2, 3}
    assert opens.count() == Counter([checkpoints.INDEX])
    opens.close()


def test_only_needed_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = []
    checkpoints.save([make(0), make(1)], tmp_path)
    original = checkpoints._Checkpoint.read
    monkeypatch.setattr(
        checkpoints._Checkpoint,
        "read",
        lambda self, name: read.append(name) or original(self, name),
    )
    checkpoints.load(make(2), tmp_path, layer=1)
    assert len(read) == len(set(read)) == len(values(make()))
    assert all(name.startswith("model.layers.1.") for name in read)


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path: Path):
    layers = [make(seed) for seed in range(3)]
    checkpoints.save(layers, tmp_path, shard_bytes=3000)
    checkpoints.save(layers, tmp_path, shard_bytes=5000)
    named = json.loads((tmp_path / checkpoints.INDEX).read_text())["weight_map"].values()
    assert {path.name for path in tmp_path.iterdir()} == {*named, checkpoints.INDEX}
    checkpoints.save(layers[::-1], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    copy = make(9)
    checkpoints.load(copy, tmp_path, layer=0)
    assert_same(values(copy), values(layers[2]))


def test_index_has_the_size(tmp_path: Path):
    checkpoints.save(make(), tmp_path, shard_bytes=1)
    index = json.loads((tmp_path / checkpoints.INDEX).read_text())
    size = sum(a.nbytes for a in values(make()).values())
    assert index["metadata"] == {"total_size": size}
    assert len(set(index["weight_map"].values())) == len(values(make()))


def test_other_tensors_are_never_lost(tmp_path: Path):
    save_file({"embed": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        message = f"`path` must have no tensors but those saved now, which replace them; got {path}"
        with pytest.raises(ValueError, match=re.escape(f"{message} with embed")):
            checkpoints.save(make(), path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["embed"]


# ---- errors ------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path):
    checkpoints.save(make(1), tmp_path / "good.safetensors", layer=7)
    at = "model.layers.7.self_attn."
    tensors = load_file(tmp_path / "good.safetensors")
    del tensors[at + "k_proj.weight"], tensors[at + "A_log"]
    tensors[at + "q_proj.weight"] = tensors[at + "q_proj.weight"].T.copy()
    tensors[at + "v_conv1d.weight"] = np.zeros((16, 1, 3), np.float32)
    tensors[at + "g_b_proj.bias"] = np.zeros(16, np.float32)
    tensors[at + "o_proj.weight"] = tensors[at + "o_proj.weight"].astype(np.int8)
    tensors[at + "o_proj.weight_scale"] = np.zeros(12, np.float32)
    save_file(tensors, tmp_path / "bad.safetensors")
    layer = make(2)
    before = values(layer)
    with pytest.raises(ValueError) as error:
        checkpoints.load(layer, tmp_path / "bad.safetensors")
    assert str(error.value) == (
        "`path` must hold the layers' tensors, and no others where they are; "
        f"got {tmp_path / 'bad.safetensors'} with\n"
        f"  missing: {at}A_log [1, 1, 2, 1]\n"
        f"  missing: {at}k_proj.weight [16, 12]\n"
        f"  extra: {at}g_b_proj.bias [16]\n"
        f"  extra: {at}o_proj.weight_scale [12]\n"
        f"  misshapen: {at}q_proj.weight must have shape [16, 12]; got [12, 16]\n"
        f"  misshapen: {at}v_conv1d.weight must have shape [16, 1, 4]; got [16, 1, 3]\n"
        f"  dtype: {at}o_proj.weight must be BF16, F16, F32 or F64; got I8"
    )
    assert_same(values(layer), before)


@pytest.mark.parametrize("naming", FORMS)
def test_each_missing_tensor_is_named(naming: Any, tmp_path: Path):
    checkpoints.save(make(), tmp_path / "good.safetensors", naming=naming, layer=0)
    tensors = load_file(tmp_path / "good.safetensors")
    for name in tensors:
        kept = {n: a for n, a in tensors.items() if n != name}
        save_file(kept, tmp_path / "bad.safetensors")
        with pytest.raises(ValueError) as error:
            checkpoints.load(make(), tmp_path / "bad.safetensors", layer=0)
        (line,) = str(error.value).splitlines()[1:]
        assert line.startswith(f"  missing: {name} [")


def test_another_naming_is_refused(tmp_path: Path):
    checkpoints.save(make(), tmp_path, naming="fla", layer=0)
    with pytest.raises(ValueError) as error:
        checkpoints.load(make(), tmp_path, naming="transformers", layer=0)
    assert "missing: model.layers.0.attn.forget_gate.A_log [1, 1, 2, 1]" in str(error.value)
    assert "extra: model.layers.0.attn.f_proj.0.weight [8, 12]" in str(error.value)


def test_only_quantised_tensors_are_a_type_error(tmp_path: Path):
    checkpoints.save(make(), tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    tensors["q_proj.weight"] = tensors["q_proj.weight"].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(TypeError, match=r"q_proj\.weight must be BF16, .*; got F8_E4M3"):
        checkpoints.load(make(), tmp_path / "x.safetensors")


def test_A_log_may_be_longer_only_by_zeros(tmp_path: Path):
    checkpoints.save(make(1), tmp_path / "x.safetensors", naming="kimi_k3")
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["A_log"].shape == (8,)  # K, which is more than the heads
    tensors["A_log"][-1] = 0.5
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"misshapen: A_log must have shape .*; got \[8\]"):
        checkpoints.load(make(2), tmp_path / "x.safetensors")


def test_shards_that_are_not_there(tmp_path: Path):
    checkpoints.save(make(), tmp_path, shard_bytes=1)
    index = json.loads((tmp_path / checkpoints.INDEX).read_text())
    files = index["weight_map"]
    gone = tmp_path / files["A_log"]
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=f"`path` must have all shards .*{gone.name}"):
        checkpoints.load(make(), tmp_path)
    gone.write_bytes((tmp_path / files["dt_bias"]).read_bytes())
    with pytest.raises(ValueError, match=r"missing: A_log \[1, 1, 2, 1\]"):
        checkpoints.load(make(), tmp_path)
    gone.write_bytes(content)
    checkpoints.load(make(), tmp_path)


def test_arguments(tmp_path: Path):
    path = tmp_path / "two"
    checkpoints.save([make(), make()], path)
    layer: Any = make()
    linear: Any = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    load: Any = checkpoints.load
    save: Any = checkpoints.save
    rule = "`layers` must be a KimiDeltaAttention, or a sequence or a mapping of them"
    there = f"{path} has the KDA layers 0, 1"
    several = "`layer` must be None unless `layers` is a single one; got 1"
    cases = [
        (lambda: load(layer, tmp_path / "no"), FileNotFoundError, "got " + str(tmp_path / "no")),
        (lambda: load(layer, tmp_path), FileNotFoundError, "`path` must be a safetensors file"),
        (lambda: load(linear, path), TypeError, f"{rule}; got Linear"),
        (lambda: load([layer, linear], path), TypeError, f"{rule}; got Linear in list"),
        (lambda: load([], path), ValueError, f"{rule}; got an empty list"),
        (lambda: load([layer], path), ValueError, f"in the checkpoint; got 1, and {there}"),
        (lambda: load(layer, path), ValueError, f"of the checkpoint; got None, and {there}"),
        (lambda: load(layer, path, layer=2), ValueError, f"of the checkpoint; got 2, and {there}"),
        (lambda: load({5: layer}, path), ValueError, f"of the checkpoint; got 5, and {there}"),
        (lambda: load([layer] * 2, path, layer=1), ValueError, several),
        (lambda: load(layer, path, layer=-1), ValueError, "`layer` must be an integer of at least"),
        (
            lambda: load(layer, path, naming="x"),
            ValueError,
            "`naming` must be one of kimi_linear, ",
        ),
        (
            lambda: save(layer, path, naming="x"),
            ValueError,
            "`naming` must be one of kimi_linear, ",
        ),
        (lambda: save(layer, path, prefix="{layer}."), ValueError, "`layer` must be given for"),
        (lambda: save([layer] * 2, path, prefix="x."), ValueError, "`prefix` must contain {layer}"),
        (lambda: save(layer, path, shard_bytes=0), ValueError, "`shard_bytes` must be positive"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=re.escape(message)):
            call()
