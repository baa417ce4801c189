"""The command line: output, exit codes, and that it starts without torch and ray."""

import json
import os
import subprocess
import sys
import types

import pytest

import raytrainer
from raytrainer.__main__ import main
from raytrainer.errors import WorkerError

SMALL = """\
name: x
data: {train: {_target_: rt_cli.Data}, global_batch_size: 8}
model: {_target_: rt_cli.Net}
loss: {_target_: rt_cli.Loss}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "a.yaml").write_text(SMALL)
    return "a.yaml"


def test_a_wrong_target_is_told_with_its_line(config, tmp_path, capsys):
    (tmp_path / "rt_lines.py").write_text(
        "class Data:\n    def __len__(self): return 8\n    def __getitem__(self, i): raise IndexError\n"
        "class Net:\n    def __init__(self, width): pass\n"
    )
    text = SMALL.replace("rt_cli", "rt_lines")
    (tmp_path / "a.yaml").write_text(text.replace("rt_lines.Net}", "rt_lines.Net, widht: 3}"))
    assert main(["validate", config, "--deep"]) == 2
    assert "a.yaml:3: model.widht: rt_lines.Net takes no keyword widht" in capsys.readouterr().err
    assert main(["run", config, "--local"]) == 2
    assert "a.yaml:3: model.widht: rt_lines.Net takes no keyword widht" in capsys.readouterr().err
    assert main(["validate", config, "--deep", "model={_target_: rt_lines.Nut}"]) == 2
    assert (
        "override 'model={_target_: rt_lines.Nut}': model: _target_ rt_lines.Nut" in capsys.readouterr().err
    )


@pytest.fixture
def stub(monkeypatch):
    """Puts a module of this name in place for the command to import."""

    def stub(name: str, **attributes):
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return stub


def test_validate_prints_the_config_as_it_will_run(config, capsys):
    assert main(["validate", config, "optimizer.lr=3e-4", "scaling.num_workers=2"]) == 0
    out, err = capsys.readouterr()
    assert "lr: 0.0003" in out
    assert "micro_batch_size: 4" in out
    assert err == ""


def test_what_validate_prints_is_a_config(config, capsys, tmp_path):
    main(["validate", config])
    first = capsys.readouterr().out
    (tmp_path / "b.yaml").write_text(first)
    main(["validate", "b.yaml"])
    assert capsys.readouterr().out == first


def test_validate_deep_asks_the_preflight_with_the_folders_importable(config, capsys, stub, tmp_path):
    stub("raytrainer.preflight", deep_report=lambda loaded: f"steps of {loaded.name} {sys.path[0]}")
    assert main(["validate", config, "--deep"]) == 0
    assert capsys.readouterr().out.endswith(f"steps of x {tmp_path}\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["validate", "none.yaml"], ["error: none.yaml", "no such file", "there are: a.yaml"]),
        (["validate", "a.yaml", "sed=3"], ["error: override 'sed=3'", "did you mean seed?"]),
        (["validate", "a.yaml", "--fast"], ["No such option", "--fast"]),
        (["validate"], ["Missing argument", "CONFIG"]),
        (["trian", "a.yaml"], ["No such command", "trian"]),
        (["run", "a.yaml", "seed=-1"], ["error: override 'seed=-1'", "at least 0"]),
    ],
)
def test_a_mistake_is_a_message_on_stderr_and_exit_code_2(config, capsys, args, words):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(word in err for word in words), err
    assert "Traceback" not in err


def test_run_passes_its_options_and_returns_the_results_exit_code(config, stub):
    calls = []

    def run(loaded, **options):
        calls.append((loaded.name, loaded.seed, options))
        return types.SimpleNamespace(exit_code=143)

    stub("raytrainer.cluster.run", run=run)
    assert main(["run", config, "seed=5", "--local"]) == 143
    assert main(["run", config, "--fresh", "--verbose", "--resume-from", "runs/old"]) == 143
    assert calls == [
        ("x", 5, {"local": True, "fresh": False, "resume_from": None, "verbose": False}),
        ("x", 0, {"local": False, "fresh": True, "resume_from": "runs/old", "verbose": True}),
    ]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(WorkerError("rank 1 raised"), 1, "error: rank 1 raised\n"), (KeyboardInterrupt(), 130, "")],
)
def test_what_a_run_raises_becomes_an_exit_code(config, stub, capsys, error, code, words):
    def run(loaded, **options):
        raise error

    stub("raytrainer.cluster.run", run=run)
    assert main(["run", config]) == code
    assert capsys.readouterr().err == words


def test_a_fault_of_our_own_keeps_its_traceback(config, stub):
    def run(loaded, **options):
        raise ZeroDivisionError("ours")

    stub("raytrainer.cluster.run", run=run)
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["run", config])


def test_schema_is_json(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "raytrainer config"


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"raytrainer {raytrainer.__version__}\n"
    assert main(["--help"]) == 0
    assert "validate" in capsys.readouterr().out


def _python(code: str, *args: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(
    "args", [["--help"], ["run", "--help"], ["validate", "a.yaml"], ["schema"], ["validate", "b"]]
)
def test_starting_imports_neither_torch_nor_ray(config, args):
    code = """
import sys
from raytrainer.__main__ import main
main(sys.argv[1:])
heavy = {"torch", "ray", "numpy", "torchvision", "torchmetrics", "tensorboardX", "omegaconf", "rich"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    done = _python(code, *args)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "raytrainer", "schema"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write)
    assert process.returncode == 1
    assert process.stderr == ""


def test_an_unknown_exception_in_the_process_exits_with_1_and_a_traceback(config):
    code = """
import sys, types
module = types.ModuleType("raytrainer.cluster.run")
module.run = lambda *a, **k: 1 / 0
sys.modules["raytrainer.cluster.run"] = module
from raytrainer.__main__ import main
sys.exit(main(["run", "a.yaml"]))
"""
    done = _python(code)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.startswith("Traceback")
