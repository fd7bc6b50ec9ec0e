"""Trains a small language model of bytes on the sources of Python, and lets it write some.

    pip install -e ".[examples]"
    python examples/train_bytes.py                   # minutes on a CPU; resumes where it stopped
    python examples/train_bytes.py --without-kda     # and the same model with KDA's output zeroed
    python examples/train_bytes.py --reference 300   # and 300 steps by plain JAX, to compare
    python examples/train_bytes.py --size large      # for a GPU
    python examples/train_bytes.py --prompt 'class'  # once trained, goes straight to writing

A document is a file of the standard library of the Python that runs this. Rows are windows into all
documents one after the other, and `segment_ids` keep those in a row apart. The folder `--out` gets
`model.safetensors` (weights, optimiser and losses, to resume from) and `loss.png`.
"""

import argparse
import codecs
import dataclasses
import functools
import itertools
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from jax_kda.layers import KimiDeltaAttention

START = 0  # begins every document; Python's sources do not contain this byte
HELD_OUT = 20  # one document in 20 is not trained on
SAVE_EVERY = 100  # steps


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    head_dim: int
    length: int  # bytes of a row
    batch: int  # rows of a step
    steps: int
    learning_rate: float = 3e-3
    dtype: str = "float32"


SIZES = {
    "tiny": Size(layers=2, width=32, heads=2, head_dim=16, length=64, batch=4, steps=20),
    "small": Size(layers=3, width=128, heads=2, head_dim=128, length=256, batch=8, steps=1000),
    "large": Size(
        layers=4, width=1024, heads=8, head_dim=128, length=2048, batch=16, steps=2000,
        learning_rate=1e-3, dtype="bfloat16",
    ),
}  # fmt: skip


# ---- the text ----------------------------------------------------------------------------------


class Corpus:
    """Documents one after the other: their bytes, and to which document each byte belongs."""

    def __init__(self, documents: list[bytes]):
        texts = [np.frombuffer(bytes([START]) + text, np.uint8) for text in documents]
        self.bytes = np.concatenate(texts)
        self.document = np.repeat(np.arange(len(texts), dtype=np.int32), [len(x) for x in texts])

    def entropy(self) -> float:
        """Of a byte on its own, in nats: the loss of the best model that sees no context."""
        p = np.bincount(self.bytes) / len(self.bytes)
        return float(-np.sum(p * np.log(p, where=p > 0, out=np.zeros_like(p))))

    def rows(self, size: Size, seed: int) -> dict[str, jax.Array]:
        """Random windows. A byte is predicted from those before it in the same document."""
        start = np.random.default_rng(seed).integers(len(self.bytes) - size.length, size=size.batch)
        window = start[:, None] + np.arange(size.length + 1)
        text, document = self.bytes[window].astype(np.int32), self.document[window]
        rows = {
            "inputs": text[:, :-1],
            "targets": text[:, 1:],
            "segment_ids": document[:, :-1] - document[:, :1] + 1,
            "weights": (document[:, :-1] == document[:, 1:]).astype(np.float32),
        }
        return {name: jnp.asarray(x) for name, x in rows.items()}


def read_corpus(length: int) -> tuple[Corpus, Corpus]:
    """What is trained on and what is held out; no window of this length has three documents."""
    folder = Path(sysconfig.get_path("stdlib"))
    aside = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
    paths = [p for p in sorted(folder.rglob("*.py")) if not aside & {*p.relative_to(folder).parts}]
    texts = [text for p in paths if len(text := p.read_bytes()) > length]
    texts = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    n = len(texts) // HELD_OUT
    return Corpus(texts[n:]), Corpus(texts[:n])


# ---- the model ---------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs, implementation: str | None):
        dtype, init = jnp.dtype(size.dtype), nnx.initializers.lecun_normal()
        linear = functools.partial(
            nnx.Linear, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs
        )
        self.kda_norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.kda = KimiDeltaAttention(
            size.width,
            size.heads,
            size.head_dim,
            kernel_init=init,
            dtype=dtype,
            implementation=implementation,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.up = linear(size.width, 3 * size.width)
        self.down = linear(3 * size.width, size.width)

    def __call__(self, x: jax.Array, with_kda: bool, **packing: Any) -> jax.Array:
        if with_kda:
            x = x + self.kda(self.kda_norm(x), **packing)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class ByteModel(nnx.Module):
    """Parameters are float32; activations, and with them the kernels' operands, of size.dtype."""

    def __init__(self, size: Size, rngs: nnx.Rngs, implementation: str | None = None):
        self.embed = nnx.Embed(256, size.width, dtype=jnp.dtype(size.dtype), rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs, implementation) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, rngs=rngs)
        self.head = nnx.Linear(size.width, 256, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, text: jax.Array, with_kda: bool = True, **packing: Any) -> jax.Array:
        """Logits [B, T, 256] of the byte that follows, from bytes [B, T]."""
        x = self.embed(text)
        for block in self.blocks:
            x = block(x, with_kda, **packing)
        return self.head(self.norm(x.astype(jnp.float32)))

    def loss(self, rows: dict[str, jax.Array], with_kda: bool = True) -> jax.Array:
        """Nats per byte."""
        ids = rows["segment_ids"]
        logits = self(rows["inputs"], with_kda, segment_ids=ids, max_segments=2)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["targets"])
        return jnp.sum(losses * rows["weights"]) / jnp.sum(rows["weights"])


