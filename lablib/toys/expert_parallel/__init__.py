"""Expert parallelism: a router, rows sent to the ranks of their experts and back, and gradients by kind of parameter.

    router      which experts a token visits, and how much of each it takes
    sorting     tokens in the order of their experts, and which of them find room
    exchange    the two all-to-alls: dispatch and combine
    experts     the products, in a loop or grouped
    layer       all of it as one layer, `MoE`
    balance     losses and the bias that even the experts out
    gradients   sums over edp, sums over dp, both divided by dp
    hops        a token sent once to a rank or a node
    model       a transformer with such layers
    collapse    a router left alone, and two cures
    folding     attention over tp, experts over ep made of tp x dp

Read `router` first, beside chapter 13, then the others in this order.
"""

from lablib.toys.expert_parallel.balance import (
    count_choices,
    largest_share,
    load_balancing_loss,
    max_violation,
    update_bias,
    z_loss,
)
from lablib.toys.expert_parallel.collapse import CURES, Groups, Step, train_mixture
from lablib.toys.expert_parallel.exchange import Trip, combine, dispatch
from lablib.toys.expert_parallel.experts import Experts, grouped_product, loop_product
from lablib.toys.expert_parallel.folding import fold
from lablib.toys.expert_parallel.gradients import average_gradients, own_group, routed_parameters
from lablib.toys.expert_parallel.hops import Hop, node_hops, rank_hop, send_once
from lablib.toys.expert_parallel.layer import MoE, Routing
from lablib.toys.expert_parallel.model import MoETransformer, tiny_mixture
from lablib.toys.expert_parallel.router import TopKRouter
from lablib.toys.expert_parallel.sorting import permute, unpermute, within_capacity

__all__ = [
    "CURES",
    "Experts",
    "Groups",
    "Hop",
    "MoE",
    "MoETransformer",
    "Routing",
    "Step",
    "TopKRouter",
    "Trip",
    "average_gradients",
    "combine",
    "count_choices",
    "dispatch",
    "fold",
    "grouped_product",
    "largest_share",
    "load_balancing_loss",
    "loop_product",
    "max_violation",
    "node_hops",
    "own_group",
    "permute",
    "rank_hop",
    "routed_parameters",
    "send_once",
    "tiny_mixture",
    "train_mixture",
    "unpermute",
    "update_bias",
    "within_capacity",
    "z_loss",
]
