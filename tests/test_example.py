"""examples/train_bytes.py from end to end, very small: it learns, stops, resumes and writes."""

import dataclasses
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for module in ("flax", "matplotlib", "optax", "safetensors", "tqdm"):
    pytest.importorskip(module, reason="needs jax_kda[examples]")

from flax import nnx  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import jax_kda  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[1] / "examples/train_bytes.py"
TINY = ["--size", "tiny", "--count", "20"]


@pytest.fixture(autouse=True)
def usual_promotion() -> Iterator[None]:
    """Optax relies on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("train_bytes", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_bytes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_trains_stops_resumes_and_writes(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = script.main(
        [*TINY, "--out", str(tmp_path / "whole"), "--without-kda", "--reference", "15"]
    )
    output = capsys.readouterr().out
    assert whole["training loss"] < np.log(256) < whole["entropy"] * 2
    assert set(whole) == {
        "entropy",
        "training loss",
        "held-out loss",
        "the same with KDA's output zeroed",
        "trained with it zeroed",
    }
    assert re.search(
        r"\n----\ndef __init__\(self, .*\n----\n\d+ bytes, \d+ bytes/s\n$", output, re.DOTALL
    )
    assert (tmp_path / "whole/loss.png").read_bytes().startswith(b"\x89PNG")
    for name, steps in {"kernels": 20, "plain JAX": 15, "without KDA": 20}.items():
        assert re.search(rf"^{name}: {steps} steps, [\d,]+ bytes/s$", output, re.MULTILINE)
    curves = [
        load_file(tmp_path / f"whole/{name}.safetensors")["losses"]
        for name in ("model", "reference", "without_kda")
    ]
    np.testing.assert_allclose(curves[0][:15], curves[1], rtol=1e-4)
    assert np.max(np.abs(curves[0] - curves[2])) > 0.01

    parts = [*TINY, "--out", str(tmp_path / "parts")]
    script.main([*parts, "--stop", "7"])
    resumed = script.main(parts)
    file = "model.safetensors"
    assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert resumed["held-out loss"] == whole["held-out loss"]

    with pytest.raises(SystemExit, match="is from other settings"):
        script.main([*parts, "--steps", "30"])


def test_mixed_precision(script: Any, monkeypatch: pytest.MonkeyPatch):
    """As on the GPU: the kernels get bfloat16; parameters, gradients and optimiser are float32."""
    from jax_kda import layers

    operands = []

    def chunk_kda(*arrays: Any, **options: Any) -> Any:
        operands.append([a.dtype for a in arrays])
        return jax_kda.chunk_kda(*arrays, **options)

    monkeypatch.setattr(layers, "chunk_kda", chunk_kda)
    assert script.SIZES["large"].dtype == "bfloat16"
    size = dataclasses.replace(script.SIZES["tiny"], dtype="bfloat16")
    corpus = script.Corpus([bytes([i + 1] * 70) for i in range(9)])
    model = script.ByteModel(size, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, script.transformation(size), wrt=nnx.Param)
    gradients = nnx.jit(nnx.grad(lambda model, rows: model.loss(rows)))(model, corpus.rows(size, 0))
    loss = script.train_step(model, optimizer, corpus.rows(size, 0), True)
    assert operands == [[jnp.bfloat16] * 4 + [jnp.float32]] * 4  # two layers, traced twice
    assert loss.dtype == jnp.float32 and np.isfinite(loss)
    for node in (gradients, nnx.state(model), nnx.state(optimizer)):
        arrays = [a for a in jax.tree.leaves(node) if jnp.issubdtype(a.dtype, jnp.floating)]
        assert arrays and all(a.dtype == jnp.float32 for a in arrays)


def test_layers_can_be_saved_for_other_implementations(script: Any, tmp_path: Path):
    from jax_kda import checkpoints

    model = script.ByteModel(script.SIZES["tiny"], nnx.Rngs(0))
    checkpoints.save([block.kda for block in model.blocks], tmp_path, naming="fla")
    assert set(checkpoints.layers(tmp_path)) == {0, 1}


def test_writing_is_what_the_model_says(script: Any):
    """Prefill and decode with the cache choose the bytes that whole forward passes choose."""
    size = script.SIZES["tiny"]
    model = script.ByteModel(size, nnx.Rngs(3))
    init = jax.random.normal(jax.random.key(0), model.head.kernel.shape)
    model.head.kernel.set_value(init)
    prompt = b"import this"
    written = b"".join(itertools.islice(script.generate(model, prompt, 1e-6, 0), 12))
    text = bytes([script.START]) + prompt
    whole = nnx.jit(lambda model, text: model(text))
    padded = np.zeros((1, len(text) + 12), np.int32)
    for byte in written:
        padded[0, : len(text)] = list(text)
        assert byte == jnp.argmax(whole(model, jnp.asarray(padded))[0, len(text) - 1])
        text += bytes([byte])
    assert len(written) > 3
    assert not jax.tree.leaves(nnx.state(model, nnx.Cache))


def test_rows_keep_documents_apart(script: Any):
    size = script.SIZES["tiny"]
    train, held_out = script.read_corpus(size.length)
    assert len(train.bytes) > 10 * len(held_out.bytes) > 0
    assert np.min(np.bincount(train.document)) > size.length
    starts = np.flatnonzero(train.bytes == script.START)
    np.testing.assert_array_equal(train.document[starts], np.arange(len(starts)))

    corpus = script.Corpus([bytes([i + 1] * 70) for i in range(9)])
    assert corpus.entropy() == pytest.approx(np.log(9), rel=0.05)
    rows = {name: np.asarray(x) for name, x in corpus.rows(size, seed=1).items()}
    assert rows["segment_ids"].max() == 2
    known = rows["weights"] == 1
    np.testing.assert_array_equal(rows["targets"][known & (rows["targets"] == 0)], [])
    inside = known & (rows["inputs"] != 0)
    np.testing.assert_array_equal(rows["inputs"][inside], rows["targets"][inside])
    assert 0 < (~known).sum() < 10
