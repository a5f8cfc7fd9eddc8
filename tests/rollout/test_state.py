"""What an engine can be asked for: every way through its states, without a process."""

from dataclasses import dataclass, replace

from lightrl.rollout.state import EDGES, EngineChange, EngineState
from tests.support.state_tables import readme, table, walk

E = EngineChange


@dataclass(frozen=True)
class Engine:
    """What each event means, one thing at a time."""

    is_started: bool = False
    is_loading: bool = False
    serves: bool = False
    is_falling_asleep: bool = False
    is_asleep: bool = False

    @property
    def has_devices(self) -> bool:
        return self.is_started and not (self.is_falling_asleep or self.is_asleep)

    def after(self, event: EngineChange) -> "Engine | None":
        match event:
            case E.DIED:
                return Engine()
            case E.STARTED if not self.is_started:
                return Engine(is_started=True)
            case E.LOAD_ORDERED if not self.is_loading and (self.has_devices or self.is_asleep):
                return replace(self, is_loading=True, serves=False, is_asleep=False)
            case E.LOADED if self.is_loading:
                return Engine(is_started=True, serves=True)
            case E.SLEEP_ORDERED if self.has_devices and not self.is_loading:
                return Engine(is_started=True, is_falling_asleep=True)
            case E.SLEPT if self.is_falling_asleep:
                return Engine(is_started=True, is_asleep=True)
            case E.LOAD_FAILED if self.is_loading:
                return replace(self, is_loading=False)
            case _:
                return None


def test_every_way_is_as_it_should_be_and_no_other_can_be_gone():
    engines = walk(EDGES, EngineState.STARTING, EngineChange, Engine(), Engine.after)
    assert [s for s, engine in engines.items() if engine.is_loading] == [EngineState.LOADING]
    assert [s for s, engine in engines.items() if engine.serves] == [EngineState.SERVING]
    assert [s for s, engine in engines.items() if not engine.is_started] == [EngineState.STARTING]


def test_readme_shows_the_edges_of_the_code():
    assert table(EDGES) in readme("rollout")
