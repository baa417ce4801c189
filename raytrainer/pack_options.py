"""What the options of `raytrainer pack` stand for: the trials, how they are packed, and where."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raytrainer.config.pack import PackFile, load_pack_file, pack_file
from raytrainer.errors import UsageError
from raytrainer.launch_options import default_name
from raytrainer.pack.fusible import with_groups
from raytrainer.pack.machines import PackSettings
from raytrainer.pack.status import PACK_FILE, read_pack
from raytrainer.pack.trials import Trial, base_config, command_trials, trials_of
from raytrainer.storage import open_storage


@dataclass(frozen=True)
class Options:
    """The command line; see `raytrainer pack --help`."""

    what: tuple[str, ...] = ()
    num_trials: int | None = None
    per_gpu: str | None = None
    local: bool = False
    timeout_s: float | None = None
    memory_gib: float | None = None
    process_args: bool = False
    name: str | None = None
    storage_path: str | None = None
    address: str | None = None
    resume: str | None = None
    dry_run: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class Job:
    """What is run. directory: of the search; notes: to be told before it begins."""

    trials: list[Trial]
    settings: PackSettings
    directory: str
    resume: bool = False
    file: PackFile | None = None
    notes: tuple[str, ...] = ()


def run_pack(options: Options) -> int:
    """Does what the options say; the exit code. Raises UsageError for a mistake in them."""
    job = job_of(options)
    from raytrainer.cluster import pack

    if options.dry_run:
        backend = _backend(options, job)()
        try:
            print(pack.dry_run(job.trials, job.settings, backend.machines(), job.notes))
        finally:
            backend.close()
        return 0
    backend = _backend(options, job)
    return pack.pack(
        job.trials, job.settings, job.directory, backend=backend, resume=job.resume, notes=job.notes
    )


def _backend(options: Options, job: Job) -> Callable[[], Any]:
    if options.local:
        from raytrainer.cluster.pack_local import LocalBackend

        return LocalBackend
    from raytrainer.cluster.pack_ray import RayBackend

    return lambda: RayBackend(options.address, job.directory, options.verbose)


def job_of(options: Options) -> Job:
    """The trials and the settings. Raises UsageError."""
    if options.resume is not None:
        return _resumed(options)
    if options.num_trials is not None:
        return _of_command(options)
    if not options.what:
        raise UsageError(
            "pack: nothing to run\n"
            "  write raytrainer pack trials.yaml, or raytrainer pack -n 3 -- python train.py --lr 0.1"
        )
    path, *overrides = options.what
    if not path.endswith((".yaml", ".yml")):
        raise UsageError(
            f"pack {path}\n  how often?\n  write raytrainer pack -n 3 -- {' '.join(options.what)}"
        )
    given = {
        "per_gpu": options.per_gpu,
        "timeout_s": options.timeout_s,
        "memory_gib": options.memory_gib,
        "name": options.name,
        "storage_path": options.storage_path,
        "process_args": "true" if options.process_args else None,
    }
    overrides += [f"{key}={value}" for key, value in given.items() if value is not None]
    file = load_pack_file(path, overrides)
    settings = PackSettings.of_file(file)
    if file.config is not None:
        folder = file.folder if not os.path.exists(file.config) else ""
        beside = os.path.dirname(os.path.abspath(os.path.join(folder, file.config)))
        settings = replace(settings, python_path=(beside, _package_root()))
    trials, notes = trials_of(file), []
    if file.mode == "fused":
        trials, notes = with_groups(trials, base_config(file))
    return Job(trials, settings, os.path.join(file.storage_path, file.name), file=file, notes=tuple(notes))


def _of_command(options: Options) -> Job:
    if options.num_trials < 1:
        raise UsageError(f"-n {options.num_trials}\n  must be a number of trials, 1 or more\n  write -n 3")
    if not options.what:
        raise UsageError("pack -n: no command\n  write raytrainer pack -n 3 -- python train.py --lr 0.1")
    limits = {"timeout_s": options.timeout_s, "memory_gib": options.memory_gib}
    mapping = {"per_gpu": _per_gpu(options.per_gpu), **limits}
    mapping |= {
        "name": options.name or _name_of(options.what),
        "storage_path": options.storage_path or "runs",
    }
    # Checked like a file's.
    file = pack_file({**mapping, "command": ["true"], "trials": [{}]})
    values = [{} for _ in range(options.num_trials)]
    trials = command_trials(options.what, values, process_args=options.process_args)
    settings = replace(PackSettings.of_file(file), all_at_once=True)
    directory = os.path.join(file.storage_path, file.name)
    return Job(trials, settings, directory if options.name else _free(directory), file=file)


def _per_gpu(text: str | None) -> Any:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"--per-gpu {text}\n  must be auto or a whole number of trials for each card, 1 or more\n"
            "  write --per-gpu 3"
        ) from None


def _name_of(command: tuple[str, ...]) -> str:
    """The script's name, or the program's."""
    script = next((part for part in command if part.endswith(".py")), command[0])
    return default_name(script, module=False)


def _free(directory: str) -> str:
    """The first of directory, directory-2, directory-3 that is no search's yet."""
    number, free = 1, directory
    while os.path.exists(os.path.join(free, PACK_FILE)) or os.path.exists(os.path.join(free, "config.yaml")):
        number += 1
        free = f"{directory}-{number}"
    return free


def _resumed(options: Options) -> Job:
    if options.what or options.num_trials is not None:
        raise UsageError(
            f"--resume {options.resume}\n  goes on with the trials that are written there\n"
            "  leave out the file, the command and -n"
        )
    trials, mapping, cwd = read_pack(open_storage(options.resume))
    if os.path.realpath(cwd) != os.path.realpath(os.getcwd()):
        raise UsageError(
            f"--resume {options.resume}\n  was begun in another working directory\n"
            f"  write cd {cwd} first: the trials' paths are relative to it"
        )
    settings = PackSettings.from_mapping(mapping, os.environ)
    changed: dict[str, Any] = {}
    if options.per_gpu is not None:
        changed["per_gpu"] = _per_gpu(options.per_gpu)
    if options.timeout_s is not None:
        changed["timeout_s"] = options.timeout_s
    if options.memory_gib is not None:
        changed["memory_gib"] = options.memory_gib
    return Job(trials, replace(settings, **changed), options.resume, resume=True)


def _package_root() -> str:
    """For `python -m raytrainer` in a trial, as it is here."""
    return os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["raytrainer"].__file__)))
