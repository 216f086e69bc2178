"""The house: which way imports point, where torch is, and how large folders and files may grow."""

import ast
import itertools
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[1]

#: A package may import those named with it, and itself.
ALLOWED = {
    "imagefleet": {"imagefleet"},
    "loadgen": {"imagefleet", "loadgen"},
    "worker": {"imagefleet", "worker"},
    "gateway": {"imagefleet", "gateway"},
    "cli": {"imagefleet", "loadgen", "cli"},
    "evaluation": {"imagefleet", "loadgen", "worker", "cli", "evaluation"},
    "fleet": {"imagefleet", "loadgen", "worker", "gateway", "cli", "fleet"},
}

TORCH = {"torch", "diffusers", "transformers", "peft", "accelerate"}

#: The engine, what measures torch itself, and the networks that judge images.
USES_TORCH = ("worker.engine", "evaluation.bench", "evaluation.score")

FILES_IN_A_FOLDER = 14
LINES_IN_A_FILE = 600
WORKER_SETTINGS = 46


#: What `make test` and `make test-slow` unpack into the tests' folders.
UNPACKED = {"debian", "node_modules", ".venv"}


def sources(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if UNPACKED.isdisjoint(path.relative_to(ROOT).parts)
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources(*ALLOWED)}


@cache
def imports(path: Path) -> list[str]:
    """The modules that a file imports, in functions and under `TYPE_CHECKING` too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{name.name}" for name in node.names]
            found += [each if each in MODULES else node.module for each in inner]
    return found


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What each module imports of the project, however late."""
    return {
        name: {each for each in imports(path) if each in MODULES and each != name}
        for name, path in MODULES.items()
    }


def test_no_import_points_up_or_to_a_neighbour():
    wrong = [
        f"{name} imports {imported}"
        for name, path in MODULES.items()
        for imported in imports(path)
        if (package := imported.split(".")[0]) in {*ALLOWED, "tests", "benchmarks"}
        and package not in ALLOWED[name.split(".")[0]]
    ]
    assert wrong == []


def test_no_module_imports_itself_by_way_of_others(graph: dict[str, set[str]]):
    done: set[str] = set()

    def circle(name: str, way: tuple[str, ...]) -> tuple[str, ...] | None:
        if name in way:
            return (*way[way.index(name) :], name)
        if name in done:
            return None
        found = (circle(each, (*way, name)) for each in sorted(graph[name]))
        first = next(filter(None, found), None)
        done.add(name)
        return first

    assert [found for name in graph if (found := circle(name, ()))] == []


def test_torch_is_imported_by_the_engine_and_its_measurements_alone():
    wrong = [
        f"{name} imports {imported}"
        for name, path in MODULES.items()
        for imported in imports(path)
        if imported.split(".")[0] in TORCH and not name.startswith(USES_TORCH)
    ]
    assert wrong == []


def test_the_engine_knows_nothing_of_queues_and_blobs(
    graph: dict[str, set[str]],
):
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        if name.startswith("worker.engine")
        for imported in graph[name]
        if imported.startswith("imagefleet.storage")
        or (imported.startswith("worker.") and not imported.startswith("worker.engine"))
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", [*ALLOWED, "dashboards", "benchmarks", "tests"])
def test_no_folder_is_so_full_that_names_need_prefixes(folder: str):
    files = Counter(path.parent.relative_to(ROOT) for path in sources(folder))
    assert {
        str(name): count for name, count in files.items() if count > FILES_IN_A_FOLDER
    } == {}


def test_no_file_is_longer_than_a_reader_takes_in():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in itertools.chain(
            sources(*ALLOWED, "dashboards", "benchmarks", "tests")
        )
    }
    assert {
        name: lines for name, lines in lengths.items() if lines > LINES_IN_A_FILE
    } == {}


def test_every_package_says_what_it_is():
    silent = [
        name
        for name, path in MODULES.items()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_a_worker_has_no_more_settings_than_anyone_reads():
    assert len(WorkerSettings.model_fields) <= WORKER_SETTINGS


def test_the_files_that_share_a_process_exist():
    """A file that was moved would be on a process of its own again, unnoticed."""
    tree = ast.parse((ROOT / "tests" / "conftest.py").read_text())
    (table,) = (
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and ast.unparse(statement.targets[0]) == "JOINED_FILES"
    )
    places = [node.value for node in ast.walk(table) if isinstance(node, ast.Constant)]
    assert places
    assert [place for place in places if not (ROOT / str(place)).exists()] == []
