"""The benchmarks' machinery, run tiny: what they print and compare is there. No time is asserted on."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.benchmarks import cli_startup, logging_cost, memory, recipe, startup, throughput
from tests.benchmarks.measure import measure, peak_memory, process_cpu_s
from tests.benchmarks.stats import ratio_of
from tests.benchmarks.turns import Coordinator
from tests.benchmarks.workload import Workload

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


TINY = ["--model", "linear", "--rounds", "2", "--block-steps", "3", "--every-n-steps", "2"]


def tables_of(path):
    content = json.loads(path.read_text())
    assert content["machine"]
    return content["tables"]


class TestStats:
    def test_a_ratio_that_never_changes_is_its_own_bound(self):
        ratio = ratio_of([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
        assert [ratio.mean, ratio.median, ratio.low, ratio.high] == pytest.approx([2.0] * 4)

    def test_the_bounds_lie_around_the_mean(self):
        ratio = ratio_of([1.0, 1.2, 0.9, 1.1, 1.0], [1.0] * 5)
        assert 0.9 < ratio.low < ratio.mean < ratio.high < 1.2

    def test_both_sides_need_as_many_rounds(self):
        with pytest.raises(ValueError, match="zip"):
            ratio_of([1.0], [1.0, 2.0])


class TestMeasure:
    def test_a_command_with_what_it_leaves_behind(self, tmp_path):
        # The command ends at once; its orphan works on, is waited for, and counts.
        orphan = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
        program = f"""
