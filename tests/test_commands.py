"""The commands from the outside: real folders in, tables, files and exit codes out."""

import json
import re
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForDepthEstimation, AutoModelForSemanticSegmentation

import dense_sets
from raptor_hf import RaptorModel, dense_probes, probes, study_report
from raptor_hf import report as report_module
from raptor_hf.cli import COMMANDS, main
from raptor_hf.cli.report import merge_results
from raptor_hf.data import dinov2_processor
from vit_families import FAMILIES, make_model

TABLE_FORMATS = ("md", "csv", "json", "tex")


@pytest.fixture
def photos(tmp_path):
    """An ImageFolder of two classes, red and blue, 12 images to train on and 6 to test."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 3)):
        for channel, name in ((0, "red"), (2, "blue")):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 90, (40, 36, 3), dtype=np.uint8)
                pixels[..., channel] += 160
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "photos"


@pytest.fixture
def teacher(make_teacher, tmp_path):
    folder = tmp_path / "teacher"
    made = make_teacher(num_hidden_layers=4, image_size=28)
    made.model.save_pretrained(folder)
    dinov2_processor(28).save_pretrained(folder)
    return folder


@pytest.fixture
def distilled(teacher, photos, tmp_path, capsys):
    code = main([
        "distill", str(teacher), "--dataset", str(photos), "--num-blocks", "2", "--max-steps", "4",
        "--per-device-train-batch-size", "4", "--use-cpu", "--output-dir", str(tmp_path / "run"),
    ])  # fmt: skip
    assert code == 0, capsys.readouterr().err
    return tmp_path / "run"


def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"raptor-hf {command}" in capsys.readouterr().out


def test_phases(teacher, photos, tmp_path, capsys):
    argv = [
        "phases",
        str(teacher),
        "--dataset",
        str(photos),
        "--num-blocks",
        "2,4",
        "--output-dir",
        str(tmp_path / "p"),
    ]
    assert main(argv) == 0
    assert "1 | 2 | 3 | 4" in capsys.readouterr().out
    record = results(tmp_path / "p")["phases"]
    assert list(record["partitions"]) == ["2", "4"]
    assert np.allclose(np.diag(record["similarity"]), 1)
    assert (tmp_path / "p" / "report.html").is_file()
    assert main(argv) == 2
    assert "holds a finished run; give --overwrite" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0
    assert main([*argv, "--overwrite", "--dataset", str(tmp_path / "none")]) == 2  # which costs no finished run
    assert results(tmp_path / "p")["phases"] == record


def test_phases_of_every_family(photos, tmp_path, capsys):
    for family in FAMILIES:
        make_model(family).save_pretrained(tmp_path / "vits" / family)
        dinov2_processor(32).save_pretrained(tmp_path / "vits" / family)
    names = [str(tmp_path / "vits" / family) for family in FAMILIES]
    flags = ["--dataset", str(photos), "--num-blocks", "2", "--output-dir", str(tmp_path / "p")]
    assert main(["phases", *names[:1], *flags, *(word for name in names[1:] for word in ("--teacher", name))]) == 0
    assert "vit_mae" in capsys.readouterr().out
    records = results(tmp_path / "p")["phases_of"]
    assert list(records) == list(FAMILIES)
    for family, record in records.items():
        groups = FAMILIES[family][1]
        assert list(record["groups"]) == ["all", *groups]  # what a family lacks is absent
        assert all(np.shape(matrix) == (3, 3) for matrix in record["groups"].values())
        assert json.loads((tmp_path / "p" / family / "phases.json").read_text())["partitions"] == record["partitions"]
    page = (tmp_path / "p" / "report.html").read_text()
    assert "Similarity of layers by token group" in page
    assert (tmp_path / "p" / "figures" / "similarity_groups.png").is_file()
    argv = ["distill", names[1], "--dataset", str(photos), "--num-blocks", "2"]
    steps = [
        "--phases",
        str(tmp_path / "p" / "dinov2_with_registers"),
        "--max-steps",
        "1",
        "--per-device-train-batch-size",
        "4",
        "--use-cpu",
    ]
    assert main([*argv, *steps, "--output-dir", str(tmp_path / "d")]) == 0, capsys.readouterr().err
    schedule = records["dinov2_with_registers"]["partitions"]["2"]["block_schedule"]
    assert results(tmp_path / "d")["models"][0]["block_schedule"] == schedule
    assert main(["phases", *names[:2], *flags, "--overwrite", "--revision", "main"]) == 2
    assert "--revision main is of one model, got 2; run them one by one." in capsys.readouterr().err
    assert main(["phases", names[0], str(tmp_path / "none"), *flags, "--overwrite"]) == 2
    assert "none' cannot be loaded" in capsys.readouterr().err
    assert results(tmp_path / "p")["phases_of"] == records


def test_distill_makes_a_model_a_report_and_a_table(distilled, capsys):
    model = RaptorModel.from_pretrained(distilled / "model")
    assert model.config.num_blocks == 2
    written = results(distilled)
    assert written["models"][0]["training"]["steps"] == 4
    assert written["dataset"] == {"name": "photos", "num_train": 12, "num_test": 6, "num_skipped": 0}
    assert written["phases"]["num_images"] == 12
    assert "raptor-k2" in (distilled / "report.html").read_text()


def test_distill_goes_on_after_an_interruption_and_says_when_it_is_done(distilled, teacher, photos, capsys):
    before = (distilled / "model" / "model.safetensors").read_bytes()
    argv = [
        "distill", str(teacher), "--dataset", str(photos), "--num-blocks", "2", "--max-steps", "4",
        "--per-device-train-batch-size", "4", "--use-cpu", "--output-dir", str(distilled),
    ]  # fmt: skip
    assert main(argv) == 2
    assert "finished run" in capsys.readouterr().err
    (distilled / "results.json").unlink()  # as if it had been stopped after training
    assert main(argv) == 0
    assert (distilled / "model" / "model.safetensors").read_bytes() == before


def test_blocks_trained_apart_are_the_joint_stage_one(teacher, photos, tmp_path, capsys):
    common = ["distill", str(teacher), "--dataset", str(photos), "--repeats", "2", "2", "--max-steps", "8",
              "--seed", "3", "--per-device-train-batch-size", "4", "--use-cpu", "--input-noise-std", "0.1"]  # fmt: skip
    joint = tmp_path / "joint"
    assert main([*common, "--output-dir", str(joint)]) == 0
    runs = [str(tmp_path / name) for name in ("b0", "b1")]
    for block, run in enumerate(runs):
        assert main([*common, "--blocks", str(block), "--output-dir", run]) == 0
    assembled = tmp_path / "assembled"
    assert main(["assemble", *runs, "--output-dir", str(assembled)]) == 0
    assert "| " + runs[1] in capsys.readouterr().out
    expected = RaptorModel.from_pretrained(joint / "blocks" / "model").state_dict()
    own = RaptorModel.from_pretrained(assembled / "model").state_dict()
    assert all(torch.equal(own[name], expected[name]) for name in expected)
    start = [argument for argument in common if argument not in ("--repeats", "2")]
    assert main([*start, "--student", str(assembled / "model"), "--output-dir", str(tmp_path / "on")]) == 0
    expected = RaptorModel.from_pretrained(joint / "end_to_end" / "model").state_dict()
    own = RaptorModel.from_pretrained(tmp_path / "on" / "model").state_dict()
    assert all(torch.equal(own[name], expected[name]) for name in expected)
    assert results(tmp_path / "on")["models"][0]["training"]["steps"] == 6
    assert AutoImageProcessor.from_pretrained(assembled / "model").crop_size["height"] == 28

    for argv, message in (
        (["assemble", runs[0]], "block 1 of 2 is in none of the runs; train it with distill --blocks 1."),
        (["assemble", *runs, runs[1]], f"block 1 was trained in {runs[1]}"),
        (["assemble", runs[0], str(joint)], "trained all blocks"),
        (["assemble", runs[0], str(tmp_path / "nothing")], "holds no finished run"),
        (["assemble"], "no runs given"),
        (["assemble", *runs, "--output-dir", str(assembled)], "exists; give another --output_dir"),
        ([*common, "--student", str(assembled / "model")], "--student and --repeats exclude each other"),
        ([*common, "--blocks", "0", "--stage", "end_to_end"], "--blocks trains in stage 1"),
        ([*common, "--blocks", "7", "--output-dir", str(tmp_path / "b7")], "has the blocks 0 to 1"),
    ):
        assert main(argv) == 2
        assert message in capsys.readouterr().err


def test_distill_from_a_file_with_repeats_or_earlier_phases(teacher, photos, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"teacher: {teacher}\ndataset: {photos}\nrepeats: [3, 1]\nmax_steps: 2\nlearning_rate: 3e-4\n"
        f"per_device_train_batch_size: 4\nuse_cpu: yes\neval_split: null\noutput_dir: {tmp_path / 'a'}\n"
    )
    assert main(["distill", str(config), "--init", "last", "--adapter-rank", "2"]) == 0, capsys.readouterr().err
    entry = results(tmp_path / "a")["models"][0]
    assert RaptorModel.from_pretrained(tmp_path / "a" / "model").config.adapter_rank == 2
    assert entry["block_schedule"] == [0, 0, 0, 1]
    assert entry["training"]["student"]["init"] == "last"
    assert entry["training"]["learning_rate"] == 3e-4
    assert main(["phases", str(teacher), "--dataset", str(photos), "--output-dir", str(tmp_path / "p")]) == 0
    argv = ["distill", str(config), "--output-dir", str(tmp_path / "b"), "--phases", str(tmp_path / "p")]
    assert main(argv) == 2
    assert "--repeats and --phases exclude each other" in capsys.readouterr().err
    config.write_text(config.read_text().replace("repeats: [3, 1]\n", "num_blocks: 3\n"))
    assert main(argv) == 0
    found = results(tmp_path / "p")["phases"]["partitions"]["3"]["block_schedule"]
    assert results(tmp_path / "b")["models"][0]["block_schedule"] == found
    assert main([*argv, "--overwrite", "--num-blocks", "1"]) == 2
    assert "has no partition into 1 blocks, only 2, 3, 4" in capsys.readouterr().err


def test_probe_of_teacher_raptor_and_random(distilled, teacher, photos, tmp_path, capsys):
    argv = [
        "probe", str(distilled / "model"), "--reference", str(teacher), "--random-baseline", "--dataset", str(photos),
        "--augment", "none", "--learning-rate", "0.1", "--num-epochs", "30", "--batch-size", "4", "--num-seeds", "2",
        "--output-dir", str(tmp_path / "probe"), "--table",
    ]  # fmt: skip
    assert main(argv) == 0, capsys.readouterr().err
    assert re.search(r"\| random +\| 4 layers +\|", capsys.readouterr().out)
    assert {path.name for path in (tmp_path / "probe").glob("table.*")} == {f"table.{x}" for x in TABLE_FORMATS}
    outcome = results(tmp_path / "probe")["probe"]["results"]
    assert set(outcome) == {"teacher", "raptor-k2", "random"}
    assert outcome["teacher"]["mean"] == 1.0
    assert outcome["raptor-k2"]["retained"] == outcome["raptor-k2"]["mean"]
    assert outcome["raptor-k2"]["num_scored"] == 6
    assert len(outcome["random"]["accuracy"]) == 2

    card = distilled / "model" / "README.md"
    assert "Not yet run." in card.read_text()
    command = ["card", str(distilled / "model"), "--license", "mit", "--probe"]
    assert main([*command, str(tmp_path / "probe")]) == 0, capsys.readouterr().err
    assert "Not yet run." not in card.read_text()
    assert f"| raptor-k2 | {100 * outcome['raptor-k2']['mean']:.2f} ± " in card.read_text()
    assert "Linear probe on photos" in card.read_text()
    assert str(tmp_path) not in card.read_text()
    assert main([*command, str(distilled)]) == 2
    assert "the probe results are of nothing, not of raptor-k2 or model" in capsys.readouterr().err
    assert main(["card", str(tmp_path)]) == 2
    assert main(["card"]) == 2
    assert main(["card", str(distilled / "model"), "--license", "My licence"]) == 2
    assert "license='My licence' in the model card is no identifier" in capsys.readouterr().err


def test_dynamics_of_teacher_and_raptor(teacher, distilled, photos, tmp_path, capsys):
    command = ["dynamics", str(teacher), str(distilled / "model"), "--dataset", str(photos), "--image-size", "28"]
    command += ["--output-dir", str(tmp_path / "flow"), "--num-perturbed", "2", "--num-blocks", "2"]
    assert main(command) == 0, capsys.readouterr().err
    assert "Spectral radius" in capsys.readouterr().out
    part = results(tmp_path / "flow")["dynamics"]
    assert list(part["models"]) == ["teacher", "raptor-k2"]
    assert part["models"]["raptor-k2"]["num_images"] == 6
    assert part["angles"]["raptor-k2"]["cls"][0] == pytest.approx(0, abs=1e-6)  # the embeddings are the teacher's
    assert part["angles"]["raptor-k2"]["cls"][-1] > 1e-3
    pictures = {path.stem for path in (tmp_path / "flow" / "figures").iterdir()}
    measures = {f"dynamics_{key}" for key in (*study_report.FLOW_CURVES, "eigenvalues", "angles")}
    paths = {f"dynamics_{kind}_{name}" for kind in study_report.FLOW_PATHS for name in ("teacher", "raptor-k2")}
    assert pictures == measures | paths
    assert "The flow in numbers" in (tmp_path / "flow" / "report.html").read_text()
    assert main(command) == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--no-ranks", "--model", str(teacher)]) == 0
    assert not (tmp_path / "flow" / "figures" / "dynamics_stable_rank.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no model given"),
        (["x", "--epsilon", "0"], "--epsilon 0.0 is not a size"),
        (["x", "--epsilon-scale", "log"], "--epsilon_scale log is unknown"),
        (["x", "--rank", "0"], "--rank 0 is below 1"),
        (["x", "--num-perturbed", "-1"], "--num_perturbed -1 is negative"),
    ],
)
def test_dynamics_options_out_of_range(options, message, capsys):
    assert main(["dynamics", *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_study_of_swaps(teacher, distilled, photos, tmp_path, capsys):
    command = ["study", "swaps", str(teacher), str(distilled / "model"), "--dataset", str(photos), "--image-size", "28"]
    command += ["--output-dir", str(tmp_path / "swaps"), "--num-blocks", "2", "--max-swaps", "3", "--batch-size", "4"]
    assert main(command) == 0, capsys.readouterr().err
    table = capsys.readouterr().out
    assert "Retained" in table
    assert " inter " in table
    records = results(tmp_path / "swaps")["studies"]["swaps"]
    assert list(records) == ["teacher", "raptor-k2"]
    for record in records.values():
        assert 0 <= record["base_accuracy"] <= 1
        assert all(effect["accuracy"] is not None for effect in record["effects"])
    pictures = {path.stem for path in (tmp_path / "swaps" / "figures").iterdir()}
    assert pictures == {f"swaps_{key}_{name}" for key in ("accuracy", "cosine") for name in ("teacher", "raptor-k2")}
    assert "Layers replaced" in (tmp_path / "swaps" / "report.html").read_text()
    bare = [*command, "--overwrite", "--head", "none", "--repeats", "1", "3", "--num-swapped", "1"]
    assert main(bare) == 0
    record = results(tmp_path / "swaps")["studies"]["swaps"]["teacher"]
    assert (record["phases"], record["base_accuracy"]) == ([1, 3], None)
    left = {path.stem for path in (tmp_path / "swaps" / "figures").iterdir()}
    assert left == {"swaps_cosine_teacher", "swaps_cosine_raptor-k2"}


def test_study_of_recurrence(teacher, distilled, photos, tmp_path, capsys):
    command = ["study", "recurrence", str(teacher), str(distilled / "model"), "--dataset", str(photos)]
    command += ["--output-dir", str(tmp_path / "rec"), "--num-blocks", "2", "--num-iterations", "4"]
    command += ["--image-size", "28", "--num-pushed", "2"]
    assert main(command) == 0, capsys.readouterr().err
    assert "At rest" in capsys.readouterr().out
    records = results(tmp_path / "rec")["studies"]["recurrence"]
    assert list(records) == ["teacher", "raptor-k2"]
    for record in records.values():
        assert len(record["iterations"]) == len(record["spans"]["phases"]) == 2
        assert all(effect["accuracy"] is not None for effect in record["lengths"])
        assert len(record["exponents"]["exponents"]) == 3
    pictures = {path.stem for path in (tmp_path / "rec" / "figures").iterdir()}
    kinds = ("lengths_accuracy", "lengths_cosine", *(f"iterations_{key}" for key in study_report.ITERATION_CURVES))
    expected = {f"{kind}_{name}" for kind in kinds for name in ("teacher", "raptor-k2")}
    assert pictures == expected | {"exponents", "exponent_shares"}
    assert "Phases as one map" in (tmp_path / "rec" / "report.html").read_text()
    assert main([*command, "--overwrite", "--head", "none", "--repeats", "1", "2"]) == 2
    assert "are not runs of layers that make up all 4 of this model" in capsys.readouterr().err
    assert results(tmp_path / "rec")["studies"]["recurrence"] == records  # what fails replaces nothing
    bare = [*command, "--overwrite", "--head", "none", "--num-exponents", "0", "--repeats", "1", "3"]
    assert main(bare) == 0
    record = results(tmp_path / "rec")["studies"]["recurrence"]["teacher"]
    assert (record["phases"], record["base_accuracy"], record["exponents"]) == ([1, 3], None, None)
    assert "lengths_accuracy_teacher" not in {path.stem for path in (tmp_path / "rec" / "figures").iterdir()}


def test_study_of_complexity(teacher, distilled, photos, tmp_path, capsys):
    command = ["study", "complexity", str(teacher), str(distilled / "model"), "--dataset", str(photos)]
    command += ["--output-dir", str(tmp_path / "bits"), "--image-size", "28", "--num-pairs", "1"]
    assert main(command) == 0, capsys.readouterr().err
    assert "Schedule bits" in capsys.readouterr().out
    record = results(tmp_path / "bits")["studies"]["complexity"]
    assert record["name"] == "teacher"
    assert record["models"]["raptor-k2"]["error"]["num_images"] == 6
    assert record["models"]["raptor-k2"]["lengths"]["bfloat16"]["num_blocks"] == 2
    pictures = {path.stem for path in (tmp_path / "bits" / "figures").iterdir()}
    assert pictures == {"complexity_epsilon", "complexity_relative"}
    assert "Length of the blocks" in (tmp_path / "bits" / "report.html").read_text()
    command[2:4] = [str(distilled / "model"), str(teacher)]
    assert main([*command, "--overwrite"]) == 2
    assert "is a Raptor; name its teacher first" in capsys.readouterr().err
    assert results(tmp_path / "bits")["studies"]["complexity"] == record  # a wrong command replaces nothing


def test_study_of_paradigms(teacher, distilled, photos, tmp_path, capsys):
    command = ["study", "paradigms", str(teacher), "--dataset", str(photos), "--image-size", "28", "--num-blocks", "2"]
    command += ["--output-dir", str(tmp_path / "ways"), "--distill-steps", "2", "--distill-batch-size", "4"]
    assert main(command) == 0, capsys.readouterr().err
    assert "teacher forcing" in capsys.readouterr().out
    record = results(tmp_path / "ways")["studies"]["paradigms"]
    assert [run["paradigm"] for run in record["runs"]] == ["terminal", "teacher forcing", "autoregressive", "hybrid"]
    assert all(0 <= run["accuracy"] <= 1 for run in record["runs"])
    assert {path.stem for path in (tmp_path / "ways" / "figures").iterdir()} == {"paradigms_r2"}
    assert "Raptors of each paradigm" in (tmp_path / "ways" / "report.html").read_text()
    assert main(["study", "paradigms", str(distilled / "model"), "--output-dir", str(tmp_path / "other")]) == 2
    assert "name a ViT for a study of paradigms" in capsys.readouterr().err


def test_study_of_partitions(teacher, distilled, photos, tmp_path, capsys):
    command = ["study", "partitions", str(teacher), "--dataset", str(photos), "--image-size", "28", "--num-blocks", "2"]
    command += ["--output-dir", str(tmp_path / "cuts"), "--distill-steps", "2", "--distill-batch-size", "4"]
    command += ["--num-random", "1"]
    assert main(command) == 0, capsys.readouterr().err
    assert "max-cut" in capsys.readouterr().out
    record = results(tmp_path / "cuts")["studies"]["partitions"]
    assert [run["scheme"] for run in record["runs"]["2"]] == ["max-cut", "random contiguous", "random"]
    assert all(0 <= run["accuracy"] <= 1 for run in record["runs"]["2"])
    assert list(record["scores"]) == ["1", "2", "3", "4"]
    pictures = {path.stem for path in (tmp_path / "cuts" / "figures").iterdir()}
    assert pictures == {"partition_scores", "partitions_accuracy", "partitions_r2"}
    (tmp_path / "cuts" / "results.json").unlink()  # as if it had been interrupted
    assert main([*command[:-1], "2"]) == 0
    assert len(results(tmp_path / "cuts")["studies"]["partitions"]["runs"]["2"]) == 5
    (tmp_path / "cuts" / "results.json").unlink()
    assert main([*command, "--distill-steps", "3"]) == 2
    assert "holds runs with distill_steps=2, not 3" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--distill-steps", "0"]) == 0
    assert results(tmp_path / "cuts")["studies"]["partitions"]["runs"] == {}
    assert main([*command, "--overwrite", "--num-blocks", "5"]) == 2
    assert "--num_blocks 5 of a ViT of 4 layers" in capsys.readouterr().err
    assert results(tmp_path / "cuts")["studies"]["partitions"]["runs"] == {}  # still there
    assert main(["study", "partitions", str(distilled / "model"), "--output-dir", str(tmp_path / "other")]) == 2
    assert "is a Raptor, whose phases are given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["partitions", "x", "y"], "distils one teacher"),
        (["swaps", "x", "--num-blocks", "2", "3"], "a study of swaps is of one partition"),
        (["recurrence", "x", "--num-iterations", "3"], "--num_iterations 3 is below 4"),
        (["paradigms", "x", "--distill-steps", "0"], "leaves a study of paradigms nothing to measure"),
        (["complexity", "x"], "name the teacher, then Raptors"),
        (["recurrence", "x", "--ridge", "0"], "--ridge 0.0 is not a size"),
        (["partitions", "x", "--num-blocks", "0"], "give numbers of at least 1"),
        (["partitions", "x", "--num-seeds", "0"], "--num_seeds 0 is below 1"),
        (["partitions", "x", "--distill-steps", "-1"], "--distill_steps -1 is negative"),
        (["swaps"], "no model given"),
        (["x", "--study", "naps"], "--study naps is unknown"),
        (["swaps", "x", "--head", "own"], "--head own is unknown"),
        (["swaps", "x", "--num-swapped", "0"], "replace at least one layer"),
        (["swaps", "x", "--max-swaps", "0"], "--max_swaps 0 is below 1"),
    ],
)
def test_study_options_out_of_range(options, message, capsys):
    assert main(["study", *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_damaged_images_are_named_or_left_out_and_counted(teacher, photos, tmp_path, capsys):
    (photos / "train" / "red" / "0.png").write_bytes(b"not an image")
    argv = ["probe", str(teacher), "--dataset", str(photos), "--augment", "none", "--num-epochs", "1"]
    assert main([*argv, "--output-dir", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "0.png" in error
    assert "Traceback" not in error
    assert main([*argv, "--output-dir", str(tmp_path / "b"), "--on-error", "skip"]) == 0
    assert results(tmp_path / "b")["probe"]["results"]["teacher"]["num_skipped"] == 1


def test_a_probe_that_streams(teacher, photos, tmp_path, capsys):
    argv = [
        "probe",
        str(teacher),
        "--dataset",
        str(photos),
        "--augment",
        "none",
        "--num-epochs",
        "2",
        "--batch-size",
        "4",
    ]
    assert main([*argv, "--output-dir", str(tmp_path / "a")]) == 0
    assert main([*argv, "--output-dir", str(tmp_path / "b"), "--streaming"]) == 0
    assert "photos (train): a stream" in capsys.readouterr().err
    values = [results(tmp_path / run)["probe"]["results"]["teacher"] for run in "ab"]
    assert values[0] == values[1]
    assert values[0]["num_scored"] == 6
    assert main([*argv[:4], "--streaming"]) == 2
    assert "give --augment none with it" in capsys.readouterr().err
    assert main(["probe", "depth", *argv[1:], "--streaming"]) == 2
    assert "--streaming is an option of classification" in capsys.readouterr().err


def test_damaged_pairs_are_named_or_left_out_and_counted(teacher, tmp_path, capsys):
    data = dense_sets.make_ade(tmp_path)
    path = data / "images" / "validation" / "ADE_val_00000001.jpg"
    path.write_bytes(path.read_bytes()[:99])
    argv = ["probe", "segmentation", str(teacher), "--dataset", str(data), "--num-epochs", "1", "--image-size", "28"]
    assert main([*argv, "--output-dir", str(tmp_path / "a")]) == 2
    assert f"{path} cannot be read" in capsys.readouterr().err
    assert main([*argv, "--output-dir", str(tmp_path / "b"), "--on-error", "skip", "--seeds", "1"]) == 0
    entry = results(tmp_path / "b")["probe"]["results"]["teacher"]
    assert (entry["num_scored"], entry["num_skipped"]) == (1, 1)
    assert "(test): 1 images, 1 damaged ones left out" in capsys.readouterr().err
    assert main([*argv, "--on-error", "ignore"]) == 2
    assert "--on_error ignore is unknown; use raise or skip" in capsys.readouterr().err


def test_distill_from_shards_that_are_streamed(teacher, photos, tmp_path, capsys):
    folder = tmp_path / "shards"
    folder.mkdir()
    for split in ("train", "test"):
        for part in range(2):
            with tarfile.open(folder / f"{split}-{part}.tar", "w") as shard:
                for number, path in enumerate(sorted((photos / split).rglob("*.png"))[part::2]):
                    shard.add(path, f"{part}{number}.png")
    argv = ["distill", str(teacher), "--dataset", str(folder), "--streaming", "--shuffle-buffer", "4", "--num-blocks",
            "2", "--phase-images", "6", "--per-device-train-batch-size", "4", "--use-cpu",
            "--output-dir", str(tmp_path / "run")]  # fmt: skip
    assert main(argv) == 2
    assert "--max_steps" in capsys.readouterr().err
    assert main([*argv, "--max-steps", "8"]) == 0
    written = results(tmp_path / "run")
    assert written["dataset"] == {"name": "shards", "num_train": None, "num_test": None, "num_skipped": 0}
    assert written["phases"]["num_images"] == 6
    assert written["models"][0]["fidelity"]["num_images"] == 6
    assert written["models"][0]["training"]["steps"] == 8
    assert "shards, a stream to train" in (tmp_path / "run" / "model" / "README.md").read_text()
    fast = [*argv[:-1], str(tmp_path / "fast"), "--max-steps", "8", "--fast-resume", "--max-images", "4"]
    assert main([*fast, "--dataloader-num-workers", "1"]) == 2
    assert "fast_resume needs dataloader_num_workers=0" in capsys.readouterr().err
    assert main([*fast, "--save-steps", "1"]) == 0
    assert results(tmp_path / "fast")["models"][0]["fidelity"]["num_images"] == 4
    assert (tmp_path / "fast" / "end_to_end" / "checkpoint-6" / "stream.json").is_file()


def test_distil_from_states_on_disk(teacher, photos, tmp_path, capsys):
    argv = ["distill", str(teacher), "--dataset", str(photos), "--num-blocks", "2", "--max-steps", "4", "--use-cpu",
            "--per-device-train-batch-size", "4", "--activation-cache", str(tmp_path / "cache")]  # fmt: skip
    assert main([*argv, "--output-dir", str(tmp_path / "first")]) == 0
    shown = capsys.readouterr().err
    assert f"activation cache {tmp_path / 'cache'}: 12 images, 3.46e-05 GB" in shown
    assert "states of the teacher: " in shown
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert set(written) == {"cache.json", "states-00000.safetensors"}
    assert main([*argv, "--output-dir", str(tmp_path / "second")]) == 0
    assert "states of the teacher: " not in capsys.readouterr().err  # they are read
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == written
    first, second = (results(tmp_path / name)["models"][0]["fidelity"] for name in ("first", "second"))
    assert first == second
    for options, message in (
        (["--image-size", "42"], "was made with image_size=[28, 28], this run has [42, 42]"),
        (["--max-images", "4"], "was made with num_images=12, this run has 4"),
        (["--streaming"], "an activation cache of a PixelStream"),
    ):
        assert main([*argv, "--output-dir", str(tmp_path / "third"), *options]) == 2
        assert message in capsys.readouterr().err
    other = [*argv, "--activation-cache-gb", "1e-6", "--output-dir", str(tmp_path / "third")]
    other[other.index("--activation-cache") + 1] = str(tmp_path / "other")
    assert main(other) == 2
    assert "would take 3.46e-05 GB, more than the 1e-06 GB it may" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()
    assert not (tmp_path / "other").exists()


def test_a_damaged_image_met_in_training_is_one_line_and_the_run_goes_on(teacher, photos, tmp_path, capsys):
    damaged = photos / "train" / "red" / "0.png"
    content = damaged.read_bytes()
    argv = ["distill", str(teacher), "--dataset", str(photos), "--repeats", "2", "2", "--max-steps", "6",
            "--save-steps", "1", "--loss-scale", "none", "--per-device-train-batch-size", "4", "--use-cpu"]  # fmt: skip
    argv += ["--dataloader-num-workers", "1"]
    assert main([*argv, "--output-dir", str(tmp_path / "straight")]) == 0
    damaged.write_bytes(b"not an image")
    capsys.readouterr()
    assert main([*argv, "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("raptor-hf distill: error: image ")
    assert "0.png" in error
    assert "on_error='skip'" in error
    damaged.write_bytes(content)
    assert main([*argv, "--output-dir", str(tmp_path / "run")]) == 0
    one, other = (tmp_path / name / "model" / "model.safetensors" for name in ("straight", "run"))
    assert one.read_bytes() == other.read_bytes()


def test_a_loss_that_is_no_number_is_one_line_and_exit_code_1(teacher, photos, tmp_path, capsys):
    argv = ["distill", str(teacher), "--dataset", str(photos), "--repeats", "2", "2", "--max-steps", "20", "--use-cpu",
            "--block-optimizer", "adamw", "--per-device-train-batch-size", "4", "--learning-rate", "1e30",
            "--max-grad-norm", "0", "--output-dir", str(tmp_path / "run")]  # fmt: skip
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert "raptor-hf distill: error: the loss or a weight is not a finite number any more" in error
    assert "Traceback" not in error


def test_report_joins_runs(distilled, tmp_path, capsys):
    assert (distilled / "model" / "results.json").is_file()  # the model's own excerpt is not another run
    assert main(["report", str(distilled), "--output-dir", str(tmp_path / "page")]) == 0
    output = capsys.readouterr()
    assert "raptor-k2" in output.out
    assert "two models" not in output.err
    assert (tmp_path / "page" / "report.html").is_file()
    assert "run/model" in (tmp_path / "page" / "report.html").read_text()  # named from where the page lies
    assert main(["report", str(distilled), "--output-dir", str(tmp_path / "page"), "--table"]) == 2
    assert "no probe in these results; run raptor-hf probe first" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "no results.json in" in capsys.readouterr().err


def test_merging_collects_models_and_probes_and_keeps_the_first(capsys):
    one = {"title": "a", "models": [{"name": "k2"}], "probe": {"dataset": "x", "results": {"teacher": 1}}}
    two = {
        "title": "b", "models": [{"name": "k2"}, {"name": "k3"}],
        "probe": {"dataset": "x", "results": {"teacher": 2, "k3": 3}, "protocol": {"num_epochs": 1}},
    }  # fmt: skip
    merged = merge_results([one, two])
    assert merged["title"] == "a"
    assert [model["name"] for model in merged["models"]] == ["k2", "k3"]
    assert merged["probe"]["results"] == {"teacher": 1, "k3": 3}
    assert "probes" not in merged
    told = capsys.readouterr().err
    assert "two models are called k2" in told
    assert "teacher was probed twice on x" in told
    assert "probes on x differ in their protocol" in told
    three = {"probe": {"dataset": "y", "results": {"k3": 4}}}
    assert [probe["results"] for probe in merge_results([one, three])["probes"]] == [{"teacher": 1}, {"k3": 4}]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["phases"], "no teacher given"),
        (["probe"], "no model given"),
        (["report"], "no run folder given"),
        (["probe", "x", "--preset", "best"], "--preset best is unknown; use one of recommended, paper, research"),
        (["probe", "x", "--random-baseline"], "--random_baseline needs --reference"),
        (["distill", "/no/such/teacher", "--use-cpu"], "cannot be loaded"),
        (["distill", "x", "--preset", "best"], "preset"),
        (["distill", "x", "--learning-rate", "fast"], "learning_rate"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_of_several_processes_that_train_alone_is_refused(teacher, photos, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["distill", str(teacher), "--dataset", str(photos), "--output-dir", str(tmp_path / "r")]
    assert main(argv) == 2
    assert "accelerate launch --multi_gpu --num_processes 2" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["segmentation", "depth"])
def test_dense_probes(task, teacher, distilled, tmp_path, capsys):
    make = dense_sets.make_ade if task == "segmentation" else dense_sets.make_nyu_csv
    data = make(tmp_path / "set")
    argv = ["probe", task, str(distilled / "model"), "--reference", str(teacher), "--dataset", str(data), "--seeds",
            "2", "--save-heads", "--num-epochs", "2", "--batch-size", "4", "--image-size", "42", "--learning-rate",
            "1e-2", "--max-images", "3", "--output-dir", str(tmp_path / "probe")]  # fmt: skip
    options = [] if task == "segmentation" else ["--crop", "none", "--silog", "code", "--align", "paper"]
    assert main([*argv, *options]) == 0
    shown = capsys.readouterr()
    metric, heading = ("mean_iou", "mIoU") if task == "segmentation" else ("rmse", "RMSE (m)")
    assert re.search(rf"\| model +\| +{re.escape(heading)} +\|", shown.out)
    assert "(train): 3 images" in shown.err
    probe = results(tmp_path / "probe")["probe"]
    assert (probe["metric"], probe["protocol"]["num_epochs"]) == (metric, 2)
    assert probe["protocol"]["image_size"] == ([42, 42] if task == "segmentation" else [42, 56])
    entry = probe["results"]["raptor-k2"]
    assert len(entry[metric]) == len(entry["details"]) == 2
    assert (entry["size"]["num_blocks"], entry["size"]["num_layers"]) == (2, 4)
    assert entry["size"]["image_size"] == ([42, 42] if task == "segmentation" else [42, 56])
    assert entry["size"]["flops"] > probe["results"]["teacher"]["size"]["flops"]  # those of the depth scales
    auto = AutoModelForSemanticSegmentation if task == "segmentation" else AutoModelForDepthEstimation
    for label in ("raptor-k2", "teacher"):
        kept = auto.from_pretrained(tmp_path / "probe" / "heads" / label)
        assert kept.config.num_hidden_layers == 4
    assert entry["mean"] == pytest.approx(sum(entry[metric]) / 2)
    whole = probe["results"]["teacher"]["mean"]
    share = entry["mean"] / whole if task == "segmentation" else whole / entry["mean"]
    assert entry["retained"] == pytest.approx(share)
    capsys.readouterr()
    head = ["--head", str(tmp_path / "probe" / "heads" / "raptor-k2"), "--overwrite"]
    again = ["--seeds", "1", "--num-epochs", "0", "--num-pictures", "0", "--output-dir", str(tmp_path / "kept")]
    assert main([*argv, *options, *head, *again]) == 0
    kept = results(tmp_path / "kept")["probe"]
    assert kept["results"]["raptor-k2"][metric] == entry[metric][:1]  # the saved head, unchanged
    assert kept["protocol"]["head"] == "raptor-k2"
    capsys.readouterr()
    assert main(["report", str(tmp_path / "probe"), "--table", "--output-dir", str(tmp_path / "page")]) == 0
    assert re.search(r"\| teacher +\| 4 layers +\|", capsys.readouterr().out)
    assert {path.name for path in (tmp_path / "page").glob("table.*")} == {f"table.{x}" for x in TABLE_FORMATS}
    report = (tmp_path / "probe" / "report.html").read_text()
    assert f"{heading.split(' (')[0]} of each run" in report
    assert "All metrics of the first head" in report
    kind = "Masks" if task == "segmentation" else "Depths"
    assert f"{kind} that the first head predicts" in report
    assert f"{kind} that the first head predicts" in (tmp_path / "page" / "report.html").read_text()
    for folder in ("probe", "page"):
        assert (tmp_path / folder / "figures" / "predictions.png").is_file()
    assert not (tmp_path / "kept" / "predictions").exists()
    assert "predictions" not in kept
    assert main(["card", str(distilled / "model"), "--probe", str(tmp_path / "probe")]) == 0
    card = (distilled / "model" / "README.md").read_text()
    assert f"| Model | {'mIoU (%)' if task == 'segmentation' else 'RMSE (m)'} | Retained |" in card
    assert f"type: {metric}" in card
    assert main([*argv, "--output-dir", str(tmp_path / "again"), "--dataset", str(tmp_path)]) == 2
    assert "is not laid out as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "flow"], "--task flow is unknown; use one of classification, segmentation, depth"),
        (["--crop", "none"], "--crop is an option of dense probes; leave it out of a classification"),
    ],
)
def test_probe_options_that_do_not_fit(options, message, teacher, photos, tmp_path, capsys):
    argv = ["probe", str(teacher), "--dataset", str(photos), "--output-dir", str(tmp_path / "probe")]
    assert main([*argv, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "distill", "probe"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_folder_without_whole_weights_is_named(command, sharded, distilled, teacher, tmp_path, capsys):
    folder = distilled / "model"
    (folder / "model.safetensors").unlink()
    if sharded:
        (folder / "pytorch_model_fsdp_0").mkdir()
    argv = {
        "export": ["export", str(folder), "--output-dir", str(tmp_path / "out")],
        "distill": [
            "distill",
            str(teacher),
            "--student",
            str(folder),
            "--use-cpu",
            "--output-dir",
            str(tmp_path / "out"),
        ],
        "probe": ["probe", str(folder), "--output-dir", str(tmp_path / "out")],
    }[command]
    assert main(argv) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{folder} has no model.safetensors" in error
    assert ("only the shards of a run on several processes, pytorch_model_fsdp_0/" in error) == sharded


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_an_interrupted_probe_goes_on_by_seed(task, teacher, distilled, photos, tmp_path, monkeypatch, capsys):
    data = photos if task == "classification" else dense_sets.make_ade(tmp_path / "set", train=3, validation=2)
    argv = ["probe", task, str(distilled / "model"), "--reference", str(teacher), "--dataset", str(data), "--num-seeds",
            "2", "--num-epochs", "1", "--batch-size", "4", "--image-size", "28", "--augment", "none"]  # fmt: skip
    module = probes if task == "classification" else dense_probes
    trained, original = [], module.train_head

    def train_head(*args, **kwargs):
        if len(trained) == fail_after:
            raise KeyboardInterrupt
        trained.append(kwargs["description"])
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "train_head", train_head)
    fail_after = -1
    assert main([*argv, "--output-dir", str(tmp_path / "straight")]) == 0
    trained.clear()
    fail_after = 3
    assert main([*argv, "--output-dir", str(tmp_path / "broken")]) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "broken" / "results.json").exists()
    fail_after = -1
    assert main([*argv, "--output-dir", str(tmp_path / "broken")]) == 0
    assert trained == ["teacher: seed 0", "teacher: seed 1", "raptor-k2: seed 0", "raptor-k2: seed 1"]
    straight, broken = (results(tmp_path / name)["probe"]["results"] for name in ("straight", "broken"))
    assert straight == broken
    assert not (tmp_path / "broken" / "progress.json").exists()


def test_progress_of_other_settings_is_not_used(teacher, photos, tmp_path, monkeypatch):
    argv = ["probe", str(teacher), "--dataset", str(photos), "--num-seeds", "1", "--image-size", "28"]
    argv += ["--augment", "none", "--output-dir", str(tmp_path / "probe")]
    seeds = []
    original = probes.train_head
    monkeypatch.setattr(probes, "train_head", lambda *a, **k: seeds.append(1) or original(*a, **k))
    write = report_module.write_report
    monkeypatch.setattr("raptor_hf.cli.probe.write_report", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main([*argv, "--num-epochs", "1"]) == 130
    assert (tmp_path / "probe" / "progress.json").is_file()
    assert not (tmp_path / "probe" / "results.json").exists()
    monkeypatch.setattr("raptor_hf.cli.probe.write_report", write)
    assert main([*argv, "--num-epochs", "2"]) == 0
    assert len(seeds) == 2
