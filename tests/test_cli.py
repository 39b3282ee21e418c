"""The command line's core: exit codes, options from flags and files, what is printed where."""

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from huggingface_hub.dataclasses import strict
from transformers import TrainingArguments

import raptor_hf
from raptor_hf import cli
from raptor_hf.cli import console
from raptor_hf.cli.parsing import parse, require_world_size
from raptor_hf.cli.values import UsageError, argument, read_config, to_bool

ROOT = Path(raptor_hf.__file__).parent
COMMAND_FILES = [p.stem for p in sorted((ROOT / "cli").glob("[a-z]*.py")) if "\ndef main(" in p.read_text()]


class Shade(Enum):
    DARK = "dark"
    LIGHT = "light"


@dataclass
class Options:
    """One field of every kind that a command may declare."""

    learning_rate: float = field(default=1e-3, metadata={"help": "peak, reached after 10% of the run"})
    max_steps: int = -1
    run_name: str | None = field(default=None, metadata={"aliases": ["-n"]})
    output_dir: Path = Path("out")
    mode: Literal["both", "blocks"] = "both"
    shade: Shade | str = "dark"
    layer: int | Literal["last"] = "last"
    ratio: float | int = 1
    repeats: list[int] = field(default_factory=lambda: [7, 3, 2])
    sizes: tuple[int, ...] | None = None
    names: list[str] = field(default_factory=list)
    tasks: list[Literal["depth", "segmentation"]] = field(default_factory=list)
    targets: str | list[str] | None = "all"
    extra: dict[str, Any] | None = None
    extra_or_file: dict | str | None = None
    seen: str | bool = "no"
    opaque: SimpleNamespace | None = None
    nested: list[list[int]] | None = None


@dataclass
class Switches:
    """Booleans of every default."""

    starts_off: bool = False
    starts_on: bool = True
    is_unset: bool | None = None
    is_set: bool | None = True


@dataclass
class Needed:
    teacher: str = field(metadata={"help": "the teacher to copy"})
    size: int = field(default=2)

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size={self.size} is too small;\n  use 1 or more.")


@dataclass
class Arguments(TrainingArguments):
    """A Trainer's arguments with governed fields redeclared."""

    learning_rate: float | None = field(default=None, metadata={"help": "peak rate, by default 5% of something"})
    bf16: bool | None = None
    preset: Literal["recommended", "paper"] = "recommended"


def options(*argv: str, types: tuple = (Options,), **kwargs) -> Any:
    """The first dataclass that `parse` fills."""
    return parse("try", types, argv, **kwargs)[0]


@pytest.fixture
def error(capsys):
    """Runs `parse`, which must exit with 2 after one line on stderr; returns that line."""

    def run(*argv: str, types: tuple = (Options,), **kwargs) -> str:
        with pytest.raises(SystemExit) as caught:
            parse("try", types, argv, **kwargs)
        out, line = capsys.readouterr()
        assert caught.value.code == 2
        assert out == ""
        assert line.startswith("raptor-hf try: error: ")
        assert line.count("\n") == 1
        return line

    return run


@pytest.fixture
def config(tmp_path):
    """Writes a configuration file and returns its path."""

    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def command(monkeypatch):
    """Installs a function as the command `try-it`, module `raptor_hf.cli.try_it`."""

    def install(main) -> None:
        monkeypatch.setitem(cli.COMMANDS, "try-it", "a command of the tests")
        monkeypatch.setitem(sys.modules, "raptor_hf.cli.try_it", SimpleNamespace(main=main))

    return install


def raiser(error: BaseException):
    def main(argv: list[str]) -> int:
        raise error

    return main


