"""Several trials of one architecture as one model: stacked parameters, and all gradients from one `vmap`.

Each trial is a `Trainer` all the same, with a run directory, metrics, evaluation, schedule, early stop and
checkpoints of its own; its parameters and its optimizer's state are views into the stacked ones. `raytrainer
pack` runs a group of them through `raytrainer.cluster.fused_process`.
"""
