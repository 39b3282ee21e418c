"""The architecture as a test: who imports whom, and that importing the package does nothing else.

All but the last test read the source as a syntax tree. Imports inside functions count, so a cycle cannot hide there;
imports under `if TYPE_CHECKING:` do not, because they never run.
"""

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "raptor_hf"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

HUB_FILES = (
    "tokens",
    "configuration_raptor",
    "modeling_raptor_layers",
    "modeling_raptor_init",
    "modeling_raptor_dense",
    "modeling_raptor",
)
# A module imports only from modules that stand before it. A folder is one entry; `__init__` is the package itself.
RANKS = (
    *HUB_FILES,
    "__init__",
    "losses",
    "fidelity",
    "dense_metrics",
    "distillation",
    "hub_data",
    "data",
    "dense_data",
    "dense_pixels",
    "streams",
    "vision_models",
    "teachers",
    "activations",
    "similarity",
    "phases",
    "metrics",
    "drawing",
    "plots",
    "flow_plots",
    "study_plots",
    "dense_plots",
    "results",
    "predictions",
    "probe_tables",
    "report_blocks",
    "probe_report",
    "study_report",
    "report",
    "card_edits",
    "cards",
    "hub",
    "optimizers",
    "checkpoints",
    "safeguards",
    "arguments",
    "saving",
    "evaluation",
    "trainer",
    "estimates",
    "processes",
    "frozen",
    "probe_features",
    "probes",
    "dense_probes",
    "probe_heads",
    "dynamics",
    "interventions",
    "complexity",
    "runs",
    "vit_training",
    "studies",
    "assembly",
    "research_import",
    "export",
    "quickstart",
    "cli",
    "__main__",
)
# These take tensors or arrays, and are of use without the models and without training.
MODEL_FREE = ("similarity", "phases", "dynamics", "losses", "fidelity", "dense_metrics", "metrics")
MODEL_OR_TRAINER = {
    "modeling_raptor_layers",
    "modeling_raptor_init",
    "modeling_raptor_dense",
    "modeling_raptor",
    "distillation",
    "arguments",
    "saving",
    "evaluation",
    "trainer",
}
# Calls that may stand alone at module level, by file.
MODULE_LEVEL_CALLS = {
    "__init__.py": r"Auto\w+\.register|Raptor\w+\.register_for_auto_class",
    "cli/values.py": r"_TextLoader\.add_implicit_resolver",  # a method of a class that the file itself defines
}
SIDE_EFFECTS = re.compile(
    r"(^|\.)(filterwarnings|simplefilter|captureWarnings|basicConfig|putenv|seed|manual_seed|set_\w+|disable_\w+)$"
    r"|(^|\.)environ\.(setdefault|update|pop|clear)$"
)


def read_modules():
    """The source files by dotted name: `raptor_hf`, `raptor_hf.tokens`, `raptor_hf.cli.values`, ..."""
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = read_modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def entry(name):
    """The entry of `RANKS` that the module belongs to."""
    if name == PACKAGE + ".__main__":
        return "__main__"
    return "__init__" if name == PACKAGE else name.split(".")[1]


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def running(node):
    """All nodes below `node` but the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            for statement in child.orelse:
                yield statement
                yield from running(statement)
            continue
        yield child
        yield from running(child)


def targets(name, node):
    """The modules of the package that the import statement `node` of the module `name` asks for."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE}
    base = (node.module or "").split(".")
    if node.level:
        package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
        base = [*package[: len(package) - node.level + 1], *filter(None, base)]
    if base[0] != PACKAGE:
        return set()
    base = ".".join(base)
    return {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}


def imports(name):
    """The modules of the package that the module `name` imports when it runs, wherever the statement stands."""
    statements = [node for node in running(TREES[name]) if isinstance(node, ast.Import | ast.ImportFrom)]
    return set().union(*(targets(name, node) for node in statements)) - {name}


GRAPH = {name: imports(name) for name in MODULES}