# ---- training ----------------------------------------------------------------------------------


@functools.partial(nnx.jit, static_argnames="with_kda", donate_argnames=("model", "optimizer"))
def train_step(model, optimizer, rows, with_kda):
    loss, gradients = nnx.value_and_grad(lambda model: model.loss(rows, with_kda))(model)
    optimizer.update(model, gradients)
    return loss


@functools.partial(nnx.jit, static_argnames="with_kda")
def evaluate_rows(model, rows, with_kda):
    return model.loss(rows, with_kda)


def evaluate(model: ByteModel, corpus: Corpus, size: Size, with_kda: bool) -> float:
    rows = [corpus.rows(size, seed) for seed in range(8)]
    return float(np.mean([evaluate_rows(model, x, with_kda) for x in rows]))


@functools.cache  # a step is compiled again for another object
def transformation(size: Size) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        0, size.learning_rate, size.steps // 20, size.steps, size.learning_rate / 20
    )
    matrices = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in jax.tree_util.keystr(path), params
    )
    adam = optax.adamw(rate, b2=0.98, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


class Run:
    """A model in training, and its file."""

    def __init__(
        self,
        name: str,
        size: Size,
        file: Path,
        seed: int,
        with_kda: bool = True,
        implementation: str | None = None,
    ):
        self.name, self.size, self.file, self.with_kda = name, size, file, with_kda
        self.settings = json.dumps(dataclasses.asdict(size) | {"seed": seed}, sort_keys=True)
        self.model = ByteModel(size, nnx.Rngs(seed), implementation)
        self.optimizer = nnx.Optimizer(self.model, transformation(size), wrt=nnx.Param)
        self.losses: list[float] = []
        self.rates: list[float] = []  # bytes a second of steps that this process has run
        if file.exists():
            self.restore()

    def variables(self) -> dict[str, nnx.Variable]:
        nodes = {"model": self.model, "optimizer": self.optimizer}
        return {
            "/".join(map(str, path)): node
            for path, node in nnx.iter_graph(nodes)
            if isinstance(node, nnx.Variable)
        }

    def save(self) -> None:
        arrays = {name: np.asarray(v.get_value()) for name, v in self.variables().items()}
        arrays["losses"] = np.array(self.losses, np.float32)
        partial = self.file.with_suffix(".partial")  # the file is whole at any time
        save_file(arrays, partial, metadata={"settings": self.settings})
        partial.replace(self.file)

    def restore(self) -> None:
        with safe_open(self.file, framework="numpy") as file:
            if file.metadata()["settings"] != self.settings:
                raise SystemExit(f"{self.file} is from other settings; choose another --out")
            for name, variable in self.variables().items():
                variable.set_value(jnp.asarray(file.get_tensor(name)))
            self.losses = file.get_tensor("losses").tolist()

    def train(self, corpus: Corpus, stop: int) -> None:
        """Up to step `stop`. What a step sees depends on its number alone."""
        total, done = self.size.steps, len(self.losses)
        pending: list[jax.Array] = []
        begin = time.perf_counter()
        with tqdm(total=total, initial=done, desc=self.name, unit="step") as bar:
            for step in range(done, stop):
                rows = corpus.rows(self.size, seed=1000 + step)
                pending.append(train_step(self.model, self.optimizer, rows, self.with_kda))
                save = (step + 1) % SAVE_EVERY == 0 or step + 1 == stop
                if save or len(pending) == 10:  # to wait for every loss would be slow
                    self.losses += np.array(pending).tolist()
                    count = len(pending) * self.size.batch * self.size.length
                    self.rates.append(count / (time.perf_counter() - begin))
                    bar.update(len(pending))
                    bar.set_postfix(loss=f"{np.mean(self.losses[-50:]):.3f}")
                    pending.clear()
                    if save:
                        self.save()
                    begin = time.perf_counter()

    def speed(self) -> str:
        """Of the fastest ten steps: compilation and other programs only ever add to the time."""
        return f", {max(self.rates):,.0f} bytes/s" if self.rates else ""


def plot(runs: list[Run], entropy: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run, style in zip(runs, ("C0-", "k:", "C1-"), strict=False):
        window = min(len(runs[0].losses) // 50 + 1, len(run.losses))
        means = np.convolve(run.losses, np.ones(window) / window, mode="valid")
        axes.plot(run.losses, style[:-1], alpha=0.2)
        label = run.name + run.speed()
        axes.plot(np.arange(window - 1, len(run.losses)), means, style, label=label)
    axes.axhline(entropy, color="gray", ls="--", label="entropy of a byte")
    axes.axhline(0.75 * entropy, color="gray", ls=":", label="three quarters of it")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, 1.2 * entropy))
    axes.legend(loc="lower left", ncols=2, fontsize="small")
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)


