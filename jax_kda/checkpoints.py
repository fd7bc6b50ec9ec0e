"""Weights of KDA layers in the safetensors files of other implementations, read and written.

    layer = jax_kda.layers.KimiDeltaAttention(2304, 32, 128, rngs=nnx.Rngs(0))
    jax_kda.checkpoints.load(layer, "Kimi-Linear-48B-A3B-Instruct", layer=0)

A naming is what a family of checkpoints calls a layer's tensors, and their shapes:

    naming         prefix of layer 3                          what differs
    kimi_linear    model.layers.3.self_attn.                  A_log [1, 1, HV, 1]
    kimi_k3        language_model.model.layers.3.self_attn.   A_log [K], zeros beyond HV
    glm5_next      model.language_model.layers.3.self_attn.   A_log [HV]
    transformers   model.layers.3.self_attn.                  forget_gate.*, one conv1d of q, k, v
    fla            model.layers.3.attn.                       f_proj.0, f_proj.1, g_proj.0, g_proj.1

`transformers` is the state dict of its modules; the files that it saves have the original names.
Everywhere matrices are [out, in], here [in, out]; convolutions [C, 1, W], here [W, C]; `dt_bias`
[HV * K], here [HV, K]. Full-rank gates are `g_proj` and `f_proj`, as in `kimi_k3`.
"""

import bisect
import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from jax_kda.layers import KimiDeltaAttention

Naming: TypeAlias = Literal["kimi_linear", "kimi_k3", "glm5_next", "transformers", "fla"]
Layers: TypeAlias = (
    KimiDeltaAttention | Sequence[KimiDeltaAttention] | Mapping[int, KimiDeltaAttention]
)

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
RULE = "`layers` must be a KimiDeltaAttention, or a sequence or a mapping of them"
DTYPES = {"BF16", "F16", "F32", "F64"}
# Where a name ends like this there is a KDA layer; full attention has no such tensors.
MARKS = ("A_log", *(f"f{x}.weight" for x in ("_a_proj", "_b_proj", "_proj", "_proj.0", "_proj.1")))


class _Form(NamedTuple):
    """What one naming does differently."""

    prefix: str
    A_log: Literal["[HV]", "[1, 1, HV, 1]", "padded"]
    names: Mapping[str, str] = {}  # from the layer's to the file's


FORMS: dict[str, _Form] = {
    "kimi_linear": _Form("model.layers.{layer}.self_attn.", "[1, 1, HV, 1]"),
    "kimi_k3": _Form("language_model.model.layers.{layer}.self_attn.", "padded"),
    "glm5_next": _Form("model.language_model.layers.{layer}.self_attn.", "[HV]"),
    "transformers": _Form(
        "model.layers.{layer}.self_attn.",
        "[1, 1, HV, 1]",
        {x: f"forget_gate.{x}" for x in ("A_log", "dt_bias", "f_a_proj", "f_b_proj", "f_proj")}
        | dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d"),
    ),
    "fla": _Form(
        "model.layers.{layer}.attn.",
        "[HV]",
        {f"{x}_{ab}_proj": f"{x}_proj.{i}" for x in "fg" for i, ab in enumerate("ab")},
    ),
}


