r"""The value of an equation in TeX, for the subset in which the chapters write their formulas.

    agrees(r"T = 2\,\frac{n-1}{n}\,\frac{S}{W}", 15.0, {"n": 16, "S": 80, "W": 10})

Letters are symbols of their own (`sbh` is s·b·h), and a subscript is part of the name (`T_{\text{comm}}` is "T_comm",
`B'` is "B_prime") unless the letter is bound to a list: then it is an index. A list that counts from 1 begins with None.
"""

import math
import re

TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+\.?\d*|\S")
MOVES = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])|\\[,;!: ]|[&~]|\\begin\{aligned\}|\\end\{aligned\}"
)
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\approx"}
CLOSES = {"(": ")", "[": "]", r"\lceil": r"\rceil", r"\lfloor": r"\rfloor", r"\lvert": r"\rvert"}
ENDS = {")", "]", "}", ",", "+", "-", r"\dots", *list(CLOSES.values())[2:]}


class Unbound(LookupError):
    """A symbol that has no value here: the name of what an equation defines."""


class _Parser:
    """Recursive descent; every method returns a function of the symbols' values."""

    def __init__(self, tokens):
        self.tokens, self.at = tokens, 0

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, expected=None):
        token = self.peek()
        if token is None or (expected and token != expected):
            raise SyntaxError(f"{expected or 'more'} expected, not {token} in {' '.join(self.tokens)}")
        self.at += 1
        return token

    def group(self):
        """Return the tokens of an argument: one, or those in braces."""
        if self.peek() != "{":
            token = self.take()
            if token.isdigit() and len(token) > 1:  # as in \frac12
                self.at -= 1
                self.tokens[self.at] = token[1:]
            return [token[0] if token.isdigit() else token, *(self.braced() if token == r"\text" else [])]
        return self.braced()[1:-1]

    def braced(self):
        """Return the tokens of a group, with its braces."""
        first, depth = self.at, 0
        while True:
            depth += {"{": 1, "}": -1}.get(self.take(), 0)
            if not depth:
                return self.tokens[first : self.at]

    def argument(self):
        return parsed(self.group())

    def sum(self):
        negative = self.peek() == "-" and self.take()
        first = self.term()
        terms = [lambda env: -first(env) if negative else first(env)]
        dots = False
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            if self.peek() == r"\dots":
                self.take()
                dots = True
                continue
            term = self.term()
            terms.append(lambda env, sign=sign, term=term: sign * term(env))
        if dots:
            return lambda env: _series([term(env) for term in terms])
        return terms[0] if len(terms) == 1 else lambda env: sum(term(env) for term in terms)

    def term(self):
        value, subscripted = self.power()
        while self.peek() not in ENDS and self.peek() is not None:
            token = self.peek()
            if token in ("/", r"\cdot", r"\bmod", r"\cdots"):
                self.take()
            right, other = self.power()
            value = _range_product(subscripted, other) if token == r"\cdots" else _combined(token, value, right)
            subscripted = other
        return value

    def power(self):
        value, subscripted = self.primary()
        if self.peek() == "^":
            self.take()
            exponent = self.argument()
            return (lambda env: value(env) ** exponent(env)), None
        return value, subscripted

    def primary(self):
        token = self.take()
        if token[0].isdigit():
            return (lambda env: float(token)), None
        if token in (r"\frac", r"\tfrac"):
            over, under = self.argument(), self.argument()
            return (lambda env: over(env) / under(env)), None
        if token == r"\sqrt":
            inside = self.argument()
            return (lambda env: math.sqrt(inside(env))), None
        if token in CLOSES:
            return self.brackets(token), None
        if token == r"\log":
            base = float("".join(self.group())) if self.peek() == "_" and self.take() else math.e
            inside = self.power()[0]
            return (lambda env: math.log(inside(env), base) if base != 2 else math.log2(inside(env))), None
        if token in (r"\sum", r"\max", r"\min"):
            return self.reduction(token), None
        if token in (r"\text", "*") or token.isalpha() or (token[0] == "\\" and token[1:].isalpha()):
            return self.symbol(token)
        raise SyntaxError(f"{token} in {' '.join(self.tokens)}")

    def brackets(self, opened):
        inside = self.sum()
        self.take(CLOSES[opened])
        if opened == r"\lvert":
            return lambda env: _each(abs, inside(env))
        # What is whole but for rounding is whole.
        whole = {r"\lceil": lambda x: math.ceil(x - 1e-9), r"\lfloor": lambda x: math.floor(x + 1e-9)}.get(opened)
        return (lambda env: whole(inside(env))) if whole else inside

    def reduction(self, token):
        """A sum, maximum or minimum: over an index, of a list, or of what stands in brackets."""
        made = {r"\sum": sum, r"\max": max, r"\min": min}[token]
        below = above = None
        while self.peek() in ("_", "^"):
            if self.take() == "_":
                below = self.group()
            else:
                above = self.argument()
        if below is None:
            if self.peek() != "(":
                body = self.power()[0]
                return lambda env: made(x for x in body(env) if x is not None)
            self.take("(")
            parts = [self.sum()]
            while self.peek() == ",":
                self.take()
                parts.append(self.sum())
            self.take(")")
            return lambda env: made(part(env) for part in parts)
        body = self.term() if token == r"\sum" else self.power()[0]
        index, relation, least = below[0], (below[1:2] or [None])[0], parsed(below[2:]) if below[2:] else None

        def value(env):
            lists = [x for x in env.values() if isinstance(x, list)]
            first = int(any(x[0] is None for x in lists)) if least is None else int(least(env)) + (relation == ">")
            last = max(map(len, lists)) - 1 if above is None else int(above(env))
            return made(body(env | {index: i}) for i in range(first, last + 1))

        return value

    def symbol(self, token):
        name = _text(self.group()) if token == r"\text" else token.lstrip("\\")
        if self.peek() == "'":
            self.take()
            name += "_prime"
        below = self.group() if self.peek() == "_" and self.take() else None
        applied = self.brackets(self.take()) if self.peek() == "(" and token == r"\text" else None

        def value(env):
            whole = name if below is None else f"{name}_{_text(below)}"
            if whole in env:
                found = env[whole]
            elif below is not None and isinstance(env.get(name), list):
                found = env[name]
                for part in _commas(below):
                    i = int(parsed(part)(env))
                    found = found[i] if i < len(found) else 0.0
            elif name == "e" and below is None:
                found = math.e
            else:
                raise Unbound(whole)
            return found(applied(env)) if applied else found

        return value, (name, below)


