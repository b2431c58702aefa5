"""The colours of every page and picture, by name, for light and for dark."""

from __future__ import annotations

LIGHT = {
    "ground": "#f6f7f9",
    "card": "#ffffff",
    "ink": "#1b2733",
    "soft": "#5b6b7a",
    "line": "#dfe4ea",
    "grid": "#e9edf1",
    "good": "#15803d",
    "bad": "#b45309",
    "on": "#ffffff",  # text on a filled bar
}
DARK = {
    "ground": "#11161c",
    "card": "#191f27",
    "ink": "#e6ebf0",
    "soft": "#95a3b1",
    "line": "#2a333d",
    "grid": "#252d36",
    "good": "#4ade80",
    "bad": "#fbbf24",
    "on": "#0f151b",
}
# Series of plots within a run (directions, clients, classes), s0, s1, ...; s7 is neutral.
_SERIES = (  # (light, dark)
    ("#2f6fd0", "#5b9bf3"),
    ("#d97706", "#f0a03c"),
    ("#0f9d76", "#38c79c"),
    ("#d64550", "#f0737c"),
    ("#7c5cd6", "#a48cf0"),
    ("#0e9fb5", "#41c3d8"),
    ("#c2559d", "#e084c0"),
    ("#7b8794", "#8593a1"),
    ("#8a9a1f", "#bccb4e"),
    ("#96683b", "#c79a68"),
)
# Methods of a comparison, m0, m1, ...: full colours, which no kind has. FedAvg is neutral.
_METHODS = (
    ("#0b5fd0", "#4c9bff"),
    ("#e8590c", "#ff8a4c"),
    ("#0a8f5b", "#2fd693"),
    ("#c2185b", "#ff5c9e"),
    ("#7428e8", "#ab7dff"),
    ("#00879e", "#22cbe8"),
    ("#a87900", "#e6b422"),
    ("#8d4f2a", "#d08b5f"),
    ("#5b7a00", "#a5d01f"),
)
# Kinds of the wire, k0, k1, ...: soft colours, which no method has. A kind has one colour on every page.
_KINDS = {
    "weights": ("#9db4cf", "#5f7893"),
    "class_abundance": ("#d8b4dd", "#8d6a93"),
    "latent_means": ("#a9d6c3", "#5d8a78"),
    "activations": ("#f3c48f", "#a67c4c"),
    "images": ("#f0a8a3", "#a0605c"),
    "feedback": ("#c7c1ec", "#7770a3"),
    "mean_samples": ("#dfd48f", "#8f864a"),
    "samples": ("#e58d9b", "#b0505f"),
    "moments": ("#9ed3de", "#538a96"),
    "scalars": ("#cfd6dd", "#525e6b"),
    "envelope": ("#e6dfd5", "#6d665c"),
    "control_variates": ("#c9b39c", "#85705a"),
}
KIND_FILLS = {kind: f"k{index}" for index, kind in enumerate(_KINDS)}
NUM_METHOD_HUES, NUM_KIND_HUES = len(_METHODS), len(_KINDS)
for _letter, _colours in (("s", _SERIES), ("m", _METHODS), ("k", tuple(_KINDS.values()))):
    LIGHT |= {f"{_letter}{index}": light for index, (light, _) in enumerate(_colours)}
    DARK |= {f"{_letter}{index}": dark for index, (_, dark) in enumerate(_colours)}
