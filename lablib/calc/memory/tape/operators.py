"""Operators of eager PyTorch as lines of a tape: what each makes, keeps for backward, and needs while it runs.

`Eager` writes on a `Tape` as a model's forward would, and knows the dtypes: `add` of fp32 and bf16 is fp32, `linear`
under autocast casts its input first. Autograd keeps what an operator's derivative needs, once, however many need it:

| operator | keeps |
|---|---|
| embedding | its indices, int64 |
| x + y, casts, sums, views, scalars | nothing |
| linear | its input (the weight is a parameter: it exists anyway) |
| dropout | the mask, already scaled, in the dtype of its input; a GPU keeps 1 byte |
| LayerNorm | its input, and a mean and an inverse deviation a token |
| RMSNorm, written out in fp32 | the fp32 input, an fp32 inverse root a token, the normed value |
| rotary positions | cosines and sines, shared by all layers; not what they turn |
| q kᵀ, weights v | both factors: a copy of k and v for every query head |
| softmax | its output |
| fused attention | q, k, v, output, one fp32 statistic a head and token |
| GELU, SiLU | its input |
| SiLU(gate) × up | both factors |
| cross-entropy | fp32 log-probabilities, the targets, the sum of weights |
"""

from __future__ import annotations

from collections.abc import Sequence

from lablib.calc.memory.tape.setting import FP32
from lablib.calc.memory.tape.tape import NEW, NONE, SHARED, VIEW, Tape, Value


