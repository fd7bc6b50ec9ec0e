"""Times what training does: the forward pass and all its gradients in one jitted function.

    python benchmarks/gradient.py              # the GPU's sizes; a small one where there is no GPU
    python benchmarks/gradient.py --heads 96,8

Gradients of q, k, v, g, beta and of the initial state are judged, for one head, by plain JAX in
float64 on the CPU. Memory is XLA's own account of arguments, results and temporaries. Prints a
table and writes it to results/gradient-DEVICE.md.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from bench import commit, progress
from timing import Jax, timed

HERE = Path(__file__).parent
K = V = 128
PROMISE = {"gpu": 0.008, "cpu": 0.005}  # RMS ratio of a gradient from bf16 inputs
JUDGED = ("q", "k", "v", "g", "beta", "initial_state")  # A_log and dt_bias are sums that cancel
SAMPLE_SECONDS = 0.2

OPTIONS: dict[str, Any] = {
    "lower_bound": -5.0,
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}


def draw(B: int, T: int, H: int) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Operands, and cotangents of o and the final state."""
    import jax
    import jax.numpy as jnp

    shapes = {"q": (H, K), "k": (H, K), "v": (H, V), "g": (H, K), "beta": (H,), "do": (H, V)}
    *keys, key = jax.random.split(jax.random.key(0), len(shapes) + 1)
    x = {
        name: jax.random.normal(key, (B, T, *shape), jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    do = x.pop("do")
    state, dstate = jax.random.normal(key, (2, B, H, V, K))
    gate = {"A_log": jnp.linspace(-0.5, 0.5, H), "dt_bias": jnp.zeros((H, K))}
    return x | gate | {"initial_state": state}, (do, dstate)


def gradients(x: dict[str, Any], cotangents: Any, **options: Any) -> Any:
    import jax

    import jax_kda

    results, pull = jax.vjp(lambda x: jax_kda.chunk_kda(**x, **OPTIONS, **options), x)
    return results, pull(cotangents)[0]


def largest_error(x: dict[str, Any], cotangents: Any, actual: dict[str, Any]) -> float:
    """Largest RMS ratio of a judged gradient, of the last head."""
    import jax

    axis = {"beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1}
    cut = lambda name, a: np.take(np.asarray(a, np.float64), [-1], axis.get(name, 2))
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        one = {name: cut(name, a) for name, a in x.items()}
        do, dstate = cotangents
        cut_cotangents = (cut("do", do), cut("initial_state", dstate))
        _, expected = gradients(one, cut_cotangents, implementation="reference")
    ratios = []
    for name in JUDGED:
        a, b = cut(name, actual[name]), np.asarray(expected[name], np.float64)
        ratios.append(float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))))
    return max(ratios) if np.isfinite(ratios).all() else np.inf


def seconds(f, typical) -> float:
    import jax

    result = f()

    def run():
        nonlocal result
        result = f()

    return typical(timed(run, lambda: jax.block_until_ready(result), SAMPLE_SECONDS))


def measure(B: int, T: int, H: int, typical) -> dict[str, Any]:
    import jax

    import jax_kda

    x, cotangents = draw(B, T, H)
    both = jax.jit(gradients).lower(x, cotangents).compile()
    forward = jax.jit(lambda x: jax_kda.chunk_kda(**x, **OPTIONS))
    memory = both.memory_analysis()
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    row: dict[str, Any] = {"bytes": sum(getattr(memory, size) for size in sizes)}
    row["error"] = largest_error(x, cotangents, both(x, cotangents)[1])
    row["forward"] = seconds(lambda: forward(x), typical)
    row["both"] = seconds(lambda: both(x, cotangents), typical)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, though there is a GPU")
    parser.add_argument("--heads", metavar="H,...", help="of T = 8192, on a CPU 2048")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR")
    args = parser.parse_args()

    import jax

    platform = "cpu" if args.cpu or jax.default_backend() != "gpu" else "gpu"
    device = Jax(platform)
    T = 8192 if platform == "gpu" else 2048
    heads = [int(H) for H in args.heads.split(",")] if args.heads else None
    shapes = [(1, T, H) for H in heads or ([96, 64, 32, 8] if platform == "gpu" else [8])]
    if platform == "gpu" and not heads:
        shapes.append((8, 2048, 32))

    lines = [
        f"`{' '.join(['python benchmarks/gradient.py', *sys.argv[1:]])}` at {commit()}",
        "",
        f"{device.device.device_kind}. K = V = {K}, bf16 operands, float32 states in and out, "
        "lower-bound gate, everything inside.",
        "",
        "| B | T | H | forward, ms | with gradients, ms | memory, GB | largest error |",
        "|---|---|---|---|---|---|---|",
    ]
    wrong = False
    for B, T, H in shapes:
        row = measure(B, T, H, device.typical)
        wrong |= not row["error"] <= PROMISE[platform]
        lines.append(
            f"| {B} | {T} | {H} | {row['forward'] * 1e3:.3f} | {row['both'] * 1e3:.3f} "
            f"| {row['bytes'] / 1e9:.2f} | {row['error']:.2g} |"
        )
        progress(lines[-1])
    report = "\n".join(lines) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    name = "cpu" if platform == "cpu" else device.device.device_kind.lower().replace(" ", "-")
    (args.output / f"gradient-{name}.md").write_text(report)
    print(report)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
