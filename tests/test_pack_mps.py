"""Trials on a GPU, as far as stand-ins of NVIDIA's tools show it: the card, and sharing it through MPS."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from raytrainer.__main__ import main
from raytrainer.cluster.mps import MpsDaemon
from tests.test_pack import here, status, wait_until, write

assert here  # a fixture
TOOLS = str(Path(__file__).parent / "pack_scripts" / "gpu_tools")


@pytest.fixture
def one_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Short, for the sockets' sake; and to see what is left.
    (tmp_path / "t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))


def pack_until(condition):
    """Runs t.yaml, and lets the trials end when the condition holds."""
    codes = []
    thread = threading.Thread(target=lambda: (wait_until(condition), Path("go").touch()))
    thread.start()
    codes.append(main(["pack", "t.yaml", "--local"]))
    thread.join()
    return codes[0]


def known(trial):
    path = Path(f"runs/search/trial_{trial:03d}/status.json")
    return path.exists() and "mps" in status(trial)["place"]


def test_who_is_served_by_mps_and_who_takes_turns(here, one_gpu, capsys):
    write("t.yaml", trials=[{"kind": "use_gpu", "wait": True}, {"kind": "use_gpu"}], per_gpu=2, mps=True)
    assert pack_until(lambda: known(0) and known(1)) == 0
    assert [status(trial)["place"]["mps"] for trial in (0, 1)] == [True, False]
    assert status(0)["place"]["card"] == "cuda:0"
    out = capsys.readouterr().out
    assert "MPS does not serve trial_001, it takes turns: it is none of the daemon's clients" in out
    assert "MPS does not serve trial_000" not in out
    # The daemon has gone, and its directory.
    assert list(Path("t").iterdir()) == []
    children = psutil.Process().children(recursive=True)
    assert not any("nvidia-cuda-mps-control" in " ".join(child.cmdline()) for child in children)


@pytest.mark.parametrize("broken", [True, False])
def test_without_a_daemon_the_trials_take_turns(here, one_gpu, monkeypatch, capsys, broken):
    """It cannot start, or is not installed."""
    if broken:
        monkeypatch.setenv("MPS_BROKEN", "1")
    else:
        monkeypatch.setattr("raytrainer.cluster.mps.CONTROL", "nvidia-cuda-mps-control-missing")
    write("t.yaml", trials=[{"kind": "ok"}], mps=True)
    assert main(["pack", "t.yaml", "--local"]) == 0
    out = capsys.readouterr().out
    why = (
        "does not answer: Cannot find any GPU"
        if broken
        else "there is no nvidia-cuda-mps-control-missing here"
    )
    assert why in out
    assert status(0)["state"] == "finished"


def test_mps_without_a_gpu_is_said(here, capsys):
    write("t.yaml", trials=[{"kind": "ok"}], mps=True)
    assert main(["pack", "t.yaml", "--local"]) == 0
    assert "warning: mps: there is no GPU to share on this machine" in capsys.readouterr().out


def test_a_daemon_serves_nobody_who_is_gone(one_gpu):
    daemon = MpsDaemon()
    try:
        assert daemon.environment.keys() == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        assert not daemon.serves(2**22)
    finally:
        daemon.close()
