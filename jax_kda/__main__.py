"""`python -m jax_kda [FILE]`: KDA over real text on this machine's best device, checked and timed.

Text becomes q, k, v, g and beta as in one layer of Kimi-Linear (head size 128): a byte embedding
and random projections from a fixed seed. `jax_kda.fwd` runs inside `jax.jit` with `out` and
`final_state` donated. The exit status is 1 if a result is wrong or a donated buffer is not reused.
"""

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_kda
from jax_kda import reference

SEED = 0
D = 128  # K and V, a head's size
HIDDEN = 512
PREFIX = 512  # tokens compared in every head
TOLERANCE = {"gpu": 0.0055, "cpu": 0.002}  # RMS ratio; rounding o to bfloat16 alone costs 0.0017
SIZES = {"gpu": (8192, 32), "cpu": (2048, 8)}  # tokens and heads; a Kimi-Linear layer has 32


class Layer(NamedTuple):
    """One call's arrays, with B = 1 and T tokens."""

    q: jax.Array  # [1, T, H, 128]
    k: jax.Array  # [1, T, H, 128]
    v: jax.Array  # [1, T, H, 128]
    g: jax.Array  # [1, T, H, 128]  gate before its activation
    beta: jax.Array  # [1, T, H]  logits
    A_log: jax.Array  # [H]
    dt_bias: jax.Array  # [H, 128]


def read_text(path: Path | None, count: int) -> tuple[str, bytes]:
    """The first `count` bytes of a file, or of the standard library's sources, and their name."""
    if path is not None:
        with path.open("rb") as file:
            return str(path), file.read(count)
    folder = Path(sysconfig.get_path("stdlib"))
    text = b""
    for source in sorted(folder.glob("*.py")):
        if len(text) < count:
            text += source.read_bytes()
    return f"{folder}/*.py", text[:count]


@partial(jax.jit, static_argnames="H")
def make_layer(text: jax.Array, H: int) -> Layer:
    """Embeds and projects T bytes with a layer's usual random initialisation."""
    keys = jax.random.split(jax.random.key(SEED), 8)
    x = jax.random.normal(keys[0], (256, HIDDEN))[text][None]

    def project(key: jax.Array, *shape: int) -> jax.Array:
        weight = jax.random.normal(key, (HIDDEN, *shape)) * HIDDEN**-0.5
        return jnp.tensordot(x, weight, 1).astype(jnp.bfloat16)

    time_step = jnp.exp(jax.random.uniform(keys[7], (H, D), minval=-6.9, maxval=-2.3))
    return Layer(
        *(project(key, H, D) for key in keys[1:5]),
        beta=project(keys[5], H),
        A_log=jnp.log(jax.random.uniform(keys[6], (H,), minval=1, maxval=16)),
        dt_bias=jnp.log(jnp.expm1(time_step)),  # softplus gives the time step back
    )


def choose_device(only_cpu: bool) -> tuple[Any, str]:
    """The device to run on, and why an accelerator is passed over."""
    device = jax.devices()[0]
    if only_cpu or device.platform == "cpu":
        return jax.devices("cpu")[0], ""
    kernel_runs_on = jax_kda.handlers()["kda_chunk_fwd"].get("cuda")
    if kernel_runs_on is None:
        reason = "this jax_kda was built without CUDA"
    elif device.device_kind not in kernel_runs_on:
        reason = "jax_kda has no kernel for it"
    else:
        return device, ""
    return jax.devices("cpu")[0], f"not used: {device.device_kind} ({reason})"


def errors(
    layer: Layer, lower_bound: float | None, o: jax.Array, state: jax.Array
) -> tuple[float, float]:
    """RMS ratios to the reference: o over a prefix of all heads, the state of one head."""

    @jax.jit
    def judge(layer: Layer):
        exact = Layer(*(x.astype(jnp.float32) for x in layer))
        return reference.chunk_kda(
            *exact[:5],
            A_log=exact.A_log,
            dt_bias=exact.dt_bias,
            lower_bound=lower_bound,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )

    def rms_ratio(x: jax.Array, true: jax.Array) -> float:
        error = np.asarray(x, np.float64) - np.asarray(true)
        return float(np.sqrt(np.mean(error**2) / np.mean(np.square(true, dtype=np.float64))))

    def cut(tokens: int | None = None, heads: int | None = None) -> Layer:
        per_token = [x[:, :tokens, :heads] for x in layer[:5]]
        return Layer(*per_token, A_log=layer.A_log[:heads], dt_bias=layer.dt_bias[:heads])

    o_true, _ = judge(cut(tokens=PREFIX))
    _, state_true = judge(cut(heads=1))
    return rms_ratio(o[:, :PREFIX], o_true), rms_ratio(state[:, :1], state_true)


