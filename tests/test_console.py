"""Tests for what the user sees: lines, the bar, events as sentences, a reader that goes away."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrainer.console import Console, Pace, describe_event, describe_metrics, format_duration

METRICS = {
    "step": 120,
    "epoch": 3,
    "time_s": 100.0,
    "loss": 0.123456,
    "lr": 0.002,
    "samples_per_s": 1674.2,
    "data_time_pct": 2.1,
    "world_size": 2,
    "total_steps": 320,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_of(*records, **options):
    stream = io.StringIO()
    console = Console(stream=stream, **options)
    for record in records:
        console.record(record)
    console.close()
    return stream.getvalue().splitlines()


def test_a_metrics_record_is_one_line():
    assert lines_of(METRICS) == [
        "step 120/320  epoch 3  loss 0.1235  lr 0.002  1,674 samples/s  data 2%  2 workers"
    ]


def test_time_left_comes_with_the_second_record():
    later = METRICS | {"step": 140, "time_s": 110.0}
    assert lines_of(METRICS, later)[1].endswith("2 workers  1:30 left")


def test_an_evaluation_shows_its_metrics():
    record = {"step": 120, "epoch": 3, "time_s": 1.0, "eval/loss": 0.5, "eval/accuracy": 0.97}
    assert lines_of(record) == ["step 120  epoch 3  eval/loss 0.5  eval/accuracy 0.97"]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"event": "started", "step": 0, "world_size": 1}, "training starts on 1 worker"),
        ({"event": "resumed", "step": 60, "epoch": 1, "world_size": 2}, "resumed at step 60 (epoch 1)"),
        ({"event": "checkpointed", "step": 120, "checkpoint": "step_120"}, "checkpoint at step 120"),
        (
            {
                "event": "worker_failed",
                "rank": 1,
                "kind": "lost",
                "message": "killed by SIGKILL",
                "step": 60,
                "num_failures": 1,
                "max_failures": 3,
            },
            "worker 1 lost: killed by SIGKILL; starting again at step 60 (failure 1 of 3 allowed in a row)",
        ),
        (
            {"event": "worker_failed", "rank": 0, "kind": "collateral", "message": "x", "step": None},
            "worker 0 failed: x; starting again from the beginning",
        ),
        ({"event": "finished", "step": 320}, None),
        ({"event": "data_skipped", "time_s": 1.0, "num_samples": 3}, "data skipped num_samples=3"),
    ],
)
def test_events_are_sentences(record, sentence):
    assert describe_event(record) == sentence
    assert lines_of(record) == ([] if sentence is None else [sentence])


def test_output_is_passed_on_as_it_is():
    assert lines_of({"output": "[bold]my print[/bold]\nsecond", "stream": "stdout"}) == [
        "[bold]my print[/bold]",
        "second",
    ]


def test_disabled_it_still_says_what_must_be_known():
    failed = {"event": "worker_failed", "rank": 1, "message": "gone", "step": 3}
    shown = lines_of(METRICS, {"event": "checkpointed", "step": 1}, failed, {"output": "mine"}, enabled=False)
    assert shown == ["worker 1 lost: gone; starting again at step 3", "mine"]


def test_on_a_terminal_a_bar_is_drawn_and_lines_stay_above_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    stream = Terminal()
    console = Console(stream=stream)
    console.record(METRICS)
    console.record({"output": "[red]user[/red]", "stream": "stdout"})
    console.record({"event": "checkpointed", "step": 120})
    console.record(METRICS | {"step": 320, "time_s": 120.0})
    console.close()
    console.close()
    text = stream.getvalue()
    assert "step 120/320" in text
    assert "step 320/320" in text
    assert "1,674 samples/s" in text
    assert "[red]user[/red]" in text
    assert "checkpoint at step 120" in text


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    Console(stream=stream).record(METRICS)
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()


def test_the_bar_does_not_draw_every_record(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream=stream)
    for step in range(1, 200):
        console.record({"step": step, "loss": 1.0, "time_s": float(step), "total_steps": 10_000})
    console.close()
    assert stream.getvalue().count("step ") < 100


def test_a_new_start_forgets_the_old_pace():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.record(METRICS)
    console.record({"event": "resumed", "step": 60, "epoch": 1})
    console.record(METRICS | {"step": 80, "time_s": 500.0})
    assert "left" not in stream.getvalue()


def test_pace():
    pace = Pace()
    assert pace.left_s(100) is None
    pace.add(10, 0.0)
    pace.add(20, 5.0)
    assert pace.left_s(100) == 40.0
    assert pace.left_s(None) is None


@pytest.mark.parametrize(("seconds", "text"), [(35, "0:35"), (725, "12:05"), (3723, "1:02:03")])
def test_durations_read_like_a_clock(seconds, text):
    assert format_duration(seconds) == text


def test_values_that_are_no_numbers_are_left_out():
    assert describe_metrics({"step": 1, "loss": 1, "note": "x"}, None, None) == "step 1  loss 1"


def test_a_closed_stream_is_survived():
    stream = io.StringIO()
    console = Console(stream=stream)
    stream.close()
    console.record(METRICS)
    console.say("nobody hears")
    console.close()


def test_a_reader_that_went_away_does_not_end_the_program():
    code = (
        "import sys\n"
        "from raytrainer.console import Console\n"
        "console = Console()\n"
        "sys.stdin.read()\n"
        "for step in range(20000):\n"
        "    console.record({'step': step, 'loss': 1.0})\n"
        "console.close()\n"
        "assert 'rich' not in sys.modules\n"
    )
    root = str(Path(__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    )
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0
