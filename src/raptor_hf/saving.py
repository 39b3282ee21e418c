"""What leaves a distillation: checkpoints hold the wrapper, all else the student alone, with processor and card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from torch import nn
from transformers import Trainer
from transformers.utils import logging

from .cards import write_card
from .checkpoints import mark_world_size
from .hub import push_folder
from .modeling_raptor import RaptorModel
from .results import trainer_results, write_json
from .safeguards import FiniteLoss, broken_loss, saving
from .streams import PixelStream

STREAM_FILE = "stream.json"
logger = logging.get_logger(__name__)

PUSH_OPTIONS = ("token", "private", "revision", "create_pr", "license", "overwrite_card")


class StudentSavingTrainer(Trainer):
    """The saving half of [`RaptorDistillationTrainer`], whose `raptor` is the student in the wrapped model."""

    raptor: RaptorModel
    args: Any  # a DistillationArguments, whose fields the library declares as optional
    _saving_checkpoint = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._finite_loss = FiniteLoss()
        super().__init__(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As the Trainer's; never one of a student that is not finite any more, and a full disk says what is left."""
        self._stop_if_broken([parameter for parameter in model.parameters() if parameter.requires_grad])
        self._saving_checkpoint = True
        step, folder = self.state.global_step, str(self.args.output_dir)
        try:
            with saving(folder, step, self.args.world_size):
                if self.args.should_save:
                    checkpoint = Path(folder) / f"checkpoint-{step}"
                    mark_world_size(checkpoint, self.args.world_size)
                    if self.args.fast_resume and isinstance(self.train_dataset, PixelStream):
                        write_json(checkpoint / STREAM_FILE, self.train_dataset.state_dict())
                super()._save_checkpoint(model, trial)
        finally:
            self._saving_checkpoint = False

    def _stop_if_broken(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Ends the run, on all processes together, if a loss or one of `parameters` is not finite."""
        if self._finite_loss.is_broken(lambda count: self.accelerator.reduce(count, reduction="sum"), parameters):
            raise broken_loss(str(self.args.output_dir), self.state.global_step, self.args.world_size)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Makes the repository that the run is pushed to. A Hub that cannot be reached now does not stop a training:
        the push comes at the end, and can be repeated.
        """
        try:
            super().init_hf_repo(token)
        except (OSError, HfHubHTTPError, LocalTokenNotFoundError) as error:
            logger.warning(f"The Hub repository could not be made ({error}); training goes on without it.")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """A checkpoint holds the wrapper; everything else is the student alone, with its image processor."""
        if self._saving_checkpoint:
            super()._save(output_dir, state_dict)
            return
        if not self.args.should_save:
            return
        if state_dict is not None:
            state_dict = {name.removeprefix("raptor."): value for name, value in state_dict.items()}
        output_dir = output_dir or self.args.output_dir
        self.raptor.save_pretrained(output_dir, state_dict=state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(output_dir)

    def create_model_card(self, license: str | None = None, model_name: str | None = None, **kwargs: Any) -> None:
        """Saves the student in `args.output_dir/model`, with a model card of what was measured.

        Args:
            license: licence of the model, such as `apache-2.0`.
            model_name: its name; by default that of the repository or of the output folder.
            kwargs: not used; the library's other facts about a model are taken from the run itself.
        """
        self.save_model(str(self._model_folder), _internal_call=True)  # which would push, otherwise
        if self.is_world_process_zero():
            write_card(self._model_folder, trainer_results(self, model_name or self._name), license=license)

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs: Any) -> Any:
        """Uploads the student, its image processor and its card to `args.hub_model_id`, by default named as
        `args.output_dir`, and nothing else of the run. They are saved in `args.output_dir/model`.

        Args:
            commit_message: of the commit.
            kwargs: `token`, `private`, `revision`, `create_pr`, `license`, `overwrite_card`, as [`push_folder`]; the
                library's other arguments (`blocking`, `tags`, ...) are taken and not used.

        Returns:
            the commit; `None` on all processes but the first.

        Raises:
            ValueError, HfHubHTTPError: as [`push_folder`].
        """
        self.save_model(str(self._model_folder), _internal_call=True)
        if not self.is_world_process_zero():
            return None
        args = self.args
        options = {"token": args.hub_token, "private": args.hub_private_repo, "revision": args.hub_revision}
        options.update({name: value for name, value in kwargs.items() if name in PUSH_OPTIONS})
        return push_folder(
            self._model_folder, self._repo_id, commit_message=commit_message or "End of training",
            results=trainer_results(self, self._name), **options,
        )  # fmt: skip

    @property
    def _model_folder(self) -> Path:
        return Path(str(self.args.output_dir)) / "model"

    @property
    def _repo_id(self) -> str:
        return self.args.hub_model_id or Path(str(self.args.output_dir)).resolve().name

    @property
    def _name(self) -> str:
        return self._repo_id.split("/")[-1]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Checkpoints stay where they are: they hold the wrapper and the optimiser."""
