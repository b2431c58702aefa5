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
# Series of plots, s0, s1, ...; s7 is neutral.
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
    ("#4b5b94", "#93a3dc"),
    ("#b3546b", "#dd92a3"),
    ("#4d7c5f", "#8fc3a3"),
)
LIGHT |= {f"s{index}": light for index, (light, _) in enumerate(_SERIES)}
DARK |= {f"s{index}": dark for index, (_, dark) in enumerate(_SERIES)}

# The series that stand for methods in a comparison; FedAvg is neutral.
METHOD_HUES = (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11)