def _text(tokens):
    return "".join(token.lstrip("\\") for token in tokens if token not in ("{", "}", r"\text"))


def _commas(tokens):
    parts = [[]]
    for token in tokens:
        if token == ",":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _each(function, x):
    return [None if y is None else function(y) for y in x] if isinstance(x, list) else function(x)


def _combined(token, left, right):
    if token == "/":
        return lambda env: left(env) / right(env)
    if token == r"\bmod":
        return lambda env: left(env) % right(env)
    return lambda env: left(env) * right(env)


def _range_product(first, last):
    """The product of n_1 \\cdots n_k."""
    name, low, high = first[0], parsed(first[1]), parsed(last[1])
    return lambda env: math.prod(env[name][int(low(env)) : int(high(env)) + 1])


def _series(terms):
    """The sum of first, second, ..., last: their distance is equal, or that of one over each of them."""
    first, second, last = terms
    if second > first:
        return sum(first + i * (second - first) for i in range(round((last - first) / (second - first)) + 1))
    first, second, last = 1 / first, 1 / second, 1 / last
    return sum(1 / (first + i * (second - first)) for i in range(round((last - first) / (second - first)) + 1))


def parsed(tokens):
    """Return a function of the symbols' values."""
    parser = _Parser(list(tokens))
    value = parser.sum()
    if parser.peek() is not None:
        raise SyntaxError(f"{parser.peek()} in {' '.join(tokens)}")
    return value


def tokenized(tex):
    """Return the tokens of an equation, without what only moves it on the page; `;` ends a statement."""
    tokens = TOKEN.findall(re.sub(r"\\q?quad(?![a-zA-Z])", ";", MOVES.sub(" ", tex).replace("\\\\", "")))
    made, depth = [], 0
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token == r"\text" and tokens[i + 1] == "{":
            end = tokens.index("}", i)
            words = "".join(tokens[i + 2 : end])
            made += [";"] if words.endswith(":") and not depth else [r"\text", "{", words, "}"]
            i = end + 1
            continue
        depth += (token in "([{" or token in CLOSES) - (token in ")]}" or token in CLOSES.values())
        i += 1
        if token != ";" or not depth:
            made.append(";" if token in (",", ":") and not depth else token)
    while made and made[-1] in (".", ";"):
        made.pop()
    return made


def sides(tokens, env):
    """Return by statement the sides that have a value, each with the relations between it and the one before."""
    statements, side, relations = [[]], [], []

    def end():
        nonlocal side, relations
        if side:
            try:
                statements[-1].append((relations, parsed(side)(env)))
                relations = []
            except Unbound:
                relations = relations if statements[-1] else []
        side = []

    depth = 0
    for token in [*tokens, ";"]:
        depth += (token == "{") - (token == "}")
        if token == ";" or (token in RELATIONS and not depth):
            end()
            if token == ";":
                statements.append([])
                relations = []
            else:
                relations = [*relations, token]
        else:
            side.append(token)
    return [statement for statement in statements if statement]


def agrees(tokens, value, env, within=1e-9):
    """Return whether an equation gives this value: its first side that has one, and all that are equal to it.

    Args:
        tokens: Of `tokenized`.
        value: A number, or a tuple where the equation gives several.
        env: Values of the symbols.
        within: Relative tolerance. A whole number may also be the formula's, rounded.
    """
    found = sides(tokens, env)
    if isinstance(value, tuple):
        flat = [number for statement in found for _, number in statement]
        return len(flat) == len(value) and all(map(lambda a, b: _same(a, b, within), flat, value))
    for statement in found:
        for n, (relations, number) in enumerate(statement):
            told = set(relations) - {"="} if n else set()
            if told <= {r"\approx"}:
                close = _same(number, value, 0.1 if told else within)
            else:
                close = value <= number if told & {"<", r"\le"} else value >= number
            if not close:
                return False
    return bool(found)


def _same(number, value, within):
    rounding = 1 if isinstance(value, int) and abs(value) > 1000 else 0
    return abs(number - value) <= max(within * abs(value), rounding, 1e-300)
