"""The bytes of a journal stay as they are: what an earlier version wrote is read, and written
again."""

from pathlib import Path

import pytest

from lightrl.core.events import PromptsDrawn, ResponseScored
from lightrl.core.log_entries import (
    LogEntry,
    RoundOpened,
    ShellNote,
    SnapshotBegan,
    SnapshotEnded,
    TokensTaken,
    VersionPublished,
)
from lightrl.core.sharing.planner import KindMemory, PlannerMemory
from lightrl.core.state import DrawnPrompt
from lightrl.errors import JournalError
from lightrl.journal.read import LOG, newest, segments
from lightrl.messages.responses import ResponseTokens
from lightrl.wire import pack_f32, pack_i32
from tests.journal.conftest import within, write

BASE: list[LogEntry] = [
    *(SnapshotBegan(), ShellNote(b"n"), SnapshotEnded(), VersionPublished(0, "aa")),
]
NEWS: list[LogEntry] = [
    *(RoundOpened(0, "plain"), PromptsDrawn((DrawnPrompt("p", 0, pack_i32([1])),))),
    TokensTaken(0, (ResponseTokens("p@0#0", 1, 0, pack_i32([7]), pack_f32([-0.5]), "stop"),)),
    ResponseScored("p@0#0", 1, 1.0),
]
WRITTEN = bytes.fromhex(
    "6c69676874726c0a03000000040000002503000000000000c8be0dd3870200005a22af5d92a7526573756d65"
    "64de0011a47374657000a96e756d5f647261776e00a5737061726590a86c6173745f63757400a96576616c75"
    "61746564c0a776657273696f6ec0a76469676573747380a863616e617269657380a96e756d5f627974657300"
    "ae6d616e69666573745f627974657300a462617365c0a8636f756e74657273de0010aa6e6f6465735f6c6f73"
    "7400ac656e67696e65735f6c6f737400af726573706f6e7365735f6d6f76656400aa6d6967726174696f6e73"
    "00ae6368756e6b735f69676e6f72656400a5686f6c657300aa6261645f6368756e6b7300ae72657761726473"
    "5f6661696c656400ae67726f7570735f64726f7070656400ab67726f7570735f666c617400af70726f6d7074"
    "735f7075745f6f666600ae726f6c6c6f75745f746f6b656e7300ab6576616c5f746f6b656e7300ae61626f72"
    "7465645f746f6b656e7300ae67726f7570735f747261696e656400b1747261696e65645f726573706f6e7365"
    "7300a66d656d6f727984a76c656e6774687380a866696e697368656480a6636f756e747390a76c6f6e676573"
    "7480a76c6561726e656485a56b696e647380a6656e67696e65c0a677616e746564c0aa72657365727665645f"
    "73cb0000000000000000ad707265656d707469626c655f73cb0000000000000000a773686172696e6784a873"
    "77697463685f73cb0000000000000000a8747261696e696e6785a16ecb0000000000000000a178cb00000000"
    "00000000a27878cb0000000000000000a179cb0000000000000000a27879cb0000000000000000a76c6f6e67"
    "65737480a677696e646f7782a5736565647380a56b6e6f776e90a7706c616e6e657283a56b696e647380a663"
    "616368657380a473697a6500a9736c6f776573745f73801000000076e3c91392a54e6f74656481a464617461"
    "c4016e0b00000099a8755992a852657374617465648063000000dcbccd1a92b056657273696f6e5075626c69"
    "7368656488a776657273696f6e00a6646967657374a26161a8706f7274696f6e7390a96e756d5f6279746573"
    "00ae6d616e69666573745f627974657300a663616e617279c0a462617365c0a87265706c69636173901f0000"
    "00757252f892ab526f756e644f70656e656482a47374657000a46b696e64a5706c61696e32000000ba41111e"
    "92ac50726f6d707473447261776e81a770726f6d7074739183a26964a170a565706f636800a6746f6b656e73"
    "c404010000008200000008adfc3992ac5061636b6564546f6b656e7388a776657273696f6e00a9726573706f"
    "6e736573a57040302330a8617474656d707473c40401000000a76f666673657473c40400000000a6636f756e"
    "7473c40401000000a866696e6973686564919200a473746f70a9746f6b656e5f696473c40407000000a86c6f"
    "6770726f6273c404000000bf4d000000ced7ba6b92ae526573706f6e736553636f72656485a8726573706f6e"
    "7365a57040302330a7617474656d707401a6726577617264cb3ff0000000000000a76661696c757265a0a973"
    "6c6f776573745f73c0"
)


def test_what_planners_remember_is_written_and_read():
    kinds = {"long": KindMemory(4, 9, 0, 9000, (30, 20), 2, 1.5)}
    stood = SnapshotBegan(planner=PlannerMemory(kinds, {2: 8000, 4: 20000}, size=4))
    assert LOG.decode(LOG.encode(stood)) == stood


def test_a_segment_has_the_bytes_that_it_always_had(tmp_path: Path):
    within(lambda: write(tmp_path, (0, BASE, NEWS)))
    [segment] = segments(tmp_path)
    assert segment.path.read_bytes() == WRITTEN


def test_a_segment_of_another_format_is_refused_in_one_line(tmp_path: Path):
    older = WRITTEN.replace(b"lightrl\x0a\x03", b"lightrl\x0a\x01", 1)
    (tmp_path / "00000001_step_0.log").write_bytes(older)
    with pytest.raises(JournalError, match="has format 1, but this LightRL reads format 3"):
        newest(tmp_path, LOG)
