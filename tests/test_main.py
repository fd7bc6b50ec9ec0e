"""`python -m jax_kda`: its report and its exit status."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jax_kda
import jax_kda.__main__ as job
import jax_kda.reference

SMALL = ("--cpu", "--tokens", "150", "--heads", "2")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -P: the clone's root may hold sources that are not compiled
    command = [sys.executable, "-P", "-m", "jax_kda", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_reports_on_the_standard_library_and_is_quiet_otherwise():
    result = command(*SMALL)
    assert (result.returncode, result.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["device"] == "cpu"
    assert lines["text"].startswith("150 bytes of ")
    assert "[1, 150, 2, 128]" in lines["shapes"] and "[1, 2, 128, 128]" in lines["shapes"]
    assert "donated buffers" in result.stdout and "tokens a second" in lines["time"]


def test_reads_a_file_shorter_than_asked_for(tmp_path: Path, capsys):
    path = tmp_path / "text"
    path.write_text("Delta " * 10)
    assert job.main([*SMALL, "--lower-bound", "-5", str(path)]) == 0
    assert f"60 bytes of {path}" in capsys.readouterr().out


def test_error_above_the_tolerance_fails():
    result = command(*SMALL, "--tolerance", "0")
    assert result.returncode == 1
    assert result.stderr == "FAILED: the result is wrong\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("no/such/file",), "cannot read no/such/file"),
        (("--lower-bound", "-6"), "--lower-bound must be in"),
        (("--heads", "-1"), "must be positive"),
    ],
)
def test_unusable_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as status:
        job.main([*SMALL, *arguments])
    assert status.value.code == 2
    assert message in capsys.readouterr().err


def without_buffers(fwd):
    """A `fwd` that ignores the buffers it is given."""

    def ignoring(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, final_state):
        del out
        empty = jnp.zeros(final_state.shape)
        return fwd(q, k, v, g, beta, scale, None, A_log, dt_bias, lower_bound, None, empty)

    return ignoring


def test_buffers_that_are_not_reused_fail(monkeypatch, capsys):
    monkeypatch.setattr(jax_kda, "fwd", without_buffers(jax_kda.fwd))
    assert job.main(SMALL) == 1
    assert capsys.readouterr().err == "FAILED: a donated buffer was not reused\n"


@pytest.mark.parametrize(
    "handlers, reason",
    [({"cpu": ["cpu"]}, "built without CUDA"), ({"cpu": ["cpu"], "cuda": []}, "no kernel for it")],
)
def test_passes_over_a_gpu_without_a_kernel(handlers, reason, monkeypatch):
    cpu = jax.devices("cpu")
    gpu = [SimpleNamespace(platform="gpu", device_kind="Some GPU")]
    monkeypatch.setattr(jax, "devices", lambda backend=None: cpu if backend == "cpu" else gpu)
    monkeypatch.setattr(jax_kda, "handlers", lambda: {"kda_chunk_fwd": handlers})
    device, remark = job.choose_device(only_cpu=False)
    assert device is cpu[0]
    assert "Some GPU" in remark and reason in remark
    assert job.choose_device(only_cpu=True) == (cpu[0], "")
