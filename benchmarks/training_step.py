"""Time a step of stage 2 (blocks connected) beside other ways to make it, its peak memory, and the whole training loop.

The teacher's states are given: the step is forward and backward through all layers, clipping, and the optimiser. It is
reported with the last two (`step`) and without (`gradients`). bfloat16 means autocast, with float32 weights. Ours is
[`RaptorForDistillation`] with the preset `recommended` (Muon and AdamW). The contenders:

    teacher         the teacher's own 12 untied layers, trained with our objective and AdamW
    research        the step of the paper's code in its second stage: SwiGLU blocks as in `inference.py`, the student on
                    its own states alone (teacher forcing ended with stage 1), noise drawn for every application though
                    its standard deviation is 0, weighted MSE of the token groups, AdamW. That code runs in float32, so
                    with bfloat16 the float32 step stands beside ours too, as `research-float32`
    research-fused  the same without its attention weights (see `inference.py`)
    products        the matrix products of our forward pass and the two gradients of each, nothing else

Peak memory is what a step needs beyond model, optimiser and states, in its second call: on a GPU PyTorch's allocator,
on a CPU the resident set of a fresh process that makes nothing but this step (`VmHWM` on Linux, which starts anew with
a process, unlike `ru_maxrss`, which begins with its parent's).

The whole loop is [`RaptorDistillationTrainer`] on images in memory: their processing, the teacher, the step. Counted as
matrix products is the own time, by torch.profiler, of the operators in `PRODUCTS`: GEMM, the patch embedding's
convolution, fused attention forward and backward; those of Muon's orthogonalisation are among them. On a GPU it is the
time of their kernels.

    python benchmarks/training_step.py --shapes vit-b --batch-sizes 8 --output runs/training_step.json
"""

import argparse
import contextlib
import gc
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inference import MatrixProducts, forward_products, research_blocks
from PIL import Image
from timing import (
    OURS,
    SHAPES,
    Part,
    Shape,
    comparison,
    interleave,
    make_parser,
    make_teacher,
    new_report,
    parse,
    save,
    synchronize,
    text_of,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import PrinterCallback, TrainerCallback

from raptor_hf import DistillationArguments, RaptorConfig, RaptorDistillationTrainer, RaptorModel
from raptor_hf.data import ImageDataset, dinov2_processor
from raptor_hf.distillation import RaptorForDistillation
from raptor_hf.losses import StateError, autoregressive
from raptor_hf.optimizers import MuonAdamW, block_parameter_groups
from raptor_hf.tokens import Segment, TokenLayout

PRODUCTS = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|_addmm_activation|mkldnn_linear|_?(slow|mkldnn|cudnn|thnn)_conv\w*"
    r"|_?(scaled_dot_product_)?\w*(flash|efficient|cudnn|fused)\w*attention\w*)"
    r"|mkldnn::_(linear|convolution)_pointwise\w*"  # what torch.compile makes of them on a CPU
)
RESEARCH_WEIGHTS = {"cls": 0.45, "registers": 0.10, "patch": 0.45}
CLIP = 1.0
MEMORY_OF = {"ours": OURS, "ours-checkpointed": f"{OURS}, activation checkpointing", "teacher": "teacher's layers",
             "research": "research block"}  # fmt: skip


class UntiedLayers(nn.Module):
    """The teacher's own layers as a student, with our objective of stage 2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = make_teacher(shape).model.encoder.layer.requires_grad_(True)
        objective = stage_2_arguments("cpu").objective_for("end_to_end")
        self.error = StateError(TokenLayout(shape.num_register_tokens), "mse", objective.end_to_end_weights)

    def forward(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Loss of the teacher's states `a_0 .. a_L`."""
        path = [Segment(0, 0, len(self.layers))]
        return autoregressive(lambda _, state, layer: self.layers[layer - 1](state), states, path, self.error).reduce(
            "mean"
        )


