"""Finding the plugins: files in `implementations/`, folders of one's own, and entry points of installed packages.

A plugin that cannot be loaded is reported (`Registry.broken`) and stops nothing. No plugin's package is ever imported
here: modules may import the standard library, torch and the harness only, and one that imports more is refused before
it runs.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError, describe
from harness.interface import DTYPES, ROUTER_CONVENTIONS, Implementation, Point

ROOT = Path(__file__).resolve().parent.parent
IMPLEMENTATIONS = ROOT / "implementations"
ENTRY_POINT_GROUP = "moebench.implementations"
#: Folders with plugins of one's own, separated by `os.pathsep`.
PLUGINS_VARIABLE = "MOEBENCH_PLUGINS"

_NAME = re.compile(r"[a-z][a-z0-9_]*")
#: What a plugin may import at module level, beside the standard library and its own folder.
_ALLOWED = frozenset({"torch", "harness", "implementations"})
_HASHED_SUFFIXES = frozenset({".py", ".pyi", ".cu", ".cuh", ".cpp", ".cc", ".h", ".hpp", ".json", ".toml"})
#: Harness modules that present, store or choose, and so change no number; all others count as measuring code.
_NOT_MEASURING = frozenset(
    {"check", "claims", "cli", "cluster", "compare", "conformance", "devices", "estimate", "regress", "registry"}
    | {"report", "runner", "session", "store", "sweep", "training"}
)


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that could not be loaded.

    Attributes:
        name: its file's name (without suffix) or its entry point's.
        reason: what is wrong, one sentence.
        source: the file or entry point.
    """

    name: str
    reason: str
    source: str


