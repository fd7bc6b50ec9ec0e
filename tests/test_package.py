"""The package as a user meets it: installing, importing, and what the README says."""

import importlib.metadata
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jax_kda
from jax_kda import primitive, validate

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*arguments: str, cwd: Path, platforms: str | None = "cpu"):
    """Runs Python; `platforms` is JAX_PLATFORMS, None for a machine where nobody has set it."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    if platforms is not None:
        env["JAX_PLATFORMS"] = platforms
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def run_code(code: str, *options: str, cwd: Path, platforms: str | None = "cpu"):
    return run(*options, "-c", textwrap.dedent(code), cwd=cwd, platforms=platforms)


def assert_quiet(process):
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def assert_import_error(process, *words):
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    for word in words:
        assert word in last


@pytest.mark.parametrize("platforms", [None, "cpu"])
def test_import_is_quiet_and_starts_no_backend(tmp_path, platforms):
    # JAX refuses to change the number of devices once a backend runs.
    code = """
        import jax
        import jax_kda
        jax.config.update("jax_num_cpu_devices", 3)
        assert len(jax.devices("cpu")) == 3
    """
    if platforms is None:  # with a GPU or its plugin, JAX itself may have something to say
        code = code.replace('assert len(jax.devices("cpu")) == 3', "")
    assert_quiet(run_code(code, "-W", "error", cwd=tmp_path, platforms=platforms))


def test_reload_changes_nothing(tmp_path):
    code = """
        import importlib
        import jax.numpy as jnp
        import jax_kda
        call = lambda: jax_kda.chunk_kda(*[jnp.ones((1, 3, 1, 2))] * 4, jnp.ones((1, 3, 1)))[0]
        before = call()
        importlib.reload(jax_kda.primitive)
        importlib.reload(jax_kda)
        assert (call() == before).all()
    """
    assert_quiet(run_code(code, "-W", "error", cwd=tmp_path))


def test_version():
    version = PYPROJECT["project"]["version"]
    assert jax_kda.__version__ == importlib.metadata.version("jax_kda") == version


def test_oldest_jax_is_the_one_whose_headers_are_built_with():
    (jaxlib,) = (r for r in PYPROJECT["build-system"]["requires"] if r.startswith("jaxlib"))
    oldest = jaxlib.removeprefix("jaxlib==")
    assert f"jax>={oldest}" in PYPROJECT["project"]["dependencies"]
    assert f"jax[cuda13]>={oldest}" in PYPROJECT["project"]["optional-dependencies"]["cuda13"]
    assert f"OLDEST={oldest} " in (ROOT / ".ci/run").read_text()
    assert f"JAX {oldest}, the oldest supported" in README


def test_handlers_of_this_machine():
    handlers = jax_kda.handlers()
    assert tuple(handlers) == jax_kda.FFI_TARGETS
    for target, devices in handlers.items():
        built = {p for p, targets in primitive._built.items() if target in targets}
        assert devices.keys() == built
        assert devices.get("cpu", ["cpu"]) == ["cpu"]


def test_handlers_know_the_gpus_they_run_on(monkeypatch):
    capabilities = ["7.5", "8.0", "8.9", "9.0", "10.0", "12.1"]
    gpus = [
        SimpleNamespace(platform="gpu", device_kind=c, compute_capability=c) for c in capabilities
    ]
    built = {"cpu": set(jax_kda.FFI_TARGETS), "cuda": set(jax_kda.FFI_TARGETS)}
    monkeypatch.setattr(primitive, "_built", built)
    cpus = jax.local_devices(backend="cpu")
    local_devices = lambda backend: cpus if backend == "cpu" else gpus
    monkeypatch.setattr(jax, "local_devices", local_devices)
    handlers = jax_kda.handlers()
    assert handlers["kda_chunk_fwd"] == {"cpu": ["cpu"], "cuda": ["9.0"]}
    assert handlers["kda_recurrent_fwd"] == {"cpu": ["cpu"], "cuda": sorted(capabilities[1:])}


def test_handlers_newer_than_jax_are_refused_in_one_line(tmp_path):
    process = run_code(
        """
        import sys
        import types
        fake = types.ModuleType("jax_kda._cpu")
        fake.api_version = lambda: (0, 99)
        sys.modules[fake.__name__] = fake
        import jax_kda
        """,
        cwd=tmp_path,
    )
    assert_import_error(process, "jax_kda._cpu", "0.99", "upgrade jax, or reinstall jax_kda")


def test_sources_that_are_not_compiled_say_so_in_one_line(tmp_path):
    # -S: without site-packages' hooks, so that an editable install does not help.
    paths = [str(ROOT), str(importlib.metadata.distribution("jax").locate_file(""))]
    process = run_code(f"import sys; sys.path[:0] = {paths!r}; import jax_kda", "-S", cwd=tmp_path)
    assert_import_error(process, f"jax_kda in {ROOT / 'jax_kda'} is not compiled", "pip install")


def test_cuda_module_needs_no_cuda_libraries():
    if primitive._cuda is None:
        pytest.skip("this build has no CUDA handlers")
    path = str(primitive._cuda.__file__)
    libraries = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"libcuda|libcudart|not found", libraries)


def test_sources_use_nothing_forbidden():
    forbidden = r"os\.environ|getenv|jax\._src|\bprintf\(|cudaMalloc|\*\*kwargs"
    suffixes = {".py", ".h", ".cc", ".cu", ".cuh"}
    sources = [p for d in ("jax_kda", "ffi") for p in (ROOT / d).rglob("*") if p.suffix in suffixes]
    assert len(sources) > 10
    found = [f"{p}: {m[0]}" for p in sources if (m := re.search(forbidden, p.read_text()))]
    assert not found


# ---- README ------------------------------------------------------------------------------------


def test_examples_of_the_readme_run(tmp_path):
    """All of its Python, in order, in one interpreter where warnings are errors."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == README.count("```python") == 4
    example = tmp_path / "example.py"
    example.write_text("\n".join(blocks))
    assert_quiet(run("-W", "error", str(example), cwd=tmp_path))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())
    missing = [x for x in links if not x.startswith("http") and not (ROOT / x).exists()]
    assert not missing


def test_table_of_what_runs_where_is_what_the_code_does():
    table = README.split("## What runs where")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if "|" in row
    ]
    (_, dtypes, sizes, *others), (_, cuda_dtypes, cuda_sizes, *cuda_others) = rows[2:4]
    rule = f"1 to {validate.MAX_HEAD_SIZE}, also K != V"
    assert (dtypes, sizes) == ("bfloat16, float32", rule)
    assert others == cuda_others
    supported = [
        (dtype, K, V)
        for dtype in ("bfloat16", "float32", "float64")
        for K in range(1, validate.MAX_HEAD_SIZE + 1)
        for V in {K, 64, 128, 256}
        if primitive.cuda_supports("kda_chunk_fwd", jnp.dtype(dtype), K, V)
    ]
    assert cuda_sizes.endswith(", also K != V")
    heads = list(map(int, re.findall(r"\d+", cuda_sizes)))
    assert sorted(supported) == [(cuda_dtypes, K, V) for K in heads for V in heads]


def test_contract_table_has_the_parameters_of_fwd_in_order():
    table = README.split("| name | dtype | shape | meaning |")[1].split("\n\n")[0]
    rows = (row.split("|")[1] for row in table.splitlines()[2:])
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    code = jax_kda.fwd.__code__
    assert names == list(code.co_varnames[: code.co_argcount])
