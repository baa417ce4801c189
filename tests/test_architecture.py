"""The floors of the package: imports go down only, one package knows Ray, and nothing imports in a circle."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "raytrainer"

# A module imports from its own floor and those below it, deferred imports (inside functions) included; those
# under TYPE_CHECKING do not count. A package's name stands for all of its modules.
FLOORS = {
    0: ["raytrainer", "errors", "config"],
    1: [
        # no torch in these
        "adopt", "console", "elastic", "heap", "ledger_files", "manifest", "policy", "result", "resume",
        "rundir", "snapshots", "step_mark", "storage", "table",
        # torch, and none of the loop
        "buffers", "checkpoint", "data", "deferred", "distributed", "fingerprint", "ledger", "loggers",
        "models", "numerics", "optim", "randomness", "timing", "transfer", "tree", "tree_reduction",
    ],
    2: ["build", "evaluation", "evaluator", "finished_step", "preflight", "records", "state", "step", "task",
    "tasks", "trainer", "training_input", "tree_step", "updates", "voting"],
    3: ["audit", "export", "finished", "fused", "pack", "predict", "reports", "runs"],
    4: ["cluster"],
    5: ["__main__", "api", "cli", "commands", "launch_options", "new_project", "pack_options"],
}  # fmt: skip

# Only this package may import ray.
KNOWS_RAY = "cluster"

# What the user's own process, Ray's controller and `--help` load; each costs its import of torch otherwise.
WITHOUT_TORCH = (
    "__main__", "api", "cli", "commands", "config", "launch_options", "new_project", "runs",
    "pack", "pack_options", "cluster.pack", "cluster.pack_local",
    "cluster.run", "cluster.local", "cluster.launch", "cluster.script_rank", "cluster.ray_run",
    "cluster.ray_train",
)  # fmt: skip
# Of these, what `raytrainer --help` and `validate` load: no ray either.
WITHOUT_RAY = (
    "pack",
    "pack_options",
    "cluster.pack",
    "cluster.pack_local",
    "__main__",
    "api",
    "cli",
    "commands",
    "config",
    "new_project",
    "runs",
    "cluster.run",
    "cluster.local",
)

# Deferred imports that close a circle on purpose. A Config is made by functions that need the class, and its
# classmethods call them; mistakes are explained with the schema's own keys.
LATE = {("config.schema", "config.loading"), ("config.reference", "config.schema")}


@dataclass(frozen=True)
class Import:
    """module: within the package without "raytrainer.", else the top-level name; deferred: inside a function;
    inside: whether it is one of the package's own."""

    module: str
    line: int
    deferred: bool
    inside: bool


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name, without "raytrainer." before it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "templates":
            found[".".join(parts).removesuffix("__init__").rstrip(".") or "raytrainer"] = path
    return found


@cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(modules()[module].read_text())))


def _imports(node: ast.AST, deferred: bool = False):
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.orelse:
            yield from _imports(child, deferred)
        return
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: write the whole name of the module"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            is_module = inner.removeprefix("raytrainer.") in modules()
            yield _import(inner if is_module else node.module, node.lineno, deferred)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield _import(alias.name, node.lineno, deferred)
    deferred = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, deferred)


def _import(name: str, line: int, deferred: bool) -> Import:
    top, _, rest = name.partition(".")
    if top != "raytrainer":
        return Import(top, line, deferred, inside=False)
    return Import(rest or "raytrainer", line, deferred, inside=True)


def floor_of(module: str) -> int | None:
    floors = [floor for floor, names in FLOORS.items() if module.split(".")[0] in names]
    return floors[0] if len(floors) == 1 else None


def loaded_with(module: str) -> dict[str, str]:
    """Everything that importing `module` imports, ours and others', each with the module that asks first."""
    asked_by, waiting = {}, [(module, "")]
    while waiting:
        name, by = waiting.pop()
        if name in asked_by:
            continue
        asked_by[name] = by
        if name not in modules():
            continue
        parts = name.split(".")
        waiting += [(".".join(parts[:n]), name) for n in range(1, len(parts))]
        waiting += [(found.module, name) for found in imports(name) if not found.deferred]
    return asked_by


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One circle, as the modules on it in order, for each place from which the search comes upon one."""
    found, done = [], set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(graph[module]):
                follow(other, [*path, module])
            done.add(module)

    for module in graph:
        follow(module, [])
    return found


def test_every_module_is_on_one_floor():
    assert [module for module in modules() if floor_of(module) is None] == [], "give these a floor in FLOORS"


def test_the_table_has_no_floor_for_what_is_not_there():
    there = {module.split(".")[0] for module in modules()}
    assert [name for names in FLOORS.values() for name in names if name not in there] == []


def test_imports_go_down():
    up = [
        f"{module}:{found.line} (floor {floor_of(module)}) imports {found.module} ({floor_of(found.module)})"
        for module in modules()
        for found in imports(module)
        if found.inside and (floor_of(found.module) or 0) > (floor_of(module) or 0)
    ]
    assert up == []


def test_only_one_package_imports_ray():
    outside = [
        f"{module}:{found.line}"
        for module in modules()
        for found in imports(module)
        if found.module == "ray" and not found.inside and module.split(".")[0] != KNOWS_RAY
    ]
    assert outside == []


def test_no_import_goes_in_a_circle():
    graph = {
        module: {found.module for found in imports(module) if found.inside} - {module, "raytrainer"}
        for module in modules()
    }
    assert all(after in graph[before] for before, after in LATE), "LATE has an import that is gone"
    deferred = {(m, found.module) for m in modules() for found in imports(m) if found.deferred}
    assert deferred >= LATE
    for before, after in LATE:
        graph[before].discard(after)
    assert [" -> ".join(circle) for circle in circles(graph)] == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [(m, "torch") for m in WITHOUT_TORCH] + [(m, "ray") for m in WITHOUT_RAY],
)
def test_light_modules_load_nothing_heavy(module, heavy):
    asked_by = loaded_with(module)
    way, name = [], heavy if heavy in asked_by else ""
    while name:
        way.append(name)
        name = asked_by[name]
    assert way == [], f"importing {module} imports {heavy}, by way of {way[1:]}"


def test_the_search_itself_finds_what_it_looks_for():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    source = "import ray.train\ndef f():\n    from raytrainer.config import loading\n"
    assert list(_imports(ast.parse(source))) == [
        Import("ray", 1, False, False),
        Import("config.loading", 3, True, True),
    ]
    assert list(_imports(ast.parse("if TYPE_CHECKING:\n    import torch\n"))) == []
    assert "torch" in loaded_with("trainer")
