"""From a pack file to its trials: each one's values, its command, and its config where it runs one.

Nothing here starts anything. What a trial draws depends on (seed, key, number) alone, so that a longer search
begins with the shorter one's trials.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raytrainer.config import Config, load_config, takes
from raytrainer.config.origin import flattened
from raytrainer.config.pack import PackFile
from raytrainer.config.reference import all_keys
from raytrainer.config.suggest import right_key
from raytrainer.errors import ConfigError, Problem, TargetError, UsageError

# Set by `pack` itself: each trial has a run directory of its own.
_OURS = ("name", "storage_path")
# Of an entry of `trials:`, not passed on to the trial.
LIMITS = ("_timeout_s", "_memory_gib", "_threads")
RUN_NAME = "run"
# Options that name where a program writes.
_WRITES_TO = re.compile(
    r"--?(out|output|save|log|logs|logging|ckpt|checkpoint|checkpoints|run|runs|model|result|results|exp|experiment)"
    r"([-_]?(dir|path|folder|root))?$",
    re.I,
)
TRIAL_DIR, TRIAL = "{trial_dir}", "{trial}"


@dataclass(frozen=True)
class Trial:
    """One process to run.

    values: what tells it from the others. command: as it is started, with {trial_dir} and {trial} still in
    place. config_yaml: the config that it runs, for a trial of a config. timeout_s, memory_gib, threads: its
    own, where they differ from the others'. loader_workers: what its config asks for. group: trials with one
    number train as one model.
    """

    index: int
    command: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict)
    config_yaml: str | None = None
    timeout_s: float | None = None
    memory_gib: float | None = None
    threads: int | None = None
    loader_workers: int | None = None
    group: int | None = None

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"trial_{self.index:03d}"

    def argv(self, trial_dir: str) -> list[str]:
        """The command in that directory of the trial's own."""
        return [part.replace(TRIAL_DIR, trial_dir).replace(TRIAL, str(self.index)) for part in self.command]


def axis(item: Any) -> list[Any]:
    """The values of one key of a grid."""
    if isinstance(item, list):
        return item
    kind, (first, last, third) = next(iter(item.items()))
    if kind == "range":
        count = math.floor((last - first) / third + 1e-9) + 1
        return [first + number * third for number in range(count)]
    count = int(third)
    if count == 1:
        return [first]
    parts = [number / (count - 1) for number in range(count)]
    if kind == "linspace":
        return [first + (last - first) * part for part in parts]
    return [first * (last / first) ** part for part in parts]


def num_values(item: Any) -> int:
    """How many values `axis` gives, without making them."""
    if isinstance(item, list):
        return len(item)
    kind, (first, last, third) = next(iter(item.items()))
    return math.floor((last - first) / third + 1e-9) + 1 if kind == "range" else int(third)


def draw(item: dict[str, Any], seed: int, key: str, number: int) -> Any:
    """The value of `key` in the trial that is the `number`-th to draw."""
    generator = random.Random(f"{seed}/{key}/{number}")
    kind, given = next(iter(item.items()))
    if kind == "choice":
        return generator.choice(given)
    if kind == "integer":
        return generator.randint(int(given[0]), int(given[1]))
    if kind == "uniform":
        return generator.uniform(*given)
    return math.exp(generator.uniform(math.log(given[0]), math.log(given[1])))


def count_trials(file: PackFile) -> int:
    if file.trials is not None:
        return len(file.trials)
    return math.prod(num_values(item) for item in file.grid.values()) * (file.num_draws or 1)


