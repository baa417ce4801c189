"""The nearest right name for a wrong one: edit distance over all keys of the config, and a table of the words
that other tools use for the same thing."""

from __future__ import annotations

from collections.abc import Iterable

ALIASES = {
    "epochs": "training.max_epochs",
    "epoch": "training.max_epochs",
    "num_epochs": "training.max_epochs",
    "n_epochs": "training.max_epochs",
    "num_train_epochs": "training.max_epochs",
    "steps": "training.max_steps",
    "num_steps": "training.max_steps",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
    "betas": "optimizer.betas",
    "mixed_precision": "training.precision",
    "amp": "training.precision",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "dtype": "training.precision",
    "grad_clip": "training.gradient_clip_norm",
    "clip_grad_norm": "training.gradient_clip_norm",
    "max_grad_norm": "training.gradient_clip_norm",
    "gradient_clip_val": "training.gradient_clip_norm",
    "torch_compile": "training.compile",
    "early_stop": "training.early_stopping",
    "patience": "training.early_stopping.patience",
    "batch_size": "data.global_batch_size",
    "train_batch_size": "data.global_batch_size",
    "batch": "data.global_batch_size",
    "per_device_batch_size": "data.micro_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size",
    "gradient_accumulation_steps": "data.micro_batch_size",
    "accumulate_grad_batches": "data.micro_batch_size",
    "dataset": "data.train",
    "train_dataset": "data.train",
    "train_data": "data.train",
    "eval_dataset": "data.eval",
    "val_dataset": "data.eval",
    "val": "data.eval",
    "validation": "data.eval",
    "test": "data.eval",
    "sampler": "data.order",
    "collate": "data.collate_fn",
    "dataloader": "data.loader",
    "loader_workers": "data.loader.num_workers",
    "prefetch": "data.loader.prefetch_factor",
    "timeout": "data.loader.timeout_s",
    "workers": "scaling.num_workers",
    "world_size": "scaling.num_workers",
    "nproc_per_node": "scaling.num_workers",
    "nnodes": "scaling.num_workers",
    "gpus": "scaling.gpus_per_worker",
    "num_gpus": "scaling.gpus_per_worker",
    "use_gpu": "scaling.gpus_per_worker",
    "cpus": "scaling.cpus_per_worker",
    "num_cpus": "scaling.cpus_per_worker",
    "output_dir": "storage_path",
    "out_dir": "storage_path",
    "save_dir": "storage_path",
    "log_dir": "storage_path",
    "run_name": "name",
    "experiment": "name",
    "random_seed": "seed",
    "net": "model",
    "network": "model",
    "criterion": "loss",
    "loss_fn": "loss",
    "loss_function": "loss",
    "optim": "optimizer",
    "lr_scheduler": "scheduler",
    "metric": "metrics",
    "pretrained": "init_from",
    "weights": "init_from",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.num_to_keep",
    "keep": "checkpoint.num_to_keep",
    "eval_every": "eval.every",
    "eval_steps": "eval.every",
    "log_every": "logging.every_n_steps",
    "logging_steps": "logging.every_n_steps",
    "log_every_n_steps": "logging.every_n_steps",
    "loggers": "logging.sinks",
    "max_restarts": "failure.max_failures",
    "freeze": "parameters.freeze",
    "param_groups": "parameters.groups",
}


def distance(a: str, b: str) -> int:
    """Edit distance, a swap of two neighbouring letters counting as one edit."""
    previous, row = [], list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, previous, row = previous, row, [i]
        for j, other in enumerate(b, 1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (letter != other))
            if before and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was probably meant to be, or None when none is near enough (a third of "
    "it)."""
    word = str(word)
    best = min(((distance(word.lower(), c.lower()), c) for c in candidates), default=None)
    if best is None or best[0] > max(1, min(len(word), len(best[1])) // 3):
        return None
    return best[1]


def right_key(wrong: str, keys: Iterable[str]) -> str | None:
    """The dotted key that was meant by the dotted key `wrong`.

    In turn: a slip of the pen among the keys beside it, another tool's word, the same last name elsewhere
    (the section nearest to where it stands first), a slip of the pen of a key elsewhere.
    """
    keys = list(keys)
    parent, leaf = wrong.rpartition(".")[0], _leaf(wrong)
    beside = {_leaf(key): key for key in keys if key.rpartition(".")[0] == parent}
    if near := nearest(leaf, beside):
        return beside[near]
    if alias := ALIASES.get(leaf.lower().replace("-", "_")):
        below = [key for key in keys if key.startswith(f"{parent}.") and _leaf(key) == _leaf(alias)]
        return below[0] if below else alias
    elsewhere: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: -_shared(parent, key)):
        elsewhere.setdefault(_leaf(key), key)
    return elsewhere.get(nearest(leaf, elsewhere) or "")


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _shared(parent: str, key: str) -> int:
    """Number of leading names that `key` shares with the section `parent`."""
    count = 0
    for a, b in zip(parent.split("."), key.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count
