"""Task heads on a Raptor. Copied to the Hub with every saved model."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from .configuration_raptor import RaptorConfig
from .modeling_raptor import RaptorModel, RaptorPreTrainedModel


class RaptorForImageClassification(RaptorPreTrainedModel):
    """A linear classifier on `[cls, mean patch]` of the final LayerNorm's output, DINOv2's linear head and the
    ImageNet-1k probe of arXiv 2512.19941, App. A.4. Registers are left out of the mean.
    """

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.raptor = RaptorModel(config)
        self.classifier = nn.Linear(2 * config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor | None = None, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Logits, and the loss when labels are given.

        Args:
            pixel_values: images `(batch_size, num_channels, height, width)`.
            labels: class numbers `(batch_size,)` for cross entropy; `(batch_size, num_labels)` floats for several
                labels at once; floats for regression (`config.problem_type`).
            kwargs: as [`RaptorModel.forward`].

        Returns:
            `loss` `()`, `logits` `(batch_size, num_labels)`, and `hidden_states`, `attentions` when asked for.
        """
        outputs = self.raptor(pixel_values, return_dict=True, **kwargs)
        logits = self.classifier(self.config.token_layout.pool(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = ["RaptorForImageClassification"]
