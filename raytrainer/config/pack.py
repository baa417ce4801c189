"""A file of trials: what each runs, which values differ, and how they share the cards. Read by `pack`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, PrivateAttr, ValidationError

from raytrainer.config.interpolation import resolve
from raytrainer.config.overrides import apply_overrides
from raytrainer.config.placing import Places
from raytrainer.config.positions import read_yaml
from raytrainer.config.problems import problem, problems_of
from raytrainer.config.schema import check_name
from raytrainer.config.search import SearchSection
from raytrainer.config.section import Broken, OptionalText, RulesBroken, Section, Text
from raytrainer.errors import ConfigError, Problem

# How a sampled value is described, and how many numbers that takes.
DRAWS = {"uniform": 2, "log_uniform": 2, "integer": 2, "choice": None}
# How a range of a grid is described: from, to, and the step or how many.
RANGES = ("range", "linspace", "logspace")


def _check_grid(value: Any) -> Any:
    """By key: a list of values, or {range|linspace|logspace: [from, to, step or count]}."""
    if not isinstance(value, dict):
        raise RulesBroken([Broken((), "must be a mapping of keys to lists of values", "write {lr: [1e-3]}")])
    broken = [Broken((key,), *problem) for key, item in value.items() if (problem := _wrong_axis(item))]
    if broken:
        raise RulesBroken(broken)
    return value


def _wrong_axis(item: Any) -> tuple[str, str] | None:
    if isinstance(item, list):
        return None if item else ("is an empty list: no trial at all", "give it at least one value")
    example = "write a list, [1e-3, 3e-4], or {linspace: [0.1, 0.5, 5]}"
    if not isinstance(item, dict) or len(item) != 1 or next(iter(item)) not in RANGES:
        return f"must be a list, or have one of {', '.join(RANGES)}", example
    kind, numbers = next(iter(item.items()))
    if not _are_numbers(numbers) or len(numbers) != 3:
        return f"{kind} takes three numbers", example
    first, last, third = numbers
    if kind == "range":
        ok = third != 0 and (last - first) * third >= 0
        return None if ok else ("the step does not lead from the first to the last", example)
    if third != int(third) or third < 1:
        return f"the third number of {kind} is how many values", example
    if kind == "logspace" and min(first, last) <= 0:
        return "logspace is between numbers above 0", "write {logspace: [1e-4, 1e-1, 4]}"
    return None


def _check_samples(value: Any) -> Any:
    """By key: {uniform|log_uniform|integer: [a, b]} or {choice: [...]}."""
    if not isinstance(value, dict):
        raise RulesBroken([Broken((), "must be a mapping of keys to what is drawn", "write {lr: {...}}")])
    broken = [Broken((key,), *problem) for key, item in value.items() if (problem := _wrong_draw(item))]
    if broken:
        raise RulesBroken(broken)
    return value


def _wrong_draw(item: Any) -> tuple[str, str] | None:
    example = "write {log_uniform: [1e-4, 1e-1]} or {choice: [relu, gelu]}"
    if not isinstance(item, dict) or len(item) != 1 or next(iter(item)) not in DRAWS:
        return f"must have one of {', '.join(DRAWS)}", example
    kind, given = next(iter(item.items()))
    if kind == "choice":
        return None if isinstance(given, list) and given else ("choice takes a list of values", example)
    if not _are_numbers(given) or len(given) != 2 or given[0] > given[1]:
        return f"{kind} takes two numbers, the smaller first", example
    if kind == "log_uniform" and given[0] <= 0:
        return "log_uniform is between numbers above 0", "write {log_uniform: [1e-4, 1e-1]}"
    if kind == "integer" and any(number != int(number) for number in given):
        return "integer is between whole numbers", "write {integer: [1, 8]}"
    return None


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in value
    )


def _check_per_gpu(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        shown = "a share of a card is 1 over the number of its trials" if isinstance(value, float) else None
        rule = "must be auto or a whole number of trials for each card, 1 or more"
        raise RulesBroken([Broken((), rule, shown or "write 3 for three trials on a card")])
    return value


class PackFile(Section):
    """Trials and how they share the cards."""

    name: Annotated[Text, AfterValidator(check_name)] = Field(
        description="Name of the search; its directory is `<storage_path>/<name>`."
    )
    storage_path: Text = Field("runs", description="The folder in which that directory is made.")
    config: OptionalText = Field(
        None, description="A raytrainer config that each trial runs, with its values in place of the file's."
    )
    command: list[Text] | None = Field(
        None, description="A command that each trial runs, its values added as `--key value`."
    )
    trials: list[dict[str, Any]] | None = Field(None, description="The values of each trial, one by one.")
    grid: Annotated[dict[str, Any], PlainValidator(_check_grid)] = Field(
        {}, description="Values by key; every combination is a trial."
    )
    samples: Annotated[dict[str, Any], PlainValidator(_check_samples)] = Field(
        {}, description="What is drawn by key, for each of `num_samples` trials."
    )
    num_samples: int | None = Field(None, ge=1, description="How many trials draw from `samples`.")
    seed: int = Field(0, ge=0, description="Seed of `samples`.")
    max_trials: int = Field(1000, ge=1, description="More trials than this are refused.")
    mode: Literal["processes", "fused"] = Field(
        "processes",
        description="processes: one for each trial. fused: trials that differ in seed and optimizer numbers "
        "alone train as one model, in one process; what cannot be fused is said and runs as processes.",
    )
    per_gpu: Annotated[Any, PlainValidator(_check_per_gpu)] = Field(
        None,
        description="Trials on a card at once. null: one on a GPU, one a core on a CPU. auto: measured, by "
        "raising it while that makes all together 10% faster.",
    )
    gpu_share: float | None = Field(
        None, gt=0, le=1, description="A trial's share of a card, in place of per_gpu: 0.25 is four on each."
    )
    strategy: Literal["packed", "spread"] = Field(
        "packed", description="packed: fill a card before the next; spread: the emptiest card first."
    )
    gpus: Literal["auto", 0] = Field("auto", description="0: the trials use no GPU, and see none.")
    mps: bool = Field(
        False,
        description="Trials share a card through NVIDIA's MPS, at the same time instead of in turns. A fault "
        "of one on the GPU (not its exception, nor its end) then ends all on that card.",
    )
    avoid_gpu_nodes: bool = Field(False, description="Trials without a GPU stay off nodes that have some.")
    memory_gib: float | None = Field(
        None, gt=0, description="A trial's cap: on a GPU its tensors, on a CPU all of its processes."
    )
    threads: int | None = Field(None, ge=1, description="Threads of a trial; null: its share of the cores.")
    shm_gib: float | None = Field(None, ge=0, description="What a trial's loader needs of /dev/shm.")
    timeout_s: float | None = Field(None, gt=0, description="Seconds after which a trial counts as hung.")
    retries: int = Field(
        1, ge=0, description="New starts of a trial that ran out of memory, or whose node was lost."
    )
    probe_s: float = Field(10.0, gt=0, description="per_gpu: auto: seconds for which each count is measured.")
    stagger_s: float = Field(0.1, ge=0, description="Seconds between two starts on one card.")
    log_mib: float = Field(16.0, gt=0, description="Size of a trial's log; its middle is left out beyond.")
    env: dict[str, Text] = Field({}, description="Environment variables of the trials.")
    process_args: bool = Field(False, description="Add --process_index I --process_num N to the command.")
    metric: OptionalText = Field(None, description="What the results are sorted by, such as eval/accuracy.")
    metric_mode: Literal["min", "max"] | None = Field(
        None, description="Whether less or more of it is better; null: max, but min for a loss or an error."
    )
    search: SearchSection | None = Field(None, description="Ends trials early; null: all run to their end.")

    _places: Places = PrivateAttr(default_factory=lambda: Places())

    def broken_rules(self) -> Iterator[Broken]:
        if (self.config is None) == (self.command is None):
            yield Broken((), "must have one of config and command", "write config: mnist.yaml")
        if self.command is not None and not self.command:
            yield Broken(("command",), "must not be empty", "write command: [python, train.py]")
        if self.trials is not None and (self.grid or self.samples):
            yield Broken(("trials",), "stands in place of grid and samples", "keep one of them")
        if self.trials is not None and not self.trials:
            yield Broken(("trials",), "is an empty list: no trial at all", "give it at least one trial")
        if self.trials is None and not self.grid and not self.samples:
            yield Broken((), "has no trials", "write grid: {optimizer.lr: [1e-3, 3e-4]}")
        if self.samples and self.num_draws is None:
            yield Broken(("samples",), "needs num_samples", "write num_samples: 20")
        if self.num_samples is not None and not self.samples:
            yield Broken(("num_samples",), "says how often samples are drawn, and there are none", None)
        for key in sorted(set(self.grid) & set(self.samples)):
            yield Broken(("samples", key), "is in the grid too", "keep one of them")
        if self.gpu_share is not None and isinstance(self.per_gpu, int) and self.per_gpu * self.gpu_share > 1:
            total = self.per_gpu * self.gpu_share
            rule = f"{self.per_gpu} trials of {self.gpu_share:g} are {total:g} cards, and there is one"
            yield Broken(("gpu_share",), rule, "write one of per_gpu and gpu_share")
        if self.process_args and self.config is not None:
            yield Broken(("process_args",), "is for a command", "leave it out")
        if self.mode == "fused" and self.config is None:
            yield Broken(("mode",), "a command cannot be fused", "write config: in place of command:")
        yield from self._broken_search()

    def _broken_search(self) -> Iterator[Broken]:
        search = self.search
        if search is None:
            return
        pairs = {"metric": "metric", "mode": "metric_mode", "num_samples": "num_samples"}
        for name, outer in pairs.items():
            inner = getattr(search, name)
            if inner is not None and getattr(self, outer) not in (None, inner):
                yield Broken(("search", name), f"differs from {outer} of the file", "keep one of them")
        if search.num_samples is not None and self.num_samples is None and not self.samples:
            yield Broken(
                ("search", "num_samples"), "says how often samples are drawn, and there are none", None
            )
        if search.scheduler != "none" and self.judged_by is None:
            rule = "trials are ended early by a metric, and none is named"
            yield Broken(("search",), rule, "write search: {metric: eval/accuracy}")

    @property
    def judged_by(self) -> str | None:
        """The metric of the search, and of the results."""
        return (self.search and self.search.metric) or self.metric

    @property
    def judged_mode(self) -> str | None:
        return (self.search and self.search.mode) or self.metric_mode

    @property
    def num_draws(self) -> int | None:
        """How many trials draw from `samples`."""
        return (self.search and self.search.num_samples) or self.num_samples

    def problem(self, path: tuple[str | int, ...], rule: str, fix: str | None, value: Any = None) -> Problem:
        """A mistake at a place of this file, with its line. value: shown when it is text or a number."""
        shown = str(value) if isinstance(value, str | int | float) and value is not None else None
        return Problem(self._places.of(path), ".".join(map(str, path)), rule, shown, fix)

    @property
    def folder(self) -> str:
        """Where the file is; the working directory for trials from options."""
        return os.path.dirname(os.path.abspath(self._places.source_path or "x"))


def load_pack_file(path: str | os.PathLike, overrides: Iterable[str] = ()) -> PackFile:
    """The file at `path` with `key=value` overrides. Raises ConfigError with every mistake found."""
    mapping, lines = read_yaml(Path(path))
    return pack_file(mapping, overrides, os.fspath(path), lines)


def pack_file(
    mapping: dict[str, Any],
    overrides: Iterable[str] = (),
    source_path: str | None = None,
    lines: dict | None = None,
) -> PackFile:
    """A pack file from nested dicts. Raises ConfigError."""
    given, texts, problems = apply_overrides(mapping, list(overrides), {})
    places = Places(source_path, lines or {}, texts)
    resolved = resolve(given)
    problems += [problem(broken, given, places) for broken in resolved.broken]
    try:
        loaded = PackFile.model_validate(resolved.values)
    except ValidationError as error:
        skip = {broken.path for broken in resolved.broken}
        problems += problems_of(error, given, places, skip, tuple(PackFile.model_fields))
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    loaded._places = places
    return loaded
