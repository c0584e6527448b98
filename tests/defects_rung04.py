"""Planted defects of rung 04: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import copy
import re
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import count, repeat
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

from lablib.calc.schedules import Action, one_f_one_b, to_csv, zb_h1
from lablib.checks.rung04 import CHANGES, uneven_model
from lablib.cli.schedule import schedule_text
from tests.planted import listed, told
from tests.scripts import load

_solution = load("labs/solutions/rung04.py")
_Named = namedtuple("_Named", "stage kind microbatch")
#: What a notebook can print before it asks the check.
_PRINTED = {(p, m): (one_f_one_b(p, m), zb_h1(p, m)) for p in range(1, 10) for m in range(1, 31)}
#: Of an answer that counts its calls.
_TURNS = count()


def _rows(p, m, warmups):
    rows = []
    for i in range(p):
        warmup = min(m, warmups(i))
        row = [f"{i}F{k}" for k in range(warmup)]
        for k in range(warmup, m):
            row += [f"{i}F{k}", f"{i}B{k - warmup}"]
        rows.append(" ".join(row + [f"{i}B{k}" for k in range(m - warmup, m)]))
    return rows


def _plain(p, m):
    return _rows(p, m, lambda i: p - 1 - i)


def _halved(row, first, second):
    """Return a row with two actions of these kinds in place of each backward."""
    return " ".join(f"{a.replace('B', first)} {a.replace('B', second)}" if "B" in a else a for a in row.split())


class one_f_one_b_schedule:
    all_forwards_first = lambda p, m: _rows(p, m, lambda i: m)
    one_forward_too_many = lambda p, m: _rows(p, m, lambda i: p - i)
    no_warmup = lambda p, m: _rows(p, m, lambda i: 0)
    warmup_turned_round = lambda p, m: _rows(p, m, lambda i: i)

    def warms_up_beyond_the_step(p, m):
        """Right for m >= p; with fewer the warm-up runs past them, and the backwards at the end begin below 0."""
        rows = []
        for i in range(p):
            warmup = p - 1 - i
            row = [f"{i}F{k}" for k in range(warmup)]
            for k in range(warmup, m):
                row += [f"{i}F{k}", f"{i}B{k - warmup}"]
            rows.append(row + [f"{i}B{k}" for k in range(m - warmup, m)])
        return rows

    loses_the_last_backwards = told(_plain, lambda rows: [row.rsplit(" ", 1)[0] for row in rows])
    backward_before_forward = told(
        _plain, lambda rows, p, m: [*rows[:-1], " ".join(f"{p - 1}B{k} {p - 1}F{k}" for k in range(m))]
    )

    def newest_backward_first(p, m):
        """A stack where a queue belongs: the last stage keeps the order and the others turn it round."""
        rows = []
        for i, row in enumerate(_plain(p, m)):
            steps, held = [], []
            for action in row.split():
                if "F" in action:
                    held.append(int(action.split("F")[1]))
                    steps.append(action)
                else:
                    steps.append(f"{i}B{held.pop()}")
            rows.append(" ".join(steps))
        return rows

    splits_the_backward = told(_plain, lambda rows: [_halved(row, "I", "W") for row in rows])
    one_step_for_forward_and_backward = told(
        _plain, lambda rows, p: [f"({p - 1}F1;{p - 1}B0)OVERLAP_F_B {row}" for row in rows]
    )
    rows_without_end = lambda p, m: repeat("0F0 0B0")
    a_row_without_end = lambda p, m: [repeat("0F0")] * p
    micro_batches_from_one = told(
        _plain, lambda rows: [" ".join(f"{a[:2]}{int(a[2:]) + 1}" for a in row.split()) for row in rows]
    )
    ranks_without_order = told(_plain, lambda rows: set(rows))
    one_stage_for_all = lambda p, m: [" ".join(f"0{kind}{k}" for k in range(m) for kind in "FB")] * p

    def right(p, m):
        """Hold at most min(m, p - i); at the limit go backward, below it forward."""
        rows = []
        for i in range(p):
            limit, forwards, backwards, row = min(m, p - i), 0, 0, []
            while backwards < m:
                if forwards < m and forwards - backwards < limit:
                    row.append(f"{i}F{forwards}")
                    forwards += 1
                else:
                    row.append(f"{i}B{backwards}")
                    backwards += 1
            rows.append(" ".join(row))
        return rows

    lablibs_own = lambda p, m: to_csv(one_f_one_b(p, m))
    lablibs_command = lambda p, m: schedule_text("1f1b", p, m, form="csv")
    lablibs_table = lambda p, m: _PRINTED.get((p, m), ((), ()))[0]
    cases_seen = told(_plain, lambda rows, p, m: rows if m < 14 else _rows(p, m, lambda i: 0))
    lablibs_other = lambda p, m: [[str(a).replace("I", "B") for a in r if a.kind != "W"] for r in zb_h1(p, m).ranks]
    two_forwards_later = told(_plain, lambda rows, p: [*rows[:-1], re.sub(r"(\S+) (\S*F2)", r"\2 \1", rows[-1])])
    two_ranks_change_places = told(_plain, lambda rows: [rows[0], *rows[:0:-1]])

    # PyTorch's CSV.
    right_2 = told(_plain, lambda rows: "\r\n".join(row.replace(" ", ",") for row in rows))

    def right_3(p, m):
        """A chart: ranks in a dictionary, tuples of cells with idle slots."""
        return {i: (None,) * i + tuple(row.split()) for i, row in enumerate(_plain(p, m))}


def _halves(p, m, warmups, late):
    rows = []
    for i, row in enumerate(_rows(p, m, warmups)):
        steps, done = [], 0
        for action in row.split():
            steps.append(action.replace("B", "I"))
            if "B" in action and int(action.split("B")[1]) >= late(i):
                steps.append(f"{i}W{done}")
                done += 1
        rows.append(" ".join(steps + [f"{i}W{k}" for k in range(done, m)]))
    return rows


class beat_1f1b:
    without_the_idea_plain_1f1b = lambda p, m: _plain(p, m)
    gpipe_is_no_shorter = lambda p, m: _rows(p, m, lambda i: m)
    twice_the_warmup = lambda p, m: _halves(p, m, lambda i: 2 * (p - 1 - i), lambda i: 2 * i)
    all_weights_at_the_end = lambda p, m: _halves(p, m, lambda i: p - 1 - i, lambda i: m)
    halves_without_warmup = lambda p, m: [_halved(row, "I", "W") for row in _rows(p, m, lambda i: 0)]
    weights_before_inputs = told(_plain, lambda rows: [_halved(row, "W", "I") for row in rows])
    never_does_the_weights = told(_plain, lambda rows: [row.replace("B", "I") for row in rows])

    # As PyTorch's CSV, the halves of each backward beside each other.
    right = told(_plain, lambda rows: [_halved(row, "I", "W").replace(" ", ",") for row in rows])

    def right_2(p, m):
        """Split the last backward alone on each rank but the first: the way up is then no longer than with all split."""
        rows = []
        for i, row in enumerate(_plain(p, m)):
            cells = row.split()
            cells[-1:] = [f"{i}I{m - 1}", f"{i}W{m - 1}"]
            rows.append(cells)
        return rows

    weights_below_zero = told(_solution.beat_1f1b, lambda rows, p, m: [*rows[:-1], rows[-1] + f" 3W{m - p}" * (m < p)])
    lablibs_own = zb_h1
    lablibs_table = lambda p, m: _PRINTED.get((p, m), ((), ()))[1]
    cases_seen = told(_plain, lambda rows, m: rows if m > 10 else [_halved(row, "I", "W") for row in rows])
    # The backwards of the calculator's 1F1B in halves, as tuples with names.
    right_3 = lambda p, m: [
        [_Named(a.stage, kind, a.microbatch) for a in rank for kind in ("IW" if a.kind == "B" else "F")]
        for rank in one_f_one_b(p, m).ranks
    ]


# --- a model, cut and trained, on ranks -------------------------------------------------------------------------------


def _best_cut(times, p):
    """Search: the least limit under which filling every stage to the brim needs no more stages."""
    work = [times["words"], *times["layers"], times["head"]]
    for limit in range(max(work), sum(work) + 1):
        stages = [[0, 0]]  # parts and time
        for part in work:
            if stages[-1][1] + part > limit:
                stages.append([0, 0])
            stages[-1] = [stages[-1][0] + 1, stages[-1][1] + part]
        if len(stages) <= p:
            sizes = [parts for parts, _ in stages]
            return [sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1]


def _equal_cut(times, p):
    count = len(times["layers"])
    return [(rank + 1) * count // p - rank * count // p for rank in range(p)]


class _Copied(_solution.Part):
    def __init__(self, model, *where):
        super().__init__(copy.deepcopy(model), *where)


def _without_places(model, *where):
    part = _solution.Part(model, *where)
    if part.places is not None:
        part.places = torch.nn.Parameter(part.places.detach())
    return part


def _deletes(model, *where):
    """As PyTorch's guide cuts: layers of other stages are deleted from the model."""
    part = _solution.Part(model, *where)
    model.layers = part.layers
    return part