def load(
    layers: Layers,
    path: str | os.PathLike[str],
    *,
    layer: int | None = None,
    naming: Naming | None = None,
    prefix: str | None = None,
) -> None:
    """Loads the weights of KDA layers from safetensors, in place.

    Each file is opened once, and only the tensors needed are read, one at a time. A parameter keeps
    its dtype and its sharding: a bfloat16 tensor goes into a bfloat16 parameter as it is, and of
    a sharded parameter a process puts on its devices only what belongs there. Layers from
    `nnx.eval_shape` are filled too, so that no other weights are ever in memory.

    Args:
      layers: a layer; or a sequence of layers, which are the checkpoint's KDA layers in order; or a
        mapping from numbers in the checkpoint to layers.
      path: a safetensors file, or a folder with `model.safetensors`, or with shards and
        `model.safetensors.index.json`.
      layer: the number in the checkpoint of a single layer. None: there is only one.
      naming: what the tensors are called, see above. None: what fits their names best.
      prefix: what precedes the names, with `{layer}` where the number is. None: whatever does.

    Raises:
      ValueError: names all tensors that are missing, have no place in the layer or have the wrong
        shape, before anything is loaded; also for the other arguments' values.
      TypeError: names all tensors whose dtype is not a float of 16 bits or more.
      FileNotFoundError: for a `path` or a shard that is not there.
    """
    if naming is not None:
        _check_naming(naming)
    with _Checkpoint(path) as checkpoint:
        tensors: dict[str, _Tensor] = {}
        extra: list[str] = []
        for at, module in _placed(layers, layer, prefix, checkpoint):
            there = checkpoint.under(at)
            readings = [
                {at + name: tensor for name, tensor in _tensors(module, form).items()}
                for form in ([FORMS[naming]] if naming else FORMS.values())
            ]
            best = max(readings, key=lambda reading: len(reading.keys() & there))
            tensors |= best
            extra += there - best.keys()
        _check_tensors(checkpoint, tensors, extra)
        for name, tensor in tensors.items():
            tensor.set(checkpoint.read(name))


