"""Times jax_kda beside the other KDA libraries installed here, and checks every result.

    python benchmarks/bench.py                    # the GPU's cases; the CPU's where there is no GPU
    python benchmarks/bench.py --cpu
    python benchmarks/bench.py --cases 'fixed-*' --implementations jax_kda,flash_kda

Each library runs in a process of its own (worker.py), on the same arrays (cases.py), and is judged
by a float64 recurrence (truth.py). A wrong result gets no ratio. Cases with `train` in their names
are the forward pass and all gradients. Writes JSON, a table and a plot.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import truth
from cases import CASES
from peers import IMPLEMENTATIONS

HERE = Path(__file__).parent
# Largest RMS error of right results and of right gradients. jax_kda's is its promise, by device and
# dtype; peers that keep a bfloat16 state or workspace are off by up to 0.01 and still compute it.
PROMISE = {
    ("gpu", "bfloat16"): (0.0055, 0.008),
    ("cpu", "bfloat16"): (0.002, 0.005),
    ("cpu", "float32"): (1e-5, 1e-5),
}
PEER_TOLERANCE = 0.02


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def judge(names: list[str], folder: Path) -> None:
    """Float64 results of the judged heads of every case, in parallel, longest first."""
    names = sorted(names, key=lambda name: -CASES[name].T)
    tasks = [(name, head) for name in names for head in truth.judged_heads(CASES[name])]
    with ProcessPoolExecutor() as pool:
        futures = [pool.submit(truth.save, *task, folder) for task in tasks]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            progress(f"float64 recurrence: {done} of {len(tasks)} heads")


def run_worker(implementation: str, *arguments: str, timeout: float, env=()) -> list[dict]:
    """The worker's RESULT lines; its other output goes to stderr."""
    command = ["env", *env, sys.executable, str(HERE / "worker.py"), implementation, *arguments]
    results = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        for line in process.stdout or ():
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
                results.append(result)
                if "case" in result:
                    time = f"{result['seconds'] * 1e3:.4f} ms" if "seconds" in result else ""
                    progress(f"{implementation} {result['case']}: {result['skipped'] or time}")
            else:
                progress(line.rstrip())
        timer.cancel()
    return results


def gradient_error(row: dict) -> float | None:
    """The largest, but of parameters: those are sums in which almost everything cancels."""
    errors = [e for name, e in row["gradient_errors"].items() if name not in ("A_log", "dt_bias")]
    return float(np.max(errors)) if errors else None  # NaN if any is


def right(row: dict, platform: str) -> bool:
    of_results = of_gradients = PEER_TOLERANCE
    if row["implementation"] == "jax_kda":
        if not row["repeats_bitwise"]:
            return False
        of_results, of_gradients = PROMISE[platform, CASES[row["case"]].dtype]
    error = gradient_error(row)
    if error is not None and not error <= of_gradients:
        return False
    return row["o_error"] <= of_results and row["state_error"] <= of_results  # NaN fails too


def add_ratios(rows: list[dict], machine: dict, platform: str) -> None:
    """Ratios to the byte floor, the matrix-product rate and jax_kda, of right results only."""
    ours = {r["case"]: r for r in rows if r["implementation"] == "jax_kda" and r.get("right")}
    for row in rows:
        if not row.get("right"):
            continue
        case = CASES[row["case"]]
        row["floor_seconds"] = case.bytes() / machine["bytes_per_second"]
        row["of_floor"] = row["seconds"] / row["floor_seconds"]
        if not case.training:
            row["of_matmul_rate"] = case.flops() / row["seconds"] / machine["flop_per_second"]
        if row["case"] in ours:
            row["of_jax_kda"] = row["seconds"] / ours[row["case"]]["seconds"]


