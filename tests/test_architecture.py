"""The house has a direction: arrows point up the list, and the pure packages touch nothing but arguments."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "everstep"
LAB = SRC.parent / "everstep_lab"
DIAGNOSE = SRC.parent / "everstep_diagnose"
OF_DUMPS = {
    "stack_text",
    "errors",
    "log",
    "bounded_pickle",
    "ring",
    "ras_json",
    "cli",
    "cli.render",
}  # leaves
FABRIC = SRC.parent / "everstep_fabric"
AT_THE_WORLD = {"probe", "steer", "at_node", "files", "command", "port"}  # of the fabric; the rest is pure
FLOORS = [
    "protocol",
    "core",
    "schedule",
    "plan",
    "layout",
    "drive",
    "job",
    "net",
    "engine",
    "store",
    "hold",
    "ranks",
    "node",
    "server",
    "launch",
    "cli",
]
PURE = {"protocol", "core", "schedule", "plan", "layout", "drive"}
NO_NUMPY = {"protocol", "core"}
IMPURE = {
    "torch",
    "asyncio",
    "socket",
    "os",
    "time",
    "random",
    "subprocess",
    "threading",
    "signal",
    "selectors",
    "multiprocessing",
    "aiohttp",
    "secrets",
    "uuid",
    "tempfile",
}
SHELLS = {"net", "engine", "store", "node", "server"}


WINGS = {"worker": 1, "task": 1, "held": 1, "faults": 1, "agent": 2, "cluster": 2}  # floors of core
ROOMS = {  # floors of engine; its modules outside a room are below them all
    "layers": 1,
    "datasets": 2,
    "hf": 2,
    "shards": 2,
    "sums": 2,
    "telemetry": 2,
    "stage": 3,
    "state": 4,
    "lightning": 5,
    "prepare": 5,
    "worker": 6,
}


@cache  # every file is asked about by several tests, and parsing all of them takes seconds
def nodes(path: Path) -> list[ast.AST]:
    """Imports and calls of a file."""
    wanted = (ast.Import, ast.ImportFrom, ast.Call)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, wanted)]


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found.add(node.module or "")
    return found


def room(parts: tuple[str, ...]) -> str:
    return parts[0] if parts and parts[0] in ROOMS else ""


def named(path: Path) -> set[tuple[str, ...]]:
    """What a file of `engine` imports from it: `from everstep.engine import keys` is ("keys",)."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("everstep.engine"):
            found |= {(*(node.module or "").split(".")[2:], alias.name) for alias in node.names}
    return found


def modules() -> list[tuple[str, Path]]:
    return [(package, path) for package in FLOORS for path in sorted((SRC / package).rglob("*.py"))]


@pytest.mark.parametrize(("package", "path"), modules(), ids=lambda x: x.stem if isinstance(x, Path) else x)
def test_imports_point_up_and_pure_packages_are_pure(package: str, path: Path) -> None:
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "everstep" and len(parts) > 1 and parts[1] in FLOORS:
            assert FLOORS.index(parts[1]) <= FLOORS.index(package), f"{path.name} imports {name} from below"
            if package == parts[1] == "core" and len(parts) > 2:
                ours, theirs = path.parent.name, parts[2]
                assert ours == theirs or WINGS[theirs] < WINGS[ours], f"{path.name} imports {name} from below"
        elif package in PURE and parts[0] != "everstep":
            assert parts[0] not in IMPURE, f"{path.name} imports {name}, but {package} is pure"
            if package in NO_NUMPY:
                assert parts[0] != "numpy", f"{path.name}: {package} is standard library only"


@pytest.mark.parametrize(
    "path", sorted((SRC / "engine").rglob("*.py")), ids=lambda x: str(x.relative_to(SRC / "engine"))
)
def test_rooms_of_the_engine_import_only_rooms_below_them(path: Path) -> None:
    ours = room(path.relative_to(SRC / "engine").parts)
    for parts in named(path):
        theirs = room(parts)
        allowed = ours == theirs or not theirs or ROOMS[theirs] < ROOMS.get(ours, 0)
        assert allowed, f"{path.name} imports {'.'.join(parts)} from a room above it"


@pytest.mark.parametrize("package", ["net", "engine", "store", "ranks", "node"])
def test_agents_and_workers_load_nothing_of_the_coordinator(package: str) -> None:
    """They would load it in every process, and decisions about tasks would have two homes."""
    for path in sorted((SRC / package).rglob("*.py")):
        for name in imports(path):
            coordinator = name.startswith(("everstep.core.cluster", "everstep.core.task", "everstep.plan"))
            assert not coordinator, f"{path} imports {name}"


def test_a_process_says_lines_through_one_function() -> None:
    """A print that raises (a full disk, a closed pipe) ended agents, coordinators and training threads."""
    for path in sorted(SRC.rglob("*.py")):
        if path.is_relative_to(SRC / "cli") or path == SRC / "log.py":
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call):
                of = node.func.value if isinstance(node.func, ast.Attribute) else None
                name = ast.unparse(node.func) if of is None or isinstance(of, ast.Name) else ""
                assert name not in ("print", "traceback.print_exc", "warnings.warn"), (
                    f"{path}:{node.lineno}: everstep.log.say"
                )


COMMANDS = sorted(path for path in SRC.parent.glob("*/cli/*.py") if path.parts[-3] != LAB.name)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_commands_print_through_a_console_that_writes_escapes_out(path: Path) -> None:
    """Names of tensors, files and nodes are other people's: they could clear a terminal, or set its title."""
    named = [
        alias.name
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module == "rich.console"
        for alias in node.names
    ]
    assert "Console" not in named, "everstep.cli.render.Console"


