"""The built-in partitioners: iid, shards, multimodal, dirichlet, dirichlet-client, quantity, natural.

Nothing is dropped, except by `multimodal`, whose clients all hold the same number of samples, and by `shards` with
`of`, which leaves the shards that nobody drew.
"""

from __future__ import annotations

import re

import numpy as np

from fedrpc.data.apportion import apportion
from fedrpc.data.partition_spec import Source, partitioner, require
from fedrpc.errors import ConfigError

MAX_ALPHA = 1e12  # samples overflow far above this, and are equal shares long before


@partitioner("iid", example="iid:stratified")
def iid(source: Source, stratified: bool = False) -> list[np.ndarray]:
    """Samples at random, sizes equal to within one.

    With `stratified` every client also holds every class equally, to within one sample.
    """
    rng = source.rng("iid")
    if not stratified:
        return np.array_split(rng.permutation(len(source)), source.num_clients)
    deck = np.concatenate([rng.permutation(member) for member in source.members])
    return [deck[client :: source.num_clients] for client in range(source.num_clients)]


@partitioner("shards", example="shards:2,strict")
def shards(source: Source, z: int, strict: bool = False, of: int | None = None) -> list[np.ndarray]:
    """McMahan's shards ("unimodal"): sorted by label, cut in equal shards, z of them to each client.

    The sort is stable, so samples of a class stay in the order of the data set. Shards are equal to within one sample,
    and one can straddle two labels. With `strict` each shard has one label, so that a client holds at most z classes;
    shards then are equal within a class only.

    `of` is the number of shards (default: as many as are dealt). With more than are dealt, those that nobody drew are
    dropped, and some class may have gone to nobody: public codes of FedAvg deal 200 shards to any number of clients.
    """
    dealt = source.num_clients * z
    total = dealt if of is None else of
    require(z >= 1, "shards", "z", "1 or more shards a client", z)
    require(dealt <= len(source), "shards", "z", f"at most {len(source) // source.num_clients} shards a client", z)
    require(dealt <= total <= len(source), "shards", "of", f"{dealt} to {len(source)} shards", total)
    if strict:
        require(total >= len(source.labels), "shards", "z", "a shard or more for each class in all", z)
        pairs = zip(source.members, _count_shards(source.counts, total), strict=True)
        pieces = [piece for member, count in pairs for piece in np.array_split(member, count)]
    else:
        pieces = np.array_split(np.concatenate(source.members), total)
    order = source.rng("shards").permutation(total)[:dealt].reshape(source.num_clients, z)
    return [np.concatenate([pieces[shard] for shard in row]) for row in order]


def _count_shards(counts: np.ndarray, total: int) -> np.ndarray:
    """How many shards each class is divided into: in proportion to its size, and at least one."""
    shares = apportion(total, counts)
    while not shares.all():
        shares[np.argmax(shares)] -= 1
        shares[np.argmin(shares)] += 1
    return shares


