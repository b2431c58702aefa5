"""How the user's own methods and models are named: `my_method.py`, `my_method.py:Class`, `net.py:Net`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedrpc.errors import ConfigError, UnknownName
from fedrpc.owncode import FOLDER, OwnFile, import_copies, import_file, list_needed, show_path
from fedrpc.registry import METHODS, MODELS, own_modules

_SPEC = re.compile(r"(?P<path>[^\0]+\.py)(?::(?P<name>\w+))?", re.DOTALL)
CODE_DIR = "code_dir"  # in values: where the copies of the files in `code` are


def parse_spec(text: object) -> tuple[Path, str] | None:
    """The path and the object in `my_method.py:Class`; None for a plain name."""
    found = _SPEC.fullmatch(text) if isinstance(text, str) else None
    return (Path(found["path"]), found["name"] or "") if found else None


def anchor(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a TOML file, in which the paths of own code are relative to the file's folder."""

    def place(spec: Any) -> Any:
        return str(folder / spec) if parse_spec(spec) else spec

    out = dict(values)
    for name in ("method", "model"):
        if name in out:
            out[name] = place(out[name])
    for name in ("methods", "import"):
        if isinstance(out.get(name), list):
            out[name] = [place(each) for each in out[name]]
    if out.get("code"):
        out[CODE_DIR] = str(folder / FOLDER)
    return out


def resolve_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run with its own code imported: files are named by their methods and models, and are in `code`.

    What is named by path wins over a copy of the same name that `code` records.
    """
    out = dict(values)
    named = [Path(path) for path in _read_imports(out.pop("import", []))]
    specs = {name: found for name in ("method", "model") if (found := parse_spec(out.get(name)))}
    _check_distinct([*named, *(path for path, _ in specs.values())])
    stored, folder = out.get("code", {}), out.pop(CODE_DIR, None)
    if folder is not None and isinstance(stored, Mapping):
        chosen = {path.name for path in [*named, *(path for path, _ in specs.values())]}
        kept = {name: digest for name, digest in stored.items() if name not in chosen}
        import_copies(Path(folder), kept)
        out["code"] = kept
    files = [import_file(path) for path in named]
    if "method" in specs:
        out["method"] = resolve_method(out["method"])
    if "model" in specs:
        out["model"] = resolve_model(out["model"])
    if code := {**out.get("code", {}), **list_needed(file.module for file in files)}:
        out["code"] = code
    return out


def import_files(layers: Iterable[Mapping[str, Any]]) -> None:
    """Imports the files that layers of values name besides methods and models, so that the names in them are known."""
    for layer in layers:
        resolve_values({name: layer[name] for name in ("import", "code", CODE_DIR) if name in layer})


def list_code(method: str, model: str, modules: list[str]) -> dict[str, str]:
    """The own files that a method and a model need, and those of further modules, with their SHA-256."""
    return list_needed([METHODS.find_owner(method), MODELS.find_owner(model), *modules])


def _read_imports(value: Any) -> list[str]:
    if isinstance(value, list | tuple) and all(isinstance(each, str | Path) for each in value):
        return [str(each) for each in value]
    raise ConfigError(f'import is a list of files such as ["my_code.py"], got {value!r}')


def _check_distinct(paths: list[Path]) -> None:
    """A run records files by their names: two of one name could not be told apart."""
    seen: dict[str, Path] = {}
    for path in paths:
        if (other := seen.setdefault(path.name, path)).resolve() != path.resolve():
            raise ConfigError(f"{other} and {path} have the same file name; rename one of them")


# Methods


def resolve_method(spec: str) -> str:
    """The name of a method; one that is given by file is imported first."""
    found = parse_spec(spec)
    if not found:
        return spec
    path, wanted = found
    file = import_file(path)
    module = own_modules[file.key]
    names = METHODS.list_owned(module)
    by_class = {METHODS[name].__name__: name for name in names}
    if wanted:
        if wanted not in by_class:
            raise _explain_unknown("method", file, wanted, by_class)
        return by_class[wanted]
    if len(names) == 1:
        return names[0]
    if names:
        raise ConfigError(f"{show_path(path)} has {len(names)} methods; say which: {_list_specs(path, by_class)}")
    raise ConfigError(
        f"{show_path(path)} has no method: expected a class that derives from fedrpc.methods.method.Method, or from a "
        "method, and has a `name` of its own; `fedrpc new method NAME` writes one"
    )


# Models


def resolve_model(spec: str) -> str:
    """The name of a model; one that is given by file is imported first, and is called file:Class."""
    found = parse_spec(spec)
    if not found:
        return spec
    path, wanted = found
    file = import_file(path)
    module = own_modules[file.key]
    registered = {getattr(MODELS[name], "make", MODELS[name]).__name__: name for name in MODELS.list_owned(module)}
    plain = {cls.__name__: f"{file.key}:{cls.__name__}" for cls in _list_networks(module)}
    known = registered or plain
    if wanted:
        if wanted in registered:
            return registered[wanted]
        if not callable(getattr(module, wanted, None)):
            raise _explain_unknown("model", file, wanted, plain | registered)
        return f"{file.key}:{wanted}"
    if len(known) == 1:
        return next(iter(known.values()))
    if known:
        raise ConfigError(f"{show_path(path)} has {len(known)} models; say which: {_list_specs(path, known)}")
    raise ConfigError(
        f"{show_path(path)} has no model: expected a class that derives from torch.nn.Module; a function that builds "
        f"one is --model {show_path(path)}:FUNCTION"
    )


def list_plain_models() -> list[str]:
    """The networks in own files that are not registered, by name."""
    made = {getattr(MODELS.imported[name], "make", None) for name in MODELS.imported}
    return [
        f"{key}:{cls.__name__}"
        for key, module in own_modules.items()
        for cls in _list_networks(module)
        if cls not in made
    ]


def _list_networks(module: ModuleType) -> list[type]:
    """The networks that a file defines, without those that are for itself only."""
    return [cls for cls in MODELS.list_classes(module) if not cls.__name__.startswith("_")]


def _list_specs(path: Path, names: Mapping[str, str]) -> str:
    return ", ".join(f"{show_path(path)}:{name}" for name in names)


def _explain_unknown(what: str, file: OwnFile, wanted: str, known: Mapping[str, str]) -> UnknownName:
    return UnknownName(f"{what} of {show_path(file.path)}", wanted, known)