class Registry:
    """The plugins found, by name; each is instantiated when first asked for."""

    def __init__(self, classes: dict[str, type[Implementation]], broken: Sequence[BrokenPlugin] = ()) -> None:
        self._classes = dict(sorted(classes.items()))
        self._instances: dict[str, Implementation] = {}
        self._broken = list(broken)

    @property
    def broken(self) -> list[BrokenPlugin]:
        """Plugins that could not be loaded (those whose instantiation failed join when it is tried)."""
        return list(self._broken)

    def broken_reason(self, name: str) -> str | None:
        """Why the plugin of this name could not be loaded; None where it could, or where there is none."""
        if name in self._classes:
            return None
        return next((entry.reason for entry in self._broken if entry.name == name), None)

    def names(self) -> list[str]:
        """Names of the usable plugins, sorted."""
        return list(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __len__(self) -> int:
        return len(self._classes)

    def __iter__(self) -> Iterator[Implementation]:
        return iter(self.all())

    def get(self, name: str) -> Implementation:
        """The plugin of this name; raises `UserError` with the reason where it is broken, else with the choices."""
        if name in self._instances:
            return self._instances[name]
        if name in self._classes:
            try:
                return self._instances.setdefault(name, self._classes[name]())
            except (Exception, SystemExit) as error:  # a plugin's own code may raise anything
                entry = BrokenPlugin(name, f"cannot be instantiated: {describe(error)}", _class_source(self, name))
                del self._classes[name]
                self._broken.append(entry)
        reason = self.broken_reason(name)
        if reason:
            raise UserError(f"implementation {name} is broken: {reason}")
        raise UserError(f"unknown implementation {name!r}; {choices(name, self.names())}")

    def all(self) -> list[Implementation]:
        """Every usable plugin, sorted by name."""
        found = []
        for name in self.names():
            try:
                found.append(self.get(name))
            except UserError:
                continue  # now listed in `broken`
        return found

    def offering(self, operation: str, device: str | None = None) -> list[Implementation]:
        """The plugins that offer an operation (on a device, where one is named)."""
        return [
            implementation
            for implementation in self.all()
            if operation in implementation.operations and (device is None or device in implementation.devices)
        ]


def choices(given: str, valid: Iterable[str]) -> str:
    """The tail of an error message: the valid choices, and the one that was probably meant."""
    listed = list(valid)
    close = difflib.get_close_matches(given, listed, n=1, cutoff=0.6)
    text = f"choose from {', '.join(listed)}" if listed else "there are none"
    return f"{text} (did you mean {close[0]}?)" if close else text


def load_registry(
    folder: Path | str | None = None,
    extra_folders: Iterable[Path | str] | None = None,
    entry_points: bool = True,
) -> Registry:
    """Look for plugins and load their modules.

    Args:
        folder: default: this project's `implementations/`.
        extra_folders: default: those named by the environment variable MOEBENCH_PLUGINS.
        entry_points: look at installed packages too.
    """
    if extra_folders is None:
        extra_folders = [part for part in os.environ.get(PLUGINS_VARIABLE, "").split(os.pathsep) if part]
    classes: dict[str, type[Implementation]] = {}
    broken: list[BrokenPlugin] = []
    for place in [Path(folder) if folder is not None else IMPLEMENTATIONS, *map(Path, extra_folders)]:
        if not place.is_dir():
            broken.append(BrokenPlugin(place.name, f"no such folder (see {PLUGINS_VARIABLE})", str(place)))
            continue
        package = _package_of(place.resolve())
        for path in _plugin_files(place.resolve()):
            stem = path.parent.name if path.name == "__init__.py" else path.stem
            try:
                _refuse_heavy_imports(path, place.resolve())
                module = importlib.import_module(f"{package}.{stem}")
                found = _implementations_in(module)
            except (Exception, SystemExit) as error:  # whatever a plugin's module raises, the others must load
                broken.append(BrokenPlugin(stem, _load_failure(error), str(path)))
                continue
            if not found:
                broken.append(
                    BrokenPlugin(stem, "defines no Implementation; helper modules start with an underscore", str(path))
                )
            for cls in found:
                _add(classes, broken, cls, stem, str(path))
    if entry_points:
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            source = f"entry point {point.name} = {point.value}"
            try:
                cls = point.load()
            except (Exception, SystemExit) as error:
                broken.append(BrokenPlugin(point.name, _load_failure(error), source))
                continue
            if not (inspect.isclass(cls) and issubclass(cls, Implementation) and not inspect.isabstract(cls)):
                broken.append(BrokenPlugin(point.name, "is not a complete Implementation class", source))
                continue
            _add(classes, broken, cls, point.name, source)
    return Registry(classes, broken)


@functools.cache
def default_registry() -> Registry:
    """`load_registry` with its defaults, once for each process."""
    return load_registry()


def installed_reason(implementation: Implementation) -> str | None:
    """What is missing for this plugin to run and how to get it; None where everything it needs can be imported.

    Nothing is imported: only the import system's finders are asked."""
    missing: dict[str, list[str]] = {}
    for module, how in implementation.requires.items():
        if not importable(module):
            missing.setdefault(how, []).append(module)
    sentences = [
        f"the package {modules[0]} is missing; get it with: {how}"
        if len(modules) == 1
        else f"the packages {', '.join(modules)} are missing; get them with: {how}"
        for how, modules in missing.items()
    ]
    return "; ".join(sentences) or None


def refusal(implementation: Implementation, point: Point) -> tuple[str, str] | None:
    """Why a plugin will not run a point, as (status, reason); None where it will. A plugin's own `restriction` may
    raise or answer with something else than a sentence, which is that plugin's failure and nobody else's."""
    try:
        reason = implementation.unsupported_reason(point)
    except (Exception, SystemExit) as error:  # a plugin's own code may raise anything
        return "crashed", f"its restriction raised {describe(error)}"
    if not reason:
        return None
    if not isinstance(reason, str):
        return "crashed", f"its restriction returned {reason!r}, expected a sentence or None"
    return "unsupported", reason


def plugin_hash(implementation: Implementation | type[Implementation]) -> str:
    """SHA-256 (64 hexadecimal digits) of the plugin's source and of all local code that it imports.

    Local is what lies in the folder of the plugin, followed through imports wherever they stand in a file; of a package
    every source file counts. Where it lies on the disk does not enter."""
    cls = implementation if isinstance(implementation, type) else type(implementation)
    file = Path(inspect.getfile(cls)).resolve()
    module = cls.__module__
    # The plugin's root module tells its folder: implementations.<stem>[.<more>] -> up to the folder `implementations`.
    depth = module.count(".") if file.name != "__init__.py" else module.count(".") + 1
    root = file.parents[max(depth - 1, 0)]
    # A package plugin's class may live in a submodule; its `__init__` belongs to the plugin as well.
    start = {file}
    if file.parent != root:
        start.add(root / file.relative_to(root).parts[0] / "__init__.py")
    files: set[Path] = set()
    waiting = [path for path in start if path.is_file()]
    while waiting:
        path = waiting.pop()
        if path in files:
            continue
        files.add(path)
        home = _home(path, root)
        relative = path.relative_to(home)
        if len(relative.parts) > 1:
            waiting += [found for found in _sources_below(home / relative.parts[0]) if found not in files]
        if path.suffix == ".py":
            waiting += [found for found in _local_imports(path, root, module_level=False) if found not in files]
    return _hash_files(files, root)


@functools.cache
def harness_hash() -> str:
    """SHA-256 (64 hexadecimal digits) of the measuring code: the harness without what presents and stores."""
    folder = Path(__file__).resolve().parent
    files = {
        path
        for path in folder.rglob("*.py")
        if path.relative_to(folder).parts[0].removesuffix(".py") not in _NOT_MEASURING
    }
    return _hash_files(files, folder)


def code_hash(implementation: Implementation | type[Implementation]) -> str:
    """`plugin_hash` and `harness_hash` in one (64 hexadecimal digits): the code that a row depends on."""
    return hashlib.sha256(f"{plugin_hash(implementation)}{harness_hash()}".encode()).hexdigest()


class _PluginRefused(Exception):
    """A plugin that breaks the interface's rules; the message is a sentence."""


def _load_failure(error: BaseException) -> str:
    return str(error) if isinstance(error, _PluginRefused) else f"cannot be imported: {describe(error)}"


def _class_source(registry: Registry, name: str) -> str:
    try:
        return inspect.getfile(registry._classes[name])
    except (TypeError, OSError):
        return name


def _package_of(folder: Path) -> str:
    """The importable package of a folder of plugins. Other folders than this project's get a package made for them,
    so that their modules can import each other relatively and cannot shadow anything."""
    if folder == IMPLEMENTATIONS:
        return "implementations"
    name = f"moebench_plugins_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        package = types.ModuleType(name, f"Plugins in {folder}")
        package.__path__ = [str(folder)]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    importlib.invalidate_caches()
    return name


def _plugin_files(folder: Path) -> list[Path]:
    files = [path for path in folder.glob("*.py") if not path.name.startswith("_")]
    packages = [
        path
        for path in folder.glob("*/__init__.py")
        if not path.parent.name.startswith("_") and path.parent.name.isidentifier()
    ]
    return sorted(files + packages)


def _implementations_in(module: types.ModuleType) -> list[type[Implementation]]:
    """The complete plugin classes that a module (or, for a package, one of its submodules) defines."""
    return [
        cls
        for name, cls in vars(module).items()
        if inspect.isclass(cls)
        and issubclass(cls, Implementation)
        and not inspect.isabstract(cls)
        and not name.startswith("_")
        and (cls.__module__ == module.__name__ or cls.__module__.startswith(module.__name__ + "."))
    ]


def _add(
    classes: dict[str, type[Implementation]],
    broken: list[BrokenPlugin],
    cls: type[Implementation],
    found_as: str,
    source: str,
) -> None:
    for attribute in ("name", "label", "upstream", "licence"):
        value = getattr(cls, attribute, None)
        if not isinstance(value, str) or not value:
            broken.append(BrokenPlugin(found_as, f"class {cls.__name__} has no {attribute}", source))
            return
    wrong = _wrong_declaration(cls)
    if wrong:
        broken.append(BrokenPlugin(found_as, f"class {cls.__name__}: {wrong}", source))
    elif not _NAME.fullmatch(cls.name):
        reason = f"name {cls.name!r} of class {cls.__name__}: use lower-case letters, digits and underscores"
        broken.append(BrokenPlugin(found_as, reason, source))
    elif cls.name in classes:
        if classes[cls.name] is not cls:
            other = inspect.getfile(classes[cls.name])
            reason = f"name {cls.name!r} of class {cls.__name__} is already taken by {other}"
            broken.append(BrokenPlugin(found_as, reason, source))
    else:
        classes[cls.name] = cls


def _wrong_declaration(cls: type[Implementation]) -> str | None:
    """What a class says about itself that nothing could act on, one sentence; None where all of it is known."""
    from harness.operations import OPERATIONS

    for attribute, known in (
        ("operations", tuple(OPERATIONS)),
        ("devices", ("cuda", "cpu")),
        ("dtypes", tuple(DTYPES)),
        ("conventions", ROUTER_CONVENTIONS),
    ):
        values = getattr(cls, attribute)
        if not isinstance(values, (tuple, list)):
            return f"{attribute} must be a tuple of names, not {values!r}"
        for value in values:
            if value not in known:
                return f"{attribute} names {value!r}; {choices(str(value), known)}"
    if not isinstance(cls.requires, dict) or not all(isinstance(how, str) for how in cls.requires.values()):
        return 'requires must be a dictionary, e.g. {"package": "how to get it"}'
    return None


def importable(module: str) -> bool:
    """Whether the import system would find a module, dotted or not. `importlib.util.find_spec` imports the parents of a
    dotted name, so they are searched by hand."""
    parts = module.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):  # a module without a spec is one that is loaded already
        return parts[0] in sys.modules
    for i in range(1, len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            return False
        try:
            locations = list(spec.submodule_search_locations)
            spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: i + 1]), locations)
        except (ImportError, KeyError, ValueError):
            return False
    return spec is not None


