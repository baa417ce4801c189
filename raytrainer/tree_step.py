"""`determinism: bitwise`: a step's gradients to the same bits, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from raytrainer.errors import ConfigError, Problem
from raytrainer.step import MicrobatchStep
from raytrainer.tree_reduction import TreeReduction

if TYPE_CHECKING:
    from raytrainer.data.loader import LoadedMicrobatch
    from raytrainer.data.sampler import StepPlan


class TreeStep(MicrobatchStep):
    """Sums the gradients of single microbatches along one fixed tree.

    A parameter that gets no gradient has one of zeros. A wish to stop of a rank that has no microbatch in a
    step is heard in the next.
    """

    def __init__(self, model: nn.Module, *args: Any, **common: Any):
        _refuse_what_has_no_fixed_sum(model)
        super().__init__(model, *args, **common)
        self._reductions: dict[str | None, TreeReduction] = {}

    def compute(
        self,
        plan: StepPlan,
        microbatches: Iterator[LoadedMicrobatch],
        step: int,
        stop: bool,
        optimizer: str | None = None,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        self._begin(step)
        reduction = self._reduction(optimizer, parameters)
        keywords = {} if optimizer is None else {"optimizer": optimizer}
        reduction.begin(plan.num_microbatches)
        for _ in plan.local:
            loaded = next(microbatches)
            self.zero_grad()
            reduction.expect()
            if loaded.num_samples == 0:
                self._vote_without_samples(stop, len(loaded.skipped))
            else:
                self._seed(step, loaded.microbatch.number)
                with self._buffers.around(loaded.microbatch.number):
                    self._backward(self._module, loaded, plan.num_samples, 1.0, stop, keywords)
            reduction.add()
        reduction.finish()
        # What is drawn after the step, by an optimizer say, must not depend on the last microbatch run here.
        self._seed(step, plan.num_microbatches)
        self._finish(step)

    def _reduction(self, optimizer: str | None, parameters: list[nn.Parameter] | None) -> TreeReduction:
        if optimizer not in self._reductions:
            trained = self._parameters if parameters is None else [*parameters, self._module.votes]
            self._reductions[optimizer] = TreeReduction(
                [parameter for parameter in trained if parameter.requires_grad], self._process
            )
        return self._reductions[optimizer]


def _refuse_what_has_no_fixed_sum(model: nn.Module) -> None:
    """Raises ConfigError for sparse gradients and for batch statistics over all ranks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            rule = (
                "its statistics are those of a rank's microbatch and the others', so of the number of ranks"
            )
            fix = "use BatchNorm, or write determinism: order"
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            rule = "its gradients are sparse, and their sums have no fixed order"
            fix = "make it with sparse=False, or write determinism: order"
        else:
            continue
        what = f"{name or 'the model'} is of type {type(module).__name__}: {rule}"
        raise ConfigError(Problem("config", "training.determinism", what, "bitwise", fix))
