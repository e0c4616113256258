"""What keeps the tree honest: import direction, banned names, no foreign code, README = tree."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "megatrain"
MODULES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))

# A module may import from levels below its own and from its own package, never from above.
LEVELS = {
    "version": 0, "text": 0, "errors": 0, "model_files": 0, "progress": 1, "files": 1,
    "quantisation": 1, "output": 2,
    "cache": 2, "step": 2, "config": 3, "lanes": 3, "models": 3, "ranks": 3, "hub": 4, "losses": 4,
    "memory": 4, "devices": 5, "optim": 5, "engine": 6, "data": 7, "disk": 7, "planning": 7,
    "doctor": 8, "run": 9, "report": 9, "cli": 10, "rewards": 10, "__main__": 11, "__init__": 12,
}  # fmt: skip
BANNED_NAMES = {"utils", "helpers", "common", "misc", "manager", "base", "core"}
BANNED_IMPORTS = {"pickle", "marshal", "shelve", "joblib", "dill", "cloudpickle", "imp"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("os", "system"), ("torch", "hub")}
DEVICE_MODULES = {"devices/runtime.py"}
FILE_MODULES = {"files.py"}
FILE_CHANGES = {
    "write_text", "write_bytes", "unlink", "rmdir", "mkdir", "makedirs", "symlink_to",
    "symlink", "hardlink_to", "rmtree", "copytree", "copyfile", "fsync", "fdatasync", "ftruncate",
    "truncate", "pwrite", "pwritev", "posix_fallocate",
}  # fmt: skip
WALL_CLOCKS = {("time", name) for name in ("monotonic", "perf_counter", "time")}
READ_A_CLOCK = {
    Path("testkit/patience.py"),
    Path("tests/attacks/sandbox.py"),  # ends what hangs
    Path("tests/lanes/test_progress.py"),  # a least time, and no most
    Path("tests/proofs/test_mutants.py"),  # ends what hangs
}
CITATION = (
    r"\b(?:src|tests|testkit|proofs|benchmarks|docs|examples)/[\w/]*\w\.(?:py|c|md|yaml|png|tsv)\b"
)
SPOKEN = ("src", "docs", "examples", "benchmarks", "proofs", "testkit")
OS_CHANGES = {"replace", "rename", "remove", "write", "link", "open"}


def _name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def _package(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def faults(name: str, source: str) -> list[str]:
    """Return what a module breaks of the rules above."""
    tree = ast.parse(source)
    package = name.split("/")[0].removesuffix(".py")
    found = []
    for imported in _imports(tree):
        head, _, rest = imported.partition(".")
        if head in BANNED_IMPORTS:
            found.append(f"imports {imported}")
        target = rest.split(".")[0]
        if head == "megatrain" and target and target != package and package != "__init__" and (
            LEVELS[target] >= LEVELS[package]
        ):  # fmt: skip
            found.append(f"imports {imported} from above")
        if imported.startswith(("torch.cuda", "torch.accelerator")) and name not in DEVICE_MODULES:
            found.append(f"imports {imported}")
    for owner, attribute in _attributes(tree):
        if (owner, attribute) in BANNED_ATTRIBUTES:
            found.append(f"uses {owner}.{attribute}")
        if owner == "torch" and attribute in ("cuda", "accelerator") and name not in DEVICE_MODULES:
            found.append(f"uses torch.{attribute}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in BANNED_CALLS:
            found.append(f"calls {ast.unparse(node.func)}")
        if isinstance(node, ast.Call) and name not in FILE_MODULES and _changes_files(node):
            found.append(f"changes files by {ast.unparse(node.func)}")
    return found


def _changes_files(call: ast.Call) -> bool:
    """Return whether a call makes, changes or removes a file, as far as names tell."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name == "open" and owner != "os":
        modes = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
        return any(isinstance(text, str) and set(text) & set("wax+") for text in texts[-1:])
    if owner == "os" and name == "write":
        return ast.unparse(call.args[0]) != "sys.stderr.fileno()"
    is_call_on = isinstance(call.func, ast.Attribute) and owner != "files"
    return is_call_on and (name in FILE_CHANGES or (owner == "os" and name in OS_CHANGES))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_modules_keep_the_rules(path: Path) -> None:
    assert _package(path) in LEVELS, f"{_name(path)} has no level"
    assert faults(_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("memory/store.py", "from megatrain.disk.hf.model import load_model", "from above"),
        ("models/decoder.py", "import megatrain.memory.store", "from above"),
        ("errors.py", "from megatrain.progress import Advance", "from above"),
        ("disk/hf/load.py", "import pickle", "imports pickle"),
        ("disk/hf/load.py", "torch.load(path)", r"uses torch\.load"),
        ("memory/store.py", "torch.cuda.synchronize()", r"uses torch\.cuda"),
        ("devices/accelerator.py", "torch.accelerator.synchronize()", r"uses torch\.accelerator"),
        ("memory/store.py", "from torch.accelerator import x", r"imports torch\.accelerator"),
        ("models/decoder.py", "eval('1')", "calls eval"),
        ("disk/checkpoint/save.py", "path.write_text('x')", r"changes files by path\.write_text"),
        ("disk/checkpoint/save.py", "path.open('wb')", r"changes files by path\.open"),
        ("disk/checkpoint/save.py", "open(path, mode='a')", "changes files by open"),
        ("disk/checkpoint/save.py", "os.replace(a, b)", r"changes files by os\.replace"),
        ("data/tokens/prepared.py", "shutil.rmtree(a)", r"changes files by shutil\.rmtree"),
    ],
)
def test_broken_rules_would_be_noticed(name: str, source: str, fault: str) -> None:
    (found,) = faults(name, source)
    assert re.search(fault, found)