def expand(file: PackFile) -> list[dict[str, Any]]:
    """The values of each trial, in order. Raises ConfigError when there are more than `max_trials`."""
    count = count_trials(file)
    if count > file.max_trials:
        place = ("trials",) if file.trials is not None else ("grid",) if file.grid else ("num_samples",)
        raise ConfigError(
            file.problem(
                place,
                f"gives {count:,} trials, and max_trials is {file.max_trials:,}",
                f"if you mean it, write max_trials: {count}; else draw from it: samples with num_samples: 50",
            )
        )
    if file.trials is not None:
        return [dict(values) for values in file.trials]
    grid = [
        dict(zip(file.grid, values, strict=True))
        for values in itertools.product(*(axis(item) for item in file.grid.values()))
    ]
    return [
        {**values, **{key: draw(item, file.seed, key, number) for key, item in file.samples.items()}}
        for number, values in enumerate(each for _ in range(file.num_draws or 1) for each in grid)
    ]


def trials_of(file: PackFile) -> list[Trial]:
    """The file's trials, each checked as far as that goes without starting it. Raises ConfigError."""
    values = expand(file)
    limits = [_own_limits(file, number, each) for number, each in enumerate(values)]
    values = [{key: value for key, value in each.items() if key not in LIMITS} for each in values]
    if file.command is not None:
        trials = command_trials(file.command, values, process_args=file.process_args)
    else:
        trials = _config_trials(file, values)
    return [replace(trial, **each) for trial, each in zip(trials, limits, strict=True)]


def _own_limits(file: PackFile, number: int, values: dict[str, Any]) -> dict[str, Any]:
    """`_timeout_s`, `_memory_gib` and `_threads` of one trial."""
    limits = {}
    for key in LIMITS:
        if key not in values:
            continue
        value, kind = values[key], int if key == "_threads" else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            place = ("trials", number, key)
            raise ConfigError(file.problem(place, "must be a number above 0", f"write {key}: 60", value))
        limits[key[1:]] = value
    return limits


# Commands


def command_trials(
    command: Sequence[str], values: Sequence[dict[str, Any]], *, process_args: bool = False
) -> list[Trial]:
    """A trial for each mapping of values. Raises UsageError for a command that is not there, and for two that
    would write to one directory."""
    check_command(command[0])
    trials = []
    for index, each in enumerate(values):
        parts = [*command, *arguments(each)]
        if process_args:
            parts += ["--process_index", str(index), "--process_num", str(len(values))]
        trials.append(Trial(index, tuple(parts), dict(each)))
    if not process_args:
        check_outputs(trials)
    return trials


def arguments(values: dict[str, Any]) -> list[str]:
    """{lr: 0.1} as --lr 0.1; true as --flag alone, false and null as nothing, a list as several words."""
    words: list[str] = []
    for key, value in values.items():
        option = key if key.startswith("-") else f"--{key}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            each = value if isinstance(value, list) else [value]
            words += [option, *(item if isinstance(item, str) else json.dumps(item) for item in each)]
    return words


def check_command(program: str) -> None:
    """Raises UsageError when there is no such program."""
    if shutil.which(program) is not None:
        return
    what = "there is no such command"
    if os.path.exists(program):
        what = "is a folder" if os.path.isdir(program) else "may not be executed"
    fix = f"write python {program}" if program.endswith(".py") else "write the program as in a shell"
    raise UsageError(f"command {program}\n  {what}\n  {fix}; nothing was started")


def check_outputs(trials: Sequence[Trial]) -> None:
    """Raises UsageError when two trials are told to write to one place."""
    seen: dict[tuple[str, str], Trial] = {}
    for trial in trials:
        for option, value in _outputs(trial.command):
            if "://" not in value and TRIAL not in value and TRIAL_DIR not in value:
                key = (option, os.path.abspath(value))
                if key in seen:
                    raise UsageError(
                        f"{option} {value}\n"
                        f"  {seen[key].name} and {trial.name} would write to one directory\n"
                        f"  write {option} {TRIAL_DIR}, each trial's own, or {option} {value}_{TRIAL}"
                    )
                seen[key] = trial


