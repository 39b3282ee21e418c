"""The timing benchmarks: what their numbers mean, that contenders do the work they stand for, and what is written.

Nothing here depends on how long anything takes.
"""

import dataclasses
import importlib
import itertools
import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from raptor_hf import RaptorModel, Teacher

FOLDER = Path(__file__).parents[1] / "benchmarks"
DATA = Path(__file__).parent / "data"
TRY = ["--shapes", "tiny", "--quick", "--pairs", "3", "--min-seconds", "0", "--batch-sizes", "2"]
CPU = torch.device("cpu")


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("timing")


@pytest.fixture
def inference(timing):
    return importlib.import_module("inference")


@pytest.fixture
def training_step(timing):
    return importlib.import_module("training_step")


def binomial_tail(count, fewer_than):
    return sum(math.comb(count, number) for number in range(fewer_than)) / 2**count


def test_the_interval_of_nine_values_is_the_second_to_the_eighth(timing):
    assert timing.median_interval([9, 1, 8, 2, 7, 3, 6, 4, 5]) == (2, 8, 1 - 2 * 10 / 2**9)
    assert timing.median_interval([3.0]) == (3.0, 3.0, 0.0)


@pytest.mark.parametrize("count", range(6, 40))
def test_the_interval_covers_95_percent_and_no_narrower_one_does(timing, count):
    low, high, coverage = timing.median_interval(list(range(1, count + 1)))
    assert low + high == count + 1
    assert coverage == pytest.approx(1 - 2 * binomial_tail(count, low))
    assert 1 - 2 * binomial_tail(count, low) >= 0.95 > 1 - 2 * binomial_tail(count, low + 1)


def test_a_row_holds_the_median_of_the_ratios_and_not_the_ratio_of_the_medians(timing):
    row = timing.comparison([1.0, 4.0, 3.0], [2.0, 2.0, 6.0], shape="tiny", against="products")
    assert (row["ratio"], row["ours_s"], row["against_s"]) == (0.5, 3.0, 2.0)
    assert (row["low"], row["high"], row["coverage"]) == (0.5, 2.0, 0.75)
    assert row["ratios"] == [0.5, 2.0, 0.5]
    assert row["outside_products"] == 1 - 2.0  # their time as a share of ours is 2, 1/2, 2
    assert "outside_products" not in timing.comparison([1.0], [1.0], against="teacher")


def test_contenders_take_turns_after_both_have_warmed_up(timing):
    order = []
    timing.interleave([lambda: order.append("A")], [lambda: order.append("B")], 4, CPU, min_seconds=1e-12)
    assert "".join(order) == "AABB" + "ABABABAB"


def test_a_part_is_timed_from_the_start_of_the_call(timing, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    parts = [lambda: next(clock), lambda: None]  # the clock itself ticks once per look
    assert timing.sample(parts, 5, CPU) == [2.0, 3.0]


def test_fewer_than_nine_pairs_are_only_for_a_try(timing, capsys):
    parser = timing.make_parser("text")
    for options in (["--pairs", "8"], ["--batch-sizes", "0"]):
        with pytest.raises(SystemExit) as stop:
            timing.parse(parser, options)
        assert stop.value.code == 2
        assert options[0] in capsys.readouterr().err
    assert timing.parse(parser, ["--pairs", "8", "--quick"]).pairs == 8
    assert timing.parse(parser, []).pairs == 9


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_research_block_computes_what_the_research_code_computed(inference, need_weights):
    names = {"attn": "attention", "ls1.gamma": "scale1", "ls2.gamma": "scale2", "mlp.0": "fc1", "mlp.2": "fc2",
             "t_proj.0": "depth1", "t_proj.2": "depth2"}  # fmt: skip
    with safe_open(DATA / "research_raptor3_swiglu.safetensors", "pt") as file:
        state = {name.removeprefix("state.blocks."): file.get_tensor(name) for name in file.keys() if "state." in name}
        trajectory = next(file.get_tensor(name) for name in file.keys() if "state." not in name)
    for old, new in names.items():
        state = {name.replace(f".{old}", f".{new}"): value for name, value in state.items()}
    blocks = torch.nn.ModuleList(inference.ResearchBlock(32, 4, need_weights) for _ in range(3)).double()
    blocks.load_state_dict(state)
    states = trajectory[:, 0]
    for layer in range(1, 13):
        depth = states.new_full((2,), layer)
        states = blocks[0 if layer <= 7 else 1 if layer <= 10 else 2](states, depth)
        torch.testing.assert_close(states, trajectory[:, layer], rtol=1e-9, atol=1e-9)


def flops_of_calls(products):
    return sum(2 * left.numel() * right.shape[-1] for _, left, right, _ in products.calls)


def depth_scale_flops(shape):
    return shape.num_layers * 2 * (16 + 16 * 3 * shape.hidden_size)


def test_the_products_are_those_of_the_forward_pass(timing, inference):
    shape = timing.SHAPES["tiny"]
    model = RaptorModel.from_teacher(timing.make_teacher(shape), shape.repeats)
    model.set_attn_implementation("eager")  # whose products the counter sees
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(2, 3, shape.image_size, shape.image_size))
    products = inference.forward_products(shape, 2)
    counted = counter.get_total_flops() - depth_scale_flops(shape)
    assert sum(product.flops for product in products) == counted
    assert flops_of_calls(inference.MatrixProducts(products, torch.float32, CPU)) == counted


