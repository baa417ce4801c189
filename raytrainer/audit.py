"""`raytrainer audit`: whether a run's ledger shows each sample exactly once in every finished epoch.

`judge` is a pure function of the ledger's lines; torch is loaded only for an order of the user's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raytrainer.config.data import ceil_div
from raytrainer.errors import UsageError
from raytrainer.ledger_files import LEDGER_FOLDER, LedgerLine, read_ledger
from raytrainer.manifest import list_checkpoints
from raytrainer.resume import DATA_LENGTH
from raytrainer.rundir import EVENTS_FILE, read_result
from raytrainer.runs import records_of
from raytrainer.storage import open_storage, read_lines

if TYPE_CHECKING:
    from raytrainer.config import Config

_SHOWN = 5


@dataclass(frozen=True)
class Epoch:
    """What the ledger says of one epoch.

    finished: its last step is committed; num_samples: that went into its steps; missing, repeated: sample
    indices that came less, or more, often than the order says; skipped: that could not be read and were left
    out.
    """

    number: int
    finished: bool
    num_samples: int
    missing: tuple[int, ...]
    repeated: tuple[int, ...]
    skipped: tuple[int, ...]

    @property
    def exact(self) -> bool:
        return not self.missing and not self.repeated


@dataclass(frozen=True)
class Audit:
    """epochs: those that the ledger covers from their start; problems: sentences, none when all is exact."""

    epochs: tuple[Epoch, ...]
    num_steps: int
    num_attempts: int
    num_lost_lines: int
    problems: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [_describe(epoch) for epoch in self.epochs]
        finished = sum(epoch.finished for epoch in self.epochs)
        lines += [
            f"{self.num_steps} committed steps, {finished} finished {_plural(finished, 'epoch')}, "
            f"{self.num_attempts} {_plural(self.num_attempts, 'attempt')}, "
            f"{self.num_lost_lines} microbatches of lost attempts counted",
            *self.problems,
            "exact: each sample exactly once in every finished epoch" if self.exact else "NOT EXACT",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Expected:
    """orders: epoch -> how often each sample is to come; steps are counted from 1.

    num_microbatches: of a step, and of an epoch's last one.
    first_step: the first that the ledger must hold; last_step: the last committed one; begun_at: the step
    from which each attempt of this run went on, in order.
    """

    steps_per_epoch: int
    num_microbatches: tuple[int, int]
    first_step: int
    last_step: int
    begun_at: Sequence[int]
    orders: dict[int, Counter[int]]


def judge(lines: Iterable[LedgerLine], expected: Expected) -> Audit:
    """Compares what was consumed with what was to be."""
    by_step: dict[int, list[LedgerLine]] = {}
    for line in lines:
        by_step.setdefault(line.step, []).append(line)
    problems = []
    absent = [s for s in range(expected.first_step, expected.last_step + 1) if s not in by_step]
    if absent:
        problems.append(f"steps that the ledger lacks: {_some(absent)}")
    torn = [s for s, of_step in by_step.items() if not _is_whole(s, of_step, expected)]
    if torn:
        problems.append(f"steps with a microbatch missing, double or of two attempts: {_some(sorted(torn))}")
    lost = [line for of_step in by_step.values() for line in of_step if _is_lost(line, expected)]
    if lost:
        problems.append(
            f"steps counted though their attempt was lost: {_some(sorted({x.step for x in lost}))}"
        )
    epochs = []
    for number, order in expected.orders.items():
        first = number * expected.steps_per_epoch + 1
        if first < expected.first_step:
            continue
        epochs.append(_judge_epoch(number, first, by_step, expected, order))
    problems += [f"epoch {e.number} is not exact" for e in epochs if e.finished and not e.exact]
    attempts = {line.attempt for of_step in by_step.values() for line in of_step}
    return Audit(tuple(epochs), len(by_step), len(attempts), len(lost), tuple(problems))


def _judge_epoch(
    number: int,
    first: int,
    by_step: dict[int, list[LedgerLine]],
    expected: Expected,
    order: Counter[int],
) -> Epoch:
    steps = range(first, first + expected.steps_per_epoch)
    lines = [line for step in steps for line in by_step.get(step, ())]
    seen = Counter(index for line in lines for index in line.indices)
    skipped = Counter(index for line in lines for index in line.skipped)
    finished = steps[-1] <= expected.last_step
    missing = order - seen - skipped if finished else Counter()
    repeated = seen + skipped - order
    return Epoch(
        number,
        finished,
        seen.total(),
        tuple(sorted(missing)),
        tuple(sorted(repeated)),
        tuple(sorted(skipped)),
    )


def _is_whole(step: int, lines: Sequence[LedgerLine], expected: Expected) -> bool:
    full, last = expected.num_microbatches
    num_microbatches = last if step % expected.steps_per_epoch == 0 else full
    numbers = sorted(line.microbatch for line in lines)
    return numbers == list(range(num_microbatches)) and len({line.attempt for line in lines}) == 1


def _is_lost(line: LedgerLine, expected: Expected) -> bool:
    """Whether a later attempt went on from before this line's step, which was thus thrown away."""
    if line.step < expected.first_step:
        return False
    return any(step < line.step for step in expected.begun_at[line.attempt + 1 :])


