"""`raytrainer init`: a project that trains and whose own test passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import raytrainer
from raytrainer.__main__ import main
from raytrainer.new_project import create_project

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_new_projects_own_test_passes(capsys):
    assert main(["init", "my-project"]) == 0
    assert "next: cd my-project && raytrainer run config.yaml" in capsys.readouterr().out
    assert sorted(path.name for path in Path("my-project").iterdir()) == [
        "README.md", "config.yaml", "my_model.py", "test_training.py",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd="my-project", env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_name_is_the_runs_and_no_placeholder_is_left():
    create_project("deep/er/rings")
    config = raytrainer.load_config("deep/er/rings/config.yaml")
    assert config.name == "rings"
    assert not any("PROJECT_NAME" in path.read_text() for path in Path("deep/er/rings").iterdir())


def test_nothing_is_overwritten(capsys):
    Path("there").mkdir()
    Path("there/config.yaml").write_text("mine")
    assert main(["init", "there"]) == 2
    assert "there is there already" in capsys.readouterr().err
    assert [path.name for path in Path("there").iterdir()] == ["config.yaml"]
    assert Path("there/config.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["a b", "-x", "a*", ".hidden"])
def test_a_name_that_is_none(name, capsys):
    assert main(["init", "--", name]) == 2
    assert "letters, digits" in capsys.readouterr().err
    assert not any(Path().iterdir())


def test_a_disk_that_fails_leaves_nothing(monkeypatch, capsys):
    def fail(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    assert main(["init", "full"]) == 1
    assert "cannot write to full: No space left on device" in capsys.readouterr().err
    assert not Path("full").exists()
