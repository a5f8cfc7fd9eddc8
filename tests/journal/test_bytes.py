"""The bytes of a journal stay as they are: what an earlier version wrote is read, and written
again."""

from pathlib import Path

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
from lightrl.core.state import DrawnPrompt
from lightrl.journal.read import LOG, newest, segments
from lightrl.messages import ResponseTokens
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
# Of af9307c.
WRITTEN = bytes.fromhex(
    "6c69676874726c0a0100000004000000d401000000000000569ef3f0690100007095302792a7526573756d6564"
    "8aa47374657000a96e756d5f647261776e00a77075745f6f666690a5737061726590a86c6173745f63757400a9"
    "6576616c7561746564c0a776657273696f6ec0a76469676573747380a8636f756e74657273de0010aa6e6f6465"
    "735f6c6f737400ac656e67696e65735f6c6f737400af726573706f6e7365735f6d6f76656400aa6d6967726174"
    "696f6e7300ae6368756e6b735f69676e6f72656400a5686f6c657300aa6261645f6368756e6b7300ae72657761"
    "7264735f6661696c656400ae67726f7570735f64726f7070656400ab67726f7570735f666c617400af70726f6d"
    "7074735f7075745f6f666600ae726f6c6c6f75745f746f6b656e7300ab6576616c5f746f6b656e7300ae61626f"
    "727465645f746f6b656e7300ae67726f7570735f747261696e656400b1747261696e65645f726573706f6e7365"
    "7300a66d656d6f727983a76c656e6774687380a866696e697368656480a6636f756e7473901000000076e3c913"
    "92a54e6f74656481a464617461c4016e0b00000099a8755992a852657374617465648030000000efb9e53592b0"
    "56657273696f6e5075626c697368656483a776657273696f6e00a6646967657374a26161a8706f7274696f6e73"
    "901f000000757252f892ab526f756e644f70656e656482a47374657000a46b696e64a5706c61696e32000000ba"
    "41111e92ac50726f6d707473447261776e81a770726f6d7074739183a26964a170a565706f636800a6746f6b65"
    "6e73c404010000008200000008adfc3992ac5061636b6564546f6b656e7388a776657273696f6e00a972657370"
    "6f6e736573a57040302330a8617474656d707473c40401000000a76f666673657473c40400000000a6636f756e"
    "7473c40401000000a866696e6973686564919200a473746f70a9746f6b656e5f696473c40407000000a86c6f67"
    "70726f6273c404000000bf420000001a0d2ef492ae526573706f6e736553636f72656484a8726573706f6e7365"
    "a57040302330a7617474656d707401a6726577617264cb3ff0000000000000a76661696c757265a0"
)


def test_a_segment_has_the_bytes_that_it_always_had(tmp_path: Path):
    within(lambda: write(tmp_path, (0, BASE, NEWS)))
    [segment] = segments(tmp_path)
    assert segment.path.read_bytes() == WRITTEN


def test_a_segment_of_an_earlier_version_is_read(tmp_path: Path):
    (tmp_path / "00000001_step_0.log").write_bytes(WRITTEN)
    _, facts, lines = newest(tmp_path, LOG)
    assert (facts, lines) == ([*BASE, *NEWS], [])