def test_pickles_are_read_by_one_reader() -> None:
    """Ours reads those of others; a process of ours may read what another one has written into its pipe."""
    for path in sorted(SRC.parent.rglob("*.py")):
        called = {ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
        own = called & {"pickle.load", "pickle.loads"}
        own -= {"pickle.loads"} if path == SRC / "engine" / "datasets" / "loading.py" else set()
        own |= {"pickle.Unpickler"} if "pickle.Unpickler" in path.read_text() else set()
        assert not own, f"{path}: everstep.bounded_pickle, not {', '.join(own)}"


def test_requests_are_made_by_one_client() -> None:
    """A token went to `http_proxy`, also for 127.0.0.1, and after redirects to other hosts."""
    for path in sorted(SRC.parent.rglob("*.py")):
        if path != SRC / "outbound.py":
            called = {ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
            own = {name for name in called if name.endswith(("urlopen", "build_opener", "ClientSession"))}
            assert not own, f"{path}: everstep.outbound, not {', '.join(own)}"


def test_http_is_served_by_one_server() -> None:
    """It unpacks nothing that a stranger sends, and hangs up on who does not say who he is."""
    for path in sorted(SRC.parent.rglob("*.py")):
        if path != SRC / "net" / "strangers.py":
            called = {ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
            own = {name for name in called if name.endswith(("AppRunner", "ServerRunner", "run_app"))}
            assert not own, f"{path}: everstep.net.strangers, not {', '.join(own)}"


def test_the_product_imports_no_satellite_and_satellites_not_each_other() -> None:
    for path in sorted(SRC.parent.rglob("*.py")):
        own = path.relative_to(SRC.parent).parts[0]
        found = {name.split(".")[0] for name in imports(path)}
        assert not {name for name in found if name.startswith("everstep_")} - {own}, path


@pytest.mark.parametrize("path", sorted(DIAGNOSE.rglob("*.py")), ids=lambda path: path.stem)
def test_dumps_are_read_without_torch_and_without_the_product(path: Path) -> None:
    for name in imports(path):
        package, _, rest = name.partition(".")
        assert package not in {"torch", "aiohttp"}, path
        assert package != "everstep" or not rest or rest in OF_DUMPS, f"{path.name} imports {name}"
        assert path.stem == "command" or package not in IMPURE, f"{path.name} imports {name}"


def test_what_dumps_are_read_with_imports_nothing_else_of_the_product() -> None:
    for name in OF_DUMPS - {"cli", "cli.render"}:
        own = {one for one in imports(SRC / f"{name}.py") if one.startswith("everstep")}
        assert own <= {"everstep", "everstep.errors", "everstep.log"}, name


@pytest.mark.parametrize("path", sorted(FABRIC.rglob("*.py")), ids=lambda path: path.stem)
def test_the_fabric_is_planned_by_pure_code(path: Path) -> None:
    for name in imports(path):
        if path.stem not in AT_THE_WORLD:
            assert name.split(".")[0] not in IMPURE, f"{path.name} imports {name}"
        if path.stem != "plan":  # workers load the others
            assert not name.startswith("everstep.core"), f"{path.name} imports {name}"


@pytest.mark.parametrize("room", [LAB / "study", SRC.parents[1] / "tests" / "storms"], ids=lambda x: x.name)
def test_the_simulator_drives_pure_code(room: Path) -> None:
    for path in sorted(room.rglob("*.py")):
        for name in imports(path):
            parts = name.split(".")
            assert parts[0] != "everstep" or parts[1] not in SHELLS, f"{path.name} imports {name}"


def test_every_package_of_the_house_is_on_the_list() -> None:
    packages = {path.parent.name for path in SRC.glob("*/__init__.py")}
    assert packages <= set(FLOORS)
    assert {path.parent.name for path in (SRC / "engine").glob("*/__init__.py")} == set(ROOMS)


@pytest.mark.parametrize("room", ["src", "tests", "bench", "harness", "tools", "examples"])
def test_what_is_imported_is_there(room: str) -> None:
    """mypy does not say it: packages that are not installed here are allowed."""
    for path in sorted((SRC.parents[1] / room).rglob("*.py")):
        for name in imports(path):
            if name.split(".")[0].startswith("everstep"):
                module = SRC.parent.joinpath(*name.split("."))
                assert module.is_dir() or module.with_suffix(".py").is_file(), f"{path}: no {name}"


@pytest.mark.parametrize(
    ("room", "closed"), [("tests", {"bench"}), ("bench", {"tests"}), ("harness", {"tests", "bench", "tools"})]
)
def test_rooms_outside_src_keep_apart(room: str, closed: set[str]) -> None:
    """What tests and benches share lives in harness/; what makes docs lives in tools/."""
    for path in sorted((SRC.parents[1] / room).rglob("*.py")):
        for name in imports(path):
            assert name.split(".")[0] not in closed, f"{path}: {room} does not import {name}"


def test_what_benches_import_by_a_bare_name_lies_beside_them() -> None:
    """`bench/scripts/trial.py` was deleted as a double of another file; all scripts there failed."""
    bench = SRC.parents[1] / "bench"
    own = {path.stem for path in bench.rglob("*.py")} - {"__init__"}
    for path in sorted(bench.rglob("*.py")):
        for name in own & {one.split(".")[0] for one in imports(path)} - sys.stdlib_module_names:
            there = [folder / f"{name}.py" for folder in (path.parent, path.parent.parent)]
            assert any(one.is_file() for one in there), f"{path}: no {name}"