# ---- writing -----------------------------------------------------------------------------------


def generate(model: ByteModel, prompt: bytes, temperature: float, seed: int) -> Iterator[bytes]:
    """Yields one byte after another, until the document ends.

    The prompt is read in one call, then every call reads one byte. The cache is donated, so that
    the states of all layers are updated where they are.
    """
    model = nnx.clone(model)
    for block in model.blocks:
        block.kda.init_cache(batch_size=1)
    graph, cache, weights = nnx.split(model, nnx.Cache, ...)

    @functools.partial(jax.jit, donate_argnames="cache")
    def read(cache, weights, text, key):
        model = nnx.merge(graph, cache, weights)
        byte = jax.random.categorical(key, model(text)[:, -1] / temperature)
        return nnx.state(model, nnx.Cache), byte[:, None]

    text = jnp.asarray(np.frombuffer(bytes([START]) + prompt, np.uint8)[None].astype(np.int32))
    keys = jax.random.key(seed)
    for i in itertools.count():
        cache, text = read(cache, weights, text, jax.random.fold_in(keys, i))
        byte = int(text[0, 0])
        if byte == START:
            return
        yield bytes([byte])


def write(model: ByteModel, prompt: str, count: int, temperature: float, seed: int) -> None:
    """Streams to the terminal."""
    print(f"\n----\n{prompt}", end="", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    begin = time.perf_counter()
    written = 0
    for byte in itertools.islice(generate(model, prompt.encode(), temperature, seed), count):
        print(decoder.decode(byte), end="", flush=True)
        written += 1
        if written == 1:
            begin = time.perf_counter()  # what comes before is reading the prompt, and compilation
    rate = (written - 1) / (time.perf_counter() - begin) if written > 1 else 0.0
    print(f"\n----\n{written} bytes, {rate:.0f} bytes/s", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument("--stop", type=int, help="stop after this step; a later call goes on")
    parser.add_argument("--without-kda", action="store_true", help="train also without KDA")
    parser.add_argument(
        "--reference", type=int, default=0, metavar="STEPS", help="train also by plain JAX, so far"
    )
    parser.add_argument("--out", type=Path, help="folder; default: train_bytes-SIZE")
    parser.add_argument("--prompt", default="def __init__(self, ")
    parser.add_argument("--count", type=int, default=600, help="bytes to write at most")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Returns what it reports, in nats per byte."""
    options = parse(arguments)
    size = SIZES[options.size]
    if options.steps is not None:
        size = dataclasses.replace(size, steps=options.steps)
    folder: Path = options.out or Path(f"train_bytes-{options.size}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    stop = size.steps if options.stop is None else min(options.stop, size.steps)

    corpus, held_out = read_corpus(size.length)
    entropy = corpus.entropy()
    print(
        f"{jax.devices()[0].device_kind}: {len(corpus.bytes) / 1e6:.1f} MB to train on, "
        f"{len(held_out.bytes) / 1e6:.1f} MB held out"
    )
    report = {"entropy": entropy}
    new_run = functools.partial(Run, size=size, seed=options.seed)
    kernels = new_run("kernels", file=folder / "model.safetensors")
    kernels.train(corpus, stop)
    model, runs = kernels.model, [kernels]
    report["training loss"] = float(np.mean(kernels.losses[-50:]))
    report["held-out loss"] = evaluate(model, held_out, size, with_kda=True)
    report["the same with KDA's output zeroed"] = evaluate(model, held_out, size, with_kda=False)
    if options.reference:
        file = folder / "reference.safetensors"
        runs.append(new_run("plain JAX", file=file, implementation="reference"))
        runs[-1].train(corpus, min(stop, options.reference))
    if options.without_kda:
        file = folder / "without_kda.safetensors"
        runs.append(new_run("without KDA", file=file, with_kda=False))
        runs[-1].train(corpus, stop)
        report["trained with it zeroed"] = evaluate(runs[-1].model, held_out, size, with_kda=False)
    plot(runs, entropy, folder / "loss.png")
    for name, value in report.items():
        print(f"{name:34} {value:.3f} nats per byte, {value / entropy:.2f} of the entropy")
    for run in runs:
        print(f"{run.name}: {len(run.losses)} steps{run.speed()}")
    print(f"{folder / 'loss.png'}, {runs[0].file}")
    write(model, options.prompt, options.count, options.temperature, options.seed)
    return report


if __name__ == "__main__":
    main()