def run(layer: Layer, lower_bound: float | None) -> tuple[tuple[jax.Array, jax.Array], bool, float]:
    """(o, final state), whether they are the memory that was given, and seconds per call."""
    fwd = jax.jit(
        jax_kda.fwd,
        static_argnames=("scale", "lower_bound"),
        donate_argnames=("out", "final_state"),
    )
    q, k, v, g, beta, A_log, dt_bias = layer

    def call(out: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return fwd(q, k, v, g, beta, D**-0.5, out, A_log, dt_bias, lower_bound, final_state=state)

    def timed(buffers: tuple[jax.Array, jax.Array], calls: int):
        begin = time.perf_counter()
        for _ in range(calls):
            buffers = call(*buffers)
        jax.block_until_ready(buffers)
        return buffers, (time.perf_counter() - begin) / calls

    buffers = (jnp.full_like(v, jnp.nan), jnp.full((1, v.shape[2], D, D), jnp.nan))
    pointers = [x.unsafe_buffer_pointer() for x in buffers]
    buffers = call(*buffers)
    in_place = [x.unsafe_buffer_pointer() for x in buffers] == pointers
    buffers, seconds = timed(buffers, 1)
    samples = []
    for _ in range(7):
        buffers, seconds_per_call = timed(buffers, max(1, int(0.1 / seconds)))
        samples.append(seconds_per_call)
    return buffers, in_place, statistics.median(samples)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jax_kda",
        description="Kimi Delta Attention over real text at the shape of a Kimi-Linear layer: "
        "written in place, checked against the reference, timed.",
        epilog="Exit status: 0 if all is well, 1 if a result is wrong or a donated buffer was not "
        "reused, 2 if the arguments are unusable.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, help="text to read (default: Python's standard library)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="T", help="bytes of text (default: 8192 on a GPU, else 2048)"
    )
    parser.add_argument(
        "--heads", type=int, metavar="H", help="heads of size 128 (default: 32 on a GPU, else 8)"
    )
    parser.add_argument(
        "--lower-bound",
        type=float,
        metavar="G",
        help="the gate bounded below by G in [-5, 0) (default: Kimi-Linear's softplus gate)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="E",
        help="largest relative RMS error of a right result (default: 0.0055 on a GPU, else 0.002)",
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU, though there is a GPU")
    args = parser.parse_args(argv)

    device, remark = choose_device(args.cpu)
    T, H = SIZES[device.platform]
    T, H = args.tokens or T, args.heads or H
    tolerance = TOLERANCE[device.platform] if args.tolerance is None else args.tolerance
    if T < 1 or H < 1:
        parser.error(f"--tokens and --heads must be positive; got {T} and {H}")
    if args.lower_bound is not None and not -5 <= args.lower_bound < 0:
        parser.error(f"--lower-bound must be in [-5, 0); got {args.lower_bound}")
    try:
        source, text = read_text(args.file, T)
    except OSError as error:
        parser.error(f"cannot read {args.file}: {error.strerror}")
    if not text:
        parser.error(f"{source} has no text: name a FILE")

    print(f"device    {device.device_kind}{remark and f'; {remark}'}")
    with jax.default_device(device):
        layer = make_layer(np.frombuffer(text, np.uint8), H)
        (o, state), in_place, seconds = run(layer, args.lower_bound)
        o_error, state_error = errors(layer, args.lower_bound, o, state)
    T = len(text)
    print(f"text      {T} bytes of {source}")
    print(f"shapes    q k v g {list(layer.q.shape)} bfloat16, state {list(state.shape)} float32")
    print(f"error     o {o_error:.2g}, state {state_error:.2g}; at most {tolerance:g}")
    print(f"in place  {'yes: the results are the donated buffers' if in_place else 'NO'}")
    print(f"time      {seconds * 1e3:.3f} ms a call, {T / seconds:,.0f} tokens a second")

    failures = []
    if not (o_error <= tolerance and state_error <= tolerance):  # NaN fails too
        failures.append("the result is wrong")
    if not jnp.isfinite(o).all():
        failures.append("the result is not finite beyond the prefix that was compared")
    if not in_place:
        failures.append("a donated buffer was not reused")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
