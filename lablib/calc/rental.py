"""A machine that is rented by the hour: its GPUs, their price, and how time is rounded up.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator

#: What a provider may bill by, in minutes.
BILLING = {"second": 1 / 60, "minute": 1.0, "hour": 60.0}


@dataclass(frozen=True)
class Machine:
    """A machine to rent.

    Attributes:
        gpus: GPUs.
        card: Their kind.
        price: Of one GPU for one hour, in any currency.
    """

    gpus: int
    card: Accelerator
    price: float

    @property
    def name(self) -> str:
        """How tables call it: "2 x A10"."""
        return f"{self.gpus} x {self.card.name}"

    def cost(self, minutes: float, billing: str = "minute") -> float:
        """Return what so many minutes cost, rounded up as they are billed.

        Args:
            minutes: From start to stop.
            billing: A key of `BILLING`.

        Raises:
            ValueError: If minutes or billing make no sense.
        """
        if not 0 <= minutes < math.inf:
            raise ValueError(f"minutes={minutes} must not be negative or infinite")
        if billing not in BILLING:
            raise ValueError(f"billing={billing!r} is unknown; use one of {', '.join(BILLING)}")
        unit = BILLING[billing]
        # A rounding error must not cost an hour: 3 x 20 minutes are one hour.
        billed = math.ceil(round(minutes / unit, 9)) * unit
        return self.gpus * self.price * billed / 60


def parse_machine(text: str) -> Machine:
    """Read "2xa10@0.75": two A10 at 0.75 per GPU and hour.

    Args:
        text: Number, kind and price.

    Raises:
        ValueError: If it is not written so, or the kind is unknown.
    """
    found = re.fullmatch(r"\s*(\d+)\s*x\s*([\w.-]+)\s*@\s*(\d+(?:\.\d*)?)\s*", text)
    if found is None or int(found[1]) < 1:
        raise ValueError(f"{text!r} is no machine; write GPUs, kind and price per GPU and hour: 2xa10@0.75")
    return Machine(int(found[1]), accelerator(found[2]), float(found[3]))