def _outputs(command: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for number, part in enumerate(command):
        option, equals, value = part.partition("=")
        if not _WRITES_TO.match(option):
            continue
        following = command[number + 1] if number + 1 < len(command) else ""
        if equals:
            found.append((option, value))
        elif following and not following.startswith("-"):
            found.append((option, following))
    return found


# Configs


def _config_trials(file: PackFile, values: Sequence[dict[str, Any]]) -> list[Trial]:
    base = base_config(file)
    if base.script is not None:
        rule = "is a config with a script, which has no values to search"
        raise ConfigError(file.problem(("config",), rule, "write command: [python, script.py]", file.config))
    problems = _wrong_keys(file, base, {key for each in values for key in each})
    if problems:
        raise ConfigError(problems)
    trials, problems = [], []
    # The config lies elsewhere then; what it names is found beside its first place, and by the same words.
    command = (sys.executable, "-m", "raytrainer", "run", f"{TRIAL_DIR}/config.yaml", "--local")
    for index, each in enumerate(values):
        try:
            config = trial_config(base, each)
        except ConfigError as error:
            problems += [_in_file(file, problem) for problem in error.problems]
            if len(problems) > 5:
                break
            continue
        workers = config.data.loader.num_workers
        asked = workers if isinstance(workers, int) else None
        trials.append(Trial(index, command, dict(each), config.stored_yaml(), loader_workers=asked))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return trials


def base_config(file: PackFile) -> Config:
    """The config that the trials run, without their values. Raises ConfigError."""
    path = file.config if os.path.exists(file.config) else os.path.join(file.folder, file.config)
    return load_config(path)


def trial_config(base: Config, values: dict[str, Any]) -> Config:
    """The config of one trial: its values put in, and one worker. Raises ConfigError."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    if "scaling.num_workers" not in values and base.scaling.num_workers != 1:
        overrides.append("scaling.num_workers=1")
    return base.with_overrides(*overrides, f"name={RUN_NAME}", "storage_path='{trial_dir}'")


def _wrong_keys(file: PackFile, base: Config, keys: set[str]) -> list[Problem]:
    known = set(flattened(base.payload()["mapping"])) | set(all_keys())
    problems = []
    for key in sorted(keys):
        if key in _OURS:
            rule = "each trial has a run directory of its own: two must not write to one"
            problems.append(file.problem(_place(file, key), rule, "leave it out; name the search instead"))
        elif not _is_key(base, key, known):
            near = right_key(key, sorted(known))
            fix = f"did you mean {near}?" if near else "raytrainer schema lists the keys"
            rule = f"there is no such key in {file.config}"
            problems.append(file.problem(_place(file, key), rule, fix))
    return problems


def _is_key(base: Config, key: str, known: set[str]) -> bool:
    if key in known or any(each.startswith(f"{key}.") for each in known):
        return True
    # A keyword of a target that the file leaves at its default.
    mapping: Any = base.payload()["mapping"]
    *parents, last = key.split(".")
    for part in parents:
        mapping = mapping.get(part) if isinstance(mapping, dict) else None
    if mapping is None and parents == ["optimizer"]:
        mapping = base.optimizer
    if not isinstance(mapping, dict):
        return False
    if "_target_" not in mapping:
        return ".".join(parents) in ("parameters", "metrics", "ray.init", "ray.runtime_env")
    try:
        return takes(mapping, last)
    except TargetError:
        return True  # the trial will say what is wrong with it


def _place(file: PackFile, key: str) -> tuple[str | int, ...]:
    for section in ("grid", "samples"):
        if key in getattr(file, section):
            return section, key
    for number, values in enumerate(file.trials or ()):
        if key in values:
            return "trials", number, key
    return ()


def _in_file(file: PackFile, problem: Problem) -> Problem:
    """A problem of a trial's config at the place of this file that gave the value."""
    keys = {key for each in (file.grid, file.samples, *(file.trials or ())) for key in each}
    for key in sorted(keys, key=len, reverse=True):
        if f"{problem.path}.".startswith(f"{key}.") or f"{key}.".startswith(f"{problem.path}."):
            place = _place(file, key)
            return Problem(
                file.problem(place, "", None).where, problem.path, problem.rule, problem.value, problem.fix
            )
    return problem