# The program


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_overview_lists_every_command_with_its_summary(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for name, summary in cli.COMMANDS.items():
        assert [line for line in out.splitlines() if line.split()[:1] == [name] and line.endswith(f"  {summary}")]


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"raptor-hf {raptor_hf.__version__}\n"


def test_module_starts_the_program():
    run = subprocess.run([sys.executable, "-m", "raptor_hf", "--help"], capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert run.stdout.startswith("usage: raptor-hf COMMAND")
    assert run.stderr == ""


def test_overview_imports_nothing_heavy():
    code = (
        "import sys, types\n"
        "package = types.ModuleType('raptor_hf')\n"
        f"package.__path__, package.__version__ = [{str(ROOT)!r}], '0'\n"
        "sys.modules['raptor_hf'] = package\n"
        "from raptor_hf.cli import main\n"
        "main(['--help'])\n"
        "sys.exit(str({'torch', 'transformers', 'huggingface_hub', 'rich', 'yaml'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr == "set()\n"


@pytest.mark.parametrize("stem", COMMAND_FILES)
def test_each_command_file_is_listed_and_answers_help(stem, capsys):
    name = stem.replace("_", "-")
    assert name in cli.COMMANDS
    assert cli.main([name, "--help"]) == 0
    assert f"raptor-hf {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "advice"), [("distil", "did you mean 'distill'?"), ("--distill", "did you"), ("xyz", "choose from quick")]
)
def test_unknown_command_suggests_one(name, advice, capsys):
    assert cli.main([name]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith(f"raptor-hf: error: unknown command '{name}'; {advice}")
    assert line.count("\n") == 1


@pytest.mark.parametrize("code", [0, 1, 2])
def test_command_gets_its_arguments_and_its_code_is_returned(code, command):
    seen = []
    command(lambda argv: seen.append(argv) or code)
    assert cli.main(["try-it", "--x", "1"]) == code
    assert seen == [["--x", "1"]]


def test_arguments_default_to_those_of_the_process(command, monkeypatch):
    command(lambda argv: len(argv))
    monkeypatch.setattr(sys, "argv", ["raptor-hf", "try-it", "a", "b"])
    assert cli.main() == 2


@strict
@dataclass
class Strict:
    size: int = 1

    def validate_size(self):
        if self.size < 1:
            raise ValueError("size must be\npositive")


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (raiser(ValueError("k=5 exceeds\n  the 4 layers;\nuse less")), "k=5 exceeds the 4 layers; use less"),
        (raiser(ValueError()), "ValueError"),
        (raiser(UsageError("wrong")), "wrong"),
        (lambda argv: Strict(size="a"), "Validation error for field 'size': TypeError: Field 'size' expected int"),
        (lambda argv: Strict(size=0), "validator 'validate_size': ValueError: size must be positive"),
        (raiser(ModuleNotFoundError("needs x; pip install 'raptor-hf[analysis]'")), "needs x; pip install"),
        (raiser(ImportError('pip install "raptor_hf[analysis]"')), 'pip install "raptor_hf[analysis]"'),
        (lambda argv: parse("try-it", [Options], ["--max_steps", "many"]), "invalid int value: 'many'"),
        (lambda argv: parse("try-it", [Needed], ["--teacher=t", "--size=0"]), "size=0 is too small; use 1 or more."),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(main, text, command, capsys):
    command(main)
    assert cli.main(["try-it"]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith("raptor-hf try-it: error: ")
    assert text in line
    assert line.count("\n") == 1


def test_traceback_of_wrong_input_on_demand(command, monkeypatch):
    command(raiser(ValueError("deep")))
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    with pytest.raises(ValueError, match="deep"):
        cli.main(["try-it"])


@pytest.mark.parametrize("error", [RuntimeError("broken"), ModuleNotFoundError("No module 'os2'"), KeyError("a")])
def test_other_exceptions_keep_their_traceback(error, command):
    command(raiser(error))
    with pytest.raises(type(error)) as caught:
        cli.main(["try-it"])
    assert caught.value is error


def test_interruption_says_what_is_kept(command, capsys):
    command(raiser(KeyboardInterrupt()))
    assert cli.main(["try-it"]) == 130
    line = capsys.readouterr().err.strip()
    assert line.startswith("raptor-hf try-it: interrupted; run the same command again")
    assert "complete checkpoints" in line
    assert "\n" not in line


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (3, 3), ("no luck", 1)])
def test_exit_inside_a_command_becomes_a_code(code, expected, command, capsys):
    command(raiser(SystemExit(code)))
    assert cli.main(["try-it"]) == expected
    assert capsys.readouterr().err == ("no luck\n" if code == "no luck" else "")


@pytest.mark.parametrize("buffering", [-1, 0])
def test_reader_of_stdout_that_went_away_is_no_traceback(buffering, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb", buffering), write_through=buffering == 0) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["--help"]) == 1
        stdout.write("more")  # goes nowhere, and neither it nor closing complains


def test_another_broken_pipe_is_not_hidden(command):
    command(raiser(BrokenPipeError("a worker")))
    with pytest.raises(BrokenPipeError, match="a worker"):
        cli.main(["try-it"])


# Booleans (B66)


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(Switches)])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("--{0}", True),
        ("--{1}", True),
        ("--no_{0}", False),
        ("--no-{1}", False),
        ("--no-{0}", False),
        ("--{0} false", False),
        ("--{1} False", False),
        ("--{0}=false", False),
        ("--{0} no", False),
        ("--{0} off", False),
        ("--{0} 0", False),
        ("--{0} true", True),
        ("--{1}=on", True),
        ("--{0} yes", True),
        ("--{0} 1", True),
    ],
)
def test_every_form_of_every_boolean(name, form, expected):
    argv = form.format(name, name.replace("_", "-")).split()
    switches = options(*argv, types=(Switches,))
    assert switches == dataclasses.replace(Switches(), **{name: expected})
    assert getattr(switches, name) is expected


