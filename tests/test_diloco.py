"""Local SGD and DiLoCo: against one process that plays all replicas, torchft's numbers, and what they send.

Comparisons of AdamW run in float64, with the tolerance that `tests.test_ddp` derives: a gradient's rounding error of some
1e-15 grows by at most lr/eps = 1e6 in a step, so a dozen steps stay below 1e-7. SGD has no such factor: a step adds a few
roundings, 1e-16 of a weight near 1, and what is there grows by at most 1 + lr · curvature, here 1.3; a dozen steps stay below
1e-13. A slip in the idea moves a weight by a learning rate times a gradient, 1e-3 and more.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.layouts import exchange_cost
from lablib.calc.models import preset
from lablib.calc.params import count_params
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.toys.data_parallel import DiLoCo, LocalSGD, NaiveDDP
from lablib.toys.transformer import Transformer, tiny_config
from tests.evidence import local_sgd
from tests.processes import far, new_seed

ADAMW, SGD = 1e-7, 1e-13
PUBLISHED = json.loads((local_sgd.TABLE.parent / "diloco_published.json").read_text(encoding="utf-8"))
BOTH = {"local-sgd": LocalSGD, "diloco": DiLoCo}


class Small(nn.Module):
    """A frozen layer, a tied weight, a weight without dimensions, and one whose memory is not plain."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.again = self.up
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def loss(self, x_BD: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.frozen(x_BD))) + self.scale * (x_BD @ self.turned)
        return (torch.tanh(self.again(self.down(hidden))) - x_BD.sum(1, keepdim=True)).square().mean()


def samples(seed: int, ranks: int, steps: int) -> Tensor:
    return torch.randn(steps, ranks, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, eps=1e-8, weight_decay=0.1)


