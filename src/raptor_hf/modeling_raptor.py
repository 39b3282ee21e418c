"""The Raptor model, a Vision Transformer whose layers are a few weight-tied blocks applied again and again, and what is
built on it: backbone and task heads.

All classes that an Auto class can load stand here: of custom code the library fetches the file of the class that is
loaded and what it imports, and a model that is saved again must still bring the others. Copied to the Hub with every
saved model: imports torch, transformers and flat siblings only.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    DepthEstimatorOutput,
    ImageClassifierOutput,
    SemanticSegmenterOutput,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs, resolve_hidden_states_indices, selected_hidden_states

from .configuration_raptor import RaptorConfig, check_config
from .modeling_raptor_dense import (
    DepthBins,
    depth_loss,
    patch_and_cls_features,
    patch_features,
    resize,
    segmentation_loss,
)
from .modeling_raptor_init import check_inits, init_adapters, init_blocks
from .modeling_raptor_layers import (
    DepthLinear,
    RaptorAttention,
    RaptorBlock,
    RaptorEmbeddings,
    RaptorLayerScale,
    RaptorLinear,
)
from .tokens import patch_grid

DEPTH_SCALE_STD = 1e-4
RANDOM_LAYERSCALE = 1e-5
AUTO_MAP = {
    "AutoConfig": "configuration_raptor.RaptorConfig",
    "AutoModel": "modeling_raptor.RaptorModel",
    "AutoBackbone": "modeling_raptor.RaptorBackbone",
    "AutoModelForImageClassification": "modeling_raptor.RaptorForImageClassification",
    "AutoModelForSemanticSegmentation": "modeling_raptor.RaptorForSemanticSegmentation",
    "AutoModelForDepthEstimation": "modeling_raptor.RaptorForDepthEstimation",
}


class RaptorPreTrainedModel(PreTrainedModel):
    """What every Raptor model shares: configuration, weight initialisation, loading and saving."""

    config: RaptorConfig
    base_model_prefix = "raptor"
    model_tags = ["raptor", "raptor_hf", "custom_code"]
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["RaptorEmbeddings", "RaptorBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": RaptorBlock, "attentions": RaptorAttention}
    _input_embed_layer = "patch_embeddings"

    def __init__(self, config: RaptorConfig, *args: Any, **kwargs: Any) -> None:
        check_config(config)  # overrides given to from_pretrained are set after the configuration's own checks
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Sets what a checkpoint lacks; the guarded `init` functions leave loaded tensors alone."""
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, RaptorEmbeddings):
            init.trunc_normal_(module.cls_token, std=std)
            init.trunc_normal_(module.position_embeddings, std=std)
            init.zeros_(module.register_tokens)
        elif isinstance(module, RaptorLayerScale):
            init.constant_(module.scale, self.config.layerscale_value)
        elif isinstance(module, RaptorLinear) and self.config.adapter_rank:
            init.normal_(module.adapter_down, std=module.in_features**-0.5)
            init.zeros_(module.adapter_up)
        elif isinstance(module, DepthLinear):
            # Asked of the module that owns the parameters: custom code is not asked for one that owns none.
            for parameter in (module.weight, module.bias):
                if module.in_features == 1:
                    init.uniform_(parameter, -1.0, 1.0)  # torch's own default for one input feature
                elif self.config.depth_scale_init == "normal":
                    init.normal_(parameter, std=DEPTH_SCALE_STD)
                else:
                    init.zeros_(parameter)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves weights, configuration and, for the classes of this file, the code that loads them without this package
        under every Auto class; arguments as in the library.
        """
        if type(self).__module__ == __name__:
            self.config.auto_map = dict(AUTO_MAP)  # the library adds the class that is saved, and links the others
        super().save_pretrained(save_directory, *args, **kwargs)

    def _grid(self, pixel_values: torch.Tensor) -> tuple[int, int]:
        return patch_grid(pixel_values.shape[-2], pixel_values.shape[-1], self.config.patch_size)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Recomputes block applications in the backward pass instead of keeping their activations.

        Raises:
            ValueError: for `use_reentrant=True`, which gives blocks behind frozen embeddings no gradient, silently.
        """
        options = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError(
                "use_reentrant=True gives weight-tied blocks wrong or no gradients; use False, which is the default."
            )
        super().activation_checkpointing_enable(options, every_n_layers, offload)


