"""What README.md and the READMEs beside configs and examples say is so: YAML, Python, commands, links."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import raytrainer
from raytrainer import Trainer, load_config
from raytrainer.cli import app
from raytrainer.config import Config, callable_from, reference_markdown
from raytrainer.config.positions import parse_value
from raytrainer.config.reference import all_keys
from raytrainer.preflight import deep_report

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = {
    name: (ROOT / name).read_text() for name in ("README.md", "configs/README.md", "examples/README.md")
}
COMMANDS = typer.main.get_command(app).commands
BASE = "configs/mnist.yaml"  # what a YAML block that is no whole config is merged into


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def file_name(block: str) -> str | None:
    """`my_model.py` where the block begins with `# my_model.py`."""
    found = re.match(r"# ([\w.]+)\n", block)
    return found[1] if found else None


def merged(base: Any, change: Any) -> Any:
    """Sections key by key; targets, what says how often, and everything else are replaced."""
    if not isinstance(base, dict) or not isinstance(change, dict) or not change or "_target_" in change:
        return change
    keys = {key: value if key == "every" else merged(base.get(key), value) for key, value in change.items()}
    return {**base, **keys}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the files that the blocks show and the repository's configs, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    names = [(file_name(block), block) for block in (*blocks("python"), *blocks("yaml"))]
    shown = {name: block for name, block in names if name}
    for name, block in shown.items():
        (tmp_path / name).write_text(block)
    yield tmp_path
    for name in shown:
        sys.modules.pop(name.removesuffix(".py"), None)


def configs() -> list[Config]:
    base = load_config(ROOT / BASE).payload()["mapping"]
    mappings = [parse_value(block) for block in blocks("yaml")]
    return [Config.from_mapping(m if "name" in m else merged(base, m)) for m in mappings]


def test_the_two_commands_stand_alone_on_their_lines():
    lines = README.splitlines()
    assert "pip install . && raytrainer run configs/mnist.yaml" in lines
    assert "pip install '.[test]' && pytest" in lines


def test_every_yaml_block_is_valid_and_passes_validate_deep(project):
    found = configs()
    assert len(found) >= 5
    for config in found:
        deep_report(config)
        callable_from(config.data.collate_fn)


def test_every_python_block_compiles_and_is_formatted():
    found = blocks("python")
    assert len(found) >= 5
    for block in found:
        compile(block, "README.md", "exec")
        assert max(map(len, block.splitlines())) <= 110


def test_a_model_of_your_own_takes_twenty_lines_and_trains(project):
    [code] = [block for block in blocks("python") if file_name(block) == "my_model.py"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    config = load_config("config.yaml", ["training.max_steps=60", "scaling.num_workers=1"])
    result = Trainer(config).train()
    assert result.metrics["eval/accuracy"] > 0.5
    assert result.run_dir == str(project / "runs" / "rings")


def test_a_task_of_your_own_trains(project):
    [config] = [config for config in configs() if config.task is not None]
    result = Trainer(config.with_overrides("training.max_steps=8", "scaling.num_workers=1")).train()
    assert 0 < result.metrics["eval/loss"] < 2


def test_what_is_shown_of_python_runs(project, monkeypatch, capsys):
    """In this process and for two steps: what the workers do has tests of its own."""

    def run(config, **options):
        return Trainer(config.with_overrides("training.max_steps=2")).train()

    monkeypatch.setattr(importlib.import_module("raytrainer.cluster.run"), "run", run)
    shown = [block for block in blocks("python") if "raytrainer" in block and not file_name(block)]
    assert len(shown) == 2
    for index, block in enumerate(shown):
        names: dict[str, Any] = {}
        code = block.replace("max_steps=20", f'max_steps=2", "name=block_{index}')
        exec(compile(code, "README.md", "exec"), names)
        assert names["result"].steps == 2
    assert "finished" in capsys.readouterr().out


def test_what_is_shown_of_an_export_loads_it(project):
    from raytrainer.export import export_model
    from raytrainer.finished import open_run

    Trainer(load_config(BASE, ["training.max_steps=1", "scaling.num_workers=1"])).train()
    export_model(open_run("runs/mnist", checkpoint="last", device=torch.device("cpu")), "out")
    [code] = [block for block in blocks("python") if "torch.export" in block]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["logits"].shape == (1, 10)


def commands() -> list[str]:
    """Every `raytrainer ...` in a shell block, or in backticks in the text."""
    found = []
    for text in DOCUMENTS.values():
        lines = [line.partition(" #")[0] for block in blocks("sh", text) for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
        for line in lines:
            for part in re.split(r"&&|\||>", line):
                if part.strip().startswith("raytrainer "):
                    found.append(part.strip())
    return found


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_command_is_there_with_these_options(command):
    name, *rest = shlex.split(command)[1:]
    assert name in COMMANDS
    rest = rest[: rest.index("--")] if "--" in rest else rest  # behind it is a command of the user's
    parameters = COMMANDS[name].params
    options = {option: parameter for parameter in parameters for option in parameter.opts}
    given, words = [], iter(rest)
    for word in words:
        if not word.startswith("-"):
            given.append(word)
            continue
        assert word in options, f"raytrainer {name} has no {word}"
        if not options[word].is_flag:
            next(words)
    required = [p for p in parameters if p.param_type_name == "argument" and p.required]
    assert len(given) >= len(required) or not rest  # `raytrainer validate` alone is a mention of it
    for word in given:
        if "=" in word:
            key = word.partition("=")[0]
            assert key in all_keys() or key.split(".")[0] in ("optimizer", "data", "model"), word
        elif word.endswith(".yaml") and "/" in word:
            assert (ROOT / word).is_file()


def test_every_command_is_named():
    assert set(COMMANDS) == {shlex.split(command)[1] for command in commands()}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[document])
    assert links
    for link in links:
        if "://" not in link:
            assert ((ROOT / document).parent / link.partition("#")[0]).exists(), link


def test_keys_in_the_text_are_keys():
    """`data.loader.num_workers` and the like, with or without a value behind them."""
    sections = {key.split(".")[0] for key in all_keys() if "." in key}
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", README):
        if key.split(".")[0] in sections and not key.endswith((".yaml", ".json", ".py")):
            assert key in all_keys(), key


def test_the_symptoms_are_what_the_messages_say():
    source = "".join(path.read_text() for path in sorted((ROOT / "raytrainer").rglob("*.py")))
    table = README.partition("## Troubleshooting")[2].partition("\n## ")[0]
    symptoms = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(symptoms) >= 10
    for symptom in symptoms:
        words = [part.strip() for part in re.split(r"\.\.\.|\b\d+\b", symptom) if len(part.strip()) > 3]
        assert words
        for part in words:
            assert part in source, f"{symptom!r}: no message says {part!r}"


def test_the_result_has_the_fields_that_are_listed():
    listed = re.search(r"^`result.json`: (.*?)There is none", README, re.DOTALL | re.MULTILINE)[1]
    fields = set(raytrainer.Result.__dataclass_fields__) - {"target", "run_dir"}
    assert fields == set(re.findall(r"`(\w+)`", listed))


def test_the_reference_of_the_configs_is_current():
    """All of it after the sentence that says so."""
    head, mark, reference = DOCUMENTS["configs/README.md"].partition("made from the schema.\n\n")
    assert mark
    assert reference == reference_markdown(), (
        'renew it: python -c "from pathlib import Path; from raytrainer.config import reference_markdown; '
        "p = Path('configs/README.md'); m = 'made from the schema.\\n\\n'; "
        'p.write_text(p.read_text().partition(m)[0] + m + reference_markdown())"'
    )
    listed = set(re.findall(r"^\| \[(\w+\.yaml)\]", head, re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "configs").glob("*.yaml")}


def test_every_example_is_listed():
    for path in (ROOT / "examples").iterdir():
        if path.name not in ("README.md", "__pycache__"):
            assert f"[{path.name}]" in DOCUMENTS["examples/README.md"], path.name
    for path in (ROOT / "examples").glob("*/*.yaml"):
        name = path.relative_to(ROOT)
        commands_of_it = (f"raytrainer run {name}`", f"raytrainer pack {name}`")
        assert any(command in DOCUMENTS["examples/README.md"] for command in commands_of_it), name
