"""How a broadcast ends that one side cannot go on with, or does not want any more: for both sides,
at once, and with an error that says so."""

import contextlib
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from lightrl.errors import WeightsError
from lightrl.weights.broadcast.group import form
from lightrl.weights.broadcast.proof import BLOCK_BYTES, MAX_WAITING, Proof
from lightrl.weights.broadcast.rendezvous import UNWANTED, Membership, Rendezvous, reach
from lightrl.weights.broadcast.transfer import receive, send
from lightrl.weights.version.layout import plan

# what a bug raises in a thread is seen in the log, too
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
SOON_S = 30.0
TENSORS = plan([(f"layers.{i:02}", "uint8", (2 * BLOCK_BYTES,)) for i in range(4 * MAX_WAITING)])
# no block has such a number: the proof of them fails as only a bug can make it fail
WRONG = tuple(replace(t, offset=t.offset - (1 << 40)) for t in TENSORS)


def place_of(rank=0):
    return Membership(secrets.token_hex(16), rank, 1, 2, "gloo", 200.0, 2 * BLOCK_BYTES)


@contextlib.contextmanager
def pair():
    """The rank's and the receiver's view of one group, and threads for them."""
    meet, place = Rendezvous("127.0.0.1"), place_of()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(form, meet, place, "cpu")
        other = form(meet.address, replace(place, rank=1), "cpu")
        try:
            yield first.result(SOON_S), other, pool
        finally:
            other.abandon("the test is over")


def zeros(i):
    return torch.zeros(TENSORS[i].shape, dtype=torch.uint8)


def received(group, tensors=TENSORS):
    return [name for name, _ in receive(group, tensors, Proof(bytes(32)))]


def test_a_proof_that_fails_ends_the_transfer_of_who_sends():
    with pair() as (rank, other, pool):
        coming = pool.submit(received, other)
        with pytest.raises(WeightsError, match=r"broadcast: the sums.*OverflowError"):
            send(rank, WRONG, zeros, Proof(bytes(32)))
        with pytest.raises(WeightsError, match="broadcast"):
            coming.result(SOON_S)


def test_a_proof_that_fails_ends_the_transfer_of_who_receives():
    with pair() as (rank, other, pool):
        going = pool.submit(send, rank, TENSORS, zeros)
        with pytest.raises(WeightsError, match=r"broadcast: the sums.*OverflowError"):
            received(other, WRONG)
        with contextlib.suppress(WeightsError):  # unless all was on its way already
            going.result(SOON_S)
        assert rank._lifeline.wait_over(SOON_S) is not None


def test_a_lack_of_memory_ends_the_transfer():
    with pair() as (rank, other, pool):
        coming = pool.submit(received, other)
        with pytest.raises(WeightsError, match=r"broadcast: .*memory"):
            send(rank, TENSORS, lambda i: torch.empty(1 << 60, dtype=torch.uint8))
        with pytest.raises(WeightsError, match="broadcast"):
            coming.result(SOON_S)


def test_who_sends_what_is_not_wanted_any_more_leaves_at_once():
    asked = threading.Event()

    def is_unwanted():
        return asked.is_set() or asked.set() is not None  # only when asked again

    with pair() as (rank, other, _):
        with pytest.raises(WeightsError, match=UNWANTED):  # nobody receives
            send(rank, TENSORS, zeros, is_unwanted=is_unwanted)
        assert other._lifeline.wait_over(SOON_S) == UNWANTED


def test_who_sends_is_asked_also_where_it_never_has_to_wait():
    """For as long as nothing stands still a version of any size goes on."""
    num_asked = []

    def slow(i):
        time.sleep(0.03)  # all before has arrived meanwhile
        return zeros(i)

    with pair() as (rank, other, pool):
        coming = pool.submit(received, other)
        send(rank, TENSORS, slow, is_unwanted=lambda: num_asked.append(1) is not None)
        coming.result(SOON_S)
    assert len(num_asked) > 1  # not at the end only


@pytest.mark.parametrize("num_come", [0, 1, 2])
def test_a_group_that_forms_is_given_up_at_once_wherever_it_stands(num_come):
    """Before anybody has come; while one more is awaited; while somebody who has come says
    nothing."""
    meet, place = Rendezvous("127.0.0.1"), replace(place_of(), world=3)
    is_over = threading.Event()
    deadline = time.monotonic() + 100
    lines = [
        reach(meet.address, replace(place, rank=rank), deadline) for rank in range(1, num_come + 1)
    ]
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(form, meet, place, "cpu", is_over.is_set)
        if num_come == 2:
            lines[0].expect(deadline)  # where the store is
        is_over.set()
        with pytest.raises(WeightsError, match=UNWANTED):
            forming.result(SOON_S)
    assert all(line.wait_over(SOON_S) is not None for line in lines)


def test_a_rendezvous_that_is_closed_sends_away_who_has_come():
    meet = Rendezvous("127.0.0.1")
    deadline = time.monotonic() + 100
    line = reach(meet.address, place_of(1), deadline)
    meet.close()
    with pytest.raises(WeightsError, match="member 0 is gone"):
        line.expect(deadline)
    with pytest.raises(WeightsError, match="cannot be reached"):
        reach(meet.address, place_of(1), deadline)