class Eager:
    """Writes operators on a tape."""

    def __init__(
        self, *, value: int, gradient: int, low: int = 0, frozen: bool = False, fused_gradients: bool = False
    ) -> None:
        self.tape = Tape()
        self.fused_gradients = fused_gradients  # a matrix adds its gradient to a buffer, and makes none
        self.value, self.gradient, self.low, self.frozen = value, gradient, low, frozen
        self.item: dict[Value, int] = {}  # bytes of a number

    def input(self, name: str, numbers: int, item: int = 0, *, needs_grad: bool = True, given: bool = False) -> Value:
        """Return a tensor from outside of so many numbers."""
        item = item or self.value
        x = self.tape.input(name, numbers * item, needs_grad=needs_grad, given=given)
        self.item[x] = item
        return x

    def numbers(self, x: Value) -> int:
        """Return how many numbers a tensor has."""
        return x.bytes // self.item[x]

    def make(self, name: str, inputs: list[Value], numbers: int, item: int, **how: object) -> Value:
        """Add an operator whose output has so many numbers of `item` bytes."""
        y = self.tape.op(name, inputs, numbers * item, **how)  # type: ignore[arg-type]
        self.item[y] = item
        return y

    # Shapes and dtypes.

    def cast(self, x: Value, item: int, label: str = "") -> Value:
        """Return x in another dtype, or x itself if it has it."""
        if self.item[x] == item:
            return x
        return self.make("cast", [x], self.numbers(x), item, label=label)

    def copy(self, x: Value, numbers: int = 0, label: str = "") -> Value:
        """Return a copy in another layout, or a repetition of it."""
        same = numbers in (0, self.numbers(x))
        how = SHARED if same else NEW
        return self.make("copy", [x], numbers or self.numbers(x), self.item[x], gradient=how, label=label)

    def view(self, x: Value, *, copies_back: bool = False) -> Value:
        """Return a view; its gradient may have to be copied on its way back."""
        return self.make("view", [x], self.numbers(x), self.item[x], view=True, gradient=NEW if copies_back else SHARED)

    def slice(self, x: Value, numbers: int) -> Value:
        """Return a part of x as a view; backward makes a gradient of the whole for it."""
        return self.make("slice", [x], numbers, self.item[x], view=True, label=f"part of {x.name}")

    def split(self, x: Value, parts: list[int]) -> list[Value]:
        """Return views of x with so many numbers each."""
        views = self.tape.split("split", x, [p * self.item[x] for p in parts])
        self.item.update(dict.fromkeys(views, self.item[x]))
        return views

    # Arithmetic.

    def add(self, x: Value, y: Value, name: str = "add", label: str = "") -> Value:
        """Return x + y: keeps nothing, and hands its gradient on as it is."""
        item = max(self.item[x], self.item[y])
        how = [SHARED if self.item[v] == item else NEW for v in (x, y)]
        return self.make(name, [x, y], self.numbers(x), item, gradient=how, label=label)

    def times(self, x: Value, y: Value, *, kind: str, name: str = "product", label: str = "") -> Value:
        """Return x * y: each is kept if the other's gradient is asked for."""
        item = max(self.item[x], self.item[y])
        keeps = [a for a, b in ((x, y), (y, x)) if b.needs_grad]
        numbers = max(self.numbers(x), self.numbers(y))
        wide = [v for v in (x, y) if v.needs_grad and self.item[v] < item]
        sums = [v for v in (x, y) if v.needs_grad and self.numbers(v) < numbers]
        temporary = numbers * item * len({*wide, *sums})
        return self.make(name, [x, y], numbers, item, keeps=keeps, kind=kind, label=label, backward_temporary=temporary)

    def scale(self, x: Value, name: str = "scale", label: str = "") -> Value:
        """Return x times or plus something that needs no gradient and that nothing keeps."""
        return self.make(name, [x], self.numbers(x), self.item[x], label=label)

    def shift(self, x: Value, name: str = "add a constant", label: str = "") -> Value:
        """Return x plus a constant or a mask: the gradient goes on as it is."""
        return self.make(name, [x], self.numbers(x), self.item[x], gradient=SHARED, label=label)

    def function(self, name: str, x: Value, *, kind: str, keeps_output: bool = False, label: str = "") -> Value:
        """Return f(x), whose derivative needs the input, or the output as softmax and tanh do."""
        keeps = [] if keeps_output else [x]
        return self.make(
            name, [x], self.numbers(x), self.item[x], keeps=keeps, keeps_output=keeps_output, kind=kind, label=label
        )

    def dropout(self, x: Value, *, kind: str, name: str = "dropout") -> Value:
        """Return x with dropout: a CPU keeps a scaled mask in the dtype of x."""
        return self.make(name, [x], self.numbers(x), self.item[x], extra=x.bytes, kind=kind, label=f"mask of {name}")

    # Layers.

    def linear(
        self,
        x: Value,
        inputs: int,
        outputs: int,
        *,
        kind: str,
        name: str,
        bias: bool = False,
        trained: bool | None = None,
        leaf: bool = True,
        copies: int = 1,
        label: str = "",
    ) -> Value:
        """Return a linear layer of x, or with `copies` of one of them for each expert: a trained weight keeps the input."""
        trained = not self.frozen if trained is None else trained
        item = self.low or self.item[x]
        weights = copies * (inputs * outputs + (outputs if bias else 0))
        tokens = self.numbers(x) // inputs
        x = self.cast(x, item, f"cast of {x.name} for {name}")
        read, keeps, gradient = [x], [x] if trained else [], [VIEW]
        if self.low and self.low != self.value:
            cast = self.weight_cast(inputs * outputs, name, cached=trained and leaf)
            read, gradient = [x, cast], [VIEW, NONE]
            keeps += [cast] if x.needs_grad else []
        return self.make(
            name,
            read,
            tokens * outputs,
            item,
            keeps=keeps,
            gradient=gradient,
            weight_gradient=weights * self.gradient if trained else 0,
            low_gradient=weights * item if trained and item != self.gradient else 0,
            kind=kind,
            label=label,
        )

    def weight_cast(self, numbers: int, name: str, *, cached: bool) -> Value:
        """Return a copy of a weight for a matmul; autocast's cache holds it until forward ends, or nobody does."""
        cast = self.tape.op(
            f"cast of the weight of {name}", [], numbers * self.low, label=f"weight of {name} in 16 bits"
        )
        self.item[cast] = self.low
        self.tape.kinds[cast] = "weight_casts"
        if cached:
            self.tape.hold(cast)
        return cast

    def layernorm(self, x: Value, width: int, *, kind: str, name: str) -> Value:
        """Return LayerNorm of x: keeps its input, a mean and an inverse deviation a token."""
        tokens = self.numbers(x) // width
        return self.make(
            name,
            [x],
            self.numbers(x),
            self.item[x],
            keeps=[x] if x.needs_grad or not self.frozen else [],
            extra=2 * tokens * self.item[x],
            weight_gradient=0 if self.frozen else 2 * width * self.gradient,
            kind=kind,
            label=f"output of {name}",
        )

    def rmsnorm(
        self, x: Value, width: int, *, kind: str, name: str, wide: bool = False, shifted: bool = False
    ) -> Value:
        """Return RMSNorm written out, in fp32, as Hugging Face and the course's transformer do.

        Args:
            wide: Multiply with the weight in fp32 too, before the cast back.
            shifted: Multiply with 1 + weight, which is a tensor of its own.
        """
        tokens = self.numbers(x) // width
        full = self.cast(x, FP32, f"input of {name} in fp32")
        square = self.make(
            f"square in {name}",
            [full],
            self.numbers(x),
            FP32,
            keeps=[full],
            kind=kind,
            backward_temporary=2 * full.bytes,
        )
        mean = self.make(f"mean in {name}", [square], tokens, FP32)
        root = self.make(
            f"inverse root in {name}",
            [self.shift(mean, "epsilon")],
            tokens,
            FP32,
            keeps_output=True,
            kind=kind,
            label=f"inverse root of {name}",
            backward_temporary=2 * tokens * FP32,
        )
        normed = self.times(full, root, kind=kind, name=f"scale in {name}", label=f"normed value of {name}")
        if not wide:
            normed = self.cast(normed, self.item[x], f"normed value of {name}")
        trained = not self.frozen
        weight, keeps = [], [normed] if trained else []
        if shifted:
            weight.append(self.make(f"1 + weight of {name}", [], width, FP32))
            keeps += weight
        y = self.make(
            f"weight of {name}",
            [normed, *weight],
            self.numbers(x),
            max(self.item[normed], self.value),  # under autocast the weight is fp32, whatever x is
            keeps=keeps,
            gradient=[NEW] + [NONE] * len(weight),
            kind=kind,
            weight_gradient=width * self.gradient if trained else 0,
            backward_temporary=normed.bytes if trained else 0,
            label=f"output of {name}",
        )
        return self.cast(y, self.item[x], f"output of {name}") if wide else y

    def matmul(self, x: Value, y: Value, numbers: int, *, kind: str, name: str) -> Value:
        """Return a batched product of two activations: each is kept for the other's gradient."""
        return self.make(name, [x, y], numbers, self.item[x], keeps=[x, y], kind=kind)

    def fused_attention(
        self, q: Value, k: Value, v: Value, statistics: int, out: int, *, kind: str, masks: Sequence[Value] = ()
    ) -> Value:
        """Return PyTorch's scaled_dot_product_attention: keeps q, k, v, a mask, its output and an fp32 number a row."""
        inputs = [self.cast(x, self.low, "cast for attention") if self.low else x for x in (q, k, v)]
        return self.make(
            "fused attention",
            [*inputs, *masks],
            out,
            self.item[inputs[0]],
            keeps=[*inputs, *masks],
            gradient=[NEW] * 3 + [NONE] * len(masks),
            keeps_output=True,
            extra=statistics * FP32,
            kind=kind,
            label="attention output",
        )

    def rotate(self, x: Value, cos: Value, sin: Value) -> Value:
        """Return x with its pairs of numbers turned; the tables are kept, and x is not."""
        half = self.numbers(x) // 2
        first, second = self.split(x, [half, half])
        straight = self.times(x, cos, kind="", name="cosines")
        minus = self.scale(second, "minus")
        crossed = self.make(
            "concatenate", [minus, first], 2 * half, self.item[x], gradient=SHARED, label="crossed pairs"
        )
        return self.add(straight, self.times(crossed, sin, kind="", name="sines"), "rotated")