class ResearchStep(nn.Module):
    """What the research code computes in a step of its second stage (arXiv 2512.19941, Sec. 3 and App. A)."""

    def __init__(self, shape: Shape, need_weights: bool) -> None:
        super().__init__()
        self.blocks, self.schedule = research_blocks(shape, need_weights), shape.schedule
        self.layout = TokenLayout(shape.num_register_tokens)

    def forward(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Loss of the teacher's states `a_0 .. a_L`."""
        state, loss = states[0], states[0].new_zeros(())
        for layer, number in enumerate(self.schedule, start=1):
            noise = torch.randn_like(state) * 0.0
            state = self.blocks[number](state + noise, state.new_full((len(state),), layer))
            for group, weight in RESEARCH_WEIGHTS.items():
                gap = self.layout.select(state, group) - self.layout.select(states[layer], group)
                loss = loss + weight * gap.square().mean() / len(self.schedule)
        return loss


class Step:
    """One optimiser step in two parts, on the same states every time.

    Args:
        module: gives the loss, or an output that has it, of the states.
        optimizer: of its parameters.
        states: the teacher's `a_0 .. a_L`, float32, each `(batch_size, seq_length, hidden_size)`.
        dtype: of autocast; float32 is none.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, states: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> None:
        self.module, self.optimizer, self.states = module, optimizer, states
        self.autocast = partial(torch.autocast, states[0].device.type, dtype, enabled=dtype != torch.float32)
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def gradients(self) -> None:
        """Loss and gradients."""
        self.optimizer.zero_grad()
        with self.autocast():
            output = self.module(self.states)
        getattr(output, "loss", output).backward()

    def update(self) -> None:
        """Clipping and the optimiser's step."""
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()


def stage_2_arguments(device: str, **options: Any) -> DistillationArguments:
    """The preset `recommended`, of stage 2, without reports and files."""
    return DistillationArguments(
        **{"output_dir": "unused", **options}, stage="end_to_end", use_cpu=device == "cpu", report_to="none",
        save_strategy="no", disable_tqdm=True, logging_steps=10**6, dataloader_pin_memory=device != "cpu",
    )  # fmt: skip


def make_step(
    name: str, shape: Shape, states: Sequence[torch.Tensor], dtype: torch.dtype, compiled: bool = False
) -> Step:
    """The step `name`: one of `MEMORY_OF`, `"research-fused"` or `"research-float32"`."""
    device = states[0].device
    module: nn.Module
    if name.startswith("ours"):
        return _our_step(name, shape, states, dtype, compiled)
    if name == "teacher":
        module = UntiedLayers(shape)
    else:
        module = ResearchStep(shape, need_weights=name != "research-fused")
    module = module.to(device).train()
    if compiled:
        module.compile()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=1e-4)
    return Step(module, optimizer, states, torch.float32 if name == "research-float32" else dtype)


def _our_step(name: str, shape: Shape, states: Sequence[torch.Tensor], dtype: torch.dtype, compiled: bool) -> Step:
    device = states[0].device
    args = stage_2_arguments(device.type)
    config = RaptorConfig.from_repeats(
        shape.repeats, hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads,
        image_size=shape.native_size, patch_size=shape.patch_size, num_register_tokens=shape.num_register_tokens,
        intermediate_size=4 * shape.hidden_size,
    )  # fmt: skip
    module = RaptorForDistillation(config, objective=args.objective_for("end_to_end")).to(device).train()
    module.loss_scale = dict.fromkeys(("all", *config.token_layout.groups), [1.0] * shape.num_layers)
    if name == "ours-checkpointed":
        module.raptor.activation_checkpointing_enable()
    if compiled:
        module.compile()
    decayed = [
        key
        for key, parameter in module.named_parameters()
        if "blocks." in key and parameter.ndim >= 2 and "depth_scale" not in key
    ]
    groups = block_parameter_groups(module, decayed, args.weight_decay or 0.0)
    return Step(module, MuonAdamW(groups, lr=1e-4), states, dtype)


def random_states(shape: Shape, batch_size: int, device: torch.device) -> list[torch.Tensor]:
    """Stand-ins of a teacher's states; what a step takes does not depend on the numbers."""
    size = (batch_size, shape.seq_length, shape.hidden_size)
    return [torch.randn(size, device=device) for _ in range(shape.num_layers + 1)]


def measure(name: str, batch_size: int, dtype_name: str, args: Any) -> list[dict[str, Any]]:
    """Rows of one configuration: for every contender the gradients alone and the whole step."""
    torch.compiler.reset()  # else one size after the other is taken for a dynamic one
    shape, dtype, device = SHAPES[name], getattr(torch, dtype_name), torch.device(args.device)
    states = random_states(shape, batch_size, device)
    labels = {"shape": name, "batch_size": batch_size, "dtype": dtype_name, "compiled": args.compile}
    ours, rows = make_step("ours", shape, states, dtype, args.compile), []
    names = list(args.against)
    if "research" in names and dtype != torch.float32:
        names.append("research-float32")
    for against in names:
        if against == "products":
            products = forward_products(shape, batch_size, embeddings=False)
            theirs: list[Part] = [MatrixProducts(products, dtype, device, backward=True), _nothing]
        else:
            step = make_step(against, shape, states, dtype, args.compile)
            theirs = [step.gradients, step.update]
        times = interleave([ours.gradients, ours.update], theirs, args.pairs, device, args.min_seconds)
        for part, what in enumerate(("gradients", "step")):
            own, other = ([pair[side][part] for pair in times] for side in (0, 1))
            rows.append(comparison(own, other, **labels, what=what, against=against))
    return rows


def _nothing() -> None:
    """Products have no optimiser."""


# ---- Peak memory ----


def step_memory(which: str, name: str, batch_size: int, dtype_name: str, device_name: str) -> int:
    """Bytes that the second step of `which` needs at most, beyond what is held before it; on a CPU this is to be the
    first thing its process does.
    """
    shape, dtype, device = SHAPES[name], getattr(torch, dtype_name), torch.device(device_name)
    step = make_step(which, shape, random_states(shape, batch_size, device), dtype)
    step.gradients()
    step.update()
    step.optimizer.zero_grad()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        before = _reset_peak()
    step.gradients()
    step.update()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")) - before