def save(
    layers: Layers,
    path: str | os.PathLike[str],
    *,
    layer: int | None = None,
    naming: Naming = "kimi_linear",
    prefix: str | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Saves the weights of KDA layers as safetensors, in their parameters' dtypes.

    Args:
      layers: a layer; or a sequence of layers, which get the numbers 0, 1, ...; or a mapping from
        numbers to layers.
      path: a file, if it ends in `.safetensors`; else a folder, made if need be, for
        `model.safetensors` or shards and `model.safetensors.index.json`. What is there is replaced.
      layer: the number of a single layer. None: the names get no prefix, unless there is one below.
      naming: what the tensors are called, and their shapes, see above.
      prefix: what precedes the names, with `{layer}` where the number is. None: as above.
      shard_bytes: the size of a folder's files, at most, if no single tensor is larger. The host
        holds one such file at a time.

    Raises:
      ValueError: for arguments' values; also if `path` has tensors that are not among those saved
        now, and would be lost.
    """
    _check_naming(naming)
    if shard_bytes < 1:
        raise ValueError(f"`shard_bytes` must be positive; got {shard_bytes}")
    path, form = Path(path), FORMS[naming]
    tensors: dict[str, _Tensor] = {}
    for number, module in _numbered(layers, layer, prefix):
        if prefix is None and number is None:
            at = ""
        else:
            at = _with_number(form.prefix if prefix is None else prefix, number)
        tensors |= {at + name: tensor for name, tensor in _tensors(module, form).items()}

    old: set[Path] = set()
    if _is_checkpoint(path):
        with _Checkpoint(path) as checkpoint:
            if lost := checkpoint.files.keys() - tensors.keys():
                raise ValueError(
                    "`path` must have no tensors but those saved now, which replace them; got "
                    f"{path} with {', '.join(sorted(lost)[:3])}{', ...' if len(lost) > 3 else ''}"
                )
            old = set(checkpoint.files.values())

    if path.suffix == ".safetensors":
        folder, shards = path.parent, [tensors]
        files = [path]
    else:
        folder, shards = path, _shards(tensors, shard_bytes)
        n = len(shards)
        files = [path / f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
        files = files if n > 1 else [path / FILE]
    folder.mkdir(parents=True, exist_ok=True)
    for file, shard in zip(files, shards, strict=True):
        arrays = {name: tensor.get() for name, tensor in shard.items()}
        partial = file.with_name(f"{file.name}.partial")
        save_file(arrays, partial, metadata={"format": "pt"})  # as transformers wants to see it
        partial.replace(file)
    for file in old - set(files):
        file.unlink()
    if folder == path:
        (path / INDEX).unlink(missing_ok=True)
        if len(files) > 1:
            _write_index(path / INDEX, files, shards)


def layers(path: str | os.PathLike[str], *, prefix: str | None = None) -> dict[int | None, str]:
    """Lists the KDA layers of a checkpoint: their numbers, and what precedes their tensors' names.

    A layer's number is the last one in what precedes the names; None if there is none.

    Args:
      path: as for `load`.
      prefix: lists only the layers that it is for, with `{layer}` where the number is.

    Raises:
      ValueError: if two layers have one number.
      FileNotFoundError: for a `path` or a shard that is not there.
    """
    with _Checkpoint(path) as checkpoint:
        return checkpoint.layers(prefix)


class _Tensor:
    """A tensor of a file: the parameters in it, one after the other along its first axis."""

    def __init__(self, params: list[nnx.Param], shapes: list[tuple[int, ...]], *, kernel: bool):
        self.params = params
        self.shapes = shapes  # all that are understood; the first is the one that is written
        self.kernel = kernel  # the parameters are transposed, their last axis is the file's first

    @property
    def nbytes(self) -> int:
        return math.prod(self.shapes[0]) * jnp.dtype(self.params[0].dtype).itemsize

    def set(self, array: np.ndarray) -> None:
        start = 0
        for param in self.params:
            shape = param.shape
            if self.kernel:
                count = shape[-1]
                value = array[start : start + count].reshape(shape[::-1]).T
            else:
                count = math.prod(shape)
                value = array.reshape(-1)[start : start + count].reshape(shape)
            param.set_value(_put(value, param.get_value()))
            start += count

    def get(self) -> np.ndarray:
        values = [np.asarray(param.get_value()) for param in self.params]
        array = np.concatenate([value.T if self.kernel else value.reshape(-1) for value in values])
        if not self.kernel:
            array = np.pad(array, (0, math.prod(self.shapes[0]) - array.size))
        return np.ascontiguousarray(array.reshape(self.shapes[0]))


def _put(value: np.ndarray, old: Any) -> jax.Array:
    """The value with dtype and sharding of the old one, which is an array or a ShapeDtypeStruct."""
    value = value.astype(old.dtype)
    if old.sharding is None or not getattr(old, "committed", True):
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index])


def _tensors(module: KimiDeltaAttention, form: _Form) -> dict[str, _Tensor]:
    """The tensors of a layer in a naming, by their names without a prefix."""
    params = {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Param)
    }
    if params["dt_bias"].ndim != 2:
        raise ValueError(
            "`layers` must be single layers, to be stacked once they are loaded; got one whose "
            f"`dt_bias` has shape {list(params['dt_bias'].shape)}"
        )
    HV, K = params["dt_bias"].shape
    groups: dict[str, list[str]] = {}
    for name in sorted(params, key=lambda name: "qkv".find(name[0])):  # the order within `conv1d`
        owner, _, leaf = name.partition(".")
        leaf = {"kernel": ".weight", "scale": ".weight", "bias": ".bias"}.get(leaf, "")
        groups.setdefault(form.names.get(owner, owner) + leaf, []).append(name)

    tensors = {}
    for file_name, names in groups.items():
        members = [params[name] for name in names]
        first, rows = members[0].shape, sum(param.shape[-1] for param in members)
        kernel = names[0].endswith(".kernel")
        if file_name.endswith("conv1d.weight"):
            shapes = [(rows, 1, first[0]), (rows, first[0])]
        elif kernel:
            shapes = [(rows, first[0])]
        elif names == ["dt_bias"]:
            shapes = [(HV * K,), (HV, K)]
        elif names == ["A_log"]:
            written = {"[HV]": (HV,), "[1, 1, HV, 1]": (1, 1, HV, 1), "padded": (max(HV, K),)}
            shapes = list(dict.fromkeys((written[form.A_log], (HV,), (1, 1, HV, 1))))
        else:
            shapes = [(rows,)]
        tensors[file_name] = _Tensor(members, shapes, kernel=kernel)
    return tensors


class _Checkpoint(contextlib.AbstractContextManager):
    """A file or a folder of safetensors: each file is opened when it is needed, once."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = path = Path(path)
        self._open: dict[Path, tuple[Any, set[str]]] = {}
        self._stack = contextlib.ExitStack()
        self.files: dict[str, Path]  # of each tensor
        if not _is_checkpoint(path):
            raise FileNotFoundError(
                f"`path` must be a safetensors file, or a folder with {FILE} or {INDEX}; got {path}"
            )
        file = path if path.is_file() else path / FILE
        if file.exists():
            self.files = dict.fromkeys(self._file(file)[1], file)
        else:
            weight_map = json.loads((path / INDEX).read_text())["weight_map"]
            shards = {file: path / file for file in set(weight_map.values())}
            self.files = {name: shards[file] for name, file in weight_map.items()}
        self._sorted = sorted(self.files)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _file(self, file: Path) -> tuple[Any, set[str]]:
        if file not in self._open:
            if not file.exists():
                raise FileNotFoundError(
                    f"`path` must have all shards of {INDEX}; {file} is missing"
                )
            opened = self._stack.enter_context(safe_open(file, framework="numpy"))
            self._open[file] = opened, set(opened.keys())
        return self._open[file]

    def describe(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype of a tensor; None if it is not there."""
        if name not in self.files:
            return None
        file, names = self._file(self.files[name])
        if name not in names:  # the index is wrong
            return None
        view = file.get_slice(name)
        return tuple(view.get_shape()), view.get_dtype()

    def read(self, name: str) -> np.ndarray:
        return self._file(self.files[name])[0].get_tensor(name)

    def under(self, prefix: str) -> set[str]:
        """The names that begin with the prefix."""
        names = itertools.islice(self._sorted, bisect.bisect_left(self._sorted, prefix), None)
        return set(itertools.takewhile(lambda name: name.startswith(prefix), names))

    def layers(self, prefix: str | None) -> dict[int | None, str]:
        prefixes = set()
        for name in filter(lambda name: name.endswith(MARKS), self.files):
            mark = next(mark for mark in MARKS if name.endswith(mark))
            at = name.removesuffix(mark).removesuffix("forget_gate.")
            if at == "" or at.endswith("."):
                prefixes.add(at)
        found: dict[int | None, str] = {}
        for at in sorted(prefixes):
            numbers = re.findall(r"(?<![^.])\d+(?=\.)", at)
            number = int(numbers[-1]) if numbers else None
            if prefix is not None and at != prefix.replace("{layer}", str(number)):
                continue
            if number in found:
                raise ValueError(
                    f"`prefix` must be given where two layers have one number; got {prefix!r}, "
                    f"and {self.path} has {found[number]} and {at}"
                )
            found[number] = at
        return dict(sorted(found.items(), key=lambda item: -1 if item[0] is None else item[0]))


def _is_padded(checkpoint: _Checkpoint, name: str, tensor: _Tensor, shape: tuple[int, ...]) -> bool:
    """Whether it is A_log with zeros for heads that there are not, as in Kimi K3."""
    HV = tensor.params[0].shape[0]
    if not name.endswith("A_log") or len(shape) != 1 or shape[0] < HV:
        return False
    return not checkpoint.read(name)[HV:].any()


def _is_checkpoint(path: Path) -> bool:
    return path.is_file() or (path / FILE).exists() or (path / INDEX).exists()


def _check_naming(naming: Any) -> None:
    if naming not in FORMS:
        raise ValueError(f"`naming` must be one of {', '.join(FORMS)}; got {naming!r}")


def _with_number(prefix: str, number: int | None) -> str:
    if number is None and "{layer}" in prefix:
        raise ValueError(f"`layer` must be given for the {{layer}} in {prefix!r}; got None")
    return prefix.replace("{layer}", str(number))


def _numbered(
    layers: Layers, layer: int | None, prefix: str | None
) -> list[tuple[int | None, KimiDeltaAttention]]:
    """The layers with their numbers: those in a mapping, or positions, or `layer`."""
    if isinstance(layers, KimiDeltaAttention):
        numbered: list[Any] = [(layer, layers)]
    else:
        if layer is not None:
            raise ValueError(f"`layer` must be None unless `layers` is a single one; got {layer}")
        if not isinstance(layers, Mapping | Sequence):
            raise TypeError(f"{RULE}; got {type(layers).__name__}")
        numbered = list(layers.items() if isinstance(layers, Mapping) else enumerate(layers))
    if not numbered:
        raise ValueError(f"{RULE}; got an empty {type(layers).__name__}")
    if len(numbered) > 1 and prefix is not None and "{layer}" not in prefix:
        raise ValueError(f"`prefix` must contain {{layer}} for several layers; got {prefix!r}")
    for number, module in numbered:
        if not isinstance(module, KimiDeltaAttention):
            raise TypeError(f"{RULE}; got {type(module).__name__} in {type(layers).__name__}")
        if not (number is None or (isinstance(number, int) and number >= 0)):
            raise ValueError(f"`layer` must be an integer of at least 0; got {number!r}")
    return numbered


def _placed(
    layers: Layers, layer: int | None, prefix: str | None, checkpoint: _Checkpoint
) -> list[tuple[str, KimiDeltaAttention]]:
    """The layers with the prefixes of their tensors in the checkpoint."""
    numbered = _numbered(layers, layer, prefix)
    several = isinstance(layers, Sequence)
    known = prefix is not None and ("{layer}" not in prefix or numbered[0][0] is not None)
    if prefix is not None and known and not several:
        return [(_with_number(prefix, number), module) for number, module in numbered]
    found = checkpoint.layers(prefix)
    there = f"{checkpoint.path} has the KDA layers {', '.join(map(str, found)) or '(none)'}"
    if several or (numbered[0][0] is None and len(found) == 1):
        if len(numbered) != len(found):
            raise ValueError(
                f"`layers` must be as many as there are in the checkpoint; got {len(numbered)}, "
                f"and {there}"
            )
        return [(at, module) for at, (_, module) in zip(found.values(), numbered, strict=True)]
    for number, _ in numbered:
        if number not in found or number is None:
            raise ValueError(
                f"`layer` must be a KDA layer of the checkpoint; got {number}, and {there}"
            )
    return [(found[number], module) for number, module in numbered]


def _check_tensors(checkpoint: _Checkpoint, tensors: dict[str, _Tensor], extra: list[str]) -> None:
    """Raises one error that names all that does not fit."""
    missing, misshapen, quantised = [], [], []
    for name, tensor in sorted(tensors.items()):
        found = checkpoint.describe(name)
        if found is None:
            missing.append(f"{name} {list(tensor.shapes[0])}")
            continue
        shape, dtype = found
        if dtype not in DTYPES:
            quantised.append(f"{name} must be BF16, F16, F32 or F64; got {dtype}")
        elif shape not in tensor.shapes and not _is_padded(checkpoint, name, tensor, shape):
            misshapen.append(f"{name} must have shape {list(tensor.shapes[0])}; got {list(shape)}")
    unknown = [f"{name} {list((checkpoint.describe(name) or ((),))[0])}" for name in sorted(extra)]
    kinds = {"missing": missing, "extra": unknown, "misshapen": misshapen, "dtype": quantised}
    lines = [f"\n  {kind}: {line}" for kind, lines in kinds.items() for line in lines]
    if lines:
        raise (ValueError if len(lines) > len(quantised) else TypeError)(
            "`path` must hold the layers' tensors, and no others where they are; "
            f"got {checkpoint.path} with{''.join(lines)}"
        )


def _shards(tensors: dict[str, _Tensor], limit: int) -> list[dict[str, _Tensor]]:
    shards: list[dict[str, _Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_index(path: Path, files: list[Path], shards: list[dict[str, _Tensor]]) -> None:
    placed = list(zip(files, shards, strict=True))
    index = {
        "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
        "weight_map": {name: file.name for file, shard in placed for name in shard},
    }
    path.write_text(json.dumps(index, indent=2) + "\n")
