"""How a recipe, a file, options and single settings become the values of a run, on the command line and in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedrpc import config
from fedrpc.errors import ConfigError


def merge_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run: those of the recipe, then of the file, then of the options, then of --set.

    Raises:
        ConfigError: The recipe or the file is of a comparison.
    """
    layers = read_layers(options)
    if methods := read_methods(layers):
        source = f"--recipe {options['recipe']}" if options["recipe"] else f"--config {options['config_file']}"
        raise ConfigError(f"this is a comparison of {', '.join(methods)}; start it with `fedrpc compare {source}`")
    return config.merge({}, *layers, collect_options(options), config.parse_set(options["set_"] or []))


def read_layers(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The values of the recipe and of the file, if any."""
    recipe, file = options["recipe"], options["config_file"]
    return [config.read_recipe(recipe) if recipe else {}, config.read_own_toml(file) if file else {}]


def read_methods(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods that a recipe or a file compares; none if it is of a single run."""
    found: list[str] = []
    for layer in layers:
        methods = layer.get("methods", found)
        if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
            raise ConfigError(f'methods is a list such as ["fedprox", "flea"], got {methods!r}')
        found = methods
    return found


def collect_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the options that were used."""
    values = {name: options[name] for name in config.RunConfig.model_fields if options.get(name) is not None}
    budget, dp_sgd = options["epsilon_budget"], options["dp_sgd"]
    privacy: dict[str, Any] = {"epsilon_budget": budget} if budget is not None else {}
    if dp_sgd is not None:
        items = [item.strip() for item in dp_sgd.split(",")]
        privacy["dp_sgd"] = config.parse_set(items, "--dp-sgd", "noise_multiplier=1,max_grad_norm=1")
    if options.get("import_"):
        values["import"] = [str(path) for path in options["import_"]]
    limits = {"byte_budget": options["byte_budget"]} if options["byte_budget"] is not None else {}
    train = {"precision": options["precision"]} if options["precision"] is not None else {}
    # Merged: in Python a table and an option that belongs into it can both be given.
    tables = {"privacy": privacy, "limits": limits, "train": train}
    return config.merge(values, {name: table for name, table in tables.items() if table})