def _reset_peak() -> int:
    """Bytes resident now, from which the peak counts again, where the system lets a process say so."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process in bytes; without /proc the peak for both."""
    status = Path("/proc/self/status")
    if status.is_file():
        found = re.search(rf"^{field}:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found.group(1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_memory(name: str, batch_size: int, dtype_name: str, args: Any) -> list[dict[str, Any]]:
    """Peak memory of the steps of `MEMORY_OF`, each on a CPU in a process of its own."""
    rows = []
    for which, what in MEMORY_OF.items():
        if args.device == "cuda":
            gc.collect()
            peak = step_memory(which, name, batch_size, dtype_name, args.device)
        else:
            command = [
                sys.executable, __file__, "--memory-of", which, "--shapes", name, "--batch-sizes", str(batch_size),
                "--dtypes", dtype_name, "--threads", str(torch.get_num_threads()),
            ]  # fmt: skip
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives freed tensors back at once
            child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            peak = json.loads(child.stdout)
        rows.append({"shape": name, "batch_size": batch_size, "dtype": dtype_name, "what": what, "bytes": peak})
    return rows


# ---- The whole loop ----


class Profile(TrainerCallback):
    """Profiles whole rounds of the loop (data, teacher, step), from the end of a warm-up step to the end of the last.

    Attributes:
        seconds: of wall clock.
        operators: own seconds by operator, on the GPU if there is one.
    """

    def __init__(self, warmup: int, device: torch.device) -> None:
        self.warmup, self.device, self.seconds = warmup, device, 0.0
        self.operators: dict[str, float] = {}
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = profile(activities=activities)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts, or stops and sums."""
        if state.global_step == self.warmup:
            synchronize(self.device)
            self.profiler.start()
            self.seconds = -time.perf_counter()
        elif state.global_step == state.max_steps:
            synchronize(self.device)
            self.seconds += time.perf_counter()
            self.profiler.stop()
            field = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            averages = self.profiler.key_averages()
            self.operators = {event.key: getattr(event, field) / 1e6 for event in averages}


def product_seconds(operators: dict[str, float]) -> dict[str, float]:
    """The operators that are matrix products, those that took any time."""
    return {name: seconds for name, seconds in operators.items() if seconds > 0 and PRODUCTS.fullmatch(name)}


def measure_loop(name: str, batch_size: int, dtype_name: str, args: Any) -> dict[str, Any]:
    """Share of the training loop's time in matrix products, over `args.loop_steps` steps after a first one."""
    shape, device = SHAPES[name], torch.device(args.device)
    teacher = make_teacher(shape)
    teacher.image_processor = dinov2_processor(shape.image_size)
    rng, callback = np.random.default_rng(0), Profile(1, device)
    pictures = [Image.fromarray(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)) for _ in range(4 * batch_size)]
    with tempfile.TemporaryDirectory() as folder:
        options = stage_2_arguments(
            args.device, output_dir=folder, max_steps=1 + args.loop_steps, per_device_train_batch_size=batch_size,
            bf16=dtype_name == "bfloat16", loss_scale_images=max(2, batch_size), torch_compile=args.compile,
        )  # fmt: skip
        student = RaptorModel.from_teacher(teacher, shape.repeats)
        trainer = RaptorDistillationTrainer(student, teacher, options, ImageDataset(pictures), callbacks=[callback])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    counted = product_seconds(callback.operators)
    others = {operator: seconds for operator, seconds in callback.operators.items() if operator not in counted}
    return {
        "shape": name, "batch_size": batch_size, "dtype": dtype_name, "compiled": args.compile,
        "steps": args.loop_steps, "seconds_per_step": callback.seconds / args.loop_steps,
        "share": sum(counted.values()) / callback.seconds, "products_s": counted,
        "longest_others_s": dict(sorted(others.items(), key=lambda item: -item[1])[:12]),
    }  # fmt: skip


def step_parser() -> argparse.ArgumentParser:
    """The options of this script."""
    parser = make_parser(__doc__)
    parser.add_argument("--loop-steps", type=int, default=6, help="profiled steps of the whole loop, 0 for none")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--memory-of", choices=MEMORY_OF, default=None, help="print the bytes of this step alone")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the tables, writes the file, and returns 0."""
    args = parse(step_parser(), argv)
    if args.memory_of is not None:
        print(step_memory(args.memory_of, args.shapes[0], args.batch_sizes[0], args.dtypes[0], args.device))
        return 0
    report = new_report("training_step", args, argv)
    parts: list[tuple[str, Callable[..., Any]]] = [("rows", measure)]
    if not args.no_memory:
        parts.append(("memory", measure_memory))
    if args.loop_steps > 0:
        parts.append(("loop", lambda *configuration: [measure_loop(*configuration)]))
    for key, function in parts:
        for name in args.shapes:
            for batch_size in args.batch_sizes:
                for dtype_name in args.dtypes:
                    report[key] += function(name, batch_size, dtype_name, args)
                    save(report, args.output)
    print(text_of([report]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
