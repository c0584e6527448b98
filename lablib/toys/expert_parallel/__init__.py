"""Expert parallelism: a router, rows sent to the ranks of their experts and back, and gradients by kind of parameter.

    plain             the layer over several ranks in one function, from routing to the weighted sum
    router            which experts a token visits, and how much of each it takes; losses and the bias that even them out
    dispatcher        tokens in the order of their experts, to the ranks of the experts and back
    experts           the products, in a loop or grouped; gradients, summed over edp or dp, both divided by dp
    layer             all of it as one layer, `MoE`
    moe_transformer   a transformer with such layers, also with attention over tp
    collapse          a router left alone, and two ways to balance it

Read `plain` first, beside chapter 13, then the others in this order.
"""

from lablib.toys.expert_parallel.collapse import BALANCING, Groups, train_mixture
from lablib.toys.expert_parallel.dispatcher import combine, dispatch, permute, unpermute, within_capacity
from lablib.toys.expert_parallel.experts import (
    Experts,
    average_gradients,
    grouped_product,
    loop_product,
    own_group,
    routed_parameters,
)
from lablib.toys.expert_parallel.layer import MoE
from lablib.toys.expert_parallel.moe_transformer import MoETransformer, fold, tiny_mixture
from lablib.toys.expert_parallel.plain import moe_forward
from lablib.toys.expert_parallel.router import (
    TopKRouter,
    count_choices,
    largest_share,
    load_balancing_loss,
    update_bias,
    z_loss,
)

__all__ = [
    "BALANCING",
    "Experts",
    "Groups",
    "MoE",
    "MoETransformer",
    "TopKRouter",
    "average_gradients",
    "combine",
    "count_choices",
    "dispatch",
    "fold",
    "grouped_product",
    "largest_share",
    "load_balancing_loss",
    "loop_product",
    "moe_forward",
    "own_group",
    "permute",
    "routed_parameters",
    "tiny_mixture",
    "train_mixture",
    "unpermute",
    "update_bias",
    "within_capacity",
    "z_loss",
]
