"""Steps of SGD, Adam and AdamW over stacked parameters, with a number of each trial's own for every option.

The same sums as in torch's single-tensor loops, in the same order. Sources: torch.optim's documentation;
Loshchilov and Hutter, "Decoupled weight decay regularization" (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

# By option, a number for each trial, float64 [N]; plain flags as they are.
Options = Mapping[str, torch.Tensor | bool]
State = dict[str, torch.Tensor]


def sgd_step(values: torch.Tensor, grads: torch.Tensor, state: State, options: Options) -> None:
    """values, grads: [N, ...]; state: "momentum_buffer" like them, zeros at first. In place."""
    lr, decay, momentum = (_like(options[n], values) for n in ("lr", "weight_decay", "momentum"))
    grads = grads + decay * values
    if "momentum_buffer" in state:
        buffer = state["momentum_buffer"]
        # Without dampening the first step's buffer is the gradient itself: as from zeros.
        buffer.mul_(momentum).add_(grads)
        grads = grads + momentum * buffer if options["nesterov"] else buffer
    values.sub_(lr * grads)


def adam_step(values: torch.Tensor, grads: torch.Tensor, state: State, options: Options) -> None:
    """values, grads: [N, ...]; state: "exp_avg", "exp_avg_sq" like them and "step" [N]. In place."""
    lr, decay, beta1, beta2 = (options[name] for name in ("lr", "weight_decay", "beta1", "beta2"))
    state["step"] += 1
    if options["decoupled_weight_decay"]:
        values.mul_(_like(1 - lr * decay, values))
    else:
        grads = grads + _like(decay, values) * values
    state["exp_avg"].lerp_(grads, _like(1 - beta1, values))
    state["exp_avg_sq"].mul_(_like(beta2, values)).add_(_like(1 - beta2, values) * grads * grads)
    step = state["step"].double()
    size = _like(lr / (1 - beta1**step), values)
    root = _like((1 - beta2**step).sqrt(), values)
    values.sub_(size * state["exp_avg"] / (state["exp_avg_sq"].sqrt() / root + _like(options["eps"], values)))


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    return sgd_step if isinstance(optimizer, torch.optim.SGD) else adam_step


def options_of(groups: list[Mapping], device: torch.device) -> Options:
    """The options of one parameter group, from that group of each trial's optimizer."""

    def numbers(get: Callable[[Mapping], float]) -> torch.Tensor:
        return torch.tensor([float(get(group)) for group in groups], dtype=torch.float64, device=device)

    options = {name: numbers(lambda group, n=name: group[n]) for name in ("lr", "weight_decay")}
    if "betas" in groups[0]:
        options["beta1"] = numbers(lambda group: group["betas"][0])
        options["beta2"] = numbers(lambda group: group["betas"][1])
        options["eps"] = numbers(lambda group: group["eps"])
        options["decoupled_weight_decay"] = groups[0].get("decoupled_weight_decay", False)
    else:
        options["momentum"] = numbers(lambda group: group["momentum"])
        options["nesterov"] = groups[0]["nesterov"]
    return options


def new_state(optimizer: torch.optim.Optimizer, groups: list[Mapping], values: torch.Tensor) -> State:
    """Of a stacked parameter before its first step; empty for plain SGD."""
    if isinstance(optimizer, torch.optim.SGD):
        has_momentum = any(group["momentum"] for group in groups)
        return {"momentum_buffer": torch.zeros_like(values)} if has_momentum else {}
    steps = torch.zeros(len(groups), dtype=torch.float32, device=values.device)
    return {"step": steps, "exp_avg": torch.zeros_like(values), "exp_avg_sq": torch.zeros_like(values)}


def clip(grads: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Each trial's gradients scaled to that norm at most, as `torch.nn.utils.clip_grad_norm_` does.

    grads: each [N, ...], changed in place. Returns the norms before, [N].
    """
    norms = torch.stack([torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads])
    total = torch.linalg.vector_norm(norms, dim=0)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(_like(factor, grad))
    return total


def _like(numbers: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[N] as [N, 1, ...] in the type of `values`, to be multiplied with them."""
    return numbers.to(values.dtype).reshape(-1, *(1,) * (values.dim() - 1))