def test_unset_boolean_is_the_default():
    assert options(types=(Switches,)) == Switches(False, True, None, True)


@pytest.mark.parametrize(("word", "expected"), [("no", False), ("off", False), ("False", False), ("on", True)])
def test_yaml_words_are_booleans_for_boolean_fields(word, expected, config):
    file = config(f"starts_off: {word}\nstarts_on: {word}\nis-unset: {word}\nis_set: '{word}'\n")
    assert options(file, types=(Switches,)) == Switches(*[expected] * 4)


def test_other_words_are_no_booleans(error, config):
    assert "--starts_on/--starts-on: expected one of true, yes, on" in error("--starts-on", "maybe", types=(Switches,))
    assert "run.yaml: argument --starts_on" in error(config("starts_on: 2"), types=(Switches,))
    with pytest.raises(argparse.ArgumentTypeError, match="got 'maybe'"):
        to_bool("maybe")


# Flags


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        ("--learning_rate 3e-4", "learning_rate", 3e-4),
        ("--learning-rate=3e-4", "learning_rate", 3e-4),
        ("--learning_rate -1e-4", "learning_rate", -1e-4),
        ("--max_steps -1", "max_steps", -1),
        ("--max_steps 1 --max-steps 2", "max_steps", 2),
        ("--run_name no", "run_name", "no"),
        ("--run_name=--odd", "run_name", "--odd"),
        ("-n short", "run_name", "short"),
        ("--output_dir a/b", "output_dir", Path("a/b")),
        ("--mode blocks", "mode", "blocks"),
        ("--shade light", "shade", "light"),
        ("--layer 3", "layer", 3),
        ("--layer last", "layer", "last"),
        ("--ratio 3", "ratio", 3),
        ("--ratio 0.5", "ratio", 0.5),
        ("--repeats 0 0 1", "repeats", [0, 0, 1]),
        ("--repeats 0,0,1", "repeats", [0, 0, 1]),
        ("--repeats [0,0,1]", "repeats", [0, 0, 1]),
        ("--repeats 0,0 -1", "repeats", [0, 0, -1]),
        ("--repeats 0,1 --repeats 2", "repeats", [0, 1, 2]),
        ("--repeats=[]", "repeats", []),
        ("--sizes 4,5", "sizes", (4, 5)),
        ("--names a,b c", "names", ["a,b", "c"]),
        ('--names ["-a","b"]', "names", ["-a", "b"]),
        ("--tasks depth,segmentation", "tasks", ["depth", "segmentation"]),
        ("--targets none", "targets", "none"),
        ("--targets a b", "targets", ["a", "b"]),
        ('--extra {"a":{"b":false}}', "extra", {"a": {"b": False}}),
        ('--extra_or_file {"a":1}', "extra_or_file", {"a": 1}),
        ("--extra_or_file zero.json", "extra_or_file", "zero.json"),
        ("--seen no", "seen", "no"),
        ("--seen true", "seen", True),
    ],
)
def test_flags_have_their_declared_types(argv, name, expected):
    given = options(*argv.split())
    assert given == dataclasses.replace(Options(), **{name: expected})
    assert type(getattr(given, name)) is type(expected)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("--learning_rate fast", "--learning_rate/--learning-rate: invalid float value: 'fast'"),
        ("--max_steps 1.5", "invalid int value: '1.5'"),
        ("--max_steps", "expected one argument"),
        ("--mode all", "invalid choice: 'all' (choose from 'both', 'blocks')"),
        ("--shade grey", "invalid choice: 'grey'"),
        ("--layer first", "--layer: 'first' is no int"),
        ("--repeats 0,x", "--repeats: 'x' is no int"),
        ("--repeats [0", "--repeats: '[0' is not a JSON array"),
        ("--tasks depth,colour", "--tasks: 'colour' is none of depth, segmentation"),
        ("--extra key=1", "--extra: expected a JSON object such as {\"key\": 1}, got 'key=1'"),
        ("--extra [1]", "--extra: expected a JSON object"),
        ("--learning_rat 1", "unknown option --learning_rat; did you mean --learning_rate?"),
        ("--learning-rte=1", "did you mean --learning_rate?"),
        ("--learn 1", "unknown option --learn"),
        ("--xyzzy", "unknown option --xyzzy; see raptor-hf try --help"),
        ("-z", "unknown option -z"),
        ("--opaque 1", "unknown option --opaque"),
        ("--nested 1", "unknown option --nested"),
        ("word", "unexpected argument 'word'"),
        ("--max_steps 1 2", "unexpected argument '2'"),
        ("a.yaml --config b.yaml", "one configuration file is enough, got b.yaml and a.yaml"),
        ("--config", "argument --config: expected one argument"),
    ],
)
def test_wrong_flags(argv, text, error):
    assert text in error(*argv.split())