def test_the_products_of_a_step_are_those_of_its_forward_and_backward_pass(timing, inference, training_step):
    shape = timing.SHAPES["tiny"]
    step = training_step.make_step("ours", shape, training_step.random_states(shape, 2, CPU), torch.float32)
    step.module.raptor.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        step.gradients()
    products = inference.MatrixProducts(
        inference.forward_products(shape, 2, embeddings=False), torch.float32, CPU, backward=True
    )
    gradients_of_depth_scale = counter.get_total_flops() - flops_of_calls(products) - depth_scale_flops(shape)
    assert 0 <= gradients_of_depth_scale <= 2 * depth_scale_flops(shape)


def test_the_products_are_products(timing, inference):
    shape = dataclasses.replace(timing.SHAPES["tiny"], repeats=(1,))  # layers share buffers
    products = inference.MatrixProducts(inference.forward_products(shape, 2), torch.float64, CPU, backward=True)
    products()
    for _, left, right, output in products.calls:
        torch.testing.assert_close(output, left @ right)


def test_a_step_learns_with_our_objective_and_every_contender_has_a_gradient(timing, training_step):
    shape = timing.SHAPES["tiny"]
    states = training_step.random_states(shape, 2, CPU)
    for name in ("ours", "ours-checkpointed", "teacher", "research", "research-fused", "research-float32"):
        step = training_step.make_step(name, shape, states, torch.bfloat16)
        before = [parameter.detach().clone() for parameter in step.parameters]
        step.gradients()
        assert all(torch.isfinite(parameter.grad).all() for parameter in step.parameters), name
        step.update()
        changed = [not torch.equal(old, new) for old, new in zip(before, step.parameters, strict=True)]
        assert any(changed), name
        blocks = (
            getattr(step.module, "layers", None) or getattr(step.module, "blocks", None) or step.module.raptor.blocks
        )
        assert len(blocks) == 3, name


def test_our_student_is_the_one_that_a_teacher_gives(timing, training_step):
    shape = timing.SHAPES["tiny"]
    ours = training_step.make_step("ours", shape, training_step.random_states(shape, 1, CPU), torch.float32)
    given = RaptorModel.from_teacher(timing.make_teacher(shape), shape.repeats)
    sizes = {name: value.shape for name, value in given.state_dict().items()}
    assert {name: value.shape for name, value in ours.module.raptor.state_dict().items()} == sizes


