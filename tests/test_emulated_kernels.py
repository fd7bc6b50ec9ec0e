"""The CUDA kernels of Hopper on the CPU, emulated: what they compute, and that they end.

tests/emulator stands in for CUDA and for the header with the instructions; everything else is what
runs on a GPU, launches and workspace included. It knows nothing of speed, and what it cannot see
(races within a warp, the memory model) is for the sanitizer: docs/kernels.md.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import GPU, draw, judge, op, truth

from jax_kda import primitive

HERE = Path(__file__).parent
SOURCES = HERE.parent / "ffi"
NORMED: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}


def build(folder: Path) -> Path:
    """Compiles the kernels for the CPU."""
    cuda = folder / "ffi" / "cuda"
    cuda.mkdir(parents=True)
    (folder / "ffi" / "common").symlink_to(SOURCES / "common")
    for file in [*SOURCES.glob("cuda/*.cuh"), *SOURCES.glob("cuda/chunk_*.cu"), SOURCES / "cuda/launch.h"]:
        text = file.read_text()
        text = text.replace(
            "extern __shared__ __align__(1024) uint8_t shared[];",
            "uint8_t* const shared = emulator::memory;",
        )
        (cuda / file.name).write_text(text.replace("__shared__ ", "static "))
    shutil.copy(HERE / "emulator" / "sm90.cuh", cuda)
    for header in ("cuda", "cuda_runtime", "cuda_runtime_api", "cuda_bf16", "cuda_fp16"):
        (folder / f"{header}.h").write_text('#include "emulator.h"\n')
    (folder / "cub" / "block").mkdir(parents=True)
    (folder / "cub" / "block" / "block_scan.cuh").write_text('#include "emulator.h"\n')
    library = folder / "emulated.so"
    includes = [f"-I{path}" for path in (folder, HERE / "emulator", jax.ffi.include_dir())]
    units = [*cuda.glob("chunk_*.cu"), HERE / "emulator" / "handlers.cc"]
    compile_ = [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-w", "-fPIC", *includes, "-c", "-x", "c++"]
    jobs = [
        subprocess.Popen([*compile_, str(unit), "-o", str(folder / f"{unit.stem}.o")])
        for unit in units
    ]
    assert not any([job.wait() for job in jobs])
    objects = [str(folder / f"{unit.stem}.o") for unit in units]
    subprocess.run([compile_[0], "-shared", *objects, "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module", autouse=True)
def emulated(tmp_path_factory: pytest.TempPathFactory):
    """Calls for the CPU lower to what a GPU would be given."""
    library = ctypes.CDLL(str(build(tmp_path_factory.mktemp("emulated"))))
    names = ("kda_chunk_fwd", "kda_chunk_bwd")
    for name in names:
        handler = getattr(library, f"emulated_{name}")
        jax.ffi.register_ffi_target(f"emulated_{name}", jax.ffi.pycapsule(handler), platform="cpu")
    call, target = primitive._ffi_call, primitive.Signature.target
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitive, "_ffi_call", lambda sig, _, *operands: call(sig, "cuda", *operands))
        patch.setattr(primitive.Signature, "target", property(lambda sig: f"emulated_{target.fget(sig)}"))
        patch.setitem(primitive._built, "cpu", {f"emulated_{name}" for name in names})
        jax.clear_caches()
        yield
    jax.clear_caches()


def expect(x: dict[str, Any], **options: Any) -> None:
    o, state = op(x, **options, implementation="ffi")
    judge(GPU, (np.asarray(o), np.asarray(state)), truth(x, **options))


@pytest.mark.parametrize("g_dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize("gate", [{}, {"use_gate_in_kernel": True}, {"use_gate_in_kernel": True, "lower_bound": -5.0}])
def test_forward(gate, g_dtype):
    x = draw(GPU, T=77, H=1, HV=2, state=True, raw=bool(gate))
    if gate:
        x |= {"A_log": np.zeros(2, np.float32), "dt_bias": np.zeros((2, 128), np.float32)}
    x["g"] = x["g"].astype(g_dtype)
    expect(x, **gate, **NORMED, use_beta_sigmoid_in_kernel=bool(gate))