@partitioner("multimodal", example="multimodal:z=2,modes=0-4x80+5-9x20")
def multimodal(source: Source, z: int = 2, modes: str = "") -> list[np.ndarray]:
    """Sub-populations of clients: each client holds z classes of its own mode, some modes have more clients.

    `modes` gives for each mode its classes and its number of clients, joined by "+"; classes are ranges and numbers
    joined by "/", as in `0-2/7x80+3-6x20`. By default the first half of the classes goes to 80 % of the clients and
    the other half to 20 %. Clients are numbered mode by mode. Within a mode every class has equally many holders, to
    within one, and every holder of any class takes the same number of samples, the largest that the scarcest class
    allows; the rest is dropped.
    """
    holders = source.rng("multimodal", "classes")
    held: list[np.ndarray] = []
    for classes, clients in _parse_modes(source, modes):
        require(1 <= z <= len(classes), "multimodal", "z", f"1 to {len(classes)}, the classes of the smallest mode", z)
        load = np.zeros(len(classes), dtype=np.int64)
        for _ in range(clients):
            chosen = np.lexsort((holders.random(len(classes)), load))[:z]  # the least held, ties at random
            load[chosen] += 1
            held.append(classes[chosen])
    held_by = np.bincount(np.concatenate(held), minlength=len(source.labels))
    quota = int(min(source.counts[held_by > 0] // held_by[held_by > 0]))
    if quota < 1:
        raise ConfigError(
            f"partition 'multimodal': a class has fewer samples than the {held_by.max()} clients that must hold it; "
            "use fewer clients, a smaller z or more data"
        )
    rng = source.rng("multimodal", "samples")
    decks = [list(np.split(rng.permutation(m), range(quota, len(m), quota))) for m in source.members]
    return [np.concatenate([decks[position].pop(0) for position in sorted(classes)]) for classes in held]


def _parse_modes(source: Source, text: str) -> list[tuple[np.ndarray, int]]:
    """Classes, as positions in source.labels, and number of clients of each mode."""
    count = len(source.labels)
    if not text:
        half, many = count // 2, round(0.8 * source.num_clients)
        expected = "a value, since the default needs 4 classes and 3 clients or more"
        require(count >= 4 and 0 < many < source.num_clients, "multimodal", "modes", expected, "nothing")
        return [(np.arange(half), many), (np.arange(half, count), source.num_clients - many)]
    found = []
    for mode in text.split("+"):
        match = re.fullmatch(r"((?:\d+(?:-\d+)?)(?:/\d+(?:-\d+)?)*)x(\d+)", mode.strip())
        require(match is not None, "multimodal", "modes", "classes x clients, such as 0-4x80", f"'{mode}'")
        assert match is not None
        found.append((_parse_classes(source, match[1]), int(match[2])))
    total = sum(clients for _, clients in found)
    require(total == source.num_clients, "multimodal", "modes", f"{source.num_clients} clients in all", total)
    return found


def _parse_classes(source: Source, text: str) -> np.ndarray:
    wanted: set[int] = set()
    for part in text.split("/"):
        first, _, last = part.partition("-")
        wanted |= set(range(int(first), int(last or first) + 1))
    here = set(source.labels.tolist())
    expected = f"classes among {min(here)}-{max(here)} that have samples"
    require(bool(wanted) and wanted <= here, "multimodal", "modes", expected, f"'{text}'")
    return np.searchsorted(source.labels, sorted(wanted))


@partitioner("dirichlet", example="dirichlet:0.1,min_size=3,block=100")
def dirichlet(
    source: Source,
    alpha: float,
    balance: bool = True,
    equal_size: bool = False,
    min_size: int | None = None,
    retries: int = 2000,
    block: int | None = None,
) -> list[np.ndarray]:
    """Dirichlet by label: each class is divided among the clients in proportions sampled from Dir(alpha).

    A draw in which a client holds fewer than `min_size` samples is rejected, at most `retries` times per block.

    - `balance` (default true): a client that holds its fair share N/K takes nothing of the classes that follow, so
      sizes stay comparable; `balance=false` is the textbook law.
    - `min_size` (default 10; with `equal_size` half of the fair share).
    - `block` (default 0, off; with `equal_size` 10): divides the data class by class into equal parts for blocks of at
      most that many clients, each sampled separately; for many clients and a small alpha, where no draw would pass.
    - `equal_size` (default false): concatenates all clients' samples and divides them again into equal sizes.
    """
    require(0 < alpha <= MAX_ALPHA, "dirichlet", "alpha", f"a number above 0, at most {MAX_ALPHA:g}", alpha)
    require(retries >= 1, "dirichlet", "retries", "1 or more", retries)
    block = block if block is not None else 10 if equal_size else 0
    require(block >= 0, "dirichlet", "block", "a number of clients, or 0 for one block", block)
    if min_size is None:
        min_size = max(1, len(source) // (2 * source.num_clients)) if equal_size else 10
    most = len(source) // source.num_clients
    require(1 <= min_size <= most, "dirichlet", "min_size", f"1 to {most}, which is samples over clients", min_size)
    clients: list[np.ndarray] = []
    for number, (members, size) in enumerate(_make_blocks(source, block)):
        rng = source.rng("dirichlet", number)
        counts = _sample_until_accepted(
            np.array([len(m) for m in members]), size, alpha, balance, min_size, retries, rng
        )
        pieces = [np.split(rng.permutation(m), np.cumsum(row)[:-1]) for m, row in zip(members, counts, strict=True)]
        clients += [np.concatenate([piece[client] for piece in pieces]) for client in range(size)]
    return np.array_split(np.concatenate(clients), source.num_clients) if equal_size else clients


def _make_blocks(source: Source, block: int) -> list[tuple[list[np.ndarray], int]]:
    """The samples of each class, and the number of clients, of each block."""
    number = -(-source.num_clients // block) if block else 1
    sizes = [len(part) for part in np.array_split(np.arange(source.num_clients), number)]
    if number == 1:
        return [(source.members, source.num_clients)]
    rng = source.rng("dirichlet", "blocks")
    cuts = np.cumsum(sizes)[:-1]
    slices = [np.split(rng.permutation(m), cuts * len(m) // source.num_clients) for m in source.members]
    return [([piece[index] for piece in slices], size) for index, size in enumerate(sizes)]


def _sample_until_accepted(
    counts: np.ndarray, size: int, alpha: float, balance: bool, min_size: int, retries: int, rng: np.random.Generator
) -> np.ndarray:
    """The first draw of class counts in which every client has `min_size` samples."""
    best = 0
    for _ in range(retries):
        sampled = _sample_counts(counts, size, alpha, balance, rng)
        smallest = int(sampled.sum(axis=0).min())
        if smallest >= min_size:
            return sampled
        best = max(best, smallest)
    lower = f"lower min_size (the best draw had {best}), " if best else ""
    raise ConfigError(
        f"partition 'dirichlet': no draw in {retries} gave each of {size} clients min_size={min_size} of "
        f"{counts.sum()} samples with alpha={alpha:g}; {lower}raise alpha, use fewer clients, draw in blocks "
        f"(block={max(2, min(100, size // 2))} or fewer), raise retries, or use dirichlet-client"
    )


def _sample_counts(counts: np.ndarray, size: int, alpha: float, balance: bool, rng: np.random.Generator) -> np.ndarray:
    """One draw: samples of each class (row) for each client (column).

    Proportions are sampled among the clients that are not full yet. That has the same distribution as sampling among
    all, zeroing the full ones and normalising again, but always leaves something to normalise.
    """
    sampled = np.zeros((len(counts), size), dtype=np.int64)
    fair = counts.sum() / size
    for row, count in zip(sampled, counts, strict=True):
        if not count:
            continue
        takes = sampled.sum(axis=0) < fair if balance else np.ones(size, dtype=bool)
        shares = rng.dirichlet(np.full(int(takes.sum()), alpha))
        cuts = np.minimum(np.floor(np.cumsum(shares) * count), count).astype(np.int64)
        cuts[-1] = count
        row[takes] = np.diff(cuts, prepend=0)
    return sampled


@partitioner("dirichlet-client", example="dirichlet-client:0.1")
def dirichlet_client(source: Source, alpha: float) -> list[np.ndarray]:
    """Dirichlet by client: each client draws its class mixture from Dir(alpha * p), p the shares of the classes.

    Sizes are equal to within one. Clients draw one after the other, without replacement; a class that has run out
    leaves the mixture, so the last clients take what is left.
    """
    require(0 < alpha <= MAX_ALPHA, "dirichlet-client", "alpha", f"a number above 0, at most {MAX_ALPHA:g}", alpha)
    rng = source.rng("dirichlet-client")
    concentration = alpha * source.counts / len(source)
    decks = [rng.permutation(member) for member in source.members]
    stock = source.counts.copy()
    clients = []
    for part in np.array_split(np.arange(len(source)), source.num_clients):
        taken = _take(len(part), concentration, stock, rng)
        chosen = [deck[left - take : left] for deck, left, take in zip(decks, stock, taken, strict=True)]
        clients.append(np.concatenate(chosen))
        stock -= taken
    return clients


def _take(size: int, concentration: np.ndarray, stock: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One client's class counts: sampled from its mixture while the stock lasts.

    Each pass either finishes or empties a class, so there are few.
    """
    mixture = rng.dirichlet(concentration)
    taken = np.zeros_like(stock)
    while (missing := size - int(taken.sum())) > 0:
        left = stock - taken
        weights = np.where(left > 0, mixture, 0.0)
        if not weights.sum() > 0:  # its whole mixture is gone: sample again among the classes that are left
            weights[left > 0] = rng.dirichlet(concentration[left > 0])
        taken += np.minimum(rng.multinomial(missing, weights / weights.sum()), left)
    return taken


@partitioner("quantity", example="quantity:3")
def quantity(source: Source, q: int) -> list[np.ndarray]:
    """Qua(q): client i holds class i mod C and q - 1 others; holders of a class share it equally, to within one."""
    count = len(source.labels)
    require(1 <= q <= count, "quantity", "q", f"1 to {count} classes a client", q)
    if source.num_clients < count:
        raise ConfigError(
            f"partition 'quantity': expected a client for each of the {count} classes, got {source.num_clients}; "
            f"give --clients {count} or more, or take another partition, such as dirichlet:0.1"
        )
    rng = source.rng("quantity")
    holds = np.zeros((source.num_clients, count), dtype=bool)
    for client, row in enumerate(holds):
        own = client % count
        others = np.delete(np.arange(count), own)
        row[[own, *rng.choice(others, q - 1, replace=False)]] = True
    parts: list[list[np.ndarray]] = [[] for _ in range(source.num_clients)]
    for position, member in enumerate(source.members):
        holders = np.flatnonzero(holds[:, position])
        for holder, piece in zip(holders, np.array_split(rng.permutation(member), len(holders)), strict=True):
            parts[holder].append(piece)
    return [np.concatenate(part) for part in parts]


@partitioner("natural", example="natural")
def natural(source: Source) -> list[np.ndarray]:
    """By group: a client is a person, speaker or recording, in the order of the groups, or several.

    With fewer clients than groups, whole groups are put together: the largest first, each to the client that has the
    fewest samples. Nothing is random.
    """
    if source.group is None:
        raise ConfigError(
            "partition 'natural': expected a data set with groups, got one without group_train.npy; "
            "use another partition, for example dirichlet:0.1"
        )
    names, inverse, sizes = np.unique(source.group, return_inverse=True, return_counts=True)
    expected = f"at most {len(names)}, the number of groups"
    require(source.num_clients <= len(names), "natural", "clients", expected, source.num_clients)
    client_of = np.arange(len(names))
    if source.num_clients < len(names):
        load = np.zeros(source.num_clients, dtype=np.int64)
        for group in np.argsort(-sizes, kind="stable"):
            client_of[group] = np.argmin(load)
            load[client_of[group]] += sizes[group]
    owner = client_of[inverse]
    return [np.flatnonzero(owner == client) for client in range(source.num_clients)]
