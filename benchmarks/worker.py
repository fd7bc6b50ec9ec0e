"""One library in one process: `worker.py IMPLEMENTATION --truth DIR --seconds S CASE...`.

Prints one line `RESULT {json}` per case, which bench.py reads: seconds per call, errors, a note.
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
from cases import CASES, Case, inputs
from peers import IMPLEMENTATIONS, Implementation
from timing import Jax, Torch

# Cases that fit in the cache rotate over copies: three times an H200's L2. On a CPU none does.
ROTATED_BYTES = {"gpu": 180e6, "cpu": 0}


def emit(**result) -> None:
    print("RESULT", json.dumps(result), flush=True)


def measure(impl: Implementation, case: Case, device: Jax | Torch, args) -> dict:
    arrays = inputs(case)
    if impl.state_k_first:
        arrays["h0"] = np.ascontiguousarray(arrays["h0"].swapaxes(-1, -2))
    x = {name: device.array(a) for name, a in arrays.items()}
    if case.lens:
        x["cu"] = device.offsets(case)
    if impl.prepare is not None:
        x = impl.prepare(case, x)
    out = lambda: device.array(np.full_like(arrays["v"], np.nan))
    state = lambda: device.array(np.full_like(arrays["h0"], np.nan))
    heads = truth.judged_heads(case)

    def judged(o, state) -> tuple[np.ndarray, np.ndarray]:
        o = device.numpy(o.reshape(arrays["v"].shape)[:, :, heads])
        state = device.numpy(state[:, heads])
        return o, state.swapaxes(-1, -2) if impl.state_k_first else state

    first = judged(*device.run(impl, case, x, out(), state()))
    o_error, state_error = truth.errors(case, *first, args.truth)
    sets = device.copies(x, max(1, math.ceil(ROTATED_BYTES[args.platform] / case.bytes())))
    samples, how, *last = device.time(impl, case, sets, [out() for _ in sets], state())
    return {
        "seconds": device.typical(samples),
        "spread": (max(samples) - min(samples)) / device.typical(samples),
        "how": how,
        "o_error": o_error,
        "state_error": state_error,
        "repeats_bitwise": all(
            np.array_equal(a, b) for a, b in zip(first, judged(*last), strict=True)
        ),
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