def _in_stages(
    cut=_best_cut, part=_solution.Part, made=Schedule1F1B, pieces=1, tied=1, loss_over=1, told=torch.mean, **options
):
    """Return an answer that does one thing in another way.

    Args:
        pieces: Into how many the batch is cut before PyTorch cuts each; "m" is one for each micro-batch.
        tied: What the sum of a tied gradient is divided by, None if nobody sums.
        loss_over: What the loss is divided by, "m" or a number.
    """

    def answer(model, times, tokens, targets, m, loss):
        rank, p, losses = dist.get_rank(), dist.get_world_size(), []
        sizes = cut(times, p)
        own = part(model, range(sum(sizes[:rank]), sum(sizes[: rank + 1])), rank == 0, rank == p - 1)
        parts, over = m if pieces == "m" else pieces, m if loss_over == "m" else loss_over
        how = {"n_microbatches": m // parts, "loss_fn": lambda y, target: loss(y, target) / over} | options
        for x, target in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            pipeline = made(PipelineStage(own, rank, p, torch.device("cpu")), **how)
            pipeline.step(*[x] * (rank == 0), target=target, losses=losses)
        ends = dist.new_group([0, p - 1])
        if tied and model.head.weight is model.words.weight and rank in (0, p - 1):
            dist.all_reduce(model.words.weight.grad, group=ends)
            model.words.weight.grad /= tied
        return told(torch.stack(losses)) * over if losses else None

    return answer


def _zero_bubble(stage, **options):
    return ScheduleInterleavedZeroBubble([stage], **options)


def _warmed(stage, warmups, **options):
    pipeline = Schedule1F1B(stage, **options)
    pipeline._num_stages = stage.stage_index + warmups[stage.stage_index]  # it runs the difference in front
    return pipeline


#: The models that every call of the check has.
_SEEN = [uneven_model(seed)[1] for seed in (6, 7, 8)]


class train_in_stages:
    without_the_idea_equal_layers = _in_stages(cut=_equal_cut)
    forgets_the_head = _in_stages(cut=lambda times, p: _best_cut(times | {"head": 0}, p))
    gpipe_for_1f1b = _in_stages(made=ScheduleGPipe)
    one_micro_batch_at_a_time = _in_stages(made=ScheduleGPipe, pieces="m", loss_over="m")
    in_smaller_pieces = _in_stages(
        made=lambda stage, n_microbatches, **how: Schedule1F1B(stage, 2 * n_microbatches, **how)
    )
    leaves_out_a_layer = _in_stages(part=lambda model, layers, *ends: _solution.Part(model, list(layers)[1:], *ends))
    deals_layers_out = _in_stages(
        part=lambda model, _, *ends: _solution.Part(model, range(dist.get_rank(), len(model.layers), 3), *ends)
    )
    warms_up_alike = _in_stages(made=lambda stage, **how: _warmed(stage, (3, 3, 3), **how))
    warms_up_too_little = _in_stages(made=lambda stage, **how: _warmed(stage, (2, 1, 1), **how))
    in_one_piece = _in_stages(made=ScheduleGPipe, n_microbatches=1)
    divides_by_m_twice = _in_stages(loss_over="m")
    never_divides = _in_stages(scale_grads=False)
    forgets_the_tie = _in_stages(tied=None)
    means_the_tie = _in_stages(tied=2)
    trains_a_copy = _in_stages(part=_Copied, tied=None)
    leaves_out_the_places = _in_stages(part=_without_places)
    sums_the_losses = _in_stages(told=torch.sum)
    clears_the_gradients = told(_in_stages(), lambda loss, model: (loss, model.zero_grad())[0])

    def without_the_idea_the_whole_model_on_every_rank(model, times, tokens, targets, m, loss):
        for x, target in zip(tokens.chunk(m), targets.chunk(m), strict=True):
            (loss(model(x), target) / m).backward()
        return loss(model(tokens), targets).detach()

    cuts_seen = _in_stages(cut=lambda times, p: (_best_cut if times in _SEEN else _equal_cut)(times, p))

    def without_the_idea_no_message(model, times, tokens, targets, m, loss):
        """Every rank runs all of a copy, in which its own stage is the model's."""
        rank, p, mixed, losses = dist.get_rank(), dist.get_world_size(), copy.deepcopy(model), []
        sizes, tied = _best_cut(times, p), mixed.words.weight
        for k in range(sum(sizes[:rank]), sum(sizes[: rank + 1])):
            mixed.layers[k] = model.layers[k]
        for name in {0: ("words", "places"), p - 1: ("norm", "head")}.get(rank, ()):
            setattr(mixed, name, getattr(model, name))
        for x, target in zip(tokens.chunk(m), targets.chunk(m), strict=True):
            losses.append(loss(mixed(x), target) / m)
            if len(losses) > 1:
                losses[-2].backward()
        losses[-1].backward()
        if model.head.weight is model.words.weight and rank in (0, p - 1):
            model.words.weight.grad += tied.grad
        return sum(losses).item() if rank == p - 1 else None

    # A search by limit, other classes of PyTorch, and a float.
    right = _in_stages(made=_zero_bubble, told=lambda losses: losses.mean().item())
    right_4 = _in_stages(part=_deletes)
    right_3 = lambda *given: ThreadPoolExecutor(1).submit(_solution.train_in_stages, *given).result()

    def right_2(model, times, tokens, targets, m, loss):
        """1F1B by hand, with recomputation and sends that do not block."""
        rank, p = dist.get_rank(), dist.get_world_size()
        sizes = _best_cut(times, p)
        part = _solution.Part(model, range(sum(sizes[:rank]), sum(sizes[: rank + 1])), rank == 0, rank == p - 1)
        xs, ys, held, sent, losses = tokens.chunk(m), targets.chunk(m), deque(), [], []

        def message(source):
            dist.recv(got := torch.empty(*xs[0].shape, model.places.shape[1]), source)
            return got

        def send(tensor, to):
            sent.append((dist.isend(tensor, to), tensor))

        def forward(k):
            x = xs[k] if rank == 0 else message(rank - 1).requires_grad_()
            with torch.set_grad_enabled(rank == p - 1):
                y = part(x)
            if rank == p - 1:
                losses.append(y := loss(y, ys[k]) / m)
            else:
                send(y.detach().contiguous(), rank + 1)
            held.append((x, y))

        def backward():
            x, y = held.popleft()
            y.backward() if rank == p - 1 else part(x).backward(message(rank + 1))
            if rank:
                send(x.grad, rank - 1)

        for k in range(m):
            forward(k)
            if len(held) == p - rank:
                backward()
        while held:
            backward()
        if model.head.weight is model.words.weight:
            everybody = [None] * p
            dist.all_gather_object(everybody, model.words.weight.grad)
            model.words.weight.grad = everybody[0] + everybody[-1]
        for work, _ in sent:
            work.wait()
        return sum(loss.item() for loss in losses) if losses else None


# --- an action that goes wrong, on ranks ------------------------------------------------------------------------------


def _watched(pipeline):
    """Return a rank's reads, what it added, its losses, and the same in one process."""
    reads, rank = {}, dist.get_rank()
    turn = {"F": count(), "B": count()}

    def note(stage, given, output):
        reads[f"{rank}F{next(turn['F'])}"] = given[0].clone().detach()
        output.register_hook(lambda grad: reads.update({f"{rank}B{next(turn['B'])}": grad.clone()}))

    handle = pipeline.stage.register_forward_hook(note)
    losses = pipeline.step()
    handle.remove()
    added = torch.cat([weight.grad.flatten() for weight in pipeline.stage.parameters()])
    return reads, added, losses, *pipeline.alone()


def _off(mine, right):
    return ((mine - right).abs().max() > 1e-3 * right.abs().max()).item()


def _signs(pipeline):
    """Return what differs on any rank: forwards that read and backwards that read, as (stage, k), and what a stage lacks."""
    reads, added, _, right, adds = _watched(pipeline)
    rank, m = dist.get_rank(), len(pipeline.microbatches)
    bad = {
        kind: [(rank, k) for k in range(m) if _off(reads[f"{rank}{kind}{k}"], right[f"{rank}{kind}{k}"])]
        for kind in "FB"
    }
    parts = torch.stack([adds[f"{rank}B{k}"] for k in range(m)])
    lacks = parts.sum(0) - added
    near = torch.cosine_similarity(parts, lacks[None]).argmax().item()
    bad["W"] = [(rank, near)] * _off(added, parts.sum(0))
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, bad)
    return {kind: [each for found in ranks for each in found[kind]] for kind in "FBW"}