def table(rows: list[dict], machine: dict, header: str) -> str:
    lines = [
        header,
        "",
        f"{machine['device']}: copy {machine['bytes_per_second'] / 1e12:.3f} TB/s, matrix product "
        f"{machine['flop_per_second'] / 1e12:.3f} TFLOP/s. Errors are RMS ratios to float64; of "
        "gradients, the largest but of A_log and dt_bias. GB: arguments, results and workspaces.",
        "",
        "| case | implementation | ms | GB | o error | state error | gradient error | x byte floor "
        "| of matmul rate | x jax_kda | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    skipped: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cells = [row["case"], row["implementation"]]
        if row["skipped"]:
            skipped.setdefault((row["implementation"], row["skipped"]), []).append(row["case"])
            continue
        tell = lambda form, x: "" if x is None else format(x, form)
        cells += [f"{row['seconds'] * 1e3:.4f}"]
        cells += [tell(".2f", row["peak_bytes"] and row["peak_bytes"] / 1e9)]
        cells += [tell(".2g", e) for e in (row["o_error"], row["state_error"], gradient_error(row))]
        if row["right"]:
            cells += [f"{row['of_floor']:.2f}", tell(".1%", row.get("of_matmul_rate"))]
            cells += [tell(".2f", row.get("of_jax_kda"))]
        else:
            cells += ["wrong"] * 3
        lines.append("| " + " | ".join([*cells, row["note"]]) + " |")
    if skipped:
        lines += ["", "Not measured:", ""]
    for (implementation, reason), cases in skipped.items():
        lines.append(f"* {implementation}, {reason}: {', '.join(cases)}")
    return "\n".join(lines) + "\n"


def commit() -> str:
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown commit"


def plot(rows: list[dict], machine: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.get("right")]
    names = list(dict.fromkeys(row["case"] for row in rows))
    shown = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(max(6, 1.1 * len(names)), 5), layout="constrained")
    width = 0.8 / max(1, len(shown))
    for i, implementation in enumerate(shown):
        mine = {r["case"]: r["of_floor"] for r in rows if r["implementation"] == implementation}
        positions = [names.index(name) + (i - (len(shown) - 1) / 2) * width for name in mine]
        axes.bar(positions, list(mine.values()), width, label=implementation)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_ylabel("time over the time its bytes need (log)")
    axes.set_title(f"KDA, {machine['device']}; lower is better")
    axes.legend()
    figure.savefig(path, dpi=120)


def write(rows: list[dict], machine: dict, platform: str, names: list[str], folder: Path) -> str:
    """Judges the rows and writes the three files; returns the table."""
    for row in rows:
        if not row["skipped"]:
            row["right"] = right(row, platform)
    add_ratios(rows, machine, platform)
    rows.sort(key=lambda row: names.index(row["case"]))
    command = " ".join(["python benchmarks/bench.py", *sys.argv[1:]])
    document = {"command": command, "commit": commit(), "machine": machine, "rows": rows}
    report = table(rows, machine, f"`{command}` at {document['commit']}")
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / ("cpu" if platform == "cpu" else machine["device"].lower().replace(" ", "-"))
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report)
    plot(rows, machine, stem.with_suffix(".png"))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, though there is a GPU")
    parser.add_argument(
        "--cases", metavar="PATTERN,...", help=f"of {', '.join(CASES)}; default: the platform's"
    )
    parser.add_argument(
        "--implementations", metavar="NAME,...", help=f"of {', '.join(IMPLEMENTATIONS)}"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="for each peer's cases (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR")
    args = parser.parse_args()

    machine = {}
    for platform in ("cpu",) if args.cpu else ("gpu", "cpu"):
        if found := run_worker("machine", "--platform", platform, timeout=120):
            machine = found[0]
            break
    else:
        parser.error("no device answered")
    patterns = args.cases.split(",") if args.cases else None
    if patterns:  # in their order: peers may have no time for the last
        names = [name for p in patterns for name in CASES if fnmatch.fnmatch(name, p)]
        names = list(dict.fromkeys(names))
    else:
        names = [name for name, case in CASES.items() if case.device == platform]
    if not names:
        parser.error(f"no case matches {args.cases}")
    if args.implementations:
        implementations = args.implementations.split(",")
        if unknown := set(implementations) - set(IMPLEMENTATIONS):
            parser.error(f"no implementation is called {', '.join(unknown)}")
    else:
        implementations = ["jax_kda", "reference"] if platform == "cpu" else list(IMPLEMENTATIONS)

    rows: list[dict] = []
    report = ""
    with tempfile.TemporaryDirectory() as scratch:
        judge(names, Path(scratch))
        for implementation in implementations:
            impl = IMPLEMENTATIONS[implementation]
            options = ["--platform", platform, "--truth", scratch]
            if implementation != "jax_kda":
                options += ["--seconds", str(args.seconds)]
            timeout = 600 if implementation == "jax_kda" else args.seconds + 120
            found = run_worker(implementation, *names, *options, timeout=timeout, env=impl.env)
            rows += [{"implementation": implementation, "note": impl.note, **row} for row in found]
            report = write(rows, machine, platform, names, args.output)  # a killed run leaves these
    print(report)
    ours = [row for row in rows if row["implementation"] == "jax_kda" and row.get("right")]
    return 0 if "jax_kda" not in implementations or len(ours) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
