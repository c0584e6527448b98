"""How close real runs come to the full rates: the fitted constants of the planner, each with a physical name.

    FITTED.rates("a100", FRAMEWORKS["hf"])    # the numbers for one job
    FITTED                                    # all of them; `tests/evidence/planner` fits and judges them

A share is of what large matrix products reach on the GPU (`Accelerator.achievable`) or of the memory's bandwidth. Seconds
are what does not shrink with the work.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.errors import one_of
from lablib.calc.hardware import Accelerator, accelerator

KERNELS = ("fused", "eager")


def generation(card: Accelerator) -> str:
    """Return the generation whose constants stand for a GPU: measured runs are of three.

    Cards without NVLink (L4, L40S, RTX) count as A100 even where they have FP8: FlashAttention-2 is written for the
    instructions of Ampere, which they have too, and reaches on Hopper a third of the peak for want of Hopper's own
    (Shah et al. 2024, arXiv 2407.08608, abstract). So does an H20, whose matrix units are slower than an A100's.
    """
    outruns = "fp8" in card.flops and card.peak("bf16") > accelerator("a100").peak("bf16")
    return card.generation or ("h100" if card.scale_up and outruns else "a100")


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What a framework does that changes a step's time.

    Attributes:
        attention: Its kernel of fused attention, as `Fitted.attention` calls it.
        kernels: How what lies between the products is written, one of `KERNELS`.
        stops_early: Whether recomputation stops behind the last tensor that backward needs.
        dp_hides: Whether gradients are sent behind the last backward, and not after it.
        tp_hides: Whether products are cut into pieces that hide tensor-parallel collectives.
        pp_hides: Whether the sends of interleaved stages hide.
        ep_hides: Whether the experts' all-to-all of one micro-batch hides behind the computing of another.
        dispatch: "all" sends every copy of a token on its own, "node" once to each node with one of its experts.
        graphs: What CUDA graphs replay, so that the host issues it at once: "step", "layer", or "" for nothing.
    """

    attention: str = "flash-2"
    kernels: str = "fused"
    stops_early: bool = False
    dp_hides: bool = True
    tp_hides: bool = False
    pp_hides: bool = False
    ep_hides: bool = False
    dispatch: str = "all"
    graphs: str = ""


#: By the implementation whose memory is counted. Hugging Face's classes run operator by operator, and torchtitan's where
#: nobody asks for a compiler (CompileConfig.enable at b5bcd76c6 of 2026-08-21); PyTorch's recomputation stops early
#: (torch.utils.checkpoint, early_stop), torchtitan's does not, and SDPA takes FlashAttention-2. Megatron-Core has
#: Transformer Engine's attention, sends gradients behind backward with --overlap-grad-reduce and stages' tensors behind
#: computing where they are interleaved. Experts of the first are DeepSeek-V3's: a token goes once to a node, behind another
#: micro-batch (arXiv 2412.19437, section 3.2); Megatron-Core does neither unless it is told.
FRAMEWORKS = {
    "paper": Framework(ep_hides=True, dispatch="node"),
    "toy": Framework(kernels="eager", stops_early=True),
    "hf": Framework(kernels="eager", stops_early=True),
    "torchtitan": Framework(kernels="eager"),
    "megatron": Framework(attention="transformer-engine", pp_hides=True),
}
FRAMEWORKS["megatron-te-loss"] = FRAMEWORKS["megatron"]


@dataclass(frozen=True)
class Rates:
    """The constants of one job; a share of 1 and 0 seconds are the full rates.

    Attributes:
        matmul: Share of the rate of large matrix products.
        fp8: The same of products in FP8 or MXFP8, of FP8's rate; None where no run says.
        attention: Share of the GPU's peak that fused attention reaches, counting the unmasked half of the scores.
        memory: Share of the memory's bandwidth that kernels between the products reach.
        overlap: Seconds that a second of hidden communication still costs: both want the same multiprocessors.
        product: Seconds of a matrix product in which the GPU is not full: its launch, first and last tiles.
        layer: Seconds that the host needs to issue a layer's forward pass.
        step: Seconds that each doubling of the nodes adds to a step, whatever the layout: waiting for the slowest.
    """

    matmul: float = 1.0
    fp8: float | None = 1.0
    attention: float = 1.0
    memory: float = 1.0
    overlap: float = 0.0
    product: float = 0.0
    layer: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class Fitted:
    """The constants of all jobs.

    Attributes:
        matmul: By generation.
        fp8: By generation and precision, "fp8" or "mxfp8".
        attention: By generation and kernel.
        memory: By how the kernels between the products are written, one of `KERNELS`.
        published: Kernels whose share is their authors' own measurement, and not fitted.
    """

    published = (("a100", "flash-2"), ("h100", "flash-2"))
    matmul: dict[str, float]
    fp8: dict[tuple[str, str], float]
    attention: dict[tuple[str, str], float]
    memory: dict[str, float]
    overlap: float
    product: float
    layer: float
    step: float

    def rates(self, name: str, framework: Framework = FRAMEWORKS["paper"], precision: str = "") -> Rates:
        """Return the constants of one job.

        A kernel that was not measured on a generation counts as the fastest that was.
        """
        one_of("kernels", framework.kernels, KERNELS)
        measured = {kernel: share for (card, kernel), share in self.attention.items() if card == name}
        return Rates(
            matmul=self.matmul[name],
            fp8=self.fp8.get((name, precision)),
            attention=measured.get(framework.attention, max(measured.values())),
            memory=self.memory[framework.kernels],
            overlap=self.overlap,
            product=self.product,
            layer=self.layer,
            step=self.step,
        )


#: The result of `fit_rates` of `tests/evidence/planner` on all rows that are fitted; a test fits again. FlashAttention-2's
#: share on A100 is its author's, forward and backward, causal, head dimension 128, 8,192 tokens (Dao 2023, arXiv 2307.08691,
#: figure 4), on H100 a round number below what Shah et al. 2024 (arXiv 2407.08608) plot of its forward and its backward.
FITTED = Fitted(
    matmul={"a100": 0.8515, "h100": 0.9187, "b200": 0.5843},
    fp8={("h100", "fp8"): 0.9675, ("b200", "fp8"): 0.7915, ("b200", "mxfp8"): 0.8121},
    attention={
        ("a100", "flash-2"): 0.58,
        ("h100", "flash-2"): 0.30,
        ("a100", "triton"): 0.3278,
        ("h100", "triton"): 0.1739,
        ("h100", "transformer-engine"): 0.4854,
        ("b200", "transformer-engine"): 0.4201,
    },
    memory={"fused": 0.8565, "eager": 0.6920},
    overlap=0.5837,
    product=41.59e-6,
    layer=930.4e-6,
    step=10.81e-3,
)