def test_last_error_of_a_union_is_about_its_widest_type():
    convert, shape, _ = argument(int | float)
    assert (convert("2"), convert("2.5"), shape) == (2, 2.5, str)
    with pytest.raises(argparse.ArgumentTypeError, match="'x' is no float"):
        convert("x")


def test_enum_items_of_a_list_are_checked():
    convert, shape, _ = argument(list[Shade] | str)
    assert (convert("dark,light"), shape) == (["dark", "light"], list)
    with pytest.raises(argparse.ArgumentTypeError, match="'grey' is none of dark, light"):
        convert("grey")
    assert argument(list[bool])[0]("yes,off") == [True, False]


def test_positional_arguments_fill_fields(error, config):
    fill = {"positional": ("run_name", "repeats")}
    assert options("a", "--max_steps", "3", "1", "2", **fill) == Options(run_name="a", max_steps=3, repeats=[1, 2])
    assert options("a", "1", "--repeats", "2", **fill) == Options(run_name="a", repeats=[1, 2])
    assert options("--mode", "both", "a", config("max_steps: 4"), **fill) == Options(run_name="a", max_steps=4)
    assert options("--starts-on", "a", types=(Switches, Options), positional=("run_name",)) == Switches()
    assert "unexpected argument 'b'" in error("a", "b", positional=("run_name",))


