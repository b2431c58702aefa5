"""A client's own policy: limits that it sets for itself, kept in its state folder and binding in every run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedrpc import log
from fedrpc.config import PrivacyConfig
from fedrpc.errors import ConfigError, Refused
from fedrpc.files import write_durably

POLICY_FILE = "policy.json"
_NONE = "none"  # what an option says to remove a limit


class Policy(BaseModel):
    """The limits; each is an option of fedrpc-client.

    Attributes:
        max_epsilon: The most that covered releases may spend on one data set, in all runs together. With it, nothing
            leaves without a guarantee, since that has no epsilon.
        delta: The delta of that epsilon; a run's own delta is the server's choice.
        require_secret_noise: Whether to refuse runs whose noise can be recomputed from a seed.
        min_clip: The least norm to which gradients, or values that are released with noise, may be clipped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_epsilon: float | None = Field(None, ge=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    require_secret_noise: bool = False
    min_clip: float | None = Field(None, gt=0)

    def check_run(self, privacy: PrivacyConfig) -> None:
        """Raises Refused when this client takes no part in a run with these settings."""
        if self.require_secret_noise and privacy.noise != "secret":
            raise Refused(
                f'expected privacy.noise = "secret" (--require-secret-noise), got "{privacy.noise}": whoever knows the '
                "seed can subtract the noise; start the server with --set privacy.noise=secret"
            )
        clip = privacy.dp_sgd.max_grad_norm if privacy.dp_sgd else None
        if self.min_clip is not None and clip is not None and clip < self.min_clip:
            raise Refused(
                f"expected a max_grad_norm of {self.min_clip:g} at least (--min-clip), got {clip:g}; start the server "
                "with another --dp-sgd"
            )


def parse_changes(
    max_epsilon: str | None, delta: float | None, require_secret_noise: bool | None, min_clip: str | None
) -> dict[str, Any]:
    """Reads the options that were given; "none" removes a limit. Raises ConfigError when one is out of range."""
    given = {
        "max_epsilon": max_epsilon,
        "delta": delta,
        "require_secret_noise": require_secret_noise,
        "min_clip": min_clip,
    }
    changes = {name: None if value == _NONE else value for name, value in given.items() if value is not None}
    try:
        return Policy(**changes).model_dump(include=set(changes))
    except ValidationError as error:
        first = error.errors()[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise ConfigError(f"{option}: {first['msg'][0].lower()}{first['msg'][1:]}, got '{first['input']}'") from None


def read_policy(folder: Path) -> Policy:
    """Reads the policy in a client's folder; without a file there are no limits.

    Raises:
        ConfigError: The file cannot be read: going on without it would drop the limits.
    """
    path = folder / POLICY_FILE
    if not path.exists():
        return Policy()
    try:
        return Policy.model_validate(json.loads(path.read_bytes()))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); mend it, or remove it and give the limits again"
        ) from None


def keep_policy(folder: Path, changes: Mapping[str, Any]) -> Policy:
    """Applies the options that were given to the policy in a client's folder, durably, and returns the result.

    Args:
        changes: The limits that were given; all others stay as they are.
    """
    before = read_policy(folder)
    after = before.model_copy(update=dict(changes))
    if after != before:
        write_durably(folder / POLICY_FILE, after.model_dump_json(indent=1) + "\n")
        log.get("client").info(
            "policy_changed", client=folder.name, before=before.model_dump(), after=after.model_dump()
        )
    return after
