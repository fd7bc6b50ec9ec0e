"""benchmarks/bench.py: what it writes, and that a wrong result gets no ratio."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_writes_a_table_json_and_a_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    arguments = ["--cpu", "--cases", "cpu-tiny", "--implementations", "jax_kda", "--output"]
    command = [sys.executable, str(BENCHMARKS / "bench.py"), *arguments, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert row["right"] and row["o_error"] < 2e-3 and row["state_error"] < 1e-5
    assert (tmp_path / "cpu.md").read_text() in result.stdout
    assert (tmp_path / "cpu.png").stat().st_size > 0


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_wrong_result_gets_no_ratio(load, error):
    bench = load("bench")
    row = {"case": "fixed-H96", "skipped": None, "note": "", "seconds": 1e-3, "state_error": 1e-3}
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


def test_gradients_are_timed_and_judged(load):
    row = load("gradient").measure(1, 70, 2, min)
    assert row["error"] < load("gradient").PROMISE["cpu"]
    assert min(row["forward"], row["both"]) > 0 and row["bytes"] > 2 * 70 * 2 * 128 * 4