def _finds(signs, p=4):
    if signs["F"]:
        return Action("F", *min(signs["F"]))
    if signs["B"]:
        stage, k = max(signs["B"])
        return Action("F" if stage == p - 1 else "B", stage, k)
    return Action("B", *signs["W"][0]) if signs["W"] else None


def _by_signs(change):
    """Return an answer made of the right one and the signs."""

    def answer(pipeline):
        signs = _signs(pipeline)
        return change(_finds(signs), signs)

    return answer


class find_wrong_action:
    without_the_idea_all_is_well = told(_signs, lambda signs: None)
    without_the_idea_the_loss_alone = _by_signs(lambda found, signs: found if found and found.kind == "F" else None)
    never_looks_at_weights = _by_signs(lambda found, signs: found if signs["F"] or signs["B"] else None)
    never_looks_at_forwards = _by_signs(lambda found, signs: _finds(signs | {"F": []}))
    the_last_that_differs = _by_signs(lambda found, signs: Action("F", *max(signs["F"])) if signs["F"] else found)
    the_lowest_of_backwards = _by_signs(
        lambda found, signs: found if signs["F"] or not signs["B"] else Action("B", *min(signs["B"]))
    )
    the_loss_is_backward = _by_signs(
        lambda found, signs: (
            Action("B", 3, found.microbatch) if found and found.stage == 3 and not signs["F"] else found
        )
    )
    blames_the_sender = _by_signs(
        lambda found, signs: found._replace(stage=found.stage - 1) if found and signs["F"] and found.stage else found
    )
    blames_its_forward = _by_signs(lambda it, signs: it._replace(kind="F") if signs["B"] and not signs["F"] else it)
    beside_what_adds_nothing = _by_signs(
        lambda found, signs: found if not found or signs["B"] else found._replace(stage=found.stage ^ 1)
    )
    the_first_micro_batch = _by_signs(lambda found, signs: found and found._replace(microbatch=0))
    finds_something_everywhere = _by_signs(lambda found, signs: found or Action("F", 0, 0))

    names_a_weight_half = _by_signs(lambda it, signs: str(it).replace("B", "W") if it else it)
    says_that_all_is_well = _by_signs(lambda found, signs: found or "healthy")

    # By their number, as the verdicts tell them.
    pipelines_seen = lambda pipeline: ["2F1", "0B4", None, "3F2", "2B3", "2B2", "0F0"][next(_TURNS) % 7]

    def each_rank_for_itself(pipeline):
        found, rank = _signs(pipeline), dist.get_rank()
        return _finds({kind: [each for each in bad if each[0] == rank] for kind, bad in found.items()})

    # An array of three, from a hook of the output.
    right = _by_signs(lambda found, signs: found and np.array([*str(found)]))
    # A tuple on every rank, with names, of a tensor and a whole float.
    right_2 = _by_signs(lambda it, signs: it and _Named(torch.tensor(it.stage), it.kind, float(it.microbatch)))

    def right_3(pipeline):
        """Ranks take turns from stage to stage, and rank 0 alone answers."""
        found = _finds(_signs(pipeline))
        return found if dist.get_rank() == 0 else None


