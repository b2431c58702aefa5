"""What a method may return to tools that open a finished run; each tool's protocol is defined beside the tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedrpc.data.examples import ClientData
from fedrpc.methods.runtime import Memory


@dataclass(frozen=True)
class PastClient:
    """One client of a finished run, as the simulator knows it; an attacker has none of it.

    Args:
        store: The client's store; empty when it is not here.
        setup_rng: The client's random streams in set-up, by purpose.
    """

    data: ClientData
    store: Memory
    setup_rng: Callable[[str], np.random.Generator]


@dataclass(frozen=True)
class SharedItems:
    """What a run has shared of clients' data, item by item.

    Args:
        items: One a row, as they travelled; whose they are need not be known.
        labels: The class of each item, or its label distribution; None when none travelled.
    """

    items: Tensor
    labels: Tensor | None = None


@dataclass(frozen=True)
class View:
    """How a method turns clients' inputs into shared items.

    Args:
        show: Turns groups of normalised inputs, (n, group_size, *shape), into n items as they travel.
        sources: Positions of the training examples behind the items that a client shared, one row of `group_size`
            each, in the order of its items; there may be more rows than items.
        group_size: Inputs behind one item.
    """

    show: Callable[[Tensor], Tensor]
    sources: Callable[[PastClient], np.ndarray]
    group_size: int = 1


@dataclass(frozen=True)
class Pictures:
    """Images that a finished run can show, in the range of its data.

    Attributes:
        samples: Fresh images by row of a contact sheet, the same number in each.
        progress: The same at points of the training.
        given: The images that clients trained on, with their labels.
    """

    samples: Mapping[str, Tensor]
    progress: Mapping[str, Tensor]
    given: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class ReportedValue:
    """A recorded value that is shown when a run ends: in summary.json, in the table and on the page.

    The latest recorded value is shown; for a mapping, the latest of each key.

    Attributes:
        record: Its name in the records, with dots into nested values ("latent_privacy.rows").
        words: A short name for people.
        about: What it is; for a claim, whose.
        why: The name, like `record`, of the recorded reason or condition.
        spread: Show mean, least and greatest of all its numbers.
        columns: For rows (a list or a mapping of mappings), the headings of the columns to show; "key" is the key.
    """

    record: str
    words: str
    about: str = ""
    why: str = ""
    spread: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
