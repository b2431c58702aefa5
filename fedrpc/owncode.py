"""A user's own files of code: imported by path, told apart by their SHA-256, and kept beside the runs that used them.

They run only where their user named them: code never travels, and no server can make a client import anything. What
such a file imports from beside it belongs to it, and is recorded, too.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType

from fedrpc.errors import ConfigError, Damaged, FedrpcError, Refused, describe_exception, find_place
from fedrpc.files import RESTORE, write_durably
from fedrpc.registry import AGGREGATORS, METHODS, Registry, own_modules

FOLDER = "code"  # beside config.toml: copies of the files
_SHOWN = 16  # digits of a hash in a message


@dataclass(frozen=True)
class OwnFile:
    """A file that was imported.

    Attributes:
        name: Its path below the folder of the file that the user named, such as "fedfocal.py" or "blocks/loss.py".
        module: What Python calls it.
        content: What was imported, whatever the file holds by now.
    """

    name: str
    path: Path
    module: str
    content: bytes

    @property
    def key(self) -> str:
        """Its name in Python's spelling, without a prefix that avoids an installed module of this name."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the content, in hex."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def imports(self) -> set[str]:
        """The modules that its import statements name, with the packages that they are in."""
        package = self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]
        found: set[str] = set()
        for node in ast.walk(ast.parse(self.content)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (package or not node.level):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                found |= {f"{base}.{alias.name}" for alias in node.names}
        paths = [name.split(".") for name in found]
        return {".".join(path[:end]) for path in paths for end in range(1, 1 + len(path))}


_loaded: dict[str, OwnFile] = {}  # by name
_imported: dict[str, set[str]] = {}  # by module: what it imported, also where no import statement says so
_running: list[str] = []  # the modules whose code has not ended
_folders: list[Path] = []  # of the files that the user named
_under_way: list[Path] = []  # the imports of such files that have not ended


# Importing


class _Loader(importlib.machinery.SourceFileLoader):
    """Notes what it loads, registers its classes, and writes no bytecode into the user's folder."""

    def __init__(self, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        folder = next(each for each in reversed(_folders) if Path(path).is_relative_to(each))
        self.name_of_file = Path(path).relative_to(folder).as_posix()

    def get_code(self, fullname: str) -> CodeType:
        """Compiles what the file holds now."""
        file = OwnFile(self.name_of_file, Path(self.path), fullname, Path(self.path).read_bytes())
        code: CodeType = compile(file.content, show_path(file.path), "exec", dont_inherit=True)
        _loaded[file.name] = file
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Runs the file, and registers methods and aggregators that did not do so themselves."""
        code = self.get_code(module.__name__)
        own_modules[_loaded[self.name_of_file].key] = module
        if _running:
            _imported.setdefault(_running[-1], set()).add(module.__name__)
        _running.append(module.__name__)
        try:
            exec(code, module.__dict__)
        finally:
            _running.pop()
        for registry in (METHODS, AGGREGATORS):
            registry.adopt(module)


class _Finder:
    """Finds what own files import from beside them; an installed module of the same name comes first."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A module in one of the folders, or in a package there."""
        if path is not None and fullname.partition(".")[0] not in own_modules:
            return None
        for folder in path if path is not None else map(str, reversed(_folders)):
            finder = importlib.machinery.FileFinder(folder, (_Loader, [".py"]))
            found = finder.find_spec(fullname)
            if found is None or (path is None and _is_installed(fullname, found)):
                continue
            if not _under_way:
                raise ImportError(
                    f"{fullname} is imported too late to be recorded: import it at the top of the file", name=fullname
                )
            if found.loader is None:  # a folder without __init__.py: its modules are ours, too
                own_modules.setdefault(fullname, ModuleType(fullname))
            return found
        return None


def _is_installed(fullname: str, own: importlib.machinery.ModuleSpec) -> bool:
    """Whether Python finds another module of this name without us."""
    if fullname in sys.builtin_module_names:
        return True
    other = importlib.machinery.PathFinder.find_spec(fullname)
    return other is not None and other.loader is not None and other.origin != own.origin


def import_file(path: Path) -> OwnFile:
    """Imports a file of the user's own, or takes it as it is if neither it nor what it imports has changed since.

    Raises:
        ConfigError: There is no such file, or its code does not run: one line with file and line.
    """
    path = Path(os.path.abspath(path.expanduser()))
    if path.suffix != ".py" or not os.path.isfile(path):  # which, unlike pathlib, also answers for names that cannot be
        raise ConfigError(f"no Python file at {show_path(path)}; check the path, which is relative to {Path.cwd()}")
    known = _loaded.get(path.name)
    if known is not None and _is_fresh(known, path.parent):
        return known
    if known is not None:
        forget_all()
    with _importing(path):
        _run_file(path)
    return _loaded[path.name]


def _is_fresh(known: OwnFile, folder: Path) -> bool:
    """Whether the files in a folder are those that were imported, from there or from elsewhere."""
    for name in list_needed([known.module]):
        try:
            if (folder / name).read_bytes() != _loaded[name].content:
                return False
        except OSError:
            return False
    return True


def forget_all() -> None:
    """Undoes all imports: a file has changed, and others may have used it."""
    for registry in Registry.everyone:
        registry.forget_owned()
    for module in [*own_modules.values(), *(sys.modules.get(file.module) for file in _loaded.values())]:
        if module is not None:
            sys.modules.pop(module.__name__, None)
    for known in (own_modules, _loaded, _imported, _folders):
        known.clear()


@contextlib.contextmanager
def _importing(path: Path) -> Iterator[None]:
    """Explains in one line what goes wrong in an import, and leaves nothing behind then."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if path.parent not in _folders:
        _folders.append(path.parent)
    _under_way.append(path)
    try:
        yield
    except SyntaxError as error:
        where = f"{error.filename or show_path(path)}:{error.lineno or 1}"
        raise _explain(path, f"{type(error).__name__}: {error.msg}, at {where}") from None
    except FedrpcError as error:
        place = find_place(error, path.stem)
        raise _explain(path, f"{error}{f', at {place}' if place else ''}") from None
    except (Exception, SystemExit) as error:
        raise _explain(path, describe_exception(error, path.stem)) from None
    finally:
        _under_way.pop()


def _explain(path: Path, why: str) -> ConfigError:
    forget_all()
    return ConfigError(f"cannot import {show_path(path)}: {why}")


def _run_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "it is a file of Python"
    is_taken = path.stem in sys.modules or _is_installed(path.stem, spec)
    name = f"own_{path.stem}" if is_taken else path.stem
    loader = _Loader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise


def show_path(path: Path) -> str:
    """A path for messages: relative where the file is below the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# What a run records


def list_needed(modules: Iterable[str]) -> dict[str, str]:
    """The own files of modules and all that these import from beside them, by name, with their SHA-256."""
    by_module = {file.module: file for file in _loaded.values()}
    found: dict[str, str] = {}
    left = [by_module[module] for module in modules if module in by_module]
    while left:
        file = left.pop()
        if file.name not in found:
            found[file.name] = file.sha256
            needed = file.imports | _imported.get(file.module, set())
            left += [each for module in needed if (each := by_module.get(module) or _find_earlier(module))]
    return dict(sorted(found.items()))


def _find_earlier(module: str) -> OwnFile | None:
    """A file beside own ones that the caller's script had imported before them, so that nobody looked for it again."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    if origin is None or module.partition(".")[0] == __package__:  # a clone of fedrpc has it beside own files
        return None
    stem = module.replace(".", "/")
    for folder in _folders:
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if os.path.realpath(folder / name) == os.path.realpath(origin):
                with contextlib.suppress(OSError):  # it was removed since
                    _loaded.setdefault(name, OwnFile(name, folder / name, module, (folder / name).read_bytes()))
                    return _loaded[name]
    return None


def get_content(name: str) -> bytes:
    """What was imported of a file."""
    return _loaded[name].content


def check_name(name: str) -> str:
    """A file's name, as a run records it; raises ValueError for one that could lead elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py" or str(path) != name:
        raise ValueError(f"expected the name of a Python file such as my_method.py, got {name!r}")
    return name


def check_same(wanted: Mapping[str, str], what: str) -> None:
    """Raises Refused unless this process has imported the same files as the server.

    Args:
        wanted: The server's, by name, with their SHA-256.
        what: The run's method and model, for the message.
    """
    for name, expected in wanted.items():
        if name not in _loaded:
            [first] = [name for name in wanted if "/" not in name][:1] or [name]
            raise Refused(
                f"this run ({what}) needs its user's own code, which no server sends: expected {name} with SHA-256 "
                f"{expected[:_SHOWN]}, got none; start the client with --import FILE, your copy of {first}"
            )
        if (got := _loaded[name].sha256) != expected:
            raise Refused(
                f"{show_path(_loaded[name].path)} differs from the server's {name}: expected SHA-256 "
                f"{expected[:_SHOWN]}, got {got[:_SHOWN]}; give client and server the same file"
            )


# Copies beside a run


def save_copies(folder: Path, code: Mapping[str, str]) -> None:
    """Writes the files of a run into a folder, as they were imported; those that are there stay."""
    for name, digest in code.items():
        path, content = folder / name, get_content(name)
        if hashlib.sha256(content).hexdigest() == digest and not holds(path, digest):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content)


def holds(path: Path, digest: str) -> bool:
    """Whether a file has this SHA-256."""
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def import_copies(folder: Path, code: Mapping[str, str]) -> None:
    """Imports a run's files from their copies, after all of them have proved unchanged.

    Raises:
        Damaged: One is missing or was changed.
    """
    for name, expected in code.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{path} is missing: config.toml names it as the run's own code; {RESTORE}")
        if not holds(path, expected):
            got = hashlib.sha256(path.read_bytes()).hexdigest()
            raise Damaged(
                f"{path} was changed: expected SHA-256 {expected[:_SHOWN]}, got {got[:_SHOWN]}; restore it, or name "
                "the file that you want by --import, --method or --model"
            )
    for name in code:
        if "/" not in name:
            import_file(folder / name)
