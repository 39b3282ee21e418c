"""Configuration of a Raptor: the sizes of a Vision Transformer, and which weight-tied block makes which layer.

Copied to the Hub with every saved model, so it imports only transformers and its flat siblings.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from .tokens import Segment, TokenLayout, schedule_segments

MLP_TYPES = ("gelu", "swiglu")
DEPTH_SCALE_INITS = ("zeros", "normal")
_DEFAULT_REPEATS = (7, 3, 2)


@strict
class RaptorConfig(BackboneConfigMixin, PreTrainedConfig):
    r"""Configuration of [`RaptorModel`], a ViT whose `L` layers are made by `k <= L` weight-tied blocks.

    The defaults are DINOv2-B/14 with four registers at 518 pixels, cut into the phases 7 | 3 | 2
    (arXiv 2512.19941, Table 3).

    Args:
        hidden_size (`int`, defaults to 768): features of a token. The paper's appendix prints 784; ViT-B has 768.
        num_hidden_layers (`int`, defaults to 12): `L`, the number of block applications.
        num_attention_heads (`int`, defaults to 12): attention heads, a divisor of `hidden_size`.
        intermediate_size (`int` or `str`, defaults to `4 * hidden_size`): width of the MLP; for SwiGLU the width of the
            gate. Two names are understood and replaced by their number: `"research"`, `4 * hidden_size`, which makes a
            SwiGLU block about 1.5 times as costly as the GELU one (the paper's published runs), and `"dinov2"`, two
            thirds of that rounded up to a multiple of 8 (DINOv2's own SwiGLU).
        mlp_type (`str`, defaults to `"gelu"`): `"gelu"` as in DINOv2 S to L, or `"swiglu"`.
        layer_norm_eps (`float`, defaults to 1e-6): eps of every LayerNorm, the teacher's; a checkpoint of the
            research code has 1e-5.
        image_size (`int`, defaults to 518): pixels of the square the position table was made for; any other size that
            is a multiple of the patch is interpolated.
        patch_size (`int`, defaults to 14): pixels of a square patch.
        num_channels (`int`, defaults to 3): colour channels.
        num_register_tokens (`int`, defaults to 4): registers between the cls token and the patches, 0 or more.
        block_schedule (`list[int]`, *optional*): block of layer `l` at index `l - 1`, blocks counted from 0, each used
            at least once; need not be contiguous (App. B). Defaults to 7 | 3 | 2 when there are 12 layers.
        depth_scale (`bool`, defaults to `True`): whether a block's branches and output are scaled by a small MLP of the
            layer number (App. A.3).
        depth_scale_init (`str`, defaults to `"zeros"`): `"zeros"` starts with scales of exactly 1; `"normal"` is the
            paper's N(0, 1e-4).
        layerscale_value (`float`, defaults to 1.0): start value of LayerScale in a randomly initialised block.
        adapter_rank (`int`, defaults to 0): rank of a low-rank change that each application of a block has to itself on
            `qkv`, `proj`, `fc1` and `fc2` (after arXiv 2410.20672; beyond the paper); 0 ties the applications fully.
        interpolate_antialias (`bool`, defaults to `True`): whether positions are interpolated with antialiasing; true
            for DINOv2 with registers alone.
        initializer_range (`float`, defaults to 0.02): standard deviation of random weights.
        num_depth_bins (`int`, defaults to 256): bins of depth that [`RaptorForDepthEstimation`] classifies (App. A.4).
        min_depth, max_depth (`float`, defaults to 0.001 and 10): metres that the bins cover, NYUv2's.
        semantic_loss_ignore_index (`int`, defaults to 255): label of pixels that [`RaptorForSemanticSegmentation`] does
            not learn from.
        teacher_name_or_path (`str`, *optional*): where the teacher came from.
        teacher_revision (`str`, *optional*): its revision.
        out_features (`list[str]`, *optional*): feature maps of [`RaptorBackbone`], of `"stem"` (the embeddings) and
            `"stage1"` to `"stageL"`, one stage per application of a block; the last one by default.
        out_indices (`list[int]`, *optional*): the same as numbers of states, 0 for the stem.
        apply_layernorm (`bool`, defaults to `True`): whether feature maps pass the final LayerNorm.
        reshape_hidden_states (`bool`, defaults to `True`): whether feature maps are the patches as an image, or states
            with all their tokens.

    Raises:
        ValueError: if sizes, heads, names or the schedule do not fit; the message gives value, rule and remedy.

    Example:

    ```python
    >>> from raptor_hf import RaptorConfig, RaptorModel

    >>> config = RaptorConfig.from_repeats((7, 3, 2), hidden_size=384, num_attention_heads=6)
    >>> model = RaptorModel(config)
    >>> model.config.num_blocks
    3
    ```
    """

    model_type = "raptor"
    base_model_fsdp_plan = {"blocks.*": "free_full_weight", "layernorm": "keep_full_weight"}

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | str | None = None
    mlp_type: str = "gelu"
    layer_norm_eps: float = 1e-6
    image_size: int = 518
    patch_size: int = 14
    num_channels: int = 3
    num_register_tokens: int = 4
    block_schedule: list[int] | tuple[int, ...] | None = None
    depth_scale: bool = True
    depth_scale_init: str = "zeros"
    layerscale_value: float | int = 1.0
    adapter_rank: int = 0
    interpolate_antialias: bool = True
    initializer_range: float = 0.02
    num_depth_bins: int = 256
    min_depth: float | int = 1e-3
    max_depth: float | int = 10.0
    semantic_loss_ignore_index: int = 255
    teacher_name_or_path: str | None = None
    teacher_revision: str | None = None
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.block_schedule is None and self.num_hidden_layers == sum(_DEFAULT_REPEATS):
            self.block_schedule = repeats_to_schedule(_DEFAULT_REPEATS)
        elif self.block_schedule is not None:
            self.block_schedule = [int(block) for block in self.block_schedule]
        self.intermediate_size = _resolve_width(self.intermediate_size, self.hidden_size)
        check_config(self)
        self.set_output_features_output_indices(kwargs.pop("out_features", None), kwargs.pop("out_indices", None))
        super().__post_init__(**kwargs)

    def validate_raptor(self) -> None:
        """Repeats the constructor's checks when the configuration is saved. Raises `ValueError` as they do."""
        check_config(self)

    @classmethod
    def from_repeats(cls, repeats: Sequence[int], **kwargs: Any) -> "RaptorConfig":
        """Configuration of contiguous phases: `(7, 3, 2)` applies block 0 seven times, then block 1, then block 2.

        Raises:
            ValueError: if a repeat is below 1, or another field does not fit.
        """
        schedule = repeats_to_schedule(repeats)
        kwargs.setdefault("num_hidden_layers", len(schedule))
        return cls(block_schedule=schedule, **kwargs)

    @classmethod
    def from_teacher(cls, teacher: Any, phases: Any, **overrides: Any) -> "RaptorConfig":
        """Configuration of a student: the teacher's fields, the schedule of `phases`, and `overrides`.

        Args:
            teacher: anything with `config_fields()`, a dict of the fields of this class.
            phases: anything with a `block_schedule`, or the repeats `(7, 3, 2)`.
            overrides: fields that shall differ from the teacher's. A new `mlp_type` without `intermediate_size` has
                width `4 * hidden_size`.

        Raises:
            ValueError: if the phases do not have the teacher's number of layers.
        """
        schedule = getattr(phases, "block_schedule", None)
        schedule = repeats_to_schedule(tuple(phases)) if schedule is None else list(schedule)
        fields = dict(teacher.config_fields())
        if len(schedule) != fields["num_hidden_layers"]:
            raise ValueError(
                f"phases of {len(schedule)} layers for a teacher of {fields['num_hidden_layers']}: find them on this "
                "teacher, or give repeats that sum to its layers."
            )
        overrides = {name: value for name, value in overrides.items() if value is not None}
        if overrides.get("mlp_type", fields["mlp_type"]) != fields["mlp_type"]:
            fields["intermediate_size"] = None
        return cls(block_schedule=schedule, **{**fields, **overrides})

    @property
    def num_blocks(self) -> int:
        """`k`, the number of weight-tied blocks."""
        return len(set(self.block_schedule or ()))

    @property
    def stage_names(self) -> list[str]:
        """Names of the states that can be feature maps: the stem, then one stage per layer."""
        return ["stem", *(f"stage{layer}" for layer in range(1, self.num_hidden_layers + 1))]

    @property
    def segments(self) -> list[Segment]:
        """Runs of layers that share a block, in order of depth."""
        return schedule_segments(self.block_schedule or ())

    @property
    def token_layout(self) -> TokenLayout:
        """Positions of cls, registers and patches."""
        return TokenLayout(self.num_register_tokens)


def repeats_to_schedule(repeats: Sequence[int]) -> list[int]:
    """Contiguous block schedule of length `sum(repeats)`: `(2, 1)` gives `[0, 0, 1]`.

    Raises:
        ValueError: if there is no repeat or one is below 1.
    """
    if len(repeats) == 0 or any(count < 1 for count in repeats):
        raise ValueError(f"repeats={tuple(repeats)}: every block is applied at least once; give positive counts.")
    return [block for block, count in enumerate(repeats) for _ in range(count)]


def check_config(config: PreTrainedConfig) -> None:
    """Checks that the fields of a [`RaptorConfig`] fit together.

    The constructor, `save_pretrained` and the model's `__init__` all call this one function, since overrides given to
    `from_pretrained` are set after the constructor has run.

    Raises:
        ValueError: naming the value, the rule and the remedy.
    """
    if not isinstance(config.intermediate_size, int):
        raise ValueError(
            f"intermediate_size={config.intermediate_size!r} set after construction; give the number, or the name to "
            "RaptorConfig(...), which resolves it."
        )
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for name in (*sizes, "image_size", "patch_size", "num_channels"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1.")
    if config.num_register_tokens < 0:
        raise ValueError(f"num_register_tokens={config.num_register_tokens} must be 0 or more; use 0 for none.")
    if not 0 <= config.adapter_rank <= config.hidden_size:
        raise ValueError(
            f"adapter_rank={config.adapter_rank} must lie between 0 (no adapters) and hidden_size={config.hidden_size}."
        )
    if config.num_depth_bins < 2 or not 0 < config.min_depth < config.max_depth:
        raise ValueError(
            f"num_depth_bins={config.num_depth_bins}, min_depth={config.min_depth}, max_depth={config.max_depth}: give "
            "at least 2 bins and a range of metres with 0 < min_depth < max_depth."
        )
    if config.layer_norm_eps <= 0:
        raise ValueError(f"layer_norm_eps={config.layer_norm_eps} must be positive; DINOv2 uses 1e-6.")
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} is no multiple of num_attention_heads={config.num_attention_heads}; "
            "choose a number of heads that divides it."
        )
    if config.image_size % config.patch_size:
        raise ValueError(
            f"image_size={config.image_size} is no multiple of patch_size={config.patch_size}; "
            f"the nearest is {config.patch_size * max(1, round(config.image_size / config.patch_size))}."
        )
    for name, allowed in (("mlp_type", MLP_TYPES), ("depth_scale_init", DEPTH_SCALE_INITS)):
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)!r} is unknown; use one of {', '.join(allowed)}.")
    _check_schedule(config.block_schedule, config.num_hidden_layers)


