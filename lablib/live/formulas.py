"""The formula explorer: what every formula of the course gives for a model and a GPU."""

from __future__ import annotations

from lablib.calc.formulas import FORMULAS, job
from lablib.calc.hardware import accelerator
from lablib.calc.models import preset
from lablib.live.explorer import Answer, Control, Explorer, device_options, model_options, table

MODELS = ("llama-3.2-1b", "llama-3-8b", "llama-2-13b", "llama-3-70b", "llama-3.1-405b")


def explore(model: str, device: str) -> Answer:
    """Return the example of each formula, by rung."""
    chosen = job(model, device)
    groups: dict[str, dict[str, tuple[str, str]]] = {}
    for each in FORMULAS:
        groups.setdefault(f"Rung {each.rung}", {})[each.name] = ("", each.example(chosen))
    caption = (
        f"{preset(model).name} on {chosen.ranks} {accelerator(device).name}: tp = {chosen.tp}, pp = {chosen.pp}, "
        f"v = {chosen.chunks}, {chosen.microbatches} micro-batches of {chosen.micro_batch} x {chosen.seq:,} tokens, "
        "each where its formula has it."
    )
    call = "\n".join(
        [
            "from lablib.calc.formulas import FORMULAS, job",
            "",
            f'chosen = job("{model}", "{device}")',
            "for formula in FORMULAS:",
            "    print(formula.name, formula.example(chosen))",
        ]
    )
    return Answer(picture="", caption=caption, table=table(groups), call=call, numbers={"params": chosen.params})


EXPLORER = Explorer(
    name="formulas",
    title="The formulas of the course for your model",
    controls=(
        Control(name="model", label="model", options=model_options(MODELS), first="llama-3-8b"),
        Control(name="device", label="GPU", options=device_options(clustered=True), first="h100"),
    ),
    compute=explore,
)