def test_required_fields_come_from_flags_or_the_file(error, config):
    assert options("--teacher", "t", types=(Needed,)).teacher == "t"
    assert options(config("teacher: t"), types=(Needed,)).teacher == "t"
    assert "missing --teacher; give it as a flag or in" in error("--size", "3", types=(Needed,))
    with pytest.raises(ValueError, match="size=0 is too small"):
        options("--teacher", "t", "--size", "0", types=(Needed,))


# Configuration files (B64)


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        ("learning_rate: 3e-4", "learning_rate", 3e-4),
        ("learning-rate: 1E-5", "learning_rate", 1e-5),
        ("learning_rate: '2'", "learning_rate", 2.0),
        ("learning_rate: null", "learning_rate", 1e-3),
        ("repeats: ~", "repeats", [7, 3, 2]),
        ("max_steps: -1", "max_steps", -1),
        ("run_name: no", "run_name", "no"),
        ("run_name: off", "run_name", "off"),
        ("run_name: Yes", "run_name", "Yes"),
        ("run_name: 1e3", "run_name", "1e3"),
        ("run_name: 2026-01-31", "run_name", "2026-01-31"),
        ("run_name: 012", "run_name", "012"),
        ("run_name: --mode", "run_name", "--mode"),
        ("run_name: 'null'", "run_name", "null"),
        ("run_name: ''", "run_name", ""),
        ("output_dir: a b", "output_dir", Path("a b")),
        ("repeats: 0,0,1", "repeats", [0, 0, 1]),
        ("repeats: [0, 0, 1]", "repeats", [0, 0, 1]),
        ("repeats:\n- 0\n- -1", "repeats", [0, -1]),
        ("repeats: []", "repeats", []),
        ("repeats: 7", "repeats", [7]),
        ("sizes: [4, 5]", "sizes", (4, 5)),
        ("names: [no, -x, '1,2']", "names", ["no", "-x", "1,2"]),
        ("targets: [a, b]", "targets", ["a", "b"]),
        ("seen: no", "seen", "no"),
        ("extra: {a: 1e-5, b: [true, x], c: {d: null}}", "extra", {"a": 1e-5, "b": [True, "x"], "c": {"d": None}}),
        ("extra_or_file: {a: 1}", "extra_or_file", {"a": 1}),
        ("extra_or_file: zero.json", "extra_or_file", "zero.json"),
        ("", "max_steps", -1),
        ("# nothing", "max_steps", -1),
    ],
)
@pytest.mark.parametrize("how", ["first", "flag", "equals"])
def test_yaml_values_have_the_declared_types(line, name, expected, how, config):
    file = config(line)
    given = options(*{"first": [file], "flag": ["--config", file], "equals": [f"--config={file}"]}[how])
    assert given == dataclasses.replace(Options(), **{name: expected})
    assert type(getattr(given, name)) is type(expected)


def test_json_values_have_the_declared_types(config):
    values = {"learning-rate": 3e-4, "run_name": "no", "repeats": [0, 0, 1], "extra": {"a": False}, "max_steps": None}
    file = config(json.dumps(values, indent="\t"), "run.json")
    assert options(file) == Options(learning_rate=3e-4, run_name="no", repeats=[0, 0, 1], extra={"a": False})
    assert options(config('{"starts_on": false}', "b.JSON"), types=(Switches,)) == Switches(starts_on=False)


def test_flags_override_the_file_wherever_it_stands(config):
    file = config("learning_rate: 1\nmax_steps: 5\nrepeats: [1]\nmode: blocks")
    expected = Options(learning_rate=1.0, max_steps=6, repeats=[2, 2], mode="both")
    flags = ["--max-steps", "6", "--repeats", "2", "2", "--mode", "both"]
    assert options(file, *flags) == options(*flags, file) == options(*flags, "--config", file) == expected
    switches = config("starts_on: true\nstarts_off: true", "switches.yml")
    assert options("--no_starts_on", switches, types=(Switches,)) == Switches(starts_off=True, starts_on=False)
    assert options("--starts_on", switches, types=(Switches,)) == Switches(starts_off=True)


