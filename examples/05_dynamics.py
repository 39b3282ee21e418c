r"""How the tokens of a ViT move over depth: speed, ranks, spectra, and perturbations that fade.

    python examples/05_dynamics.py facebook/dinov2-with-registers-small photos/
    python examples/05_dynamics.py runs/quickstart/teacher digits

`raptor-hf dynamics` measures the same and more, for several models, with a report.
"""

import argparse

import torch
from torch.utils.data import DataLoader

from raptor_hf import Teacher
from raptor_hf.data import PixelDataset, collate_pixels, load_images
from raptor_hf.dynamics import DynamicsEstimator
from raptor_hf.interventions import sensitivity_curve


def main() -> None:
    """Measures a model and prints what its token groups do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a ViT: folder or Hub id")
    parser.add_argument("dataset", help="folder of images, Hub dataset id, or digits")
    parser.add_argument("--max_images", type=int, default=64)
    args = parser.parse_args()

    teacher = Teacher.from_pretrained(args.model)
    images = load_images(args.dataset, split="test", max_images=args.max_images)
    pixels = PixelDataset(images, teacher.image_processor)
    batches = list(DataLoader(pixels, batch_size=16, collate_fn=collate_pixels))

    estimator = DynamicsEstimator(teacher.layout)
    for batch in batches:
        estimator.update(teacher.hidden_states(batch["pixel_values"]))
    dynamics = estimator.result()
    for name, group in dynamics.groups.items():
        fastest = int(group.angular_speed.mean.argmax()) + 1
        print(f"{name}: {group.angular_speed.mean.mean():.3f} rad per layer, fastest in layer {fastest}")
        print(f"  effective rank of the updates {group.effective_rank[0]:.1f} -> {group.effective_rank[-1]:.1f}")
        print(f"  {int((group.modes.eigenvalues.abs() < 1).sum())} of {group.modes.rank} eigenvalues inside the circle")

    curve = sensitivity_curve(teacher, batches[:1], eps=0.1, layers=[0, teacher.num_layers // 2])
    for name, values in curve.distance.items():
        first, middle = values[name]
        print(f"{name} perturbed by a tenth: 1 - cos at the end {first:.1e} from state 0, {middle:.1e} from the middle")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
