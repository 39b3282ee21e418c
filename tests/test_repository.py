"""The repository as a test: README, version, metadata and budgets say what the folder holds."""

import ast
import configparser
import fnmatch
import io
import re
import tokenize
from pathlib import Path

import pytest
import yaml

import raptor_hf

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "raptor_hf"
SOURCE_FILES = sorted(SOURCE.rglob("*.py"))
CODE_FILES = [*SOURCE_FILES, *sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]

MODULE_LINES = 450
FUNCTION_LINES = 60
CONTRIBUTING_LINES = 45
# Of these folders the README lists each file; of the others it may list the folder alone.
LISTED_FOLDERS = ("", "src/raptor_hf/", "benchmarks/", "examples/")

in_source = pytest.mark.parametrize("path", SOURCE_FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
in_code = pytest.mark.parametrize("path", CODE_FILES, ids=lambda path: path.relative_to(ROOT).as_posix())


def read_readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def read_tree(readme):
    """The README's file tree, path -> comment; a folder's path ends in a slash."""
    block = re.search(r"^```\w*\nraptor_hf/\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, "README.md needs a fenced block that starts with the line `raptor_hf/`"
    tree, folders = {}, [""]
    for line in block[1].splitlines():
        entry = re.fullmatch(r"(?P<indent>(?:[│ ] {3})*)[├└]── (?P<name>\S+) *(?P<comment>.*)", line)
        assert entry, f"not a line of a file tree: {line!r}"
        depth = len(entry["indent"]) // 4
        path = folders[depth] + entry["name"]
        tree[path] = entry["comment"]
        folders[depth + 1 :] = [path]
    return tree


def read_api(readme):
    """The names that the bullets of the README's section `## API` begin with."""
    section = re.search(r"^## API\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    assert section, "README.md needs a section `## API`"
    return re.findall(r"^(?:- |\| *)`(\w+)", section[1], re.MULTILINE)


def children(folder):
    """Names in `folder`, without hidden ones, those that .gitignore names, and folders that hold nothing else."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    names = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(".") or any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored):
            continue
        if path.is_file() or children(path):
            names.add(path.name)
    return names


def functions(path):
    return [n for n in ast.walk(parse(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def code_lines(function):
    """Lines of a function from `def` on, without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def caught(handler):
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {"everything" if kind is None else ast.unparse(kind) for kind in kinds}


def test_readme_tree_lists_what_is_there():
    for path, comment in read_tree(read_readme()).items():
        assert (ROOT / path).exists(), f"README.md lists {path}, which does not exist"
        assert (ROOT / path).is_dir() == path.endswith("/"), f"README.md: a folder's name ends in a slash, {path}"
        assert comment, f"README.md: {path} needs a comment"


def test_what_is_there_is_in_the_readme_tree():
    tree = read_tree(read_readme())
    listed_in_full = {path for path in tree if any(other != path and other.startswith(path) for other in tree)}
    for folder in sorted({*LISTED_FOLDERS, *(path for path in listed_in_full if path.endswith("/"))}):
        listed = {path[len(folder) :].split("/")[0] for path in tree if path.startswith(folder) and path != folder}
        missing = children(ROOT / folder) - listed
        assert not missing, f"README.md: the file tree lacks {sorted(missing)} of {folder or 'the repository'}"


def test_the_tree_parser_sees_depth_and_comments():
    lines = ["├── a.md   first", "├── src/raptor_hf/  code", "│   └── cli/  two", "│       └── b.py", "└── c  last"]
    text = "\n".join(["text", "```", "raptor_hf/", *lines, "```", ""])
    tree = {"a.md": "first", "src/raptor_hf/": "code", "src/raptor_hf/cli/": "two", "src/raptor_hf/cli/b.py": ""}
    assert read_tree(text) == {**tree, "c": "last"}


def test_readme_documents_the_public_names():
    assert sorted(read_api(read_readme())) == sorted(raptor_hf.__all__)


@pytest.mark.parametrize("name", raptor_hf.__all__)
def test_public_names_are_there(name):
    assert getattr(raptor_hf, name).__doc__
    assert name in dir(raptor_hf)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'raptor_hf' has no attribute 'Rapture'"):
        _ = raptor_hf.Rapture


def test_one_version_everywhere():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert metadata["metadata"]["version"] == citation["version"] == raptor_hf.__version__


def test_package_is_typed():
    assert (SOURCE / "py.typed").is_file()


def test_contributing_is_short():
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= CONTRIBUTING_LINES


@in_code
def test_module_says_what_it_is_and_keeps_to_its_budget(path):
    assert ast.get_docstring(parse(path)), "the module needs a docstring: what it does and why"
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES, f"{lines} lines; the budget is {MODULE_LINES}: split it by idea"


@in_code
def test_functions_keep_to_their_budget(path):
    long = {f"{f.name}:{f.lineno}": code_lines(f) for f in functions(path) if code_lines(f) > FUNCTION_LINES}
    assert not long, f"the budget is {FUNCTION_LINES} lines without docstring"


@in_source
def test_library_code_neither_prints_nor_asserts_nor_catches_everything(path):
    for node in ast.walk(parse(path)):
        where = f"line {getattr(node, 'lineno', '?')}"
        assert not isinstance(node, ast.Assert), f"{where}: raise ValueError for a user's mistake, never assert"
        is_print = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        assert not is_print, f"{where}: the library logs, the command line writes through rich"
        if isinstance(node, ast.ExceptHandler):
            blind = caught(node) & {"everything", "Exception", "BaseException"}
            assert not blind, f"{where}: name the exceptions that are expected, not {blind}"


@in_source
def test_library_code_leaves_no_notes_to_self(path):
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    text = [token for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
    notes = [token.start[0] for token in text if re.search(r"\b(TODO|FIXME|XXX)\b", token.string)]
    assert not notes, f"lines {notes}: what is not done belongs in an issue"