def _is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(tree: ast.AST, module_level: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements: all of a file, or those that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif module_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        elif isinstance(node, ast.If) and _is_type_checking(node):
            for branch in node.orelse:
                yield from _imports(ast.Module([branch], []), module_level)
        else:
            yield from _imports(node, module_level)


def _home(path: Path, root: Path) -> Path:
    """The folder of plugins in which a file lies: ``root``, or this project's own, from which others may import."""
    return root if root in path.parents else IMPLEMENTATIONS


def _local_imports(path: Path, root: Path, module_level: bool) -> set[Path]:
    """Files in the folder of plugins ``root`` and in this project's own that a file there imports, relatively or by
    the folder's name."""
    found: set[Path] = set()
    folders = {"implementations": IMPLEMENTATIONS, root.name: root}
    home = _home(path, root)

    def note(base: Path, parts: Sequence[str]) -> bool:
        """Add the module ``parts`` below ``base`` and the packages on the way; False where there is no such file."""
        here = base
        for i, part in enumerate(parts):
            here = here / part
            if (here / "__init__.py").is_file():
                found.add(here / "__init__.py")
            elif i == len(parts) - 1 and here.with_suffix(".py").is_file():
                found.add(here.with_suffix(".py"))
            else:
                return False
        return True

    for node in _import_statements(path.read_bytes(), path.name, module_level):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] in folders:
                    note(folders[parts[0]], parts[1:])
        else:
            parts = node.module.split(".") if node.module else []
            if node.level:
                base = path.parents[node.level - 1]
                if base != home and home not in base.parents:
                    continue
            elif parts[0] in folders:
                base, parts = folders[parts[0]], parts[1:]
            else:
                continue
            note(base, parts)
            for alias in node.names:
                note(base, [*parts, alias.name])
    return found


