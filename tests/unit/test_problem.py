"""A method that is not whole is told at the start, not in a traceback at the end."""

from __future__ import annotations

import pytest

from fedrpc.errors import ConfigError
from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.method import Method
from tests.fakes import problem_of


def test_a_method_that_lacks_something_is_refused() -> None:
    class Half(Method[object]):
        name = "half"
        init, model = FedAvg.init, FedAvg.model

    with pytest.raises(ConfigError, match="method 'half' is incomplete: Half lacks round, cost"):
        problem_of(Half)