def distance(a: nn.Module, b: nn.Module) -> float:
    return max(far(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# One process that plays all replicas


def simulated(start: nn.Module, xs_SRBD: Tensor, inner_steps: int, method: str) -> list[nn.Module]:
    """Train copies one after the other; torch.optim.SGD takes the outer step of DiLoCo, on a copy of its own."""
    replicas = [copy.deepcopy(start) for _ in xs_SRBD[0]]
    optimizers, center = [adamw(replica) for replica in replicas], copy.deepcopy(start)
    outer = torch.optim.SGD([p for p in center.parameters() if p.requires_grad], lr=0.7, momentum=0.9, nesterov=True)
    for step, xs_RBD in enumerate(xs_SRBD, start=1):
        for replica, optimizer, x in zip(replicas, optimizers, xs_RBD, strict=True):
            replica.loss(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % inner_steps == 0:
            for p, *of in zip(center.parameters(), *(replica.parameters() for replica in replicas), strict=True):
                mean = torch.stack([q.detach() for q in of]).mean(0)
                if method == "diloco":
                    p.grad = p.detach() - mean if p.requires_grad else None
                else:
                    p.data = mean
            if method == "diloco":
                outer.step()
            for replica in replicas:
                replica.load_state_dict(center.state_dict())
    return replicas


def train_as_replicas(seed: int, inner_steps: int) -> dict[str, float]:
    """Seven steps in each method, from rank 0's weights; the last exchange may be a while ago."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    start, xs = Small(), samples(seed, n, steps=7)
    far_off = {}
    for method, cls in BOTH.items():
        module = copy.deepcopy(start)
        for tensor in module.state_dict().values():
            tensor.add_(rank)
        trainer = cls(module, adamw(module), inner_steps)
        exchanged = []
        for x_RBD in xs:
            module.loss(x_RBD[rank]).backward()
            exchanged.append(trainer.step())
        assert exchanged == [step % inner_steps == 0 for step in range(1, 8)]
        far_off[method] = distance(module, simulated(start, xs, inner_steps, method)[rank])
        assert distance(module, start) > 1e-3
    return far_off


@pytest.mark.parametrize(("ranks", "inner_steps"), [(1, 2), (2, 3), (3, 1), (4, 2)])
def test_equal_one_process_that_plays_all_replicas(ranks: int, inner_steps: int) -> None:
    for far_off in run_ranks(train_as_replicas, ranks, new_seed(), inner_steps):
        assert max(far_off.values()) < ADAMW, far_off


def every_step_in_three_ways(seed: int) -> dict[str, float]:
    """Plain SGD: data parallelism, local SGD with H = 1, and DiLoCo whose outer step goes all the way."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    start, ends = Small(), {}
    for name in ("ddp", *BOTH):
        module = copy.deepcopy(start)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        if name == "ddp":
            trainer = NaiveDDP(module)
        else:
            outer = {"outer_lr": 1.0, "outer_momentum": 0.0} if name == "diloco" else {}
            trainer = BOTH[name](module, optimizer, 1, **outer)
        for x_RBD in samples(seed, n, steps=5):
            module.loss(x_RBD[rank]).backward()
            if name == "ddp":
                trainer.sync()
                optimizer.step()
                optimizer.zero_grad()
            else:
                trainer.step()
        ends[name] = module
    return {name: distance(module, ends["ddp"]) for name, module in ends.items()} | {
        "moved": distance(ends["ddp"], start)
    }


def test_an_exchange_in_every_step_of_sgd_is_data_parallelism() -> None:
    for far_off in run_ranks(every_step_in_three_ways, 3, new_seed()):
        assert far_off.pop("moved") > 1e-3
        assert max(far_off.values()) < SGD, far_off


def in_two_groups() -> tuple[float, float]:
    """Ranks 0 and 1, and 2 and 3, are replicas of each other; rank r pulls its weight to r."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(1))
    trainer = LocalSGD(module, torch.optim.SGD([module.w], lr=1.0), 1, group=groups[dist.get_rank() // 2])
    (module.w - dist.get_rank()).square().mul(0.5).sum().backward()
    trainer.step()
    return module.w.item()


def test_a_group_is_those_replicas_alone() -> None:
    assert run_ranks(in_two_groups, 4) == [0.5, 0.5, 2.5, 2.5]


# torchft's numbers


def pulled(method: str, run: dict) -> list[list[float]]:
    """The weights after every step of torchft's run, from this toy."""
    rank, module = dist.get_rank(), nn.Module()
    curvature, minimum = (torch.tensor(run[key][rank], dtype=torch.float64) for key in ("curvature", "minimum"))
    module.w = nn.Parameter(torch.tensor(run["start"], dtype=torch.float64))
    trainer, history = BOTH[method](module, torch.optim.SGD([module.w], lr=0.1), 3), []
    for _ in run[method][rank]:
        (0.5 * curvature * (module.w - minimum) ** 2).sum().backward()
        trainer.step()
        history.append(module.w.tolist())
    return history


@pytest.mark.parametrize("method", BOTH)
def test_torchft_goes_the_same_way(method: str) -> None:
    run = PUBLISHED["run"]
    ours = torch.tensor(run_ranks(pulled, 2, method, run), dtype=torch.float64)
    theirs = torch.tensor(run[method], dtype=torch.float64)
    assert far(ours, theirs) < SGD
    assert far(theirs, torch.tensor(run["local-sgd" if method == "diloco" else "diloco"])) > 0.1


def constant_gradient(spans: list[int], steps: int) -> list[float]:
    """torchft's mock: gradient 2, inner rate 1, outer rate 2; H is the first span, then the second."""
    module, history = nn.Module(), []
    module.w = nn.Parameter(torch.ones(1))
    options = {"outer_lr": 2.0, "outer_momentum": 0.0}
    trainer = DiLoCo(module, torch.optim.SGD([module.w], lr=1.0), spans[0], **options)
    for step in range(steps):
        history.append(module.w.item())
        if step == spans[0]:
            trainer = DiLoCo(module, trainer.optimizer, spans[-1], **options)
        module.w.grad = torch.full((1,), 2.0)
        trainer.step()
    return history


def test_torchfts_own_fixture() -> None:
    """Whole numbers, so nothing rounds. Of its seven files this is the one without delay and mixing.

    Two fragments take turns there, and each alone is DiLoCo with H = 6; the first has its first exchange after 3. The
    others mix local weights in (alpha of 0.5 and 1), exchange late (a delay of 1), or lose a replica.
    """
    for name, spans in (("layers.0", [3, 6]), ("layers.1", [6])):
        theirs = PUBLISHED["fixture"][name.replace("layers.", "")]
        assert run_ranks(constant_gradient, 2, spans, len(theirs)) == [theirs, theirs]


# What they send and keep


def sent_and_kept(method: str) -> tuple[dict[str, int], float, int]:
    model = Transformer(tiny_config("llama", num_layers=1, hidden=32))
    trainer = BOTH[method](model, torch.optim.AdamW(model.parameters()), 3)
    with record_comms() as log:
        for _ in range(7):  # two exchanges, and a step
            model.loss(torch.arange(9).view(1, 9)).backward()
            trainer.step()
    kept = (*getattr(trainer, "before", ()), *getattr(trainer, "momentum", ()))
    return dict(log.calls), log.ring_bytes_sent(), sum(tensor.nbytes for tensor in kept)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_those_of_the_calculator(method: str, ranks: int) -> None:
    config, job = (
        tiny_config("llama", num_layers=1, hidden=32),
        {"tokens_per_step": 8, "step_seconds": 1, "bandwidth": 1},
    )
    cost = exchange_cost(method, config, replicas=ranks, inner_steps=3, **job)
    for calls, sent, kept in run_ranks(sent_and_kept, ranks, method):
        assert calls == {"all_reduce": 2}
        assert sent == pytest.approx(2 * cost.message, rel=1e-12)
        assert kept == cost.extra_memory


def bad_setups() -> list[str]:
    said = []
    others = dist.new_group([0])
    for change in ({"inner_steps": 0}, {"inner_steps": 2.0}, {"group": others}, {"width": 2 + dist.get_rank()}):
        module = nn.Linear(change.pop("width", 2), 2)
        try:
            LocalSGD(module, torch.optim.SGD(module.parameters(), lr=1), **{"inner_steps": 1, **change})
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_bad_input_is_refused() -> None:
    first, second = run_ranks(bad_setups, 2)
    assert [text.partition(" ")[0] for text in first] == ["inner_steps=0", "inner_steps=2.0", "", "rank"]
    assert "rank 1 is not in the group" in second[2]
    assert "another module than rank 0" in first[3] == second[3]


# What others published, and what was measured


def asked(method: str, model: dict, utilization: float, gbits: float) -> float:
    """Return the bandwidth that `exchange_cost` asks for, over the published one; the file says under what conditions."""
    link = {"bandwidth": gbits * 1e9 / 8, "step_seconds": model["step_seconds"], "tokens_per_step": 1}
    steps = 100 if method == "diloco" else 1
    cost = exchange_cost(method, "gpt2", replicas=2, wire_bytes=2, inner_steps=steps, **link)
    seconds = cost.communicate * model["params"] / count_params(preset("gpt2")).total
    return seconds / (cost.compute * (1 / utilization - 1) + 2 / 3 * model["step_seconds"])


def test_published_bandwidths_are_met_to_a_step_of_their_grid() -> None:
    """But for data parallelism at 99 percent, where the last layer's message counts, which leaves after backward."""
    table, step = PUBLISHED["bandwidths"], 10 ** (4 / 49)
    for model in table["models"].values():
        for method in ("ddp", "diloco"):
            rates = zip(table["utilization"], model[method], strict=True)
            ratios = [asked(method, model, part, gbits) for part, gbits in rates]
            assert all(1 / step < ratio < step for ratio in ratios[: 4 if method == "ddp" else 5])
        assert ratios == pytest.approx(model["asked"], abs=1e-4)


def test_the_committed_runs_say_what_the_page_does() -> None:
    kept = json.loads(local_sgd.TABLE.read_text(encoding="utf-8"))
    assert local_sgd.summary(kept["samples"]) == kept["table"]
    assert len(kept["samples"]) == kept["how"]["seeds"] * len(local_sgd.WAYS)
    for row in kept["table"][1:]:
        assert kept["recorded"][row["way"]] == row["message"]
        data = row["exchanges"] * row["message"]
        # A packet of 1,514 bytes has 1,448 of data, and each pair of packets is answered by one of 66.
        assert data < row["sent"] < data * (1514 + 33) / 1448
    rows = {row["way"]: row for row in kept["table"]}
    assert all(row["above"] > row["above_half"] for row in kept["table"][2:])  # every loss is above every step's
    overshot, alone = rows["DiLoCo, H = 10"], rows[local_sgd.ALONE]
    assert overshot["loss"] - overshot["half"] > alone["loss"] + alone["half"]
