"""Reading what nccl-tests prints: sizes, times, and two bandwidths that are computed, not measured.

    algbw = S/t                                  how fast the caller sees the array done
    busbw = algbw · factor of the collective     what a link carried, if the algorithm is optimal

S is the whole array: for all_gather and reduce_scatter n times what one rank holds. GB are 1e9 bytes, and the time
is in microseconds. Each size is run twice, out of place and in place.

Chapter: book/10_communication.md. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.comm import algorithm_bandwidth, bus_bandwidth

#: The programs of nccl-tests, and what `bus_bandwidth` calls their collective.
PROGRAMS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "gather_perf": "gather",
    "scatter_perf": "scatter",
    "sendrecv_perf": "send_recv",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One half of one line: a size, out of place or in place.

    Attributes:
        size: S in bytes.
        count: Elements, as the program counts them.
        dtype: NCCL's name of the type.
        in_place: Which half of the line it is.
        seconds: Measured.
        algbw: As printed, in bytes per second.
        busbw: As printed, in bytes per second.
        wrong: Elements that were wrong, or None where the check was off.
    """

    size: int
    count: int
    dtype: str
    in_place: bool
    seconds: float
    algbw: float
    busbw: float
    wrong: float | None


def parse(text: str) -> list[Run]:
    """Return the lines of a table that a program of nccl-tests has printed.

    Args:
        text: The whole output; what is no line of the table is passed over. Lines of old versions,
            without the columns `redop` or `root`, are understood: size, count, type, perhaps those two, then time,
            algbw, busbw and #wrong twice.

    Raises:
        ValueError: If there is no such line.
    """
    runs = []
    for line in text.splitlines():
        words = line.split()
        if len(words) not in (11, 12, 13) or not (words[0].isdigit() and words[1].isdigit()):
            continue
        for in_place, half in ((False, words[-8:-4]), (True, words[-4:])):
            time, algbw, busbw, wrong = half
            runs.append(
                Run(
                    size=int(words[0]),
                    count=int(words[1]),
                    dtype=words[2],
                    in_place=in_place,
                    seconds=float(time) * 1e-6,
                    algbw=float(algbw) * 1e9,
                    busbw=float(busbw) * 1e9,
                    wrong=None if wrong == "N/A" else float(wrong),
                )
            )
    if not runs:
        raise ValueError("no line of an nccl-tests table: it begins with size, count and type")
    return runs


def recomputed(run: Run, collective: str, ranks: int) -> tuple[float, float]:
    """Return algbw and busbw of a line, computed from its size and time.

    Args:
        run: A line.
        collective: A value of `PROGRAMS`.
        ranks: n.
    """
    return (
        algorithm_bandwidth(run.size, run.seconds),
        bus_bandwidth(collective, run.size, ranks, run.seconds),
    )


def table(collective: str, ranks: int, timings: list[tuple[int, float]]) -> str:
    """Return measurements of your own in the columns of nccl-tests: size, time, algbw and busbw.

    Args:
        collective: A value of `PROGRAMS`.
        ranks: n.
        timings: Size in bytes and seconds.
    """
    rows = [f"{'size (B)':>12}  {'time (us)':>10}  {'algbw (GB/s)':>12}  {'busbw (GB/s)':>12}"]
    for size, seconds in timings:
        algbw = algorithm_bandwidth(size, seconds) / 1e9
        busbw = bus_bandwidth(collective, size, ranks, seconds) / 1e9
        rows.append(f"{size:>12}  {seconds * 1e6:>10.1f}  {algbw:>12.3f}  {busbw:>12.3f}")
    return "\n".join(rows)