# Outside of the package: who may import whom. The package itself imports none of these.
MAY_IMPORT = {
    "testkit": {"testkit"},
    "benchmarks": {"testkit", "benchmarks"},
    "proofs": {"testkit", "proofs"},
    "tests": {"testkit", "benchmarks", "proofs", "tests"},
}


def _forbidden_imports(folder: str, source: str) -> set[str]:
    heads = {imported.split(".")[0] for imported in _imports(ast.parse(source))}
    return heads & set(MAY_IMPORT) - MAY_IMPORT.get(folder, set())


@pytest.mark.parametrize("folder", ["src", *MAY_IMPORT])
def test_tests_proofs_and_benchmarks_import_one_way(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        found = _forbidden_imports(folder, path.read_text())
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("src", "from testkit import families"),
        ("testkit", "import proofs.races"),
        ("benchmarks", "from tests.conftest import x"),
        ("proofs", "import benchmarks"),
    ],
)
def test_an_import_the_other_way_would_be_noticed(folder: str, source: str) -> None:
    assert _forbidden_imports(folder, source)


def test_names_say_what_things_are() -> None:
    parts = {part.removesuffix(".py") for path in MODULES for part in Path(_name(path)).parts}
    assert not parts & BANNED_NAMES


def _public_names(source: str) -> Iterator[str]:
    """Yield the public names that a module defines at its top level."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def _defined_twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for name in set(_public_names(source)) - {"main", "app"}:
            homes.setdefault(name, []).append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_a_name_has_one_meaning() -> None:
    """No public class, function or constant is defined in two modules."""
    assert _defined_twice({_name(path): path.read_text() for path in MODULES}) == {}


def test_a_second_meaning_would_be_noticed() -> None:
    sources = {
        "a.py": "class Line: ...\nLIMIT: int = 1\n_own = 1\ndef main(): ...",
        "b.py": "Line = int\nLIMIT = 2\n_own = 2\ndef main(): ...\nif True:\n    def f(): ...",
        "c.py": "from a import Line\ndef f(): ...",
    }
    assert _defined_twice(sources) == {"Line": ["a.py", "b.py"], "LIMIT": ["a.py", "b.py"]}


def _module(path: Path) -> str:
    return ".".join(("megatrain", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def _mentions(source: str) -> Iterator[str]:
    """Yield the modules that a module may import, also inside functions and by their names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _unreachable(sources: Mapping[str, str]) -> set[str]:
    """Return the modules that neither the command line nor a public name leads to."""
    reached: set[str] = set()
    waiting = ["megatrain", "megatrain.__main__"]
    while waiting:
        module = waiting.pop()
        if module in sources and module not in reached:
            reached.add(module)
            waiting += [*_mentions(sources[module]), module.rpartition(".")[0]]
    return set(sources) - reached