@functools.lru_cache(maxsize=1024)
def _import_statements(source: bytes, name: str, module_level: bool) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(_imports(_parsed(source, name), module_level))


@functools.lru_cache(maxsize=512)
def _parsed(source: bytes, name: str) -> ast.Module:
    """Of equal sources once: most plugins import the same files. Nobody changes the tree."""
    return ast.parse(source, filename=name)


def _refuse_heavy_imports(path: Path, root: Path) -> None:
    """Raise where importing the plugin would import a package that belongs into `build`."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for node in _import_statements(file.read_bytes(), file.name, True):
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level else [node.module or ""]
            else:
                names = [alias.name for alias in node.names]
            for name in names:
                top = name.split(".")[0]
                if top not in _ALLOWED and top not in sys.stdlib_module_names:
                    raise _PluginRefused(
                        f"imports {top} at module level ({file.relative_to(_home(file, root))}, line {node.lineno}); "
                        "move the import into build"
                    )
        waiting += _local_imports(file, root, module_level=True)


def _sources_below(package: Path) -> list[Path]:
    return [
        path
        for path in package.rglob("*")
        if path.suffix in _HASHED_SUFFIXES and path.is_file() and "__pycache__" not in path.parts
    ]


def _hash_files(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    named = {path.relative_to(_home(path, root)).as_posix(): path for path in files}
    for name in sorted(named):
        content = named[name].read_bytes()
        digest.update(f"{len(name)} {name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
