"""Messages that a node may send, and answers that it accepts: every path through its states."""

from dataclasses import dataclass, replace

from lightrl.daemon.state import EDGES, ConnectionEvent, ConnectionState
from tests.support.state_tables import readme, table, walk

E = ConnectionEvent


@dataclass(frozen=True)
class Node:
    """The effect of each event, one property at a time."""

    is_admitted: bool = False
    awaits_answer: bool = False

    def after(self, event: ConnectionEvent) -> "Node | None":
        match event:
            case E.CONNECTION_LOST:
                return Node()
            case E.HELLO_SENT if not self.is_admitted:
                return replace(self, awaits_answer=True)
            case E.DISMISSED if self.awaits_answer:
                return Node()
            case E.WELCOMED if self.awaits_answer:
                return Node(is_admitted=True)
            case _:
                return None


def test_every_path_follows_the_table_and_no_other_exists():
    start = ConnectionState.DISCONNECTED
    nodes = walk(EDGES, start, ConnectionEvent, Node(), Node.after)
    assert [s for s, node in nodes.items() if node.awaits_answer] == [ConnectionState.JOINING]
    assert [s for s, node in nodes.items() if node.is_admitted] == [ConnectionState.ADMITTED]


def test_readme_shows_the_edges_of_the_code():
    assert table(EDGES) in readme("daemon")