def test_every_module_is_reachable() -> None:
    assert _unreachable({_module(path): path.read_text() for path in MODULES}) == set()


def test_a_module_that_nothing_uses_would_be_noticed() -> None:
    sources = {
        "megatrain": "_HOMES = {'Engine': 'megatrain.engine'}",
        "megatrain.__main__": "def main():\n    from megatrain.cli import app",
        "megatrain.cli": "",
        "megatrain.cli.app": "",
        "megatrain.engine": "",
        "megatrain.old": "import megatrain.cli",
    }
    assert _unreachable(sources) == {"megatrain.old"}


def test_files_functions_and_folders_stay_small() -> None:
    for path in MODULES:
        text = path.read_text()
        assert text.isascii(), f"{_name(path)} has characters that are not ASCII"
        assert len(text.splitlines()) <= 400, f"{_name(path)} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{_name(path)}: {node.name} has {length} lines"
    for folder in {path.parent for path in MODULES}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 14, f"{folder} has {len(modules)} modules"


def test_every_module_says_what_it_is() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{_name(path)} has no docstring"


def test_tests_mirror_the_source() -> None:
    mirrored = {path.parent.relative_to(SOURCE) for path in MODULES} - {Path()}
    for folder in mirrored:
        assert (ROOT / "tests" / folder).is_dir(), f"tests/{folder} is missing"


@pytest.mark.parametrize("path", TESTS, ids=str)
def test_no_test_depends_on_the_time_of_day(path: Path) -> None:
    """Effort is measured by testkit/effort.py, and testkit/patience.py waits for events."""
    read = set(_attributes(ast.parse((ROOT / path).read_text()))) & WALL_CLOCKS
    assert not read or path in READ_A_CLOCK, f"{path} reads {read}"


def _missing_citations(text: str) -> list[str]:
    return [path for path in re.findall(CITATION, text) if not (ROOT / path).exists()]


@pytest.mark.parametrize("folder", [*SPOKEN, "."])
def test_what_is_cited_exists(folder: str) -> None:
    paths = (ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*")
    for path in paths:
        if path.suffix in (".py", ".md", ".c", ".yaml"):
            assert not _missing_citations(path.read_text()), path


def test_a_dangling_citation_would_be_noticed() -> None:
    assert _missing_citations(
        "Laws (tests/disk/checkpoint/test_save.py, tests/disk/test_no_such.py)"
    ) == ["tests/disk/test_no_such.py"]


def test_type_checkers_of_users_see_our_types() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = packaged["package-data"]["megatrain"]
    assert "py.typed" in patterns
    assert all(list(SOURCE.glob(pattern)) for pattern in patterns)
    shipped = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    sources = {*MODULES, *SOURCE.rglob("*.c"), *SOURCE.rglob("*.so")}
    assert {p for p in SOURCE.rglob("*.*") if "__pycache__" not in p.parts} == sources | shipped


def _folders_of(readme: str) -> set[str]:
    block = re.search(r"```\nsrc/megatrain/\n(.*?)```", readme, re.S)
    return set(re.findall(r"^  (\w+)/ +\S", block[1], re.M)) if block else set()


def test_the_readme_names_every_folder() -> None:
    """docs/tree.md has every file; tests/test_docs.py keeps it up to date."""
    real = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert _folders_of((ROOT / "README.md").read_text()) == real


def test_a_missing_folder_would_be_noticed() -> None:
    assert _folders_of("```\nsrc/megatrain/\n  cli/  verbs\n  run/\n```") == {"cli"}


def test_the_project_speaks_of_itself_alone() -> None:
    words = re.compile(r"/root/|/work/|pypi\.org|\bissue #?\d+\b|\bsession\b", re.I)
    texts = [p for d in SPOKEN for p in (ROOT / d).rglob("*")]
    texts += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
    for path in texts:
        if path.suffix in (".py", ".md", ".c", ".toml", ".yaml", "") and path.is_file():
            found = words.search(path.read_text())
            assert not found, f"{path.relative_to(ROOT)}: {found}"
