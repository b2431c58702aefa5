"""How clients' updates become one."""

from fedrpc.aggregation.aggregator import AGGREGATORS

__all__ = ["AGGREGATORS"]
