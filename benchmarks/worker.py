"""One library in one process: `worker.py IMPLEMENTATION --truth DIR --seconds S CASE...`.

Prints one line `RESULT {json}` per case, which bench.py reads: seconds per call, errors, memory.
The implementation `machine` measures the device's copy and matrix-product rates instead.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import truth
from cases import CASES, DIFFERENTIABLE, HEAD_AXIS, Case, inputs
from peers import IMPLEMENTATIONS, Implementation
from timing import Jax, Torch

# Cases that fit in the cache rotate over copies: three times an H200's L2. On a CPU none does.
ROTATED_BYTES = {"gpu": 180e6, "cpu": 0}


def emit(**result) -> None:
    print("RESULT", json.dumps(result), flush=True)


def measure(impl: Implementation, case: Case, device: Jax | Torch, args) -> dict:
    arrays = inputs(case)
    states = arrays.keys() & {"h0", "dstate"} if impl.state_k_first else ()
    for name in states:
        arrays[name] = np.ascontiguousarray(arrays[name].swapaxes(-1, -2))
    x = {name: device.array(a) for name, a in arrays.items()}
    if case.lens:
        x["cu"] = device.offsets(case)
    if impl.prepare is not None:
        x = impl.prepare(case, x)
    heads = truth.judged_heads(case)

    def judged(o, state, gradients=()) -> dict[str, np.ndarray]:
        def heads_of(a, like: str) -> np.ndarray:
            a = a.reshape(arrays[like].shape)[(slice(None),) * HEAD_AXIS[like] + (heads,)]
            return device.numpy(a.swapaxes(-1, -2) if like in states else a)

        results = {"o": heads_of(o, like="v"), "state": heads_of(state, like="h0")}
        gradients = zip(DIFFERENTIABLE, gradients, strict=True) if case.training else ()
        return results | {name: heads_of(a, like=name) for name, a in gradients}

    count = max(1, math.ceil(ROTATED_BYTES[args.platform] / case.bytes()))
    if case.training:
        call, *results, peak_bytes = device.training(impl, case, x)
        first = judged(*results)
        samples, how, *last = device.time_calls(call, [(x,) for x in device.copies(x, count)])
    else:
        out = lambda: device.array(np.full_like(arrays["v"], np.nan))
        state = lambda: device.array(np.full_like(arrays["h0"], np.nan))
        first, peak_bytes = judged(*device.run(impl, case, x, out(), state())), None
        sets = device.copies(x, count)
        samples, how, *last = device.time(impl, case, sets, [out() for _ in sets], state())
    last, errors = judged(*last), truth.errors(case, first, args.truth)
    return {
        "seconds": device.typical(samples),
        "spread": (max(samples) - min(samples)) / device.typical(samples),
        "how": how,
        "o_error": errors.pop("o"),
        "state_error": errors.pop("state"),
        "gradient_errors": errors,
        "peak_bytes": peak_bytes,
        "repeats_bitwise": all(np.array_equal(first[name], last[name]) for name in first),
    }


def machine(device: Jax) -> dict:
    bytes_per_second, flop_per_second = device.rates()
    packages = ("jax", "jaxlib", "torch", "triton", "tokenspeed-flashkda", "fla-core")
    packages += ("jax-linear-attention", "nvidia-cudnn-frontend")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.device.platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return {
        "device": device.device.device_kind,
        "bytes_per_second": bytes_per_second,
        "flop_per_second": flop_per_second,
        "versions": versions,
    }


def open_device(framework, platform: str):
    try:
        return framework(platform)
    except RuntimeError as error:
        sys.exit(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("implementation", choices=("machine", *IMPLEMENTATIONS))
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--platform", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--truth", type=Path, help="folder of the judge's results")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no case after this long"
    )
    args = parser.parse_args()

    if args.implementation == "machine":
        return emit(**machine(open_device(Jax, args.platform)))
    impl = IMPLEMENTATIONS[args.implementation]
    if importlib.util.find_spec(impl.module) is None:
        sys.exit(f"{impl.module} is not installed")
    device = open_device({"jax": Jax, "torch": Torch}[impl.framework], args.platform)
    begin = time.monotonic()
    for name in args.cases:
        case, result = CASES[name], {}
        reason = impl.refuses(case)
        if case.training and impl.train is None:
            reason = reason or "no gradients"
        if time.monotonic() - begin > args.seconds:
            reason = f"no time left of {args.seconds:.0f} s"
        if reason is None:
            try:
                result = measure(impl, case, device, args)
            except Exception as error:  # a peer's failure is a row of the table, not the end of it
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        emit(case=name, skipped=reason, **result)


if __name__ == "__main__":
    main()