def reachable(start):
    """Every module that the modules `start` import, directly or through others."""
    found, todo = set(), list(start)
    while todo:
        new = GRAPH.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def calls_at_import(node):
    """The calls that run when the module is imported: not those in function bodies, but those in class bodies."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            now = [*child.decorator_list, *child.args.defaults, *filter(None, child.args.kw_defaults)]
            yield from (call for part in now for call in ast.walk(part) if isinstance(call, ast.Call))
        elif not isinstance(child, ast.Lambda):
            if isinstance(child, ast.Call):
                yield child
            yield from calls_at_import(child)


def is_plain(statement, file):
    """Whether a statement at module level is a definition, an import, or one of the few listed exceptions."""
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return True
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        left = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [part for target in left for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        return all(isinstance(part, ast.Name) for part in names)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return bool(re.fullmatch(MODULE_LEVEL_CALLS.get(file, "never^"), ast.unparse(statement.value.func)))
    if is_type_checking(statement):
        return all(isinstance(part, ast.Import | ast.ImportFrom) for part in [*statement.body, *statement.orelse])
    if isinstance(statement, ast.If):
        return file == "__main__.py" and ast.unparse(statement.test) == "__name__ == '__main__'"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_the_package_is_where_this_test_looks():
    assert {f"{PACKAGE}.{name}" for name in HUB_FILES} <= MODULES.keys()
    assert f"{PACKAGE}.tokens" in GRAPH[f"{PACKAGE}.configuration_raptor"]


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_up_the_list(name):
    assert entry(name) in RANKS, f"{name} is new: add it to RANKS, where its imports and its users allow"
    for target in GRAPH[name]:
        assert entry(target) in RANKS, f"{name} imports {target}, which is not in RANKS"
        is_above = RANKS.index(entry(target)) < RANKS.index(entry(name))
        assert is_above or entry(target) == entry(name), f"{name} imports {target}, which stands below it in RANKS"


def test_no_import_cycles():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("name", HUB_FILES)
def test_hub_files_need_torch_transformers_and_each_other_only(name):
    for node in ast.walk(TREES[f"{PACKAGE}.{name}"]):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
            wrong = roots - {"torch", "transformers"} - sys.stdlib_module_names
            assert not wrong, f"{name}.py is copied to the Hub and must not import {wrong}"
        elif isinstance(node, ast.ImportFrom) and node.level:
            is_sibling = node.level == 1 and node.module in HUB_FILES
            assert is_sibling, f"{name}.py is copied to the Hub; only `from .name import x` finds {HUB_FILES}"
        elif isinstance(node, ast.ImportFrom):
            is_strict = node.module == "huggingface_hub.dataclasses" and [a.name for a in node.names] == ["strict"]
            is_known = node.module.split(".")[0] in {"torch", "transformers"} | sys.stdlib_module_names
            assert is_strict or is_known, f"{name}.py is copied to the Hub and must not import from {node.module}"


@pytest.mark.parametrize("name", MODEL_FREE)
def test_array_code_reaches_neither_model_nor_trainer(name):
    start = [module for module in MODULES if entry(module) == name]
    wrong = {module for module in reachable(start) if entry(module) in MODEL_OR_TRAINER}
    assert not wrong, f"{name} must be usable without {wrong}"


@pytest.mark.parametrize("name", MODULES)
def test_modules_only_define(name):
    file = MODULES[name].relative_to(SOURCE).as_posix()
    for statement in TREES[name].body:
        text = ast.unparse(statement).splitlines()[0]
        assert is_plain(statement, file), f"{file}:{statement.lineno} does something on import: {text}"
    for call in calls_at_import(TREES[name]):
        function = ast.unparse(call.func)
        assert not SIDE_EFFECTS.search(function), f"{file}:{call.lineno} changes global state on import: {function}"


def test_importing_the_package_costs_what_one_transformers_model_costs():
    """After `transformers` has imported one of its own ViTs, the package adds its root and the Hub files, no more."""
    code = (
        "import json, sys\n"
        "from transformers import Dinov2WithRegistersModel\n"
        "before = set(sys.modules)\n"
        f"import {PACKAGE}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
        "heavy = {'transformers.trainer', 'evaluate', 'datasets', 'matplotlib'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    added, heavy = map(json.loads, run.stdout.splitlines()[-2:])
    assert set(added) - sys.stdlib_module_names == {PACKAGE, *(f"{PACKAGE}.{name}" for name in HUB_FILES)}
    assert heavy == []


def test_no_argument_that_the_hub_client_has_dropped():
    """`token` is the one name of a token; repositories are written by commits."""
    dropped = re.compile(r"use_auth_token|huggingface_hub.*\bRepository\b|local_dir_use_symlinks|resume_download")
    assert [name for name, path in MODULES.items() if dropped.search(path.read_text(encoding="utf-8"))] == []
