"""What every rank holds after each step of a ring all-reduce.

n ranks, the data cut into n chunks. In each step every rank sends one chunk to its right neighbour.
n - 1 steps of reduce-scatter leave every rank with one finished chunk; n - 1 steps of all-gather hand
the finished chunks round.

Chapter: book/02_data_parallelism.md. Paper: Patarasuk and Yuan 2009.
"""

from __future__ import annotations


def ring_states(ranks: int) -> list[list[list[tuple[int, ...]]]]:
    """Return who is summed in every chunk on every rank, at the start and after each of 2(n-1) steps.

    In step k of the reduce-scatter rank r sends chunk (r - k) mod n, so that rank r ends with chunk
    (r + 1) mod n finished. In step k of the all-gather it sends chunk (r + 1 - k) mod n.

    Args:
        ranks: n, at least 1.

    Returns:
        `states[step][rank][chunk]`, the ranks summed there in the order in which they were added.

    Raises:
        ValueError: If `ranks` is not positive.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    held = [[(rank,) for _ in range(ranks)] for rank in range(ranks)]
    states = [[list(chunks) for chunks in held]]
    for step in range(2 * (ranks - 1)):
        reducing = step < ranks - 1
        shift = -step if reducing else 1 - (step - (ranks - 1))
        sent = {rank: ((rank + shift) % ranks) for rank in range(ranks)}
        before = states[-1]
        for rank, chunk in sent.items():
            right = (rank + 1) % ranks
            arriving = before[rank][chunk]
            held[right][chunk] = arriving + before[right][chunk] if reducing else arriving
        states.append([list(chunks) for chunks in held])
    return states


def summation_orders(ranks: int) -> list[tuple[int, ...]]:
    """Return, for every chunk, the order in which a ring adds the ranks' numbers.

    Chunk c starts at rank c and goes round: every chunk is added in another order, and on any number of
    ranks in another order again. That is why the bits of a sum depend on the number of ranks.

    Args:
        ranks: n, at least 1.
    """
    return list(ring_states(ranks)[-1][0])
