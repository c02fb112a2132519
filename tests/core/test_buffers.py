"""A buffer that a send still reads from is never written to."""

from everstep.core.worker.buffers import MOST_SPARE, Buffers


class Pool:
    """Buffers are lists; those in `sending` are queued."""

    def __init__(self) -> None:
        self.sending: list[list[int]] = []
        self.buffers: Buffers[list[int]] = Buffers(
            borrowed=lambda one: any(one is other for other in self.sending), new=list, copy=list
        )


def test_a_buffer_is_used_again_only_when_no_send_reads_from_it() -> None:
    pool = Pool()
    one, other = pool.buffers.take(), pool.buffers.take()
    pool.sending.append(one)
    pool.buffers.give_back(one)
    pool.buffers.give_back(other)
    assert pool.buffers.take() is other
    assert pool.buffers.take() is not one


def test_what_is_changed_while_a_send_reads_it_is_a_copy() -> None:
    pool = Pool()
    one = [1, 2]
    assert pool.buffers.writable(one) is one
    pool.sending.append(one)
    found = pool.buffers.writable(one)
    found.append(3)
    assert one == [1, 2]


def test_few_buffers_are_kept() -> None:
    pool = Pool()
    given = [pool.buffers.take() for _ in range(MOST_SPARE + 3)]
    for buffer in given:
        pool.buffers.give_back(buffer)
    again = [pool.buffers.take() for _ in given]
    assert sum(any(one is other for other in given) for one in again) == MOST_SPARE
