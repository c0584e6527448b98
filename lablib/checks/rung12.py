"""The checks of rung 12: merging two parts of a softmax, a step on packed documents, a wrong block, and how to split.

Parts of attention are made from drawn scores, so what their merge must be is known from the scores of both together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lablib.calc.parallel import WAYS, attention_traffic, context_buffers, context_degrees
from lablib.checks.judging import (
    NEW,
    Wrong,
    as_float,
    ask_ranks,
    by_name,
    check,
    chosen,
    close,
    close_bytes,
    on_ranks,
    pair,
    recognize,
    refuse,
    some,
    whole,
)
from lablib.launch.ranks import rank_mesh
from lablib.toys.context_parallel import (
    IGNORED,
    ContextParallelTransformer,
    average_gradients,
    next_tokens,
    token_positions,
    visible,
)
from lablib.toys.context_parallel import merge as merge_parts
from lablib.toys.transformer import Transformer, rotary, tiny_config

__all__ = ["choose_split", "find_wrong_block", "job", "merge", "packed_step"]


# --- two parts of a softmax ---------------------------------------------------------------------------------

Part = tuple[Tensor, Tensor]


def _attend(scores: Tensor, values: Tensor) -> Part:
    """Return what a block gives to each row, and the log of its sum of exponentials: nothing where all is masked."""
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return weights @ values, lse


def _parts() -> list[tuple[str, Part, Part, Part]]:
    """Return cases: what is special in them, two parts, and what both together give."""
    # By hand: outputs 5 and 1, sums 3 and 7 and so on. In one row alone, weights that add up over rows would be 1 and 1.
    hand = torch.tensor([[3, 7], [5, 2], [4, 6]], dtype=torch.float64).log()
    ends = torch.tensor([[5], [1]], dtype=torch.float64)
    cases = [("rows by hand", _attend(hand[:, :1], ends[:1]), _attend(hand[:, 1:], ends[1:]), _attend(hand, ends))]
    dice = torch.Generator().manual_seed(NEW.randrange(2**31))  # no list has these
    kinds = ("two blocks of random scores", "scores of about 1,000", "rows that see nothing in a block",
             "rows that see nothing in either block")  # fmt: skip
    for kind in kinds:
        scores = 3 * torch.randn(5, 7, generator=dice, dtype=torch.float64)
        values = torch.randn(7, 4, generator=dice, dtype=torch.float64)
        if kind == kinds[1]:
            scores[::2] += 1000
            scores[1, :3] -= 2000
            scores[3, 3:] -= 2000
        if kind == kinds[2]:
            scores[0, :3] = scores[1, 3:] = scores[4, 3:] = -math.inf
        if kind == kinds[3]:
            scores[2:] = -math.inf
        first, second = _attend(scores[:, :3], values[:3]), _attend(scores[:, 3:], values[3:])
        cases.append((kind, first, second, _attend(scores, values)))
    return cases


@check(
    idea="Each part is a mean that was divided by its own sum of exponentials, and exp(lse) is that sum.",
    section="Softmax of one row whose keys lie on two ranks",
    line="The new lse is the larger of both plus log(exp(a - larger) + exp(b - larger)), and an output weighs "
    "exp(its lse - new lse); where both are -inf nothing is subtracted.",
)
def merge(answer: Callable[[Part, Part], Part]) -> str:
    """Judge `merge(a, b)` of two pairs (out, lse) by attention over both blocks at once."""
    cases = _parts()
    for kind, a, b, truth in cases:
        given = [tuple(each.clone() for each in part) for part in (a, b)]
        try:
            got = answer(*given)
        except (OverflowError, ZeroDivisionError, ValueError) as error:
            if kind == cases[0][0]:
                raise
            raise Wrong(_not_a_number(kind, type(error).__name__)) from None
        _judge_merge(got, a, b, truth, kind)
    if "lablib.toys.context_parallel.softmax.merge" in getattr(answer, "called", ()):
        raise Wrong("It is right, and lablib's own merge answers for you: weigh both outputs yourself.")
    return f"{len(cases)} pairs of blocks, scores of about 1,000 and rows that see nothing among them."


def _judge_merge(got: Any, a: Part, b: Part, truth: Part, kind: str) -> None:
    otherwise = "Return a pair, like the two that you were given: the output, and the log of the sum of exponentials."
    parts = zip(pair(got, otherwise, "out", "lse"), ("The output", "lse"), strict=True)
    out, lse = (_tensor(each, name) for each, name in parts)
    if (out.numel(), lse.numel()) != (truth[0].numel(), truth[1].numel()):
        raise Wrong(f"For rows of width {truth[0].shape[1]} return an output of shape {tuple(truth[0].shape)}, and one "
                    f"lse a row; yours have the shapes {tuple(out.shape)} and {tuple(lse.shape)}.")  # fmt: skip
    if out.shape == truth[1].shape and lse.shape == truth[0].shape != truth[1].shape:
        raise Wrong("The output comes first, then lse.")
    out, lse = out.reshape(truth[0].shape), lse.reshape(truth[1].shape)
    if out.isnan().any() or lse.isnan().any() or (lse == math.inf).any() or out.isinf().any():
        raise Wrong(_not_a_number(kind))
    (out_a, lse_a), (out_b, lse_b) = a, b
    larger = torch.maximum(lse_a, lse_b)
    near = _within(truth[1])
    if not near(lse, truth[1]):
        if (gone := lse[truth[1] == -math.inf]).isfinite().any():
            raise Wrong(f"Two lse of -inf, the log of a sum of nothing: merged it still is, yours is {_shown(gone)}.")
        _refuse_half(lse, truth[1], "lse")
        slips = [
            ("These are the sums of exponentials; lse is the logarithm of their sum", lse_a.exp() + lse_b.exp()),
            ("The two lse are added, which multiplies the sums: exp(lse) is what adds up", lse_a + lse_b),
            ("This is the lse of one block, so the keys of the other are lost", larger),
            ("The two lse are averaged: the sums of exponentials add up", (lse_a + lse_b) / 2),
            ("This logarithm is of base 2; the scores are exponents of e", truth[1] / math.log(2)),
        ]  # fmt: skip
        recognize(lse, kind, slips, near)
        raise Wrong(f"lse must be the log of exp(lse of a) + exp(lse of b): {_shown(truth[1])}, and yours is "
                    f"{_shown(lse)} ({kind}).")  # fmt: skip
    if near(out, truth[0]):
        return
    _refuse_half(out, truth[0], "The output")
    weigh_a, weigh_b = ((each - truth[1]).exp().nan_to_num(0.0).unsqueeze(-1) for each in (lse_a, lse_b))
    total = (lse_a.exp() + lse_b.exp()).unsqueeze(-1)
    score_a, score_b = lse_a.unsqueeze(-1), lse_b.unsqueeze(-1)
    slips = [
        ("The outputs are averaged; a block with large scores must count for more", (out_a + out_b) / 2),
        ("The outputs are added. Each is divided by its own sum: weigh it by its share of both sums", out_a + out_b),
        ("The weights are exchanged: a's output weighs exp(lse of a) over both", weigh_b * out_a + weigh_a * out_b),
        ("The weights are the lse themselves; a block's weight is exp(lse), its sum of exponentials",
         (score_a * out_a + score_b * out_b) / (score_a + score_b)),
        ("The outputs are weighed and not divided by the new sum", total * truth[0]),
        ("This is the output of the block with the larger sum alone; both have a share", torch.where(score_a >= score_b, out_a, out_b)),
        ("The division by the new sum is missing", truth[0] * (truth[1] - larger).exp().unsqueeze(-1)),
    ]  # fmt: skip
    recognize(out, kind, [(f"lse is right. {sentence}", slip) for sentence, slip in slips], near)
    raise Wrong(f"lse is right, and the output is not: each output weighs exp(its lse - new lse) ({kind}).")


def _not_a_number(kind: str, error: str = "") -> str:
    what = f"the result {f'stops with {error}' if error else 'is not a number'}"
    if "1,000" in kind:
        return (f"With {kind} {what}: exp(1,000) is more than a float can hold, and exp(-1,000) is zero. Subtract the larger "
                "of both lse, row by row, before the exponential.")  # fmt: skip
    if "nothing in a" in kind:
        return f"With {kind} {what}: there lse is -inf and its weight is zero, so the result must be the other part."
    if "either" in kind:
        return (f"With {kind} {what}: both lse are -inf and both sums 0, where -inf minus -inf, 0 / 0 and math.log(0) are "
                "undefined. Nothing merged with nothing is output 0 and lse -inf.")  # fmt: skip
    return f"{what.capitalize()} ({kind})."


def _within(lse: Tensor) -> Callable[[Tensor, Tensor], bool]:
    """Return what takes numbers in single precision for right; a mistake is larger by far.

    fp32 rounds an lse by 2**-24 of itself. Three such roundings meet in a weight, and outputs are at most 5.
    """
    slack = 1e-5 + 2**-20 * float(lse.nan_to_num(0.0, neginf=0.0).abs().max())
    return lambda got, truth: torch.allclose(got, truth, atol=slack, rtol=1e-5)


def _refuse_half(got: Tensor, truth: Tensor, name: str) -> None:
    """Raise `Wrong` for a right number in half precision: the first case has numbers of about one."""
    if torch.allclose(got, truth, atol=1e-2, rtol=0):
        raise Wrong(f"{name} is right to a few digits only, and as many parts are merged as there are ranks: keep fp32 or "
                    "wider, and add nothing to the sums.")  # fmt: skip


def _shown(lse: Tensor) -> str:
    return ", ".join(f"{each:.3g}" for each in lse.tolist()[:3]) + (", ..." if len(lse) > 3 else "")


def _tensor(value: Any, what: str) -> Tensor:
    """Return numbers as a tensor, whatever holds them: tensors, arrays, lists of either."""

    def plain(each: Any) -> Any:
        if hasattr(each, "tolist"):
            return each.tolist()
        return [plain(inner) for inner in each] if isinstance(each, list | tuple) else each

    try:
        return torch.tensor(plain(value), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{what} should be a tensor, an array or a list of numbers.") from None


# --- a step on packed documents -----------------------------------------------------------------------------

_SEQ, _ROWS, _RANKS = 32, 4, 4
_MESHES = ((2, 2), (1, 4), (4, 1))  # dp and cp
_PACKED = tiny_config("llama", num_layers=1, hidden=32, num_heads=4, num_kv_heads=2, ffn=64)

Batch = tuple[Tensor, Tensor, Tensor]


def _batch(seed: int) -> Batch:
    """Return tokens, documents and what counts, (rows, S + 1). A token tells its row and place; row 1 ends in a new document."""
    dice, shape = torch.Generator().manual_seed(seed), (_ROWS, _SEQ + 1)
    tokens = torch.randperm(_PACKED.vocab, generator=dice)[: _ROWS * (_SEQ + 1)].view(shape)
    documents = (torch.rand(shape, generator=dice) < 0.12).cumsum(1)
    counted = torch.rand(shape, generator=dice) < torch.tensor([0.8, 0.7, 0.5, 0])[:, None]  # the last row is padding
    return tokens, documents, counted


class _Watched(ContextParallelTransformer):
    """The course's model on a cut sequence, with positions as an argument; it notes what it is given."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        super().__init__(_PACKED, group)
        self.seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def forward(self, tokens: Any, positions: Any, documents: Any = None) -> Tensor:
        """Return the logits of this rank's tokens."""
        if documents is None:
            raise Wrong("Without `documents` every token sees all before it, those of other documents too.")
        tokens, positions, documents = (torch.as_tensor(each) for each in (tokens, positions, documents))
        if tokens.dim() != 2 or tokens.shape[1] * self.cp != _SEQ:
            raise Wrong(f"A rank of cp={self.cp} gives the model {_SEQ // self.cp} tokens of each of its sequences, and yours "
                        f"have shape {tuple(tokens.shape)}; of {_SEQ + 1} tokens the last is a label only.")  # fmt: skip
        if tuple(documents.shape) != (len(tokens), _SEQ):
            raise Wrong(f"`documents` have this replica's rows and all places but the last, {(len(tokens), _SEQ)} here and not "
                        f"{tuple(documents.shape)}: a document may begin on another rank.")  # fmt: skip
        if positions.shape[-1:] != tokens.shape[1:] or positions.numel() not in (tokens.shape[1], tokens.numel()):
            raise Wrong(f"Each of a rank's tokens has one position; yours have shape {tuple(positions.shape)}.")
        turns = rotary(_SEQ, _PACKED.head_dim, device=tokens.device, dtype=torch.float64)
        rope = turns[:, positions.expand(tokens.shape).clamp(0, _SEQ - 1)].unsqueeze(2)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rope, documents)
        logits = self.head(self.norm(x))
        if logits.requires_grad:  # it may look at the loss first
            logits.retain_grad()
            self.seen.append((tokens, positions.expand(tokens.shape), documents, logits))
        return logits

    def mean(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse what would be the answer, as `loss` does."""
        raise Wrong("The model's own `loss` or `mean` answers for you: weigh the losses of the labels yourself.")

    loss = mean


def _on_meshes(answer: Callable[..., Any], batch: Batch) -> list[Any]:
    """Return for each mesh what this rank gave the model, what it learned from it, its loss, and its gradients."""
    found = []
    for shape in _MESHES:
        mesh = rank_mesh(*shape, names=("dp", "cp"))
        model = _Watched(mesh["cp"].get_group()).double()
        loss = answer(model, *(each.clone() for each in batch), mesh)
        dist.barrier()  # a collective that some ranks left out waits here, and meets no gradient
        if not model.seen:
            raise Wrong(f"Rank {dist.get_rank()} does not call the model with gradients; it must, without labels too.")
        learned = [part for part in model.seen if part[3].grad is not None]  # others it may have looked at
        if not learned or all(p.grad is None for p in model.parameters()):
            raise Wrong(f"At the end rank {dist.get_rank()} has no gradients: run backward and leave what it gives.")
        tokens, positions, documents, logits = (torch.cat(parts) for parts in zip(*learned, strict=True))
        # A token's loss pulls the logit of its label up and all others down, by their probabilities and its weight.
        grad, chances = torch.cat([part[3].grad for part in learned]), logits.softmax(-1)
        labels = grad.argmin(-1, keepdim=True)
        weights = -(grad / (1 - chances)).gather(-1, labels)
        fit = weights * chances.scatter_add(-1, labels, -torch.ones_like(weights))
        if ((grad - fit).abs() > fit.abs() / 2).any():
            raise Wrong(f"Rank {dist.get_rank()}'s logits get no cross-entropy's gradient, a positive weight times the probabilities "
                        "with 1 less at the label. Look at a token's loss: its sign, its log_softmax.")  # fmt: skip
        labels, weights = labels.masked_fill(weights.abs() < 1e-12, IGNORED)[..., 0], weights[..., 0]
        average_gradients(model, dist.group.WORLD)
        mean = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        plain = [each.detach().tolist() for each in (tokens, positions, documents, labels, weights)]
        found.append((*plain, as_float(loss.detach() if isinstance(loss, Tensor) else loss, "The loss"), mean))
    return found


def _one_process(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the labels of all tokens, the loss of each, and the gradients of their mean, in one process."""
    tokens, documents, counted = batch
    torch.manual_seed(0)
    model, here = Transformer(_PACKED).double(), torch.arange(_SEQ)
    mask = visible(here, here, True, documents[:, :-1])
    for block in model.blocks:
        block.attention.core = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    labels = next_tokens(tokens, documents).masked_fill(~counted[:, 1:], IGNORED)
    losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    (losses.sum() / (labels != IGNORED).sum()).backward()
    return labels, losses.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@check(
    kind="work",
    idea="Where a token stands, what follows it and how many count are facts of the whole batch: settle them there, then cut.",
    section="Positions, labels, mean, documents, gradients: what changes outside of attention",
    line="Make labels in the whole windows, take chunks r and 2 cp - 1 - r of tokens and labels, pass their places, and run "
    "backward of (number of ranks) * (own sum) / (counted labels of all ranks).",
)
def packed_step(answer: Callable[..., Any], seed: int = 12) -> str:
    """Judge `packed_step(model, tokens, documents, counted, mesh)` on ranks, by what the model got and learned."""
    batch = _batch(seed)
    truth = _one_process(batch)
    by_rank = on_ranks(_on_meshes, _RANKS, answer, batch)
    for (dp, cp), found in zip(_MESHES, zip(*by_rank, strict=True), strict=True):
        _judge_held(found, batch, dp, cp)
        _judge_learned(found, batch, truth, dp, cp)
    return (f"{len(_MESHES)} meshes of {_RANKS} ranks: each rank's tokens, positions and labels, the loss and the gradients are "
            "those of one process, with documents that cross ranks, and a rank on which nothing counts.")  # fmt: skip


def _judge_held(found: Sequence[Any], batch: Batch, dp: int, cp: int) -> None:
    tokens, documents, _ = batch
    case, width = f"dp={dp}, cp={cp}", _SEQ // (2 * cp)
    place = {int(token): divmod(i, _SEQ + 1) for i, token in enumerate(tokens.flatten())}
    held = [[[place.get(token, (-1, -1)) for token in row] for row in each[0]] for each in found]
    rows = [[row[0][0] for row in each] for each in held]
    groups = [rows[d * cp : (d + 1) * cp] for d in range(dp)]
    dealt = sorted(row for group in groups for row in group[0])
    refuse(
        f"{case}, -1 for a token of none",
        ("The first tokens of rows on the ranks of one cp group are of different sequences, and the group shares one: a sampler "
         "counts dp ranks", any(each != group[0] for group in groups for each in group)),
        (f"The first tokens of the replicas' rows are of the sequences {dealt}: each of the {_ROWS} belongs to one replica, once",
         dealt != [*range(_ROWS)]),
    )  # fmt: skip
    for rank, each in enumerate(held):
        r = rank % cp
        right = [*range(r * width, (r + 1) * width), *range(_SEQ - (r + 1) * width, _SEQ - r * width)]
        part, got = [*range(r * 2 * width, (r + 1) * 2 * width)], [p for _, p in each[0]]
        first, last = sum(range(1, 2 * width + 1)), sum(range(_SEQ - 2 * width + 1, _SEQ + 1))
        refuse(
            f"{case}, rank {rank} holds {some(got)}",
            ("Each rank has one contiguous part. Under the causal mask the first rank of a sequence would compute "
             f"{first} scores and the last {last}; the ring here takes a zigzag for granted", got == part != right),
            ("The pair of chunks is right, and not their order: the early chunk comes first, and the ring's masks rely on it",
             got != right and sorted(got) == right),
            (f"The ring takes it that rank r of cp has chunk r and chunk 2 cp - 1 - r, here {some(right)}",
             any([p for _, p in row] != right for row in each)),
        )  # fmt: skip
        same = [ids[:, :, None] == ids[:, None] for ids in (torch.tensor(found[rank][2]), documents[rows[rank], :-1])]
        refuse(case, ("`documents` are not those of the rank's sequences: they go with the rows, and leave out the last token",
                      not torch.equal(*same)))  # fmt: skip
    offsets: dict[tuple[int, int], set[int]] = {}
    for each, places in zip(found, held, strict=True):
        for row, own in zip(places, each[1], strict=True):
            for (which, p), position in zip(row, own, strict=True):
                offsets.setdefault((which, int(documents[which, p])), set()).add(p - position)
    counts_own = cp > 1 and all(row == [*range(len(row))] for each in found for row in each[1])
    refuse(
        case,
        ("Every rank counts its own tokens 0, 1, 2 and so on: a position is the token's place in the whole sequence", counts_own),
        ("Two tokens of one document are not as far apart as in the whole sequence: one way there is that positions restart "
         "where a rank's part begins or a chunk ends", any(len(each) > 1 for each in offsets.values())),
        (f"Positions are places in the sequence, from 0 to {_SEQ - 1}, and not all of yours are",
         any(not 0 <= p < _SEQ for each in found for row in each[1] for p in row)),
    )  # fmt: skip


def _judge_learned(found: Sequence[Any], batch: Batch, truth: tuple[Tensor, Tensor, Tensor], dp: int, cp: int) -> None:
    labels, losses, gradients = truth
    case, n, total = f"dp={dp}, cp={cp}", dp * cp, int((labels != IGNORED).sum())
    place = {int(token): divmod(i, _SEQ + 1) for i, token in enumerate(batch[0].flatten())}
    sums, counts, wrong, lost = [], [], [], []
    # fp32 angles differ where positions restart, and norms round gradients of another size otherwise.
    atol = 1e-6 * gradients.abs().max().item()
    equal = all(torch.allclose(each[6], gradients, rtol=1e-4, atol=atol) for each in found)
    for rank, each in enumerate(found):
        here = [[place[token] for token in row] for row in each[0]]
        lost += [rank] * (math.isnan(each[5]) or any(math.isnan(w) for row in each[4] for w in row))
        for row, learned in zip(here, each[3], strict=True):
            wrong += [(rank, *i, got, place.get(got)) for i, got in zip(row, learned, strict=True) if got != labels[i]]
        at = tuple(zip(*(pair_ for row in here for pair_ in row), strict=True))
        sums.append(losses[at].sum().item())
        counts.append(int((labels[at] != IGNORED).sum()))
    if lost:
        why = f": rank {counts.index(0)} has no label, and its mean may be 0 divided by 0" if 0 in counts else ""
        raise Wrong(f"What rank {lost[0]} trains on or returns is not a number{why} ({case}).")
    _explain_labels(wrong, batch, labels, case, _SEQ // (2 * cp))
    own = [sum(counts[rank // cp * cp : (rank // cp + 1) * cp]) for rank in range(n)]  # of the cp group
    mean, means = sum(sums) / total, [s / c if c else math.nan for s, c in zip(sums, counts, strict=True)]
    for rank, each in enumerate(found):
        weights = [w for row in each[4] for w in row if abs(w) > 1e-12]
        told = f"{case}: rank {rank} has {counts[rank]} of {total} labels"
        slips = [
            ("Each rank trains on its own mean, so a token counts for more where few count: divide by the labels of all ranks",
             1 / max(1, counts[rank])),
            ("Backward runs from each rank's sum over the labels of all, and the average over the ranks divides once more, by "
             "their number, dp and cp together", 1 / total),
            *(("This fits an average over one axis of the mesh; gradients are averaged over dp and cp together", of / total) for of in (cp, dp)),
            *(("The labels of one cp group are counted, and other replicas have more or fewer", of / max(1, own[rank])) for of in (1, cp)),
            ("The sum is divided by all tokens; those without a label do not count", n / losses.numel()),
            ("Backward runs from the plain sum, and the gradients that you leave do not average to those of the mean", 1.0),
        ]  # fmt: skip
        for weight in weights:
            if not equal and not close(weight, n / total):  # it may have scaled or summed gradients itself
                recognize(weight, told, slips if max(weights) < 1.001 * min(weights) else ())  # each slip is even
                raise Wrong(f"In backward a token weighs {weight:.4g} and should weigh n / labels = {n / total:.4g}, since the "
                            f"average divides by n = {n} ({told}).")  # fmt: skip
    for rank, each in enumerate(found):
        loss, told = each[5], f"{case}, rank {rank}: backward is right, and the loss that you return is not"
        if not close(loss, mean):
            recognize(loss, told, [
                ("This is the rank's own mean", means[rank]),
                ("This is the mean of the ranks' means", sum(means) / n),
                ("This is the rank's own share; add up the sums of all ranks", sums[rank] / total),
                ("This is what backward starts from: its factor is there for the average of gradients", n * sums[rank] / total),
                ("This is multiplied by the ranks", n * mean), ("This is a sum, not a mean", sum(sums)),
            ])  # fmt: skip
            raise Wrong(f"The mean over all labels is {mean:.6g}, and you return {loss:.6g} ({told}).")
    if not equal:
        raise Wrong(f"All that the model gets is right, and the gradients are not those of one process ({case}).")


def _explain_labels(wrong: Sequence[tuple[Any, ...]], batch: Batch, labels: Tensor, case: str, width: int) -> None:
    """Raise `Wrong` for tokens that learn another label than theirs: rank, row, place, label, and the label's row and place."""
    _, documents, counted = batch
    signs: list[tuple[int, str, int]] = []
    cut, last = "Shift whole sequences, then cut", "The last of `tokens` is a label too"
    for rank, row, p, label, given in wrong:
        if label == IGNORED:
            kind = 3 if p == _SEQ - 1 else int((p + 1) % width == 0) if counted[row, p] else 2  # 1 ends a chunk
            why = "It is in the same document", cut, f"It counts, though {p} does not", last
            signs.append((5 + kind, f"The token at {p} lacks its label, that at {p + 1}. {why[kind]}", rank))
        elif given != (row, p + 1):
            seen = f"that at {given[1]}" if given and given[0] == row else f"{label}, no token of its sequence"
            told, learns = f"The token at {p} learns to be followed by {seen}", labels[row, p] != IGNORED
            why = last if p == _SEQ - 1 else cut if (p + 1) % width == 0 else f"Its label is that at {p + 1}"
            why = f". {why}" if learns else ", and has no label: leave it out of the loss"
            signs.append((((p + 1) % width == 0) + (p == _SEQ - 1) if learns else 8, told + why, rank))
        elif documents[row, p] != documents[row, p + 1]:
            signs.append((2, f"The token at {p} ends a document and learns the first token of the next one", rank))
        elif counted[row, p]:
            signs.append((4, f"`counted` is shifted as labels are: {p + 1} does not count, and {p} learns it", rank))
        else:
            signs.append((3, f"The token at {p + 1} does not count, and is learned", rank))
    if signs:
        raise Wrong(f"{min(signs)[1]} ({case}, rank {min(signs)[2]}).")


# --- a block that is wrong ----------------------------------------------------------------------------------

_KINDS = ("keys", "weights", "gradients")
_LAYERS = 3
_JOB = tiny_config("llama", num_layers=_LAYERS, hidden=32, num_heads=4, num_kv_heads=2, ffn=64)


class Fault(NamedTuple):
    """What is wrong in a job, and where."""

    what: str
    layer: int
    rank: int
    step: int


Job = Callable[[dist.ProcessGroup], ContextParallelTransformer]


def _drawn(number: int) -> Fault | None:
    dice = random.Random(f"job {number}")
    fault = Fault(dice.choice(_KINDS), dice.randrange(_LAYERS), dice.randrange(_RANKS), dice.randrange(1, _RANKS))
    return fault if dice.random() < 0.8 else None


def job(number: int) -> Job:
    """Return what builds a model on each of four ranks, the same one for every number; one thing may be wrong in it."""

    def build(group: dist.ProcessGroup) -> ContextParallelTransformer:
        torch.manual_seed(0)
        model = ContextParallelTransformer(_JOB, group).double()
        for layer, block in enumerate(model.blocks):
            block.attention.core = partial(step_by_step, group, number, layer)
        return model

    return build


def step_by_step(
    group: dist.ProcessGroup, number: int, layer: int, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Return attention that meets the keys of one rank after the other, as a ring does."""
    cp, rank, copies = dist.get_world_size(group), dist.get_rank(group), q.shape[1] // k.shape[1]
    fault = _drawn(number)  # asked here, so that printing the attention does not show it
    here = fault is not None and (layer, rank) == (fault.layer, fault.rank)
    held = [token_positions(q.shape[2] * cp, cp, each) for each in range(cp)]
    blocks = _Gathered.apply(torch.cat((k, v), dim=-1), group).repeat_interleave(copies, dim=2)
    seen: Any = None
    for step in range(cp):
        source, wrong = (rank - step) % cp, fault.what if here and fault.step == step else ""
        block = blocks[source].detach() if wrong == "gradients" else blocks[source]
        theirs, values = block.split((k.shape[-1], v.shape[-1]), dim=-1)
        mask = visible(held[rank], held[rank if wrong == "keys" else source], True, documents)
        # Finite, so that a row that sees nothing has a gradient that is a number.
        scores = (q @ theirs.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -1e9)
        lse = scores.logsumexp(-1)
        piece = ((scores - lse[..., None]).exp() @ values, lse / math.log(2) if wrong == "weights" else lse)
        seen = merge_parts(seen, piece) if step else piece
    return seen[0]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def _picked(seed: int) -> list[int]:
    """Return jobs: one of each kind, a healthy one and another; some of them are such that other ideas fail in them."""
    dice = random.Random(seed)
    while True:
        found = [dice.randrange(10**6) for _ in range(5)]
        faults = [fault for fault in map(_drawn, found) if fault]
        sources = {fault: (fault.rank - fault.step) % _RANKS for fault in faults}
        if (
            len(faults) == 4
            and {fault.what for fault in faults} == set(_KINDS)
            and len({fault.layer for fault in faults}) > 1
            and any(source != fault.step != 2 for fault, source in sources.items())
            and any(source and fault.what == "weights" for fault, source in sources.items())
        ):
            return found


@check(
    kind="fault",
    idea="Attention is linear in its values, so values that tell whose they are show in the output how much of each was taken.",
    section="Softmax of one row whose keys lie on two ranks",
    line="In each layer call the attention with the rows of an identity as values, and start backward with them too: the output "
    "is its matrix of weights, the values' gradient the transpose: compare both with one process, block by block.",
)
def find_wrong_block(answer: Callable[[Job], Any], seed: int = 12) -> str:
    """Judge `find_wrong_block(job)`, which runs on each of four ranks, on jobs of every kind and a healthy one."""
    new = [number for number in NEW.sample(range(10**6), 60) if _drawn(number)]  # in no table
    numbers_ = [*_picked(seed), *new[:2]]
    for number, said in zip(numbers_, ask_ranks(answer, _RANKS, numbers_, make=job), strict=True):
        _judge_fault(said[0], _drawn(number))
    return ("Six sick jobs and a healthy one. `keys`: a later step had the causal triangle of step 0. `weights`: one log-sum-exp "
            "came in base 2, as some kernels give it (sglang#40903). `gradients`: the keys' gradient of one step never left the "
            "rank; diffusers#14265 had wrong ones for all remote keys, behind a forward pass without fault.")  # fmt: skip


def _judge_fault(said: Any, fault: Fault | None) -> None:
    otherwise = "Return a dictionary with what, layer, rank and step, or None for a healthy job."
    said = dict.fromkeys(Fault._fields) if said is None or (isinstance(said, Mapping) and not said) else said
    got = by_name(said, *Fault._fields, otherwise=otherwise)
    if got["what"] is None or fault is None:
        refuse(
            "",
            ("A healthy job is called sick; by an exact comparison it is, as sums in another order differ in the last digits", got["what"] is not None and not fault),
            ("A sick job passes for healthy on rank 0, which is read: its outputs are right, and what comes back to the keys is not",
             fault and fault.what == "gradients"),
            ("A sick job passes for healthy on rank 0, which is read, though an attention gives an output that one process does not", fault),
        )  # fmt: skip
        return
    what, (layer, rank, step) = got["what"], (whole(got[name], f"`{name}`") for name in Fault._fields[1:])
    source = (fault.rank - fault.step) % _RANKS
    refuse(
        f"you say {what!r}, layer {layer}, rank {rank}, step {step}",
        (f"`what` is one of {', '.join(_KINDS)}", what not in _KINDS),
        ("Layers count from 0, and in this one nothing is wrong, or its input alone: an error goes on through all layers above, its "
         "gradient through all below. Give each layer's attention inputs of your own", layer != fault.layer),
        ("That rank owns the keys of the wrong block. Asked is the one that attends to them", rank == source != fault.rank),
        ("The rank is another: its queries are the rows in which the matrix of weights is wrong", rank != fault.rank),
        (f"The step is another: in step j rank r has the keys of rank r - j, in step {step} those of rank {(rank - step) % _RANKS}. "
         + ("In backward the weights of one block are missing, and all others are right" if fault.what == "gradients" else
            "A row's weights add up to 1, so one wrong block changes all of them, and by one factor; the block with another factor "
            "is it"), step != fault.step),
        (f"Layer, rank and step are right, and it is not {what!r}: "
         + {"keys": "keys have weight that their query may not see, or none that it should see",
            "weights": "the right keys have weight, and too much or too little",
            "gradients": "the output is right"}[fault.what], what != fault.what),
    )  # fmt: skip


# --- how to split -------------------------------------------------------------------------------------------

_KEYS = ("possible", "way", "order", "sent", "averaged_over")

Job = dict[str, int | bool]

#: What the buffers of a way hold.
_HELD = {
    "ring": "keys and values of two blocks, or of one if cp is 2",
    "gathered": "keys and values of the other ranks",
    "ulysses": "queries, keys, values and outputs once more",
}


def _jobs(dice: random.Random) -> list[Job]:
    """Return jobs: some of known models, and drawn ones in which each way is the best for some."""
    mib = 2**20
    big, small = {"head_dim": 128, "causal": True, "dp": 4}, {"head_dim": 128, "causal": True, "dp": 2}
    jobs: list[Job] = [
        # Groups of five: at cp 4 a gather sends less than Ulysses, at cp 8 more. cp, dp and the group differ for mistakes.
        small | {"seq": 2**17, "heads": 40, "kv_heads": 8, "tp": 1, "cp": 4, "dp": 3, "room": 2**40},
        small | {"seq": 2**17, "heads": 40, "kv_heads": 8, "tp": 1, "cp": 8, "dp": 3, "room": 2**40},
        # tp has taken the key heads.
        big | {"seq": 2**17, "heads": 128, "kv_heads": 8, "tp": 8, "cp": 16, "room": 2**40},
        big | {"seq": 2**20, "heads": 128, "kv_heads": 8, "tp": 8, "cp": 16, "room": 100 * mib},
        # cp = 6 divides 24 query heads and not 8 key heads, which are more than 6; a mask that is not causal.
        small | {"seq": 6 * 2**12, "heads": 24, "kv_heads": 8, "tp": 1, "cp": 6, "room": 2**40, "causal": False},
        # The sequence has cp equal parts and not 2 cp; and none at all.
        small | {"seq": 4 * 1001, "heads": 16, "kv_heads": 16, "tp": 2, "cp": 4, "room": 2**40},
        small | {"seq": 4 * 1001, "heads": 16, "kv_heads": 4, "tp": 2, "cp": 4, "room": 2**40},
        small | {"seq": 4 * 1001, "heads": 16, "kv_heads": 4, "tp": 2, "cp": 4, "room": 2**40, "causal": False},
        small | {"seq": 4 * 1001 + 2, "heads": 16, "kv_heads": 16, "tp": 2, "cp": 4, "room": 2**40, "causal": False},
    ]
    # Room for all but one byte of what each way needs, 4, 6 and 8 blocks of keys: a block less would fit.
    edge = small | {"seq": 2**17, "heads": 24, "kv_heads": 8, "tp": 1, "cp": 4}
    jobs += [edge | {"room": int(context_buffers(way, **_on_a_rank(edge))) - 1} for way in WAYS]
    jobs.append(edge | {"cp": 2, "room": int(context_buffers("ring", **_on_a_rank(edge | {"cp": 2})))})  # one block
    while len(jobs) < 44:
        cp, tp = dice.choice((2, 3, 4, 8, 16)), dice.choice((1, 2, 4))
        kv = tp * dice.choice((1, 2, 3, 4, 8, 16))
        job: Job = {"seq": cp * dice.choice((2, 2, 2, 1)) * dice.randint(64, 9999), "heads": kv * dice.randint(1, 8)}
        job |= {"kv_heads": kv, "head_dim": dice.choice((64, 128)), "tp": tp, "cp": cp, "dp": dice.randint(1, 8)}
        job["causal"] = dice.random() < 0.7
        needed = [context_buffers("gathered", **_on_a_rank(job)), context_buffers("ring", **_on_a_rank(job))]
        job["room"] = int(dice.choice((2**40, max(needed) - 1, min(needed), 3 * max(needed))))
        jobs.append(job)
    return jobs


def _on_a_rank(job: Job) -> dict[str, int]:
    """Return the sizes of one attention on a rank; for buffers and traffic copies of key heads do not come up."""
    sizes = {name: job[name] for name in ("seq", "head_dim", "cp")}
    return sizes | {"heads": job["heads"] // job["tp"], "kv_heads": job["kv_heads"] // job["tp"], "batch": 1}


def _allowed(job: Job, way: str) -> bool:
    order = "zigzag" if job["causal"] else "contiguous"
    model = {name: job[name] for name in ("seq", "heads", "kv_heads", "tp")}
    return job["cp"] in context_degrees(way, **model, order=order, most=job["cp"])


@check(
    idea="First what can run: whole heads for Ulysses, equal chunks for the others, buffers that fit. Then what sends least.",
    section="Ring, all-gather, Ulysses: bytes, messages, memory, limits",
    line="Drop Ulysses unless cp divides seq and kv_heads // tp, the others unless 2 cp (cp without a causal mask) divides "
    "seq, and all whose buffers are larger than room; take the least sent of the rest.",
)
def choose_split(answer: Callable[..., Mapping[str, Any]], seed: int = 12) -> str:
    """Judge `choose_split(seq, heads, kv_heads, head_dim, tp, cp, dp, causal, room)` for jobs of every kind."""
    jobs = _jobs(random.Random(seed)) + _jobs(NEW)[-6:]  # no list has the last
    taken = dict.fromkeys(WAYS, 0)
    for job in jobs:
        possible = [
            way for way in WAYS if _allowed(job, way) and context_buffers(way, **_on_a_rank(job)) <= job["room"]
        ]
        try:
            got = answer(**job)
        except ValueError as error:
            if not possible:
                continue
            raise Wrong(f"You stop with a ValueError, {str(error)[:60]!r}, and {_why_possible(job, possible[0])} "
                        f"({_job(job)}).") from None  # fmt: skip
        if not possible:
            named = got.get("possible") if isinstance(got, Mapping) else None
            why = [_why_not(job, way) for way in WAYS if named is not None and way in _possible(named)]
            raise Wrong(f"Nothing can run here, so raise a ValueError{': ' + why[0] if why else ''} ({_job(job)}).")
        taken[_judge_split(got, job, possible)] += 1
    called = [name.rpartition(".") for name in getattr(answer, "called", ())]
    if asked := [name for room, _, name in called if room.startswith("lablib.calc.parallel")]:
        raise Wrong(f"It is right, and {asked[0]} answers for you: count what can run and what is sent yourself.")
    counts = ", ".join(f"{way} {number}" for way, number in taken.items())
    return f"{len(jobs)} jobs: {counts}, and {len(jobs) - sum(taken.values())} that nothing can run."


def _job(job: Job) -> str:
    names = ("seq", "heads", "kv_heads", "tp", "cp", "causal")
    return ", ".join(f"{name}={job[name]}" for name in names) + f", room={job['room']:,}"


def _judge_split(got: Any, job: Job, possible: list[str]) -> str:
    got = by_name(got, *_KEYS)
    named = _possible(got["possible"])
    for way in WAYS:
        if (way in named) != (way in possible):
            why = _why_possible(job, way) if way in possible else _why_not(job, way)
            raise Wrong(f"{way} is {'missing' if way in possible else 'named as possible'}: {why} ({_job(job)}).")
    sizes = _on_a_rank(job)
    sent = {way: attention_traffic(way, **sizes).total for way in possible}
    way = got["way"].lower() if isinstance(got["way"], str) else got["way"]
    if way not in possible:
        raise Wrong(f"`way` is one of `possible`, here {', '.join(possible)}, and you say {way!r} ({_job(job)}).")
    if not close(sent[way], min(sent.values())):
        best = min(sent, key=sent.get)
        raise Wrong(f"A rank sends {sent[way] / 1e6:.2f} MB with {way} and {sent[best] / 1e6:.2f} MB with {best}, which can "
                    f"run as well ({_job(job)}).")  # fmt: skip
    _judge_order(got["order"], way, job)
    if not close_bytes(got["sent"], sent[way]):
        _explain_sent(float(got["sent"]), way, sent[way], job)
    ranks, dp, cp, tp = whole(got["averaged_over"], "`averaged_over`"), job["dp"], job["cp"], job["tp"]
    if ranks != dp * cp:
        refuse(
            f"dp={dp}, cp={cp}, tp={tp}",
            ("cp ranks hold the same weights and see other tokens, so their gradients are averaged too, dp and cp together",
             ranks == dp),
            ("Replicas are averaged as well: dp and cp together", ranks == cp),
            ("tp ranks hold other weights, and there is nothing to average between them", ranks == dp * cp * tp),
            ("A gradient is averaged over all ranks with the same weights and other tokens, dp times cp", True),
        )  # fmt: skip
    return way


def _possible(given: Any) -> set[str]:
    return chosen(given, WAYS, f"`possible` names ways: of {', '.join(WAYS)} those that can run.")


def _why_not(job: Job, way: str) -> str:
    """Say what stops a way that cannot run."""
    keys, cp, seq = job["kv_heads"] // job["tp"], job["cp"], job["seq"]
    if _allowed(job, way):
        needed = context_buffers(way, **_on_a_rank(job))
        return f"the buffers of {way}, {_HELD[way]}, take {needed:,.0f} bytes, more than room"
    if way != "ulysses":
        parts = f"{2 * cp} equal chunks for zigzag" if job["causal"] else f"{cp} equal parts"
        return f"seq={seq} has no {parts}"
    if seq % cp:
        return f"cp={cp} does not divide seq={seq}"
    if job["kv_heads"] % cp == 0:
        return f"tp={job['tp']} leaves a rank {keys} of the {job['kv_heads']} key heads, which cp={cp} does not divide"
    return f"cp={cp} does not divide the number of key heads of a rank, {keys}, and query heads alone are not enough"


def _why_possible(job: Job, way: str) -> str:
    """Say why a way can run that an answer leaves out."""
    cp, seq = job["cp"], job["seq"]
    if seq % (2 * cp) and way == "ulysses":
        return f"ulysses can run: its ranks attend over the whole sequence, so {cp} equal parts will do"
    if seq % (2 * cp):
        return f"{way} can run: without a causal mask nothing needs balance, so {cp} equal parts will do"
    needed = context_buffers(way, **_on_a_rank(job))
    return f"{way} can run: its degree is allowed, and its buffers take {needed:,.0f} bytes, which fit into room"


def _judge_order(order: Any, way: str, job: Job) -> None:
    right = {"zigzag" if job["causal"] and way != "ulysses" else "contiguous"}
    if way == "ulysses" and job["seq"] % (2 * job["cp"]) == 0:
        right = {"zigzag", "contiguous"}  # every rank attends over all of it, in either order
    if isinstance(order, str) and order.lower() in right:
        return
    if str(order).lower() not in ("zigzag", "contiguous"):
        raise Wrong(f"`order` is 'zigzag' or 'contiguous', and here it is {order!r}.")
    refuse(
        _job(job),
        (f"With contiguous parts under a causal mask the last rank computes most, and all wait for it: {way} needs zigzag",
         right == {"zigzag"}),
        ("In Ulysses every rank attends over the whole sequence for some heads, so nothing is to be balanced; and the "
         f"sequence has no {2 * job['cp']} equal chunks, so the order is contiguous", way == "ulysses"),
        ("Without a causal mask each query sees every key, so contiguous parts are equal already", True),
    )  # fmt: skip


def _explain_sent(got: float, way: str, truth: float, job: Job) -> NoReturn:
    cp, tp = job["cp"], job["tp"]
    slips = [
        (f"These are the bytes of all heads: tp={tp} has left a rank one part in {tp} of them", tp),
        ("This is what all ranks send together; one rank is asked" + f", and to each other one part in {cp} goes" * (way == "ulysses"), cp),
        ("This is forward alone" if way == "ring" else "This is half: backward sends as much again, a number has two bytes, values travel "
         "too, and a mask spares no bytes", 1 / 3 if way == "ring" else 1 / 2),
        ("Backward needs more than one round: nobody kept the keys and values, and the gradients of both come home",
         2 / 3 if way == "ring" else 0),
        ("What was gathered is kept, and the gradients are scattered once, at two bytes", 3 / 2 if way == "gathered" else 0),
        (f"A rank's own part never travels: of {cp} parts {cp - 1} leave, or pass by", cp / (cp - 1)),
        ("Two bytes carry a number, with a mask or without, and values travel too", 1 / 2), ("Two bytes carry a number, with a mask or without, and what arrives others sent", 2),
    ]  # fmt: skip
    known = [(sentence, truth * change) for sentence, change in slips if change not in (0, 1)]
    recognize(got, f"{way}, {_job(job)}", known)
    raise Wrong(f"With {way} a rank sends {truth:,.0f} bytes in forward and backward, not {got:,.0f} ({_job(job)}).")
