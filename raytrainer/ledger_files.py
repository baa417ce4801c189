"""The ledger's files: ledger/steps_00000041-00000080.jsonl holds what those steps consumed.

A file is written before the checkpoint that its last step belongs to is committed, so whatever is committed
is in the ledger. A file that ends after the newest checkpoint belongs to steps that were lost, and goes when
the run resumes. Loads no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from raytrainer.errors import CheckpointError
from raytrainer.storage import Storage

LEDGER_FOLDER = "ledger"
_NAME = re.compile(r"steps_(\d{8,})-(\d{8,})\.jsonl")


@dataclass(frozen=True)
class LedgerLine:
    """One microbatch of a finished step.

    step: counted from 1, as in metrics; epoch: in which it was taken; microbatch: its number in the step;
    rank, attempt: who computed it, in the how-manieth start of the run's ranks; indices: of the data set, in
    order; skipped: indices of samples that were left out.
    """

    step: int
    epoch: int
    microbatch: int
    rank: int
    attempt: int
    indices: list[int]
    skipped: list[int] = field(default_factory=list)

    def to_json(self) -> str:
        entries = asdict(self)
        if not self.skipped:
            del entries["skipped"]
        return json.dumps(entries)


def write_lines(storage: Storage, lines: list[LedgerLine]) -> None:
    """Writes the lines of consecutive steps, durably, as one file."""
    if not lines:
        return
    steps = [line.step for line in lines]
    content = "".join(f"{line.to_json()}\n" for line in lines)
    storage.write(f"{LEDGER_FOLDER}/{_name(min(steps), max(steps))}", content.encode())


def read_ledger(
    storage: Storage, until_step: int, on_damage: Callable[[str], None] | None = None
) -> Iterator[LedgerLine]:
    """The lines of all steps up to `until_step`, file by file; what is beyond belongs to lost steps.

    Two files may tell of the same computation, when one of them was written for a checkpoint that a crash
    kept from being committed: it counts once. on_damage: told of each line that cannot be read, which is then
    left out; without it that is a CheckpointError.
    """
    seen = set()
    for name, _, _ in _files(storage):
        for line in _lines(storage, name, on_damage):
            key = line.step, line.microbatch, line.rank, line.attempt
            if line.step <= until_step and key not in seen:
                seen.add(key)
                yield line


def delete_after(storage: Storage, step: int) -> None:
    """Removes the files that reach beyond `step`, the step that the run resumes from."""
    for name, _, last in _files(storage):
        if last > step:
            storage.delete(f"{LEDGER_FOLDER}/{name}")


def keep_newest(storage: Storage) -> None:
    """Removes all files but the one that reaches furthest, for those that each begin where the first did."""
    for name, _, _ in sorted(_files(storage), key=lambda each: each[2])[:-1]:
        storage.delete(f"{LEDGER_FOLDER}/{name}")


def copy_until(source: Storage, target: Storage, step: int) -> None:
    """Copies the files of the steps up to `step` from one run directory to another."""
    for name, first, last in _files(source):
        if last <= step:
            target.write(f"{LEDGER_FOLDER}/{name}", source.read(f"{LEDGER_FOLDER}/{name}"))
        elif first <= step:
            write_lines(target, [line for line in _lines(source, name) if line.step <= step])


def _lines(
    storage: Storage, name: str, on_damage: Callable[[str], None] | None = None
) -> Iterator[LedgerLine]:
    path = f"{LEDGER_FOLDER}/{name}"
    for number, text in enumerate(storage.read(path).splitlines(), start=1):
        try:
            line = LedgerLine(**json.loads(text))
        except (ValueError, TypeError) as error:
            damage = f"{storage.path(path)}:{number} is damaged: no line of a ledger"
            if on_damage is None:
                raise CheckpointError(damage) from error
            on_damage(damage)
        else:
            yield line


def _files(storage: Storage) -> list[tuple[str, int, int]]:
    """(name, first step, last step) of each file, in order."""
    matches = [_NAME.fullmatch(name) for name in storage.list(LEDGER_FOLDER)]
    return sorted(
        ((match[0], int(match[1]), int(match[2])) for match in matches if match), key=lambda each: each[1:]
    )


def _name(first: int, last: int) -> str:
    return f"steps_{first:08d}-{last:08d}.jsonl"
