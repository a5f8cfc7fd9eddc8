"""Framed records: their bytes, and what is read of a file that is not as it was written."""

import io

import pytest

from lightrl.errors import ProtocolError
from lightrl.system import framing

WRITTEN = bytes.fromhex("03000000335de166616263000000001cdf4421")  # of af9307c


def test_the_bytes_stay_as_they_are():
    assert b"".join(framing.framed([b"abc", b""])) == WRITTEN
    assert (framing.size(b"abc"), framing.size(b"")) == (11, 8)


def test_records_are_read_one_after_the_other():
    file, left = io.BytesIO(WRITTEN), len(WRITTEN)
    assert framing.read_payload(file, left) == b"abc"
    assert framing.read_payload(file, left - 11) == b""


@pytest.mark.parametrize("length", range(len(WRITTEN) - 8))
def test_a_record_that_is_cut_off_is_torn(length: int):
    with pytest.raises(framing.TornRecord):
        framing.read_payload(io.BytesIO(WRITTEN[:length]), length)


@pytest.mark.parametrize("bit", range(8 * 11))
def test_one_wrong_bit_is_seen_and_behind_a_damaged_payload_follows_the_next(bit: int):
    spoilt = bytearray(WRITTEN)
    spoilt[bit // 8] ^= 1 << bit % 8
    file = io.BytesIO(spoilt)
    with pytest.raises(ProtocolError):
        framing.read_payload(file, len(spoilt))
    if bit >= 32:  # the length is right
        assert framing.read_payload(file, len(spoilt) - file.tell()) == b""


def test_a_record_longer_than_any_can_be_is_not_read():
    with pytest.raises(ProtocolError, match="damaged"):
        framing.read_payload(io.BytesIO(WRITTEN), len(WRITTEN), most=2)


def test_a_file_that_becomes_shorter_while_it_is_read_is_torn():
    with pytest.raises(framing.TornRecord):
        framing.read_payload(io.BytesIO(WRITTEN[:10]), len(WRITTEN))
