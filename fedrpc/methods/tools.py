"""What a method may hand to tools that look at a finished run; who asks for it says so beside its own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedrpc.data.examples import ClientData
from fedrpc.methods.runtime import Memory


@dataclass(frozen=True)
class PastClient:
    """One client of a finished run, as a simulator finds it again; an attacker has none of it.

    Args:
        store: What the client remembers; empty when its store is not here.
        setup_rng: The streams that it had in set-up, by purpose.
    """

    data: ClientData
    store: Memory
    setup_rng: Callable[[str], np.random.Generator]


@dataclass(frozen=True)
class SharedItems:
    """What a run has shared of clients' data, item by item.

    Args:
        items: One a row, as they travelled; who gave them need not be known.
        labels: The class of each item, or its label distribution; None when none travelled.
    """

    items: Tensor
    labels: Tensor | None = None


@dataclass(frozen=True)
class View:
    """How a method makes items of clients' inputs.

    Args:
        show: Turns groups of normalised inputs, (n, group_size, *shape), into n items as they travel.
        sources: Positions of the training examples behind the items that a client gave, one row of `group_size` each,
            in the order in which it showed them; there may be more than it gave.
        group_size: Inputs behind one item.
    """

    show: Callable[[Tensor], Tensor]
    sources: Callable[[PastClient], np.ndarray]
    group_size: int = 1


@dataclass(frozen=True)
class Pictures:
    """Images that a finished run can show, in the range of its data.

    Attributes:
        samples: Fresh ones by row of a contact sheet, as many in each.
        progress: The same, as training went on.
        given: Those that clients were given, with their labels.
    """

    samples: Mapping[str, Tensor]
    progress: Mapping[str, Tensor]
    given: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Reported:
    """A recorded figure that must be seen when a run ends: in summary.json, in the table and on the page.

    Told is its newest value in the records; of a mapping, the newest of each key.

    Attributes:
        record: Its name in the records, with dots into what it holds ("latent_privacy.rows").
        words: Its name for people, in few words.
        about: What it is; of a claim, whose.
        why: The name, like `record`, of what says why it is so or when it holds.
        spread: Tell mean, least and greatest of all the numbers in it.
        columns: Of rows (a list or a mapping of mappings), headings of what is told; "key" is a mapping's key.
    """

    record: str
    words: str
    about: str = ""
    why: str = ""
    spread: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