def _check_schedule(schedule: Sequence[int] | None, num_layers: int) -> None:
    if schedule is None:
        raise ValueError(
            f"block_schedule is missing and has no default for num_hidden_layers={num_layers}; "
            "use RaptorConfig.from_repeats((n_1, ..., n_k)) or give one block number per layer."
        )
    if len(schedule) != num_layers:
        raise ValueError(
            f"block_schedule has {len(schedule)} entries for num_hidden_layers={num_layers}; it needs one block number "
            "per layer (RaptorConfig.from_repeats sets both)."
        )
    if min(schedule) < 0:
        raise ValueError(f"block_schedule={list(schedule)}: blocks are numbered from 0, {min(schedule)} is negative.")
    num_blocks = max(schedule) + 1
    if num_blocks > num_layers:
        raise ValueError(
            f"block_schedule={list(schedule)} names {num_blocks} blocks for {num_layers} layers; use at most one block "
            "per layer, numbered from 0."
        )
    used = Counter(schedule)
    unused = [block for block in range(num_blocks) if block not in used]
    if unused:
        raise ValueError(
            f"block_schedule={list(schedule)} never uses block {unused[0]}; number the blocks 0..k-1 without gaps."
        )


def _resolve_width(intermediate_size: int | str | None, hidden_size: int) -> int:
    full = 4 * hidden_size
    named = {None: full, "research": full, "dinov2": (int(full * 2 / 3) + 7) // 8 * 8}
    if isinstance(intermediate_size, int):
        return intermediate_size
    if intermediate_size not in named:
        raise ValueError(
            f"intermediate_size={intermediate_size!r} is no width; give a number, 'research' (4 * hidden_size) or "
            "'dinov2' (two thirds of it, rounded up to a multiple of 8)."
        )
    return named[intermediate_size]


__all__ = ["RaptorConfig"]
