"""What is trained: a [`RaptorModel`] wrapped so that one forward pass turns the teacher's states into a loss.

All training arithmetic happens inside [`RaptorForDistillation.forward`], called once per step as the wrapped module, so
that DDP and FSDP synchronise and autocast applies. The class has no Auto class and never reaches the Hub: what is saved
for use is its `raptor`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import ModelOutput

from .configuration_raptor import RaptorConfig
from .losses import BlockStep, LayerErrors, StateError, autoregressive, teacher_forcing, terminal
from .modeling_raptor import RaptorModel, RaptorPreTrainedModel
from .tokens import Segment

OBJECTIVES = ("hybrid", "teacher_forcing", "autoregressive", "terminal")
STAGES = ("blocks", "end_to_end")
LAST_BLOCK_WEIGHTS = {"cls": 0.34, "registers": 0.33, "patch": 0.33}
END_TO_END_WEIGHTS = {"cls": 0.45, "registers": 0.10, "patch": 0.45}


@dataclass(frozen=True)
class DistillationObjective:
    """What one stage minimises; see arXiv 2512.19941, Sec. 3 and App. A.

    Attributes:
        stage: `"blocks"` starts every segment at the teacher's state, so blocks do not depend on each other (stage 1);
            `"end_to_end"` connects them from state 0 (stage 2).
        objective: `"hybrid"` (teacher forcing and autoregression, mixed by the weight given to each step),
            `"teacher_forcing"`, `"autoregressive"`, or `"terminal"`, which compares the path's last layer alone.
        error, direction_weight: see [`~raptor_hf.losses.StateError`].
        layer_reduction: see [`~raptor_hf.losses.LayerErrors.reduce`].
        last_block_weights: token weights of the block that makes layer `L` in stage `"blocks"`; the other blocks take
            the plain error over all tokens.
        end_to_end_weights: token weights in stage `"end_to_end"`.
        horizon: layers that the autoregressive part runs from the start of its path; all by default.
        input_noise_std: standard deviation of the Gaussian noise on a block's input during training (research code).

    Raises:
        ValueError: if a name is unknown, the horizon is below 1, or noise or direction weight are negative.
    """

    stage: str = "end_to_end"
    objective: str = "hybrid"
    error: str = "mse"
    layer_reduction: str = "mean"
    last_block_weights: Mapping[str, float] | None = field(default_factory=lambda: LAST_BLOCK_WEIGHTS)
    end_to_end_weights: Mapping[str, float] | None = field(default_factory=lambda: END_TO_END_WEIGHTS)
    horizon: int | None = None
    input_noise_std: float = 0.0
    direction_weight: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (("stage", STAGES), ("objective", OBJECTIVES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}.")
        if self.horizon is not None and self.horizon < 1:
            raise ValueError(f"horizon={self.horizon} must be at least 1 layer; leave it out to run all of them.")
        for name in ("input_noise_std", "direction_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more.")


@dataclass
class DistillationOutput(ModelOutput):
    """Result of [`RaptorForDistillation`]; losses are float32 scalars, and what was not computed is `None`.

    Attributes:
        loss: what is minimised.
        tf, ar: teacher-forced and autoregressive part, summed over the paths, before they are mixed.
        cls, reg, patch: mean error of the token groups over all compared layers, unweighted.
        student_states: states that were compared, by layer: `L + 1` entries, state 0 the teacher's, `None` where no
            state was made. Only when asked for.
    """

    loss: torch.Tensor | None = None
    tf: torch.Tensor | None = None
    ar: torch.Tensor | None = None
    cls: torch.Tensor | None = None
    reg: torch.Tensor | None = None
    patch: torch.Tensor | None = None
    student_states: tuple[torch.Tensor | None, ...] | None = None


@dataclass(frozen=True)
class _Path:
    """Segments that are run one after the other, how their error is measured, and their share of the loss."""

    segments: list[Segment]
    error: StateError
    weight: float


class RaptorForDistillation(RaptorPreTrainedModel):
    """A Raptor with a distillation loss.

    Args:
        config: the student's configuration.
        raptor: the student itself; a new one is made when absent.
        objective: what is minimised.
        blocks: numbers of the blocks that learn; all by default. The others, the embeddings and the final norm are
            frozen.

    Raises:
        ValueError: if a block does not exist.
    """

    accepts_loss_kwargs = False  # the loss is a mean over the batch, never one over a number of items

    def __init__(
        self,
        config: RaptorConfig,
        raptor: RaptorModel | None = None,
        objective: DistillationObjective | None = None,
        blocks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(config)
        self.raptor = RaptorModel(config) if raptor is None else raptor
        self.objective = objective or DistillationObjective()
        self.loss_scale: Mapping[str, Sequence[float]] | None = None
        self.trained_blocks = tuple(range(config.num_blocks) if blocks is None else sorted(set(blocks)))
        if not self.trained_blocks or not set(self.trained_blocks) <= set(range(config.num_blocks)):
            raise ValueError(f"blocks={blocks}: this model has the blocks 0 to {config.num_blocks - 1}.")
        self.post_init()
        self.raptor.freeze_embeddings()
        for number, block in enumerate(self.raptor.blocks):
            block.requires_grad_(number in self.trained_blocks)

    def forward(
        self,
        hidden_states: Sequence[torch.Tensor],
        teacher_forcing_weight: float = 0.0,
        noise_seed: int | None = None,
        return_states: bool = False,
        rollout: bool = False,
    ) -> DistillationOutput:
        """Loss of the student against the teacher's states.

        Args:
            hidden_states: the teacher's `a_0 .. a_L`, each `(batch_size, seq_length, hidden_size)`.
            teacher_forcing_weight: lambda of the hybrid loss, 0 to 1; a part with weight 0 is not computed.
            noise_seed: seed of the input noise of this step; needed in training when there is noise.
            return_states: whether to return the states compared.
            rollout: whether to return the states of an undisturbed run from state 0 instead.

        Returns:
            a [`DistillationOutput`].

        Raises:
            ValueError: if the number of states is not `L + 1`.
        """
        if len(hidden_states) != self.config.num_hidden_layers + 1:
            raise ValueError(
                f"{len(hidden_states)} hidden states for a student of {self.config.num_hidden_layers} layers: the "
                "teacher must have as many layers as the student."
            )
        step = self._step(noise_seed)
        weights = self._part_weights(teacher_forcing_weight)
        parts: dict[str, list[torch.Tensor]] = {"tf": [], "ar": []}
        compared: list[LayerErrors] = []
        for path in self._paths():
            for part, weight in weights.items():
                if weight > 0:
                    errors = self._compare(part, step, hidden_states, path)
                    parts[part].append(path.weight * errors.reduce(self.objective.layer_reduction))
                    compared.append(errors)
        sums = {part: torch.stack(losses).sum() for part, losses in parts.items() if losses}
        loss = torch.stack([weights[part] * value for part, value in sums.items()]).sum()
        states: tuple[torch.Tensor | None, ...] | None = None
        if rollout:
            states = self._rollout(hidden_states[0])
        elif return_states:
            states = self._states_by_layer(hidden_states[0], compared)
        parts_detached = {part: value.detach() for part, value in sums.items()}
        return DistillationOutput(loss=loss, **parts_detached, **_group_means(compared), student_states=states)

    def _paths(self) -> list[_Path]:
        options, config = self.objective, self.config
        schedule = list(config.block_schedule or ())

        def error(token_weights: Mapping[str, float] | None) -> StateError:
            """Error with the objective's options and these token weights."""
            return StateError(
                config.token_layout, options.error, token_weights, self.loss_scale, options.direction_weight
            )

        if options.stage == "end_to_end":
            return [_Path(config.segments, error(options.end_to_end_weights), 1.0)]
        paths = []
        for segment in config.segments:
            if segment.block not in self.trained_blocks:
                continue
            is_last = segment.block == schedule[-1]
            applications = schedule.count(segment.block)
            share = segment.num_layers / applications if options.layer_reduction == "mean" else 1.0
            paths.append(_Path([segment], error(options.last_block_weights if is_last else None), share))
        return paths

    def _part_weights(self, teacher_forcing_weight: float) -> dict[str, float]:
        fixed = {"teacher_forcing": 1.0, "autoregressive": 0.0, "terminal": 0.0}
        weight = fixed.get(self.objective.objective, teacher_forcing_weight)
        return {"tf": weight, "ar": 1.0 - weight}

    def _compare(self, part: str, step: BlockStep, states: Sequence[torch.Tensor], path: _Path) -> LayerErrors:
        if part == "tf":
            return teacher_forcing(step, states, path.segments, path.error)
        if self.objective.objective == "terminal":
            return terminal(step, states, path.segments, path.error)
        return autoregressive(step, states, path.segments, path.error, self.objective.horizon)

    def _step(self, noise_seed: int | None) -> BlockStep:
        std = self.objective.input_noise_std if self.training else 0.0
        if std == 0.0:
            return self.raptor.apply_block
        if noise_seed is None:
            raise ValueError(f"input_noise_std={std} needs a noise_seed for every training step.")
        # One generator per block, so that a block trained apart is disturbed as it is among others.
        generators = [
            torch.Generator(self.device).manual_seed(noise_seed ^ (block << 40))
            for block in range(self.config.num_blocks)
        ]

        def step(block: int, hidden_states: torch.Tensor, depth: int | torch.Tensor) -> torch.Tensor:
            """One application of a block to a disturbed input."""
            noise = torch.randn(
                hidden_states.shape, generator=generators[block], device=hidden_states.device, dtype=hidden_states.dtype
            )
            return self.raptor.apply_block(block, hidden_states + std * noise, depth)

        return step

    def _rollout(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = [state]
        for layer in range(1, self.config.num_hidden_layers + 1):
            states.append(self.raptor.apply_layer(states[-1], layer))
        return tuple(states)

    def _states_by_layer(self, start: torch.Tensor, compared: Sequence[LayerErrors]) -> tuple[torch.Tensor | None, ...]:
        states: list[torch.Tensor | None] = [start] + [None] * self.config.num_hidden_layers
        for errors in compared:  # the autoregressive part of a path comes last and wins
            for layer, state in zip(errors.layers, errors.states, strict=True):
                states[layer] = state.detach()
        return tuple(states)


def _group_means(compared: Sequence[LayerErrors]) -> dict[str, Any]:
    means = [errors.group_mean() for errors in compared]
    names = {"cls": "cls", "registers": "reg", "patch": "patch"}
    return {
        own: torch.stack([mean[group] for mean in means]).mean() for group, own in names.items() if group in means[0]
    }
