"""A client's own policy: options are kept, only options change it, and it decides which runs a client joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrpc.client.policy import POLICY_FILE, Policy, keep_policy, parse_changes, read_policy
from fedrpc.config import PrivacyConfig
from fedrpc.errors import ConfigError, Refused

NOTHING: dict[str, Any] = {"max_epsilon": None, "delta": None, "require_secret_noise": None, "min_clip": None}


def parse(**options: Any) -> dict[str, Any]:
    return parse_changes(**(NOTHING | options))


def test_without_options_there_is_no_policy_and_no_file(tmp_path: Path) -> None:
    assert keep_policy(tmp_path, parse()) == Policy()
    assert list(tmp_path.iterdir()) == []


def test_options_bind_later_starts_that_do_not_give_them(tmp_path: Path) -> None:
    keep_policy(tmp_path, parse(max_epsilon="8", require_secret_noise=True))
    assert keep_policy(tmp_path, parse()) == Policy(max_epsilon=8.0, require_secret_noise=True)
    keep_policy(tmp_path, parse(min_clip="0.1", delta=1e-6))
    assert read_policy(tmp_path) == Policy(max_epsilon=8.0, delta=1e-6, require_secret_noise=True, min_clip=0.1)


def test_a_limit_is_removed_only_explicitly(tmp_path: Path) -> None:
    keep_policy(tmp_path, parse(max_epsilon="8", min_clip="1", require_secret_noise=True))
    assert keep_policy(tmp_path, parse(max_epsilon="none")) == Policy(min_clip=1.0, require_secret_noise=True)
    assert keep_policy(tmp_path, parse(min_clip="none", require_secret_noise=False)) == Policy()


def test_the_policy_is_durable_when_it_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr("fedrpc.client.policy.write_durably", lambda path, _: written.append(path))
    keep_policy(tmp_path, parse(max_epsilon="8"))
    assert written == [tmp_path / POLICY_FILE]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epsilon": "-1"}, "--max-epsilon: input should be greater than or equal to 0, got '-1'"),
        ({"max_epsilon": "much"}, "--max-epsilon: input should be a valid number"),
        ({"max_epsilon": "inf"}, "--max-epsilon: input should be a finite number"),
        ({"delta": 1.0}, "--delta: input should be less than 1"),
        ({"min_clip": "0"}, "--min-clip: input should be greater than 0"),
    ],
)
def test_a_limit_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"max_epsilon": "x"}', '{"max_epsilons": 8}', ""])
def test_a_policy_that_cannot_be_read_is_not_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / POLICY_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"policy\.json cannot be read"):
        keep_policy(tmp_path, {})


def test_a_run_with_seeded_noise_is_refused_if_secret_noise_is_required() -> None:
    strict = Policy(require_secret_noise=True)
    strict.check_run(PrivacyConfig(noise="secret"))
    with pytest.raises(Refused, match=r'expected privacy\.noise = "secret" .* got "seeded"'):
        strict.check_run(PrivacyConfig())
    Policy().check_run(PrivacyConfig())


def test_a_run_that_clips_below_the_least_norm_is_refused() -> None:
    policy = Policy(min_clip=0.1)
    policy.check_run(PrivacyConfig())
    policy.check_run(PrivacyConfig(dp_sgd={"noise_multiplier": 1.0, "max_grad_norm": 0.1}))
    with pytest.raises(Refused, match=r"max_grad_norm of 0\.1 at least \(--min-clip\), got 0\.05"):
        policy.check_run(PrivacyConfig(dp_sgd={"noise_multiplier": 1.0, "max_grad_norm": 0.05}))


LIMIT = st.one_of(st.none(), st.just("none"), st.floats(0.01, 100).map(str))
STARTS = st.lists(
    st.fixed_dictionaries(
        {
            "max_epsilon": LIMIT,
            "delta": st.one_of(st.none(), st.floats(1e-9, 0.1)),
            "require_secret_noise": st.one_of(st.none(), st.booleans()),
            "min_clip": LIMIT,
        }
    ),
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(STARTS)
def test_each_limit_is_the_last_that_was_given(tmp_path_factory: pytest.TempPathFactory, starts: list[Any]) -> None:
    folder, expected = tmp_path_factory.mktemp("policy"), Policy().model_dump()
    for options in starts:
        for name, value in options.items():
            if value is not None:
                expected[name] = None if value == "none" else float(value) if isinstance(value, str) else value
        assert keep_policy(folder, parse(**options)).model_dump() == expected
        assert read_policy(folder).model_dump() == expected
