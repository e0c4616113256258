"""What keeps the tree honest: import direction, no foreign code, citations."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "megatrain"
MODULES = sorted(SOURCE.rglob("*.py"))

# A module may import from levels below its own and from its own package, never from above.
LEVELS = {
    "version": 0, "text": 0, "errors": 0, "model_files": 0, "choices": 0, "compat": 0, "late": 0,
    "media": 0, "progress": 1, "files": 1, "quantization": 1, "narrow": 1, "output": 2,
    "cache": 2, "places": 2, "step": 2, "config": 3, "fetched": 3, "lanes": 3, "models": 3,
    "ranks": 3, "hub": 4, "losses": 4, "memory": 4,
    "batch": 5, "devices": 5, "optim": 5, "data": 6, "engine": 6, "features": 7, "disk": 7,
    "planning": 8, "doctor": 9, "rewards": 9, "run": 10, "report": 10, "integrations": 11,
    "cli": 12, "__main__": 13, "__init__": 14,
}  # fmt: skip
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
    r"\b(?:src|tests|testkit|proofs|benchmarks|docs|examples)"
    r"/[\w/-]*\w\.(?:py|c|md|yaml|png|tsv)\b"
)
CITING = ("src", "docs", "examples", "benchmarks", "proofs", "testkit")
OS_CHANGES = {"replace", "rename", "remove", "write", "link", "open"}


def _name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def _package(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _attributes(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


@functools.cache
def _parsed(source: str) -> ast.Module:
    """Return the tree of a source; several rules read each."""
    return ast.parse(source)


@functools.cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_parsed(source)))


def faults(name: str, source: str) -> list[str]:
    """Return what a module breaks of the rules above."""
    nodes = _nodes(source)
    package = name.split("/")[0].removesuffix(".py")
    found = []
    for imported in _imports(nodes):
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
    for owner, attribute in _attributes(nodes):
        if (owner, attribute) in BANNED_ATTRIBUTES:
            found.append(f"uses {owner}.{attribute}")
        if owner == "torch" and attribute in ("cuda", "accelerator") and name not in DEVICE_MODULES:
            found.append(f"uses torch.{attribute}")
    for node in nodes:
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
        return not ast.unparse(call.args[0]).endswith((".stderr.fileno()", ".stdin.fileno()"))
    is_call_on = isinstance(call.func, ast.Attribute) and owner != "files"
    return is_call_on and (name in FILE_CHANGES or (owner == "os" and name in OS_CHANGES))


def test_modules_keep_the_rules() -> None:
    assert {_package(path) for path in MODULES} <= set(LEVELS)
    offenders = {_name(path): faults(_name(path), path.read_text()) for path in MODULES}
    assert {name: found for name, found in offenders.items() if found} == {}


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("memory/store.py", "from megatrain.disk.hf.model import load_model", "from above"),
        ("disk/hf/load.py", "import pickle", "imports pickle"),
        ("disk/hf/load.py", "torch.load(path)", r"uses torch\.load"),
        ("memory/store.py", "torch.cuda.synchronize()", r"uses torch\.cuda"),
        ("models/decoder.py", "eval('1')", "calls eval"),
        ("disk/checkpoint/save.py", "path.write_text('x')", r"changes files by path\.write_text"),
        ("disk/checkpoint/save.py", "open(path, mode='a')", "changes files by open"),
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


_FROM_OUTSIDE = re.compile(rf"^\s*(?:from|import) ({'|'.join(MAY_IMPORT)})\b", re.MULTILINE)


def _forbidden_imports(folder: str, source: str) -> set[str]:
    return set(_FROM_OUTSIDE.findall(source)) - MAY_IMPORT.get(folder, set())


def test_tests_proofs_and_benchmarks_import_one_way() -> None:
    offenders = {
        str(path.relative_to(ROOT)): _forbidden_imports(folder, path.read_text())
        for folder in ("src", *MAY_IMPORT)
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path: found for path, found in offenders.items() if found} == {}


def _module(path: Path) -> str:
    return ".".join(("megatrain", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def _mentions(source: str) -> Iterator[str]:
    """Yield the modules that a module may import, also inside functions and by their names."""
    for node in _nodes(source):
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
    waiting = ["megatrain", "megatrain.__main__", "megatrain.integrations.trl"]
    while waiting:
        module = waiting.pop()
        if module in sources and module not in reached:
            reached.add(module)
            waiting += [*_mentions(sources[module]), module.rpartition(".")[0]]
    return set(sources) - reached


def test_every_module_is_reachable() -> None:
    assert _unreachable({_module(path): path.read_text() for path in MODULES}) == set()


def test_the_engine_and_all_below_it_find_features_in_one_place() -> None:
    """By name: an import would point upwards."""
    below = [path for path in MODULES if LEVELS[_package(path)] <= LEVELS["engine"]]
    naming = {_name(path) for path in below if "megatrain.features" in path.read_text()}
    assert naming == {"engine/features.py"}


CEILINGS = {"megatrain.engine.engine": 74, "megatrain.run.trainer": 266}
"""Modules that an import of each reaches. Lower a figure when it falls; it rises only by the module
of a capability that the engine itself needs."""


def _imported_at_once(source: str) -> Iterator[str]:
    """Yield the modules that an import of a module imports: not those that functions import."""
    waiting: list[ast.AST] = [_parsed(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.expr):
            waiting += ast.iter_child_nodes(node)


def _reached(start: str, sources: Mapping[str, str]) -> set[str]:
    reached, waiting = set[str](), [start]
    while waiting:
        module = waiting.pop()
        if module in sources and module not in reached:
            reached.add(module)
            waiting += _imported_at_once(sources[module])
    return reached


def test_the_engine_and_the_trainer_reach_no_more_modules() -> None:
    """Somebody who follows one batch opens these; the fewer, the better."""
    sources = {_module(path): path.read_text() for path in MODULES}
    found = {start: len(_reached(start, sources)) for start in CEILINGS}
    assert {start: count for start, count in found.items() if count > CEILINGS[start]} == {}


MOST_FILES = 8
"""Files that name the setting of a lever: its own, the settings, the engine's, the config's, and
those of step/ where it changes the ops of a step. It was 17 before a lever was one file."""
PLAIN_WORDS = {"micro_batch_tokens", "slots", "state", "tape", "tier", "update"}
"""Levers whose names mean more than the lever."""


def _files_with_levers(sources: Mapping[str, str]) -> dict[str, int]:
    found = (re.findall(r'^    name = "(\w+)"', text, re.M)
             for name, text in sources.items() if ".levers." in name)  # fmt: skip
    levers = {lever for names in found for lever in names} - PLAIN_WORDS
    words = [set(re.findall(r"\w+", text)) for text in sources.values()]
    return {lever: sum(lever in file for file in words) for lever in levers}


def test_few_files_know_a_lever() -> None:
    counts = _files_with_levers({_module(path): path.read_text() for path in MODULES})
    assert len(counts) == 6
    assert {lever: count for lever, count in counts.items() if count > MOST_FILES} == {}


def test_every_module_is_ascii_and_says_what_it_is() -> None:
    texts = {_name(path): path.read_text() for path in MODULES}
    assert [name for name, text in texts.items() if not text.isascii()] == []
    assert [name for name, text in texts.items() if not ast.get_docstring(_parsed(text))] == []


def _clocks_read(source: str) -> set[tuple[str, str]]:
    if "time." not in source:  # most have none, and need not be parsed
        return set()
    return set(_attributes(_nodes(source))) & WALL_CLOCKS


def test_no_test_depends_on_the_time_of_day() -> None:
    """Effort is measured by testkit/effort.py, and testkit/patience.py waits for events."""
    paths = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")} - READ_A_CLOCK
    offenders = {str(path): _clocks_read((ROOT / path).read_text()) for path in paths}
    assert {path: read for path, read in offenders.items() if read} == {}


def _missing_citations(text: str) -> list[str]:
    return [path for path in re.findall(CITATION, text) if not (ROOT / path).exists()]


def test_what_is_cited_exists() -> None:
    paths = [*ROOT.glob("*.md"), *(path for name in CITING for path in (ROOT / name).rglob("*"))]
    offenders = {
        str(path.relative_to(ROOT)): _missing_citations(path.read_text())
        for path in paths
        if path.suffix in (".py", ".md", ".c", ".yaml")
    }
    assert {path: missing for path, missing in offenders.items() if missing} == {}


def test_type_checkers_of_users_see_our_types() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = packaged["package-data"]["megatrain"]
    assert "py.typed" in patterns
    assert all(list(SOURCE.glob(pattern)) for pattern in patterns)
    shipped = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    sources = {*MODULES, *SOURCE.rglob("*.c"), *SOURCE.rglob("*.so")}
    assert {p for p in SOURCE.rglob("*.*") if "__pycache__" not in p.parts} == sources | shipped