def test_yaml_anchors_and_merges(config):
    file = config("extra: &base {a: 1, b: 2}\nextra_or_file: {<<: *base, b: 3}\n")
    assert options(file) == Options(extra={"a": 1, "b": 2}, extra_or_file={"a": 1, "b": 3})
    file = config("<<: {max_steps: 3, run_name: base}\nrun_name: own\n")
    assert options(file) == Options(max_steps=3, run_name="own")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "run.yaml: unknown key 'learning_rat'; did you mean learning_rate?"),
        ("config: a.yaml", "run.yaml: unknown key 'config'"),
        ("xyzzy: 1", "run.yaml: unknown key 'xyzzy'; see raptor-hf try --help"),
        ("learning_rate: fast", "run.yaml: argument --learning_rate/--learning-rate: invalid float value: 'fast'"),
        ("max_steps: 1e3", "run.yaml: argument --max_steps/--max-steps: invalid int value: '1e3'"),
        ("mode: no", "invalid choice: 'no'"),
        ("learning_rate: [1, 2]", "'learning_rate' takes one value, got a list of 2"),
        ("run_name: [a]", "'run_name' takes one value, got a list of 1"),
        ("extra: [a]", "'extra' takes one value, got a list of 1"),
        ("learning_rate: {a: 1}", "'learning_rate' cannot be a mapping; nested keys are for"),
        ("repeats: {a: 1}", "'repeats' cannot be a mapping"),
        ("repeats: [1, null]", "'repeats' takes a list of plain values"),
        ("repeats: [[1], [2]]", "'repeats' takes a list of plain values"),
        ("max_steps: 1\nmode: both\nmax_steps: 2", "run.yaml: the key 'max_steps' is given twice; keep one"),
        ("max_steps: 1\nmax-steps: 2", "'max_steps' is given twice, with hyphens and with underscores"),
        ("extra: {a: 1, a: 2}", "the key 'a' is given twice"),
        ("extra: {b: [{a: 1, a: 2}]}", "the key 'a' is given twice"),
        ("max_steps: 1\n[a]: 1", "line 2: a key must be a word"),
        ("- max_steps", "run.yaml: must hold lines of 'name: value'"),
        ("max_steps: [1", "run.yaml: while parsing a flow sequence"),
        ("extra: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_wrong_yaml_files(text, message, error, config):
    assert message in error(config(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_steps": 1, "max_steps": 2}', "run.json: the key 'max_steps' is given twice"),
        ("[1]", "run.json: must hold a JSON object, got list"),
        ('{"max_steps": 1', "run.json: Expecting ',' delimiter"),
        ('{"mod": "both"}', "run.json: unknown key 'mod'; did you mean mode?"),
        ('{"run_name": {"a": 1}}', "'run_name' cannot be a mapping"),
    ],
)
def test_wrong_json_files(text, message, error, config):
    assert message in error(config(text, "run.json"))


def test_files_that_cannot_be_read(error, tmp_path):
    assert "absent.yaml: cannot be read: No such file or directory" in error(str(tmp_path / "absent.yaml"))
    assert "cannot be read" in error("--config", str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"run_name: \xe9")
    assert "latin.yaml: 'utf-8' codec can't decode" in error(str(tmp_path / "latin.yaml"))


@pytest.mark.parametrize(
    ("text", "match"), [("- a", "must hold lines"), ("[a]: 1", "a key must be"), ("a: 1\na: 2", "twice")]
)
def test_read_config_raises_usage_errors(text, match, config):
    with pytest.raises(UsageError, match=match):
        read_config(Path(config(text)))
    with pytest.raises(UsageError, match="must hold a JSON object"):
        read_config(Path(config("3", "run.json")))


# TrainingArguments


def test_training_arguments_from_file_and_flags(config, tmp_path):
    before = {item.name: item.type for item in dataclasses.fields(TrainingArguments)}
    file = config(
        f"output_dir: {tmp_path}\nlearning_rate: 3e-4\neval_strategy: no\nsave_strategy: no\nwarmup_steps: 0.1\n"
        "report_to: none\ninclude_num_input_tokens_seen: no\nlogging_first_step: yes\ndataloader_pin_memory: off\n"
        "lr_scheduler_type: constant_with_warmup\nactivation_checkpointing_kwargs: {use_reentrant: false}\n"
        "label_names: [depth, mask]\nmax_steps: 7\n"
    )
    argv = [
        file,
        "--use-cpu",
        "--bf16",
        "false",
        "--max_steps",
        "3",
        "--preset=paper",
        "--optim_target_modules",
        "a",
        "b",
    ]
    arguments, other = parse("try", [Arguments, Switches], argv)
    assert (arguments.learning_rate, arguments.max_steps, arguments.warmup_steps) == (3e-4, 3, 0.1)
    assert (arguments.eval_strategy.value, arguments.save_strategy.value, arguments.preset) == ("no", "no", "paper")
    assert (arguments.bf16, arguments.use_cpu, arguments.dataloader_pin_memory) == (False, True, False)
    assert (arguments.logging_first_step, arguments.include_num_input_tokens_seen) == (True, "no")
    assert arguments.activation_checkpointing_kwargs == {"use_reentrant": False}
    assert arguments.lr_scheduler_type == "constant_with_warmup"
    assert (arguments.report_to, arguments.label_names) == ([], ["depth", "mask"])
    assert arguments.optim_target_modules == ["a", "b"]
    assert other == Switches()
    assert {item.name: item.type for item in dataclasses.fields(TrainingArguments)} == before


def test_unset_governed_fields_stay_unset():
    arguments = options("--use_cpu", types=(Arguments,))
    assert (arguments.learning_rate, arguments.bf16, arguments.weight_decay) == (None, None, 0.0)


@pytest.mark.parametrize(
    "name", ["use_cpu", "dataloader_drop_last", "remove_unused_columns", "tf32", "ddp_static_graph"]
)
def test_booleans_of_the_trainer(name):
    parser_values = {
        form: getattr(options("--use_cpu", *form.format(name).split(), types=(Arguments,)), name)
        for form in ("--no_{}", "--{} false")
    }
    assert set(parser_values.values()) == {False}


def test_value_error_of_training_arguments_is_one_line(command, capsys):
    command(lambda argv: parse("try-it", [Arguments], ["--use_cpu", "--eval_strategy", "steps", "--logging_steps=0"]))
    assert cli.main(["try-it"]) == 2
    assert capsys.readouterr().err.startswith("raptor-hf try-it: error: evaluation strategy")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_own_options_before_those_of_the_trainer(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("try", [Arguments, Needed], ["--unknown", flag], description="Tries 100 things.")
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert caught.value.code == 0
    assert out.startswith("usage: raptor-hf try [FILE.yaml] [options]\n\nTries 100 things.")
    assert out.index("\nArguments:") < out.index("--preset") < out.index("\nNeeded:") < out.index("\nTrainer:")
    assert out.index("--learning_rate FLOAT") < out.index("\nTrainer:") < out.index("--per_device_train_batch_size")
    assert "peak rate, by default 5% of something" in words
    assert "at the cost of ~20% slower training" in words
    assert "--teacher STR the teacher to copy (required)" in words
    assert "--size INT (default: 2)" in words
    assert "--no_average_tokens_across_devices the same as --average_tokens_across_devices false" in words
    assert "--no_use_cpu" not in words
    assert "--ddp_backend {nccl," in words


# Several processes (B71)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_processes_that_do_not_see_each_other_are_refused(variable, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    require_world_size(1, "distill ... --use_cpu")
    monkeypatch.setenv(variable, "2")
    require_world_size(2, "distill ... --use_cpu")
    remedy = (
        "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 -m raptor_hf distill ... --use_cpu"
    )
    with pytest.raises(UsageError, match=remedy):
        require_world_size(1, "distill ... --use_cpu")
    monkeypatch.setenv(variable, "1")
    require_world_size(1, "distill ... --use_cpu")
    monkeypatch.setenv(variable, "several")
    require_world_size(1, "distill ... --use_cpu")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # four machines
    with pytest.raises(UsageError, match="4 processes were started"):
        require_world_size(1, "distill ... --use_cpu")


# What is shown


@pytest.fixture(autouse=True)
def _one_process_without_colours(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def on_terminal(monkeypatch, columns: int = 60) -> None:
    """Makes both streams look like a terminal of `columns`."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def test_piped_table_is_markdown_and_never_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    long = "x" * 300
    rows = [("a [bold]", 0.123456, None, 3), (long, 12345.678, 1.0, 20)]
    console.table(["model", "R2", "loss", "k"], rows, title="Raptors")
    out, err = capsys.readouterr()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    assert out.startswith("Raptors\n")
    assert lines[0] == ["model", "R2", "loss", "k"]
    assert lines[2:] == [["a [bold]", "0.1235", "-", "3"], [long, "12346", "1", "20"]]
    assert "|  3 |" in out
    assert "\x1b" not in out + err


def test_table_on_a_terminal_fits_it_and_keeps_every_character(capsys, monkeypatch):
    on_terminal(monkeypatch, columns=40)
    console.table(["name"], [["".join(chr(0x4E00 + n) for n in range(60))]])
    out = capsys.readouterr().out
    assert all(chr(0x4E00 + n) in out for n in range(60))
    assert all(len(line) <= 40 for line in out.splitlines() if "\x1b" not in line)
    assert "|" not in out


def test_ragged_table_is_refused():
    with pytest.raises(ValueError, match=r"has 1 cells, the header has 2: \['a'\]"):
        console.table(["x", "y"], [["a"]])


@pytest.mark.parametrize(
    ("variable", "rank", "shown"), [("RANK", "1", False), ("LOCAL_RANK", "1", False), ("RANK", "0", True)]
)
def test_only_the_main_process_writes(variable, rank, shown, capsys, monkeypatch):
    monkeypatch.setenv(variable, rank)
    assert console.is_main_process() is shown
    console.table(["a"], [[1]])
    console.note("a note")
    console.warn("a warning")
    with console.status("working"):
        pass
    assert list(console.progress([1, 2], "counting")) == [1, 2]
    assert [bool(text) for text in capsys.readouterr()] == [shown, shown]


def test_world_rank_counts_before_local_rank(monkeypatch):
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not console.is_main_process()


def test_notes_and_warnings_are_single_plain_lines_on_stderr(capsys):
    text = "a [red] word, " * 20
    console.note(text)
    console.warn(text)
    assert capsys.readouterr() == ("", f"{text}\nwarning: {text}\n")


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_on_a_terminal_follow_no_color(no_color, capsys, monkeypatch):
    on_terminal(monkeypatch)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    console.warn("careful")
    assert ("\x1b[33m" in capsys.readouterr().err) is not no_color


def test_status_and_progress_in_a_log_are_lines(capsys):
    with console.status("loading"):
        pass
    assert list(console.progress(iter("abc"), "reading", total=3)) == ["a", "b", "c"]
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.rsplit(" ", 2)[0] for line in err.splitlines()] == ["loading", "loading:", "reading", "reading:"]
    assert err.splitlines()[0] == "loading ..."
    assert err.splitlines()[1].endswith(" s")
    assert "\r" not in err


def test_status_that_fails_claims_no_success(capsys):
    with pytest.raises(RuntimeError, match="no"), console.status("loading"):
        raise RuntimeError("no")
    assert capsys.readouterr().err == "loading ...\n"


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    on_terminal(monkeypatch)
    assert list(console.progress(range(3), "counting")) == [0, 1, 2]
    err = capsys.readouterr().err
    assert "counting: 100%" in err
    assert "3/3" in err


def test_spinner_on_a_terminal(capsys, monkeypatch):
    on_terminal(monkeypatch)
    with console.status("loading"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading: " in err
