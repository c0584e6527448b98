"""Collectives: bytes, messages and times, and the links that carry them.

    costs        bytes and times of ring collectives, speedup and efficiency
    algorithms   ring, tree, doubling, hierarchical: messages and bytes in every round
    times        latency and bandwidth fitted to measured times, and the fastest algorithm for a size
    topology     nodes, the links inside them and the network cards between them

Read `costs` first. Chapter 10; `costs` is used from chapter 02 on.
"""

from lablib.calc.communication.algorithms import (
    Traffic,
    algorithm_rounds,
    chunk_sizes,
    hierarchical_rounds,
    hierarchical_traffic,
    traffic,
)
from lablib.calc.communication.costs import (
    Scaling,
    amdahl_speedup,
    bus_bandwidth,
    chance_of_any,
    check_link,
    data_parallel_bytes,
    dispatch_nodes,
    efficiency,
    expected_slowest,
    hiding_tokens,
    hybrid_shard_bytes,
    in_switch_all_reduce_bytes,
    ring_all_gather_bytes,
    ring_all_gather_time,
    ring_all_reduce_bytes,
    ring_all_reduce_time,
    ring_reduce_scatter_bytes,
    ring_states,
    speedup,
    summation_orders,
)
from lablib.calc.communication.times import (
    Line,
    collective_time,
    cost_terms,
    crossover,
    fastest_algorithm,
    fit_line,
    fit_pieces,
    parse_nccl_tests,
    recomputed_bandwidths,
)
from lablib.calc.communication.topology import Topology, tcp_bandwidth

__all__ = [
    "Line",
    "Scaling",
    "Topology",
    "Traffic",
    "algorithm_rounds",
    "amdahl_speedup",
    "bus_bandwidth",
    "chance_of_any",
    "check_link",
    "chunk_sizes",
    "collective_time",
    "cost_terms",
    "crossover",
    "data_parallel_bytes",
    "dispatch_nodes",
    "efficiency",
    "expected_slowest",
    "fastest_algorithm",
    "fit_line",
    "fit_pieces",
    "hiding_tokens",
    "hierarchical_rounds",
    "hierarchical_traffic",
    "hybrid_shard_bytes",
    "in_switch_all_reduce_bytes",
    "parse_nccl_tests",
    "recomputed_bandwidths",
    "ring_all_gather_bytes",
    "ring_all_gather_time",
    "ring_all_reduce_bytes",
    "ring_all_reduce_time",
    "ring_reduce_scatter_bytes",
    "ring_states",
    "speedup",
    "summation_orders",
    "tcp_bandwidth",
    "traffic",
]