def audit_run(run_dir: str) -> Audit:
    """Reads and judges the ledger of a run directory. Raises UsageError where it has none."""
    from raytrainer.finished import load_run_config

    storage = open_storage(run_dir)
    infos, result = list_checkpoints(storage), read_result(run_dir)
    if not storage.list(LEDGER_FOLDER) or not infos:
        raise UsageError(
            f"{run_dir} has no ledger{'' if infos else ' and no checkpoint'}\n"
            "  write logging.ledger: true into the config before the run"
        )
    last_step = max(infos[-1].step, result.steps if result and result.status == "finished" else 0)
    events = records_of(read_lines(storage, EVENTS_FILE))
    begun_at = [event["step"] for event in events if event.get("event") in ("started", "resumed")]
    branch = next((event["step"] for event in events if event.get("event") == "branched"), 0)
    damage: list[str] = []
    lines = list(read_ledger(storage, last_step, damage.append))
    first_step = branch + 1 if branch and all(line.step > branch for line in lines) else 1
    config = load_run_config(run_dir)
    num_samples = infos[-1].meaning[DATA_LENGTH]
    if branch and first_step == 1:
        # The source run's ledger came with the checkpoint; its attempts were counted there.
        lines_before = [line for line in lines if line.step <= branch]
        lines = [line for line in lines if line.step > branch]
        lines += [LedgerLine(**{**vars(line), "attempt": 0}) for line in lines_before]
        begun_at = [max(step, branch) for step in begun_at]
    found = judge(lines, _expected(config, num_samples, first_step, last_step, begun_at))
    return replace(found, problems=(*damage, *found.problems))


def _expected(
    config: Config, num_samples: int, first_step: int, last_step: int, begun_at: list[int]
) -> Expected:
    order, length = _order_of(config, num_samples)
    steps_per_epoch = config.data.steps_per_epoch(length)
    num_epochs = -(-last_step // steps_per_epoch)
    taken = min(length, steps_per_epoch * config.data.global_batch_size)
    last_size = taken - (steps_per_epoch - 1) * config.data.global_batch_size
    return Expected(
        steps_per_epoch,
        (config.num_microbatches, ceil_div(last_size, config.data.micro_batch_size)),
        first_step,
        last_step,
        begun_at,
        {epoch: Counter(order(epoch)[:taken]) for epoch in range(num_epochs)},
    )


def _order_of(config: Config, num_samples: int) -> tuple[Any, int]:
    """(epoch -> its indices in order, their number)."""
    if config.data.order is None and not config.data.drop_last:
        return lambda epoch: list(range(num_samples)), num_samples
    from raytrainer.build import build_data
    from raytrainer.data.order import epoch_order, validated_order

    if config.data.order is None:
        return lambda epoch: epoch_order(
            config.seed, epoch, num_samples, config.data.shuffle
        ).tolist(), num_samples
    custom = build_data(config).order

    def order(epoch: int) -> list[int]:
        return validated_order(custom, config.seed, epoch, num_samples).tolist()

    return order, len(order(0))


def _describe(epoch: Epoch) -> str:
    text = f"epoch {epoch.number}: {epoch.num_samples} samples"
    if epoch.skipped:
        text += f", {len(epoch.skipped)} unreadable and left out"
    if not epoch.finished:
        return f"{text} so far, not finished"
    if epoch.exact:
        return f"{text}, each as often as the order says"
    parts = [
        f"{len(found)} {word} ({_some(found)})"
        for word, found in (("missing", epoch.missing), ("repeated", epoch.repeated))
        if found
    ]
    return f"{text}: {', '.join(parts)}"


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return ", ".join(str(number) for number in numbers[:_SHOWN]) + more


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