def _explained(**changes):
    """Return an answer in which these entries are other ones, each made of the right answer and of what was asked."""

    def answer(before, after):
        got = dict(_solution.explain_1f1b(before, after))
        return got | {key: change(got, before, after) for key, change in changes.items()}

    return answer


def _takes_for(name, sign):
    """Return an answer that takes whatever shows a sign for the one change: `sign(before, after)`."""
    return _explained(changed=lambda got, b, a: name if sign(b, a) else got["changed"])


def _idle_share(a):
    return a["idle"][0] / (a["busy"][0] + a["idle"][0])


class explain_1f1b:
    without_the_idea_shorter_waits_are_smaller_micro_batches = _takes_for(
        "smaller micro-batches", lambda b, a: a["idle"][0] < b["idle"][0]
    )
    less_held_is_another_order = _takes_for("1f1b for gpipe", lambda b, a: a["held"][0] < b["held"][0])
    more_held_is_more_stages = _takes_for(
        "more stages a rank", lambda b, a: a["held"][-1] > b["held"][-1] and a["busy"] == b["busy"]
    )
    the_order_stays = _explained(schedule=lambda got, b, a: b["schedule"])
    halves_are_still_1f1b = _explained(schedule=lambda got, b, a: got["schedule"].replace("zb-h1", "1f1b"))
    same_share_of_idle_time = _explained(idle_over_total=lambda got, b, a: _idle_share(a))
    share_of_before = _explained(idle_over_total=lambda got, b, a: _idle_share(b))
    over_the_ideal_time = _explained(idle_over_total=lambda got, b, a: a["idle"][0] / (2 * a["busy"][0]))
    # For one that the check has, 1/20, the right share is 1/20 too when it is rounded.
    gpipe_over_the_ideal_time = _explained(
        idle_over_total=lambda got, b, a: (
            a["idle"][0] / (2 * a["busy"][0]) if got["schedule"] == "gpipe" else got["idle_over_total"]
        )
    )
    half_the_share = _explained(idle_over_total=lambda got, b, a: _idle_share(a) / 2)
    holds_twice_as_much = _explained(held=lambda got, b, a: [2 * held for held in a["held"]])
    holds_what_it_held = _explained(held=lambda got, b, a: a["held"])
    in_percent = _explained(idle_over_total=lambda got, b, a: 100 * got["idle_over_total"])
    to_two_digits = _explained(idle_over_total=lambda got, b, a: round(got["idle_over_total"], 2))
    all_hold_what_the_fullest_holds = _explained(held=lambda got, b, a: [max(got["held"])] * len(got["held"]))
    holds_without_end = _explained(held=lambda got, b, a: count())
    any_name_with_the_word = _explained(
        schedule=lambda got, b, a: got["schedule"].replace("interleaved", "not interleaved")
    )
    in_his_own_words = _explained(changed=lambda got, b, a: "the schedule")
    in_the_order_of_the_list = _explained(changed=lambda got, b, a: list(CHANGES)[next(_TURNS) // 3 % 6])

    def right(before, after):
        """Ratios of what is seen, and a table of them."""
        ranks = len(after["idle"]) / len(before["idle"])
        work = sum(after["busy"]) / sum(before["busy"])
        waits = after["idle"][-1] / before["idle"][-1]
        sent = after["messages"] / before["messages"]
        changed = {(2, 1): "more ranks", (1, 2): "more micro-batches"}.get((round(ranks), round(work)))
        if changed is None and waits > 0.99:
            changed = "1f1b for gpipe"
        if changed is None and sent == 1:
            changed = "backward in halves"
        if changed is None:
            changed = "smaller micro-batches" if sent == 2 else "more stages a rank"
        new = {"1f1b for gpipe": "1f1b", "more stages a rank": "interleaved", "backward in halves": "zb-h1"}
        name = new.get(changed, before["schedule"])
        total = 2 * sum(after["busy"]) + sum(after["idle"])
        held = np.array(after["held"]) * (1 + (name == "gpipe"))
        return {
            "changed": changed,
            "schedule": name,
            "idle_over_total": np.float64(sum(after["idle"]) / total),
            "held": held,
        }

    def right_2(before, after):
        """An object, names written in other ways, and a dictionary of ranks."""
        got = _solution.explain_1f1b(before, after)
        named = {"interleaved": "Interleaved 1F1B", "zb-h1": "ZB_H1", "1f1b": "1F1B", "gpipe": "GPipe"}
        return SimpleNamespace(
            changed=Enum("_", {"it": got["changed"].capitalize()}, type=str).it,
            schedule=named[got["schedule"]],
            idle_over_total=got["idle_over_total"],
            held={f"rank {i}": held for i, held in reversed(list(enumerate(got["held"])))},
        )


DEFECTS, SECOND_SOLUTIONS = listed(one_f_one_b_schedule, beat_1f1b, train_in_stages, find_wrong_action, explain_1f1b)
#: What the verdict on a defect must say: that it names the mistake, not only that there is one.
SENTENCES = {
    "without_the_idea_equal_layers": "equal numbers of layers",
    "without_the_idea_the_whole_model_on_every_rank": "a layer lives on one rank",
    "forgets_the_head": "the head is work of the last stage",
    "gpipe_for_1f1b": "run too far ahead of backwards",
    "one_micro_batch_at_a_time": "one rank works at a time",
    "in_one_piece": "in larger pieces",
    "in_smaller_pieces": "in smaller ones",
    "warms_up_alike": "1F1B p - i = 2: its forwards",
    "warms_up_too_little": "1F1B p - i = 3: with fewer it waits",
    "leaves_out_a_layer": "it is left out",
    "two_forwards_later": "at most p - i = 1 ahead",
    "two_ranks_change_places": "stage 1 runs on rank 2",
    "halves_without_warmup": "its backwards are in halves",
    "beside_what_adds_nothing": "one adds nothing",
    "lablibs_other": "ready-made",
    "divides_by_m_twice": "divided by m once too often",
    "never_divides": "sums over the micro-batches",
    "lablibs_own": "ready-made",
    "lablibs_command": "schedule_text` makes orders ready-made",
    "lablibs_table": "you return 0",
    "weights_below_zero": "W-2' is not an action",
    "deals_layers_out": "a stage is neighbouring layers",
    "same_share_of_idle_time": "the share of `after` as it is; the work doubles",
    "without_the_idea_no_message": "hand on what they computed",
    "says_that_all_is_well": "or None",
    "forgets_the_tie": "they drift apart",
    "means_the_tie": "not their mean",
    "trains_a_copy": "a copy runs in its place",
    "leaves_out_the_places": "left out or copied",
    "clears_the_gradients": "or its gradient cleared",
    "names_a_weight_half": "a forward or a whole backward",
    "without_the_idea_the_loss_alone": "A loss says nothing of the backwards",
    "each_rank_for_itself": "the ranks have to compare",
    "blames_the_sender": "the value that its neighbour read",
    "the_loss_is_backward": "the loss belongs to the last stage's forward",
    "finds_something_everywhere": "one process's, but for rounding",
    "blames_its_forward": "and not to it",
    "in_percent": "percent",
    "newest_backward_first": "a queue and not a stack",
    "warms_up_beyond_the_step": "min(m, p - 1 - i)",
    "to_two_digits": "but for rounding",
    "gpipe_over_the_ideal_time": "you have it over the ideal time",
    "gpipe_is_no_shorter": "from F until W, and may hold at most",
    "rows_without_end": "never ends",
    "one_step_for_forward_and_backward": "one action at a time",
    "all_hold_what_the_fullest_holds": "GB now and would have",
    "holds_without_end": "never ends",
    "micro_batches_from_one": "counted from 0",
    "any_name_with_the_word": "the schedule is interleaved",
}
