"""The CUDA kernels of Hopper on the CPU, emulated: what they compute, and that they do not race.

tests/emulator stands in for CUDA and for the header with the instructions; all else is what runs on
a GPU, launches and workspace included. It knows nothing of speed; what it cannot see is said in
emulator.h, and is for `pytest -m gpu` and the sanitizer.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gpu
import test_gpu_gradients
from platforms import GPU, draw, op
from test_gradients import gradients

from jax_kda import primitive

HERE = Path(__file__).parent
SOURCES = HERE.parent / "ffi"
HEADERS = (
    "cuda.h",
    "cuda_runtime.h",
    "cuda_runtime_api.h",
    "cuda_bf16.h",
    "cuda_fp16.h",
    "cub/block/block_scan.cuh",
)


def build(
    folder: Path, passes: str = "[fb]wd", edit: Callable[[str], str] = lambda text: text
) -> Path:
    """Compiles the kernels of `passes` for the CPU, from edited copies of their files."""
    cuda = folder / "ffi" / "cuda"
    cuda.mkdir(parents=True)
    (folder / "ffi" / "common").symlink_to(SOURCES / "common")
    for pattern in ("*.cuh", "chunk_*.cu", "launch.h"):
        for file in SOURCES.glob(f"cuda/{pattern}"):
            text = file.read_text().replace(
                "extern __shared__ __align__(1024) uint8_t shared[];",
                "uint8_t* const shared = emulator::SharedMemory();",
            )
            text = text.replace("__shared__ ", "emulator::ExpectOneBlock(); static ")
            (cuda / file.name).write_text(edit(text))
    shutil.copy(HERE / "emulator" / "sm90.cuh", cuda)
    for header in HEADERS:
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / header).write_text('#include "emulator.h"\n')
    options = ["-std=c++20", "-O2", "-w", "-fPIC"]
    options += [f"-I{path}" for path in (folder, HERE / "emulator", jax.ffi.include_dir())]
    units = {unit: folder / f"{unit.stem}.o" for unit in cuda.glob(f"chunk_{passes}*.cu")}
    units[HERE / "emulator" / "handlers.cc"] = folder / "handlers.o"
    jobs = [
        subprocess.Popen(["c++", *options, "-c", "-x", "c++", unit, "-o", to])
        for unit, to in units.items()
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    library = folder / "emulated.so"
    subprocess.run(["c++", "-shared", *units.values(), "-o", library], check=True)
    return library


@contextlib.contextmanager
def emulated(library: Path) -> Iterator[None]:
    """Calls on the CPU become what a GPU would be given."""
    handlers = ctypes.CDLL(str(library), mode=os.RTLD_LAZY)  # a pass may not be there
    prefix = f"{library.parent.name}_"
    names = [f"kda_chunk_{pass_}" for pass_ in ("fwd", "bwd")]
    for name in names:
        capsule = jax.ffi.pycapsule(getattr(handlers, f"emulated_{name}"))
        jax.ffi.register_ffi_target(prefix + name, capsule, platform="cpu")
    call, target = primitive._ffi_call, primitive.Signature.target.fget
    assert target is not None  # of a property

    def run(_: Any, x: dict[str, Any], f: Any = op, **options: Any) -> Any:
        return tuple(np.asarray(result) for result in f(x, **options, implementation="ffi"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitive, "_ffi_call", lambda sig, _, *x: call(sig, "cuda", *x))
        patch.setattr(primitive.Signature, "target", property(lambda sig: prefix + target(sig)))
        patch.setitem(primitive._built, "cpu", {prefix + name for name in names})
        patch.setattr(test_gpu, "run", run)
        patch.setattr(test_gpu_gradients, "on_gpu", gradients)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with emulated(build(tmp_path_factory.mktemp("emulated"))):
        yield


# What is taken out, and what is said then.
PLANTS = {
    "barrier": (
        "  BarSync(kAllBarrier, kBuildThreads);  // Aqk takes",
        "  //",
        "not have done with",
    ),
    "halves": (
        "  BarSync(kAllBarrier, kBuildThreads);  // L is",
        "  //",
        "not have done with",
    ),
    "warp": (
        "      StsF32x2(at + M::kLogDecays, sum.x, sum.y);\n      __syncwarp();",
        "      StsF32x2(at + M::kLogDecays, sum.x, sum.y);",
        "not have done with",
    ),
    "bytes": ("(sizeof(G) == 2 ? 3 : 2) * kTile", "2 * kTile", "more than it expects"),
    "early": (
        "  BarSync(kAllBarrier, C::kThreads);\n  if (warp >= 4) return;\n",
        "  if (warp >= 4) return;\n  BarSync(kAllBarrier, C::kThreads);\n",
        "deadlock",
    ),
    "peer": (
        "  MbarrierArriveCluster(Mapa(bar, rank ^ 1));\n  MbarrierWait(bar, parity);",
        "  MbarrierArriveCluster(Mapa(bar, rank ^ 1));",
        "not have done with",
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path):
    old, new, message = PLANTS[name]
    library = build(tmp_path, "fwd", lambda text: text.replace(old, new))
    x = draw(GPU, T=200, H=1)  # enough chunks for every ring to come round
    x["g"] = x["g"].astype(jnp.bfloat16)
    with emulated(library), pytest.raises(jax.errors.JaxRuntimeError, match=message):
        test_gpu.run(GPU, x)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", test_gpu.combinations()[::7], ids=str)
def test_options(case: tuple[Any, ...]):
    test_gpu.test_options(*case)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("l2norm", [True, False], ids=["fp16", "bf16"])
def test_strong_gates(l2norm: bool):
    test_gpu.test_a_strong_gate_at_every_place_of_eight_tokens("bf16", l2norm)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "name",
    ["one_token", "ragged_tail", "grouped_heads", "packed_with_tail", "segments", "beta_zero"],
)
def test_gradients(name: str):
    test_gpu_gradients.test_gradients(name)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("file", test_gpu_gradients.FLA_GOLDEN)
def test_golden_gradients(file: str):
    test_gpu_gradients.test_golden((file, ""))


@pytest.mark.usefixtures("kernels")
def test_slices(monkeypatch: pytest.MonkeyPatch):
    test_gpu.test_slices_leave_the_bits_of_whole_rows(monkeypatch, 2)
    test_gpu.test_slices_of_a_pool_with_checkpoints(monkeypatch)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("gate", ["activated", "softplus", "lower_bound"])
def test_gradients_of_types(gate: str):
    test_gpu_gradients.test_types(gate, jnp.bfloat16, False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("log_decay", [-1e-6, -20.0, -np.inf])
def test_gradients_of_constant_gates(log_decay: float):
    test_gpu_gradients.test_constant_gates_of_any_strength(log_decay)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "test",
    [
        test_gpu.test_infinite_gates_among_mild_ones,
        test_gpu.test_strong_and_weak_channels_in_one_token,
        test_gpu.test_decays_that_add_up_beyond_the_range_of_tf32,
        test_gpu.test_every_length_at_once,
        test_gpu.test_earlier_outputs_do_not_depend_on_later_tokens,
        test_gpu.test_packed_sequences_are_the_sequences_alone,
        test_gpu.test_segments_with_beta_beyond_one_and_unnormalised_keys,
        test_gpu_gradients.test_strong_gates_beside_weak_ones,
        test_gpu_gradients.test_zero_queries_keys_and_betas,
        test_gpu_gradients.test_repeated_keys,
        test_gpu_gradients.test_tokens_of_no_sequence_are_not_read,
        test_gpu_gradients.test_malformed_offsets_are_nan,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_as_on_a_gpu(test: Callable[[], None]):
    test()
