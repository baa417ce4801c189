"""Tasks for kinds of training that are common and not plain supervised learning."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from raytrainer.task import EvaluationOutput, StepOutput, Task


class LanguageModelling(Task):
    """Next-token prediction: batches of (inputs, targets), int64 [N, T]; the model gives logits [N, T, C].

    The loss is the mean cross-entropy a token, in nats. Targets equal to `ignore_index` (padding) do not
    count: the weight is the number of tokens that do, so microbatches with more padding count less.
    """

    def __init__(self, ignore_index: int = -100):
        self.ignore_index = ignore_index

    def training_step(self, batch: tuple[Tensor, Tensor]) -> StepOutput:
        """The mean loss a token, weighted by the number of tokens."""
        loss, weight, _ = self._loss_weight_logits(batch)
        return StepOutput(loss, weight)

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> EvaluationOutput:
        """As in training; predictions are logits [N*T, C] and targets [N*T], so that metrics take them."""
        loss, weight, logits = self._loss_weight_logits(batch)
        return EvaluationOutput(loss, weight, logits, batch[1].flatten())

    def _loss_weight_logits(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = batch
        logits = self.model(inputs).flatten(0, 1)
        weight = (targets != self.ignore_index).sum()
        total = functional.cross_entropy(
            logits, targets.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )
        # A microbatch of nothing but padding has the loss 0 and the weight 0, not 0/0.
        return total / weight.clamp(min=1), weight, logits
