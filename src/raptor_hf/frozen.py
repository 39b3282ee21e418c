"""A backbone that does not learn: what probes and studies read features from."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .modeling_raptor import RaptorModel
from .teachers import Teacher


class FrozenBackbone:
    """A Raptor or [`Teacher`] that does not learn: pixels to the final norm's output, float32, without gradients.

    Attributes:
        layout, hidden_size, patch_size, device: of the backbone.
        num_parameters, num_layers: of the backbone.
        num_blocks: of a Raptor; `None` for a ViT.
    """

    def __init__(self, backbone: RaptorModel | Teacher) -> None:
        self.device = backbone.device
        config = backbone.model.config if isinstance(backbone, Teacher) else backbone.config
        size = config.patch_size
        self.hidden_size, self.patch_size = config.hidden_size, size if isinstance(size, int) else size[0]
        self.num_blocks: int | None = None
        if isinstance(backbone, Teacher):
            self.last_hidden_state, self.layout = backbone.last_hidden_state, backbone.layout
            self.num_parameters, self.num_layers = backbone.model.num_parameters(), backbone.num_layers
        else:
            backbone.eval()
            self.num_parameters, self.num_layers = backbone.num_parameters(), backbone.config.num_hidden_layers
            self.num_blocks = backbone.config.num_blocks
            self.last_hidden_state = lambda pixel_values: backbone(pixel_values).last_hidden_state
            self.layout = backbone.config.token_layout

    def flops(self, height: int, width: int) -> int:
        """Floating-point operations of the matrix products and convolutions of one image of `height x width` pixels, a
        multiplication and an addition counted as two; attention included.
        """
        # Only attention in plain matrix products is counted on every device.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self(torch.zeros(1, 3, height, width))
        return counter.get_total_flops()

    def size(self, height: int, width: int) -> dict[str, Any]:
        """What tables say of the backbone: `num_blocks`, `num_layers`, `num_parameters`, and its `flops` at the
        `image_size` `[height, width]`.
        """
        return {
            "num_blocks": self.num_blocks,
            "num_layers": self.num_layers,
            "num_parameters": self.num_parameters,
            "image_size": [height, width],
            "flops": self.flops(height, width),
        }

    @torch.no_grad()
    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images `(batch_size, 3, height, width)` to `(batch_size, seq_length, hidden_size)`."""
        return self.last_hidden_state(pixel_values.to(self.device)).float()