def test_inference_writes_what_it_measured(inference, timing, tmp_path, capsys):
    output = tmp_path / "results" / "inference.json"
    arguments = [*TRY, "--against", *timing.AGAINST, "--output", str(output)]
    assert inference.main(arguments) == 0
    report = json.loads(output.read_text())
    assert report["command"].startswith("python benchmarks/inference.py --shapes tiny")
    assert str(tmp_path) not in output.read_text()
    assert report["environment"]["torch"] == torch.__version__
    assert report["environment"]["torch_threads"] == torch.get_num_threads()
    assert report["settings"]["pairs"] == 3
    assert report["settings"]["shapes"]["tiny"]["hidden_size"] == 32
    made = [(row["dtype"], row["against"]) for row in report["rows"]]
    assert made == list(itertools.product(("float32", "bfloat16"), timing.AGAINST))
    for row in report["rows"]:
        assert len(row["ratios"]) == row["pairs"] == 3
        assert row["ratio"] == sorted(row["ratios"])[1]
        assert row["low"] <= row["ratio"] <= row["high"]
        assert ("outside_products" in row) == (row["against"] == "products")
    printed = capsys.readouterr().out
    assert timing.main([str(output)]) == 0
    assert capsys.readouterr().out == printed
    assert printed.count("\n") == 2 + len(report["rows"])