class RaptorModel(RaptorPreTrainedModel):
    """A Vision Transformer whose `L` layers are made by `k` weight-tied blocks (arXiv 2512.19941, Def. 1), between the
    teacher's embeddings and final LayerNorm. `config.block_schedule[l - 1]` is the block of layer `l`.
    """

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__(config)
        self.embeddings = RaptorEmbeddings(config)
        self.blocks = nn.ModuleList([RaptorBlock(config, number) for number in range(config.num_blocks)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def apply_layer(self, hidden_states: torch.Tensor, layer: int, **kwargs: Any) -> torch.Tensor:
        """Makes state `layer`, counted from 1, from state `layer - 1`, both `(batch_size, seq_length, hidden_size)`."""
        schedule: Any = self.config.block_schedule
        return self.apply_block(schedule[layer - 1], hidden_states, layer, **kwargs)

    def apply_block(
        self, block: int, hidden_states: torch.Tensor, depth: int | Sequence[int] | torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Applies one block to states `(batch_size, seq_length, hidden_size)`, at a layer or at one per sample."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        depth = torch.as_tensor(depth, dtype=dtype, device=hidden_states.device)
        return self.blocks[block](hidden_states, depth, **kwargs)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        start_layer: int = 0,
        end_layer: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Runs the layers `start_layer + 1 .. end_layer`.

        Args:
            pixel_values: images `(batch_size, num_channels, height, width)`, sides multiples of the patch size. The run
                then starts at state 0.
            hidden_states: states `(batch_size, seq_length, hidden_size)` of layer `start_layer`, instead of images.
                Both inputs are cast to the model's dtype.
            start_layer: state the run starts from.
            end_layer: state it stops at, `start_layer < end_layer <= L`; the last one by default.
            kwargs: `output_hidden_states` (`True`, or the indices wanted), `output_attentions` (implementation
                `"eager"` only), `return_dict`.

        Returns:
            `last_hidden_state`: the final LayerNorm of the last state computed, wherever the run stops;
            `pooler_output`: its cls token; `hidden_states`: `end_layer - start_layer + 1` states **before** that norm,
            the first one the run's input; `attentions`: one map per application.

        Raises:
            ValueError: if not exactly one input is given, the layers are out of range or do not fit it, the image's
                size does not fit the patch, or attentions are asked of another implementation.
        """
        end_layer = self.config.num_hidden_layers if end_layer is None else end_layer
        self._check_inputs(pixel_values, hidden_states, start_layer, end_layer)
        if kwargs.get("output_attentions", self.config.output_attentions):
            self._check_attentions()
        hidden_states = self.embeddings(pixel_values) if hidden_states is None else hidden_states.to(self.dtype)
        for layer in range(start_layer + 1, end_layer + 1):
            hidden_states = self.apply_layer(hidden_states, layer, **kwargs)
        last_hidden_state = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(
            last_hidden_state=last_hidden_state,
            pooler_output=self.config.token_layout.select(last_hidden_state, "cls").squeeze(-2),
        )

    def _check_inputs(
        self, pixel_values: torch.Tensor | None, hidden_states: torch.Tensor | None, start_layer: int, end_layer: int
    ) -> None:
        if (pixel_values is None) == (hidden_states is None):
            raise ValueError("give exactly one of pixel_values (images) and hidden_states (states of start_layer).")
        if not 0 <= start_layer < end_layer <= self.config.num_hidden_layers:
            raise ValueError(
                f"start_layer={start_layer}, end_layer={end_layer}: states are numbered 0 (embeddings) to "
                f"{self.config.num_hidden_layers}, and a run needs start_layer < end_layer."
            )
        if pixel_values is not None and start_layer:
            raise ValueError(f"start_layer={start_layer} needs hidden_states; images enter at state 0.")
        shape = None if hidden_states is None else tuple(hidden_states.shape)
        if shape is not None and (len(shape) != 3 or shape[-1] != self.config.hidden_size):
            raise ValueError(
                f"hidden_states of shape {shape}: expected (batch_size, seq_length, {self.config.hidden_size})."
            )

    def _check_attentions(self) -> None:
        if self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True needs the eager attention, not {self.config._attn_implementation!r}; call "
                "model.set_attn_implementation('eager') first."
            )

    @classmethod
    def from_teacher(
        cls, teacher: Any, phases: Any, *, init: str = "middle", adapter_init: str = "svd", **config_fields: Any
    ) -> "RaptorModel":
        """A student for `teacher`, ready to be distilled: its embeddings and final norm copied and frozen.

        Args:
            teacher: a [`~raptor_hf.Teacher`], or anything with `config_fields()` (a dict of [`RaptorConfig`] fields),
                `embedding_state()` (our names to tensors) and `block_state(layer)` (the same for layer `1..L`).
            phases: what [`~raptor_hf.find_phases`] returns, anything with a `block_schedule`, or repeats `(7, 3, 2)`.
            init: the layer a block starts from: the `"first"`, `"middle"` or `"last"` one it makes, their `"mean"`, or
                `"random"`, the paper's, with LayerScale 1e-5 as in the research code.
            adapter_init: with an `adapter_rank`, `"svd"` starts every application's adapters at the best approximation
                of what its teacher layer's matrices differ from the block's by, `"zeros"` at no change.
            config_fields: fields of [`RaptorConfig`] that shall differ from the teacher's: `mlp_type`,
                `intermediate_size` (then the MLP alone starts at random), `depth_scale`, `depth_scale_init`,
                `layerscale_value`, `adapter_rank`, `dtype`.

        Raises:
            ValueError: if `init` or `adapter_init` is unknown, the numbers of layers differ, or embeddings do not have
                our names.
        """
        check_inits(init, adapter_init)
        if init == "random":
            config_fields.setdefault("layerscale_value", RANDOM_LAYERSCALE)
        model = cls._from_config(RaptorConfig.from_teacher(teacher, phases, **config_fields))  # in config.dtype
        report = model.load_state_dict(teacher.embedding_state(), strict=False)
        missing = [name for name in report.missing_keys if not name.startswith("blocks.")]
        if missing or report.unexpected_keys:
            raise ValueError(
                f"the teacher's embedding_state() lacks {missing} and has unknown {report.unexpected_keys}; give the "
                "embeddings and the final layernorm in Raptor's names."
            )
        model.freeze_embeddings()
        if init != "random":
            init_blocks(model.blocks, model.config, teacher, init)
        if model.config.adapter_rank and adapter_init == "svd":
            init_adapters(model.blocks, model.config, teacher)
        return model

    def freeze_embeddings(self) -> None:
        """Freezes what is the teacher's own: patch embedding, tokens, positions and the final LayerNorm."""
        self.embeddings.requires_grad_(False)
        self.layernorm.requires_grad_(False)


class RaptorBackbone(BackboneMixin, RaptorPreTrainedModel):
    """Feature maps of a Raptor for dense heads: the states that `config.out_features` names, one stage per application
    of a block. No layer after the last of them is run.

    `AutoBackbone.from_pretrained` needs a Hub id (transformers 5.24); [`RaptorBackbone.from_pretrained`] also takes a
    folder.
    """

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        self.raptor = RaptorModel(config)
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> BackboneOutput:
        """Feature maps of images.

        Args:
            pixel_values: images `(batch_size, num_channels, height, width)`, sides multiples of the patch size.
            kwargs: as [`RaptorModel.forward`].

        Returns:
            `feature_maps`, one per name in `config.out_features`, each `(batch_size, hidden_size, rows, columns)`, or
            `(batch_size, seq_length, hidden_size)` without `config.reshape_hidden_states`; `hidden_states` and
            `attentions` when asked for, of all layers.

        Raises:
            ValueError: as [`RaptorModel.forward`].
        """
        wanted = kwargs.pop("output_hidden_states", self.config.output_hidden_states)
        layers = [self.stage_names.index(name) for name in self.out_features]
        runs_fully = wanted or kwargs.get("output_attentions", self.config.output_attentions)
        end_layer = self.config.num_hidden_layers if runs_fully else max(1, *layers)
        kwargs.update(return_dict=True, output_hidden_states=True)
        outputs = self.raptor(pixel_values, end_layer=end_layer, **kwargs)
        hidden_states = outputs.hidden_states
        feature_maps = tuple(self._feature_map(hidden_states[layer], pixel_values) for layer in layers)
        chosen = selected_hidden_states(wanted)
        if chosen is not None:
            chosen = resolve_hidden_states_indices(self, chosen, num_hidden_states=len(hidden_states))
            hidden_states = tuple(state if index in chosen else None for index, state in enumerate(hidden_states))
        return BackboneOutput(
            feature_maps=feature_maps,
            hidden_states=hidden_states if wanted else None,
            attentions=outputs.attentions,
        )

    def _feature_map(self, hidden_states: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        if self.config.apply_layernorm:
            hidden_states = self.raptor.layernorm(hidden_states)
        if not self.config.reshape_hidden_states:
            return hidden_states
        return patch_features(hidden_states, self.config.token_layout, self._grid(pixel_values)).contiguous()


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


class RaptorForSemanticSegmentation(RaptorPreTrainedModel):
    """A linear classifier of each patch token after the final LayerNorm, as the paper's ADE20k probe (App. A.4)."""

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.raptor = RaptorModel(config)
        self.decode_head = nn.Conv2d(config.hidden_size, self.num_labels, kernel_size=1)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> SemanticSegmenterOutput:
        """Logits of each patch, and the loss when labels are given.

        Args:
            pixel_values: images `(batch_size, num_channels, height, width)`, sides multiples of the patch size.
            labels: class numbers `(batch_size, label height, label width)`, of any size;
                `config.semantic_loss_ignore_index` where there is none.
            kwargs: as [`RaptorModel.forward`].

        Returns:
            `loss` `()`, cross entropy at the labels' size; `logits` `(batch_size, num_labels, rows, columns)`, which
            the image processor's `post_process_semantic_segmentation` brings to any size; and `hidden_states`,
            `attentions` when asked for.
        """
        outputs = self.raptor(pixel_values, return_dict=True, **kwargs)
        features = patch_features(outputs.last_hidden_state, self.config.token_layout, self._grid(pixel_values))
        logits, loss = self.decode_head(features), None
        if labels is not None:
            loss = segmentation_loss(logits, labels.long(), ignore_index=self.config.semantic_loss_ignore_index)
        return SemanticSegmenterOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class RaptorForDepthEstimation(RaptorPreTrainedModel):
    """A linear classifier of depth bins on `[patch, cls]` of the final LayerNorm's output, the NYUv2 probe of
    arXiv 2512.19941, App. A.4: the depth is the mean of the bins by their probability.
    """

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__(config)
        self.bins = DepthBins(config.num_depth_bins, config.min_depth, config.max_depth)
        self.raptor = RaptorModel(config)
        self.head = nn.Conv2d(2 * config.hidden_size, config.num_depth_bins, kernel_size=1)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> DepthEstimatorOutput:
        """Depth of each pixel, and the loss when labels are given.

        Args:
            pixel_values: images `(batch_size, num_channels, height, width)`, sides multiples of the patch size.
            labels: metres `(batch_size, label height, label width)`, of any size; anything outside of
                `config.min_depth .. config.max_depth`, such as 0, where there is none.
            kwargs: as [`RaptorModel.forward`].

        Returns:
            `loss` `()`, ten times the scale-invariant error plus the cross entropy of the bins; `predicted_depth`,
            metres `(batch_size, height, width)` in float32 at least; and `hidden_states`, `attentions` when asked for.
        """
        outputs = self.raptor(pixel_values, return_dict=True, **kwargs)
        grid, size = self._grid(pixel_values), (pixel_values.shape[-2], pixel_values.shape[-1])
        logits = self.head(patch_and_cls_features(outputs.last_hidden_state, self.config.token_layout, grid))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return DepthEstimatorOutput(
            loss=None if labels is None else depth_loss(logits, labels.to(logits.dtype), self.bins),
            predicted_depth=resize(self.bins.depths(logits), size).squeeze(1),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = [
    "RaptorBackbone",
    "RaptorForDepthEstimation",
    "RaptorForImageClassification",
    "RaptorForSemanticSegmentation",
    "RaptorModel",
    "RaptorPreTrainedModel",
]
