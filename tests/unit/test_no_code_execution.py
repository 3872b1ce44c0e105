"""Jobs are data: no source file of ours may unpickle, evaluate or execute anything that it was handed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("fusion", "node", "coordinator", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)

FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "torch.package",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.export.load",
    "torch.hub.load",
    "torch.ops.load_library",
    "yaml.load",
    "torch.fx.GraphModule",
    "fx.GraphModule",
    "GraphModule",
    "os.fork",
}
#: The demo's helper processes are our own modules, named by our own command.
ALLOWED = {("fusion/cli/child.py", "runpy")}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def findings(source: str) -> Iterator[str]:
    """Yield every forbidden import or call in a source text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FORBIDDEN_MODULES | {"runpy", "code"})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            yield from names & (FORBIDDEN_MODULES | {"runpy", "code"})
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in FORBIDDEN_CALLS:
                yield name
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords) and not _is_false(node, "allow_pickle"):
                yield f"{name}(allow_pickle)"


def _is_false(call: ast.Call, name: str) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return all(isinstance(value, ast.Constant) and value.value is False for value in values)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_executes_nothing_it_was_handed(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = {item for item in findings(path.read_text()) if (name, item) not in ALLOWED}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import package",
        "torch.load(f)",
        "eval('1')",
        "exec(x)",
        "np.load(p, allow_pickle=True)",
    ],
)
def test_the_search_itself_finds_what_it_looks_for(source: str) -> None:
    assert list(findings(source))


def test_there_are_files_to_search() -> None:
    assert len(FILES) > 30
