"""Times what serving does: one token a sequence, and prefill into a pool, beside a copy.

    python benchmarks/decode.py                 # the GPU's sizes; small ones where there is no GPU
    python benchmarks/decode.py --batches 1,128

Steps are chained in one jitted function, the state donated and updated in place, and judged by
float64 on two sequences. Batches whose states exceed the cache find it cold at every step. Prints a
table and writes it to results/decode-DEVICE.md.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from bench import commit, progress
from timing import Jax, timed

HERE = Path(__file__).parent
TOKENS, PROMPTS = 128, 16  # calls in one jitted function
SAMPLE_SECONDS = 0.2  # hides how a function of so many calls is started
K = V = 128
PROMISE = 0.0055  # of o in bfloat16, RMS ratio


def draw(N: int, T: int, H: int, state_dtype, slots: int) -> tuple[dict[str, Any], Any]:
    import jax
    import jax.numpy as jnp

    shapes = {"q": (H, K), "k": (H, K), "v": (H, V), "g": (H, K), "beta": (H,)}
    *keys, key = jax.random.split(jax.random.key(0), len(shapes) + 1)
    x = {
        name: jax.random.normal(key, (N, T, *shape), jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    state = jax.random.normal(key, (slots, H, V, K), state_dtype)
    return x | {"A_log": jnp.zeros(H), "dt_bias": jnp.zeros((H, K))}, state


OPTIONS: dict[str, Any] = {
    "lower_bound": -5.0,
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def seconds_per_call(call, x, state, calls: int, typical) -> float:
    """Of `calls` calls in one jitted function, each on the states that the last one wrote."""
    import jax

    @functools.partial(jax.jit, donate_argnums=1)
    def chain(x, state):
        o = None
        for _ in range(calls):
            o, state = call(x, state)
        return o, state

    o = None

    def run():
        nonlocal o, state
        o, state = chain(x, state)

    run()
    sync = lambda: jax.block_until_ready((o, state))
    return typical(timed(run, sync, SAMPLE_SECONDS)) / calls


def token_error(x: dict, state, o) -> float:
    """RMS ratio of o to one token in float64, for the first and the last sequence."""
    rows = [0, -1]
    names = ("q", "k", "v", "g", "beta")
    q, k, v, g, beta = (np.asarray(x[name][:, 0], np.float64)[rows] for name in names)
    q, k = (a / np.sqrt(np.sum(a * a, -1, keepdims=True) + 1e-6) for a in (q, k))
    S = np.asarray(state[np.array(rows)], np.float64)
    S = S * np.exp(-5 / (1 + np.exp(-g)))[:, :, None, :]
    error = v - np.einsum("nhvk,nhk->nhv", S, k)
    S += np.einsum("nh,nhv,nhk->nhvk", 1 / (1 + np.exp(-beta)), error, k)
    true = np.einsum("nhvk,nhk->nhv", S, q) * K**-0.5
    o = np.asarray(o[:, 0], np.float64)[rows]
    return float(np.sqrt(np.mean((o - true) ** 2) / np.mean(true**2)))


def decode(N: int, H: int, state_dtype, pooled: bool, typical) -> dict:
    import jax
    import jax.numpy as jnp

    import jax_kda

    x, state = draw(N, 1, H, state_dtype, N)
    indices = jnp.arange(N, dtype=jnp.int32)[::-1] if pooled else None
    call = lambda x, state: jax_kda.recurrent_kda(
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        x["beta"],
        state,
        state_indices=indices,
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        **OPTIONS,
    )
    o, _ = jax.jit(call)(x, state)  # not donated: `state` is judged below
    of_rows = state if indices is None else state[indices]
    result = {"error": token_error(x, of_rows, o), "bytes": 2 * state.nbytes}
    return result | {"seconds": seconds_per_call(call, x, state, TOKENS, typical)}


def prefill(B: int, T: int, H: int, pooled: bool, typical) -> dict:
    import jax.numpy as jnp

    import jax_kda

    x, state = draw(B, T, H, jnp.float32, 2 * B if pooled else B)
    indices = jnp.arange(B, dtype=jnp.int32) * 2 if pooled else None
    call = lambda x, state: jax_kda.chunk_kda(
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        x["beta"],
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        initial_state=state,
        output_final_state=True,
        state_indices=indices,
        **OPTIONS,
    )
    return {"seconds": seconds_per_call(call, x, state, PROMPTS, typical)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, though there is a GPU")
    parser.add_argument("--batches", metavar="N,...", help="default: 1 to 512, on a CPU 1 and 32")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR")
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp

    platform = "cpu" if args.cpu or jax.default_backend() != "gpu" else "gpu"
    device = Jax(platform)
    gpu = platform == "gpu"
    H = 32 if gpu else 8
    batches = [int(N) for N in args.batches.split(",")] if args.batches else None
    batches = batches or ([1, 8, 32, 128, 512] if gpu else [1, 32])
    copy, _ = device.rates()

    lines = [
        f"`{' '.join(['python benchmarks/decode.py', *sys.argv[1:]])}` at {commit()}",
        "",
        f"{device.device.device_kind}: copy {copy / 1e12:.3f} TB/s. One token a sequence, "
        f"H = {H}, K = V = 128, bf16 operands, {TOKENS} steps in one jitted function.",
        "",
        "| states | batch | us | TB/s of state | of copy | o error |",
        "|---|---|---|---|---|---|",
    ]
    wrong = False
    for dtype, pooled in ((jnp.float32, False), (jnp.float32, True), (jnp.bfloat16, False)):
        for N in batches:
            row = decode(N, H, dtype, pooled, device.typical)
            rate = row["bytes"] / row["seconds"]
            wrong |= not row["error"] <= PROMISE
            lines.append(
                f"| {jnp.dtype(dtype).name}{' in a pool' if pooled else ''} | {N} "
                f"| {row['seconds'] * 1e6:.2f} | {rate / 1e12:.2f} | {rate / copy:.0%} "
                f"| {row['error']:.2g} |"
            )
            progress(lines[-1])
    lines += ["", "| prefill | states by themselves, ms | in a pool, ms |", "|---|---|---|"]
    for B, T, heads in ((1, 8192, 96), (8, 1024, 96)) if gpu else ((1, 2048, 8),):
        times = [
            prefill(B, T, heads, pooled, device.typical)["seconds"] for pooled in (False, True)
        ]
        cells = " | ".join(f"{s * 1e3:.4f}" for s in times)
        lines.append(f"| B = {B}, T = {T}, H = {heads} | {cells} |")
        progress(lines[-1])

    report = "\n".join(lines) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    name = "cpu" if not gpu else device.device.device_kind.lower().replace(" ", "-")
    (args.output / f"decode-{name}.md").write_text(report)
    print(report)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