import subprocess, sys
from tests.benchmarks.measure import mark
mark("rank")
subprocess.Popen([sys.executable, "-c", {orphan!r}], start_new_session=True)
mark("first_step")
"""
        measured = measure([sys.executable, "-c", program], tmp_path, {})
        assert 0 < measured.first_s("rank") <= measured.first_s("first_step") <= measured.exit_s
        assert measured.exit_s < measured.gone_s
        assert measured.cpu_s >= 0.3
        assert 0 < measured.cpu_s_at(measured.exit_s) <= measured.cpu_s
        assert measured.left_behind == []

    def test_what_never_ends_is_ended_and_named(self, tmp_path):
        with pytest.raises(RuntimeError, match="exit code -9"):
            measure(["sleep", "1000"], tmp_path, {}, timeout_s=0.5)
        measured = json.loads((tmp_path / "measured.json").read_text())
        assert measured["left_behind"] == ["sleep"]

    def test_a_failing_command_shows_its_output(self, tmp_path):
        with pytest.raises(RuntimeError, match="this is why"):
            measure([sys.executable, "-c", "raise SystemExit('this is why')"], tmp_path, {})

    def test_this_process(self):
        assert process_cpu_s(os.getpid()) > 0
        assert peak_memory(os.getpid())["peak"] > 1000


class TestTurns:
    def test_a_contender_that_dies_is_an_error_with_its_log(self, tmp_path):
        command = [sys.executable, "-c", "print('its last words', flush=True); raise SystemExit(3)"]
        said = pytest.raises(RuntimeError, match=r"broken failed \(exit code 3\)[^$]*its last words")
        with Coordinator(tmp_path) as coordinator, said:
            coordinator.start("broken", command, 1, {})


def test_throughput_compares_loops_that_do_the_same_work(tmp_path):
    out = tmp_path / "out.json"
    throughput.main(["--contenders", "raytrainer", "elastic", "hand_written", *TINY, "--json", str(out)])
    speed, ratios = tables_of(out).values()
    assert [row["contender"] for row in speed] == [
        "raytrainer run --local",
        "the same, num_workers: {min, max}",
        "hand-written DDP, torchrun",
    ]
    assert all(row["samples/s"] > 0 and row["CPU ms a step, all ranks"] > 0 for row in speed)
    assert [(row["ours"], row["against"], row["weights"]) for row in ratios] == [
        ("raytrainer run --local", "hand-written DDP, torchrun", "equal to the bit"),
        ("the same, num_workers: {min, max}", "raytrainer run --local", "equal to the bit"),
        ("the same, num_workers: {min, max}", "hand-written DDP, torchrun", "equal to the bit"),
    ]


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_throughput_with_other_libraries(tmp_path, name):
    pytest.importorskip(name)
    out = tmp_path / "out.json"
    throughput.main(["--contenders", "trainer", name, *TINY, "--json", str(out)])
    (row,) = tables_of(out)["Ours against theirs, by round"]
    assert row["weights"] == "equal to the bit"


@pytest.mark.ray
def test_throughput_with_bare_ray(tmp_path):
    out = tmp_path / "out.json"
    throughput.main(["--contenders", "trainer", "bare_ray", *TINY, "--json", str(out)])
    (row,) = tables_of(out)["Ours against theirs, by round"]
    assert row["weights"] == "equal to the bit"


def test_a_library_that_is_not_installed_is_left_out_with_a_line(capsys, monkeypatch):
    monkeypatch.setattr(throughput, "find_spec", lambda name: None)
    assert throughput.installed(["raytrainer", "lightning"]) == ["raytrainer"]
    assert "lightning: left out" in capsys.readouterr().out


def test_recipe(tmp_path):
    out = tmp_path / "out.json"
    recipe.main(["--models", "linear", "--rounds", "2", "--block-steps", "4", "--json", str(out)])
    (rows,) = tables_of(out).values()
    assert [row["model"] for row in rows] == ["linear", "(loaders alone)"]
    assert all(row["ratio"] > 0 for row in rows)


def test_startup_and_memory(tmp_path):
    workload = Workload(num_steps=3, model="linear")
    measured = startup.run_once("raytrainer", workload, tmp_path / "run")
    assert 0 < measured.first_s("rank") < measured.first_s("first_step") < measured.exit_s <= measured.gone_s
    assert measured.left_behind == []
    assert len([mark for mark in measured.marks if mark["event"] == "first_step"]) == 2
    assert memory._mean_mib([measured], "peak") > 50


def test_startup_tables(tmp_path, monkeypatch):
    runs = startup.Measured(
        exit_s=4.0,
        gone_s=5.0,
        cpu_s=6.0,
        marks=[{"event": "rank", "pid": 1, "time_s": 1.0}, {"event": "first_step", "pid": 1, "time_s": 2.0}],
        cpu_curve=[(1.0, 1.0), (3.0, 5.0)],
        memory={"1": {"peak": 2048, "pss": 1024}},
    )
    for module in (startup, memory):
        monkeypatch.setattr(module, "run_rounds", lambda names, *_: {name: [runs, runs] for name in names})
    startup.main(["--json", str(tmp_path / "startup.json")])
    medians, ratios = tables_of(tmp_path / "startup.json").values()
    assert medians[0]["CPU-s to first step"] == 3.0
    assert [(row["first step"], row["reached"]) for row in ratios] == [(1.0, False), (1.0, True)]
    memory.main(["--json", str(tmp_path / "memory.json")])
    (rows,) = tables_of(tmp_path / "memory.json").values()
    assert (rows[0]["peak a rank, MiB"], rows[0]["times hand_written"]) == (2.0, 1.0)


def test_logging_cost(tmp_path):
    out = tmp_path / "out.json"
    logging_cost.main(["--rounds", "2", "--block-steps", "3", "--step-s", "0", "--json", str(out)])
    (rows,) = tables_of(out).values()
    assert [row["logging"] for row in rows] == list(logging_cost.ARMS)
    assert all(row["loop's CPU us a step"] > 0 for row in rows)


def test_cli_startup(tmp_path):
    out = tmp_path / "out.json"
    cli_startup.main(["--rounds", "1", "--json", str(out)])
    (rows,) = tables_of(out).values()
    assert {row["loads of torch, ray"] for row in rows} == {"[]"}
