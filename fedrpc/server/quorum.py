"""Too few answers to a question: whether asking again can help, and what to tell the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedrpc.config import RunConfig
from fedrpc.errors import AnswerRefused, ConfigError, Diverged, FedrpcError, MethodFailed, QuorumError
from fedrpc.server.code_changes import describe_remedy
from fedrpc.server.mailbox import Missing

_MAX_REASONS = 3  # in one message
_MAX_CLIENTS = 3  # named for one reason


def group_by_reason(missing: Mapping[int, Missing]) -> dict[str, list[int]]:
    """The clients that did not answer, by reason: the same mistake in all of them is one mistake."""
    found: dict[str, list[int]] = {}
    for client, why in missing.items():
        found.setdefault(why.reason, []).append(client)
    return found


def name_clients(clients: Sequence[int]) -> str:
    """Clients in words: client 0; clients 0, 1, 2 and 7 more."""
    more = f" and {len(clients) - _MAX_CLIENTS} more" if len(clients) > _MAX_CLIENTS else ""
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients[:_MAX_CLIENTS]))}{more}"


def build_quorum_error(
    where: str, num_asked: int, needed: int, missing: Mapping[int, Missing], config: RunConfig
) -> FedrpcError:
    """The error that ends a run in which too few clients answered.

    It is a QuorumError, after which the same command can go on, if enough of the missing clients could answer then.

    Args:
        where: The round and the phase.
        needed: How many answers the quorum asks for.
    """
    answered = num_asked - len(missing)
    failed = {client: why for client, why in missing.items() if why.failed}
    passing = sum(not why.failed and not why.abstained and not why.planned for why in missing.values())
    lasts = answered + passing < needed
    if lasts and not failed and any(why.planned for why in missing.values()):
        return ConfigError(
            f"{where}: {answered} of {num_asked} clients answered, the quorum is {needed}: too many drop out of this "
            "round, and the same ones will again; go on with a lower --set limits.quorum, or choose a lower --dropout "
            "or a higher --select-extra, in another --out"
        )
    groups = group_by_reason(failed if lasts else missing)
    reasons = [f"{name_clients(clients)}: {reason}" for reason, clients in list(groups.items())[:_MAX_REASONS]]
    what = f"{where}: {answered} of {num_asked} clients answered, the quorum is {needed} ({'; '.join(reasons)})"
    if not lasts:
        return QuorumError(f"{what}; run the same command again to go on from here")
    kinds, clients = {why.failed for why in failed.values()}, [c for c in failed if failed[c].failed != AnswerRefused]
    if kinds == {Diverged}:
        rate = f"lower train.lr, which is {config.train.lr:g}, and choose another --out"
        return Diverged(f"{what}; {rate}; more is in the log of client {clients[0]}", clients)
    if not clients:  # their answers are kept, here and there, and would be taken again
        return AnswerRefused(f"{what}; correct the method, and choose another --out")
    remedy = f"{describe_remedy(config)} to go on from here"
    return MethodFailed(f"{what}; {remedy}; the traceback is in the log of client {clients[0]}", clients)
