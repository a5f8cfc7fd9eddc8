"""A taskset of verifiers >= 0.4 with a tool, a server of its own process; no environment."""

import verifiers.v1 as vf

__all__ = ["ClerkTaskset"]

ROOMS = {"1": "answer", "2": "user"}


class RoomsConfig(vf.ToolsetConfig):
    closed: str = "2"


class Rooms(vf.Toolset[RoomsConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def room(self, number: str) -> str:
        """Say who is in a room."""
        return "closed" if number == self.config.closed else ROOMS.get(number, "nobody")


class ClerkData(vf.TaskData):
    number: str
    """Of the room in question."""


class ClerkConfig(vf.TaskConfig):
    rooms: RoomsConfig = RoomsConfig()


class Clerk(vf.Task[ClerkData, vf.State, ClerkConfig]):
    @classmethod
    def toolsets(cls, config: ClerkConfig) -> list[vf.Toolset]:
        return [Rooms(config.rooms)]

    @vf.reward
    async def knows(self, trace) -> float:
        found = [str(message.content) for message in trace.tool_messages]
        return float(ROOMS[self.data.number] in found and trace.last_reply in found)

    @vf.reward(weight=0.5)
    async def is_short(self, trace) -> float:
        return float(len(trace.last_reply) < 20)


class ClerkTasksetConfig(vf.TasksetConfig):
    task: ClerkConfig = ClerkConfig()


class ClerkTaskset(vf.Taskset[Clerk, ClerkTasksetConfig]):
    def load(self):
        for number in ROOMS:
            data = ClerkData(prompt=f"Who is in room {number}?", number=number)
            yield Clerk(data, self.config.task)


if __name__ == "__main__":
    Rooms.run()
