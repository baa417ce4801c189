"""`per_gpu: auto`: the policy on known curves, and real processes that slow each other down."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrainer.__main__ import main
from raytrainer.pack.auto import (
    GAIN,
    Probe,
    Report,
    best_count,
    evidence,
    fills_the_card,
    next_count,
    rate_of,
)

CONTEND = str(Path(__file__).parent / "pack_scripts" / "contend.py")


def probe_all(curve, most=None, fits=100):
    """The probes that the policy asks for where `curve` has the rates by count."""
    probes = []
    while (count := next_count(probes, most or len(curve))) is not None:
        rate = curve[count - 1] if count <= fits else None
        probes.append(Probe(count, rate, 1.0, "" if rate else "out of memory"))
    return probes


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12))
def test_auto_finds_the_exact_best_of_any_curve(curve):
    """By its rule: the first count whose successor does not bring 10%; one probe more than that."""
    expected = next(
        (n for n in range(1, len(curve)) if curve[n] < GAIN * curve[n - 1] * (1 - 1e-9)), len(curve)
    )
    probes = probe_all(curve)
    assert best_count(probes) == expected
    assert len(probes) == min(expected + 1, len(curve))
    assert fills_the_card(probes) == (expected == 1 and len(curve) > 1)


def test_auto_stops_where_no_more_fit_or_none_are_left():
    assert best_count(probe_all([1, 2, 3, 4, 5], fits=3)) == 3
    assert best_count(probe_all([1, 2, 3, 4, 5], most=2)) == 2
    assert not fills_the_card(probe_all([1, 2], most=1))
    alone = probe_all([1, 2, 3], fits=1)
    assert fills_the_card(alone)
    assert "out of memory" in evidence(alone)
    assert evidence(probe_all([2, 4, 4.1])).splitlines()[-1].split() == ["3", "4.1", "+2%", "1.00", "GiB"]


def test_a_rate_needs_enough_of_every_trial():
    def steps(*times_s):
        return [Report(time_s, 10.0 * time_s) for time_s in times_s]

    assert rate_of({}, 1.0) is None
    assert rate_of({0: steps(1, 2.5), 1: []}, 1.0) is None
    assert rate_of({0: steps(1, 2.5), 1: steps(3, 3.5)}, 1.0) is None
    assert rate_of({0: steps(1, 2.5), 1: steps(3, 4)}, 1.0) == pytest.approx(20.0)
    assert rate_of({0: [Report(1, 5), Report(3, 5)]}, 1.0) is None


def pack(tmp_path, monkeypatch, curve, **keys):
    monkeypatch.chdir(tmp_path)
    Path("peers").mkdir()
    command = [sys.executable, CONTEND, "--curve", curve, "--peers", "peers"]
    content = {"name": "s", "command": command, "per_gpu": "auto", "probe_s": 0.6, "stagger_s": 0}
    Path("t.yaml").write_text(json.dumps({**content, "grid": {"steps": [25] * 6}, **keys}))
    return main(["pack", "t.yaml", "--local"])


def test_auto_packs_as_many_as_pay(tmp_path, monkeypatch, capsys):
    """Rates of 20, 40, 54 and 55 steps a second: three on the card."""
    steps = {"steps": [600] * 4}
    assert pack(tmp_path, monkeypatch, "1,1,1.111,1.4545,9,9", grid=steps) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:3] for line in out.splitlines() if line[:1].isdigit()]
    assert rows[:4] == [["1", "20", "0.01"], ["2", "40", "+100%"], ["3", "54", "+35%"], ["4", "55", "+2%"]]
    assert "per_gpu: auto: 3 on each card" in out
    assert "4 trials, 3 at once on 1 card" in out
    states = [json.loads(Path(f"runs/s/trial_{n:03d}/status.json").read_text()) for n in range(4)]
    assert [each["state"] for each in states] == ["finished"] * 4
    # Each ran once, from its first step on; nothing is left of the measuring.
    assert [len(each["attempts"]) for each in states] == [1] * 4
    assert [each["step"] for each in states] == [600] * 4
    assert not Path("runs/s/auto").exists()
    assert json.loads(Path("runs/s/pack.json").read_text())["settings"]["per_gpu"] == 3


def test_auto_refuses_trials_that_fill_the_card(tmp_path, monkeypatch, capsys):
    assert pack(tmp_path, monkeypatch, "1,2,3,4,5,6", grid={"steps": [1000] * 3}) == 2
    said = capsys.readouterr()
    assert "TRIALS ON A CARD" in said.out
    assert "one trial fills the card already" in said.err
    assert "write per_gpu: 1" in said.err


def test_auto_says_why_it_cannot_measure(tmp_path, monkeypatch, capsys):
    assert pack(tmp_path, monkeypatch, "1,1,1,1,1,1", grid={"steps": [2] * 3}) == 2
    assert "trial_000 was over before its rate could be measured for 0.6 s" in capsys.readouterr().err
    Path("peers").rename("elsewhere")
    assert main(["pack", "t.yaml", "--local", "--name", "t"]) == 1
    said = capsys.readouterr().err
    assert "trial_000 failed while it was measured: FileNotFoundError" in said
    assert Path("runs/t/auto/1/trial_000/stdout.log").exists()


def test_a_dry_run_says_that_auto_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, CONTEND]
    Path("t.yaml").write_text(
        json.dumps({"name": "s", "command": command, "per_gpu": "auto", "grid": {"steps": [1]}})
    )
    assert main(["pack", "t.yaml", "--local", "--dry-run"]) == 0
    assert "per_gpu: auto is measured at the start" in capsys.readouterr().out
