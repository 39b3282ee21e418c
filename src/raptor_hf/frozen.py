"""A backbone that does not learn: what probes and studies read features from."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .modeling_raptor import RaptorModel
from .teachers import Teacher


class FrozenBackbone:
    """A Raptor or [`Teacher`] that does not learn: pixels to the final norm's output, float32, without gradients.

    Attributes:
        layout, hidden_size, patch_size, device: of the backbone.
    """

    def __init__(self, backbone: RaptorModel | Teacher) -> None:
        self.device = backbone.device
        config = backbone.model.config if isinstance(backbone, Teacher) else backbone.config
        size = config.patch_size
        self.hidden_size, self.patch_size = config.hidden_size, size if isinstance(size, int) else size[0]
        if isinstance(backbone, Teacher):
            self.last_hidden_state, self.layout = backbone.last_hidden_state, backbone.layout
        else:
            backbone.eval()
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

    @torch.no_grad()
    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images `(batch_size, 3, height, width)` to `(batch_size, seq_length, hidden_size)`."""
        return self.last_hidden_state(pixel_values.to(self.device)).float()
