"""A taskset of verifiers >= 0.4 and an environment that answers in its user's place."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    word: str
    """To be said."""


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def said(self, trace) -> float:
        if self.data.word == "broken":
            raise ValueError("no reward")
        return float(any(self.data.word in (m.content or "") for m in trace.assistant_messages))

    @vf.metric
    async def replies(self, trace) -> float:
        return float(len(trace.assistant_messages))


class GuessConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("yes", "answer")


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for word in self.config.words:
            yield GuessTask(GuessData(prompt="Say a word.", word=word), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    turns: int = 3


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for k in range(1, self.config.turns):
                if segment.terminated or task.data.word in segment.last_reply:
                    break
                segment = await interaction.turn(f"No. Question {k}.")
