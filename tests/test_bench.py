"""benchmarks/bench.py: what it writes, and that a wrong result gets no ratio."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_writes_a_table_json_and_a_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    arguments = ["--cpu", "--cases", "cpu-*tiny", "--output", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "bench.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["cpu-tiny"] * 2 + ["cpu-train-tiny"] * 2
    for row in rows:
        assert row["right"] and row["o_error"] < 2e-3 and row["state_error"] < 1e-5
    for row in rows[2:]:
        assert len(row["gradient_errors"]) == 8 and max(row["gradient_errors"].values()) < 5e-3
        assert row["peak_bytes"] > 2 * 2 * 100 * 2 * 1282
    assert (tmp_path / "cpu.md").read_text() in result.stdout
    assert (tmp_path / "cpu.png").stat().st_size > 0


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_wrong_result_gets_no_ratio(load, error):
    bench = load("bench")
    row = {"case": "fixed-H96", "skipped": None, "note": "", "seconds": 1e-3, "state_error": 1e-3}
    row |= {"gradient_errors": {}, "peak_bytes": None}
    ours = row | {"implementation": "jax_kda", "o_error": 3e-3, "repeats_bitwise": True}
    wrong = row | {"implementation": "fla", "o_error": error}
    racing = ours | {"case": "fixed-H64", "repeats_bitwise": False}
    rows = [ours, wrong, racing]
    for r in rows:
        r["right"] = bench.right(r, "gpu")
    machine = {"device": "GPU", "bytes_per_second": 4e12, "flop_per_second": 7e14}
    bench.add_ratios(rows, machine, "gpu")
    assert [r["right"] for r in rows] == [True, False, False]
    assert ours["of_jax_kda"] == 1 and ours["of_floor"] == pytest.approx(3.87, rel=0.05)
    lines = bench.table(rows, machine, "").splitlines()
    assert [line.count("wrong") for line in lines[-3:]] == [0, 3, 3]


def test_inputs_of_all_heads_are_those_of_each(load):
    cases = load("cases")
    case = cases.Case("", 2, 5, 3, gate="weak")
    x = cases.inputs(case)
    one = cases.head_inputs(case, 2)
    np.testing.assert_array_equal(x["q"][:, :, 2], one["q"])
    np.testing.assert_array_equal(x["beta"][:, :, 2], one["beta"])
    np.testing.assert_array_equal(x["dt_bias"][2], one["dt_bias"])
    np.testing.assert_array_equal(x["h0"][:, 2], one["h0"])


@pytest.mark.parametrize("error, promised", [(0.01, False), (float("nan"), False), (0.007, True)])
def test_a_wrong_gradient_gets_no_ratio(load, error, promised):
    bench = load("bench")
    row = {"case": "train-H8", "skipped": None, "note": "", "seconds": 1e-3, "peak_bytes": 4e9}
    row |= {"implementation": "jax_kda", "repeats_bitwise": True, "o_error": 0, "state_error": 0}
    row |= {"gradient_errors": {"q": 0.001, "beta": error, "A_log": 0.1}}
    row["right"] = bench.right(row, "gpu")
    assert row["right"] == promised
    assert bench.right(row | {"implementation": "fla"}, "gpu") == np.isfinite(error)
    machine = {"device": "GPU", "bytes_per_second": 4e12, "flop_per_second": 7e14}
    bench.add_ratios([row], machine, "gpu")
    line = bench.table([row], machine, "").splitlines()[-1]
    assert ("wrong" in line) != promised and "| 1.0000 | 4.00 | 0 | 0 |" in line


@pytest.mark.parametrize("gate", ["strong", "softplus"])
def test_the_judge_is_right(load, gate):
    """Its gradients are those of the reference, which nobody wrote by hand."""
    cases, truth = load("cases"), load("truth")
    case = cases.Case("", 1, 90, 1, (30, 0, 60), gate=gate, training=True)
    x = {name: a.astype(np.float64) for name, a in cases.head_inputs(case, 0).items()}
    axis = cases.HEAD_AXIS

    def call(inputs):
        inputs = {name: jnp.expand_dims(a, axis[name]) for name, a in inputs.items()}
        inputs["cu"] = jnp.array(case.offsets, jnp.int32)
        o, state = load("peers").jax_kda_reference(case, inputs, None, None)
        return o[:, :, 0], state[:, 0]

    with jax.enable_x64(True):
        results, pull = jax.vjp(call, {name: x[name] for name in cases.DIFFERENTIABLE})
        (gradients,) = pull((jnp.asarray(x["do"]), jnp.asarray(x["dstate"])))
        (o, state), gradients = jax.device_get((results, gradients))
    expected = {"o": o[0], "state": state, **gradients}
    actual = truth.recurrence(case, x) | truth.gradients(case, x)
    assert actual.keys() == expected.keys()
    for name, a in actual.items():
        assert truth.rms_ratio(a, expected[name]) < 1e-12, name