def test_training_writes_steps_and_loop(training_step, tmp_path, capsys):
    output = tmp_path / "training.json"
    assert training_step.main([*TRY, "--no-memory", "--loop-steps", "2", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    made = [(row["dtype"], row["against"], row["what"]) for row in report["rows"]]
    against = {"float32": ["teacher", "research", "products"]}
    against["bfloat16"] = [*against["float32"], "research-float32"]
    assert made == [(d, a, w) for d, names in against.items() for a in names for w in ("gradients", "step")]
    assert report["memory"] == []
    for loop, dtype in zip(report["loop"], ("float32", "bfloat16"), strict=True):
        assert (loop["dtype"], loop["steps"]) == (dtype, 2)
        whole = 2 * loop["seconds_per_step"]
        assert loop["share"] == pytest.approx(sum(loop["products_s"].values()) / whole)
        assert 0 < loop["share"] < 1
        assert {"aten::mm", "aten::addmm"} <= set(loop["products_s"])
        assert any("attention" in name for name in loop["products_s"])
        assert any("backward" in name for name in loop["products_s"])
    assert "in matrix products" in capsys.readouterr().out


def test_steps_that_read_states_stand_beside_steps_that_compute_them(timing, monkeypatch, tmp_path, capsys):
    benchmark = importlib.import_module("activation_cache")
    runs = []
    original = Teacher.hidden_states
    monkeypatch.setattr(Teacher, "hidden_states", lambda self, pixels: runs.append(1) or original(self, pixels))

    def interleave(first, second, pairs, device, min_seconds):
        counts = []
        for parts in (first, second):
            before = len(runs)
            for part in (*parts, *parts):
                part()
            counts.append(len(runs) - before)
        assert counts == [0, 2]  # ours reads, the other computes
        return timing.interleave(first, second, pairs, device, min_seconds)

    monkeypatch.setattr(benchmark, "interleave", interleave)
    assert benchmark.main([*TRY, "--dtypes", "float32", "--output", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["what"], row["against"]) for row in rows] == [("blocks", "computed"), ("end_to_end", "computed")]
    assert all(row["bytes_per_image"] == 2 * 4 * 9 * 32 for row in rows)
    assert "tiny, batch 2, float32, blocks: 0.00 MB per image" in capsys.readouterr().out


def test_dynamics_are_timed_beside_the_passes_that_they_measure(timing, monkeypatch, tmp_path, capsys):
    benchmark = importlib.import_module("dynamics")
    teacher = timing.make_teacher(timing.SHAPES["tiny"])
    batch = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    assert [len(part()) for part in benchmark.passes(teacher, batch, None)] == [4]  # the states
    for ranks in (False, True):
        update, result = benchmark.passes(teacher, batch, ranks)
        update()
        update()
        found = result().to_dict()
        assert found["num_images"] == 6
        assert ("effective_rank" in found["groups"]["cls"]) is ranks
    pairs = [([2.0, 2.5], [1.0])] * 3
    monkeypatch.setattr(benchmark, "interleave", lambda *_: pairs)
    command = [*TRY, "--dtypes", "float32", "--images", "20", "--output", str(tmp_path / "out.json")]
    assert benchmark.main(command) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["flow", "flow and ranks"]
    for row in rows:  # ten batches of two, and one result
        assert (row["ours_s"], row["against_s"], row["ratio"]) == (20.5, 10.0, 2.05)
        assert (row["result_s"], row["images"], row["against"]) == (0.5, 20, "forward passes")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(FOLDER))
    assert benchmark.main([*TRY, "--dtypes", "float32"]) == 0
    assert "Seconds for 200 images" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        benchmark.main([*TRY, "--images", "0"])
    assert "--images 0: give at least one" in capsys.readouterr().err


def test_memory_is_that_of_a_process_of_its_own(training_step, monkeypatch):
    monkeypatch.setattr(training_step, "MEMORY_OF", {"ours": "Raptor"})
    args = training_step.step_parser().parse_args(TRY)
    (row,) = training_step.measure_memory("tiny", 64, "float32", args)
    saved = 64 * 9 * 32 * 4 * 3 * 12  # bytes of the states that the backward pass needs of 3 layers, at least 12 each
    assert saved <= row["bytes"] <= 10 * saved
    assert {key: row[key] for key in ("shape", "batch_size", "what")} == {
        "shape": "tiny", "batch_size": 64, "what": "Raptor"
    }  # fmt: skip


def test_matrix_products_are_told_from_other_operators(training_step):
    counted = """aten::mm aten::addmm aten::bmm aten::baddbmm aten::mkldnn_convolution aten::_slow_conv2d_forward
    aten::cudnn_convolution aten::_scaled_dot_product_flash_attention_for_cpu aten::_flash_attention_forward
    aten::_scaled_dot_product_flash_attention_for_cpu_backward aten::_efficient_attention_backward
    aten::_scaled_dot_product_cudnn_attention mkldnn::_linear_pointwise""".split()
    others = [
        "aten::mul",
        "aten::add_",
        "aten::linear",
        "aten::layer_norm",
        "aten::gelu",
        "aten::_to_copy",
        "aten::addcmul_",
    ]
    operators = dict.fromkeys([*counted, *others], 1.0)
    assert sorted(training_step.product_seconds(operators)) == sorted(counted)
    assert training_step.product_seconds({"aten::mm": 0.0}) == {}


@pytest.fixture
def gpu_script(tmp_path):
    """Runs gpu.sh with a stand-in for Python that writes down what it is called with and makes the file asked for."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit "$DEVICES"\nshift_to_name=$(basename "$1")\n'
        f'echo "$shift_to_name $*" >> {tmp_path}/calls\n'
        'while [ $# -gt 0 ]; do [ "$1" = --output ] && echo "{}" > "$2"; shift; done\n'
    )
    python.chmod(0o755)

    def run(devices, **options):
        environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out"), "DEVICES": devices, **options}
        done = subprocess.run(["sh", FOLDER / "gpu.sh"], env=environment, capture_output=True, text=True, check=False)
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_the_gpu_script_stops_without_a_device(gpu_script):
    done, calls = gpu_script("1")
    assert (done.returncode, done.stdout, calls) == (2, "", [])
    assert done.stderr.count("\n") == 1
    assert "needs a CUDA device" in done.stderr


def test_the_gpu_script_runs_both_benchmarks_eager_and_compiled(gpu_script, training_step, timing):
    done, calls = gpu_script("0")
    assert done.returncode == 0, done.stderr
    *runs, last = [call.split() for call in calls]
    assert last[0] == "timing.py"
    assert len(last) == 2 + len(runs)  # name, path, and each run's file
    seen = set()
    for name, _, *options in runs:
        assert (FOLDER / name).is_file()
        parser = training_step.step_parser() if name == "training_step.py" else timing.make_parser(None)
        args = parser.parse_args(options)
        assert (args.device, args.dtypes, args.shapes, args.quick) == ("cuda", ["bfloat16"], ["vit-b"], False)
        seen |= {(name, batch, args.compile) for batch in args.batch_sizes}
    assert seen == set(itertools.product(("inference.py", "training_step.py"), (8, 32, 64), (False, True)))


def test_the_gpu_script_leaves_out_what_it_has_no_time_for(gpu_script):
    done, calls = gpu_script("0", LIMIT="3")
    assert (done.returncode, calls) == (1, [])
    assert "no time" in done.stderr
    assert "nothing was measured" in done.stderr
