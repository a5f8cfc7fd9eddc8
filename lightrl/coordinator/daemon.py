"""The coordinator role of a daemon: feeds events to the core and carries out its commands.

Owns the router, the reward pool and the files of the run. core/coordinator.py makes all decisions.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.coordinator import run_files
from lightrl.coordinator.descriptors import Descriptors
from lightrl.coordinator.episodes import EpisodeMessages, Ordered
from lightrl.coordinator.history_sync import open_histories
from lightrl.coordinator.inbound import Inbound
from lightrl.coordinator.journaling import Journaling, load_entries, new_records, noted, recall
from lightrl.coordinator.peers import Peers, Watchers
from lightrl.coordinator.prompts import Prompts
from lightrl.coordinator.replays import Replays
from lightrl.coordinator.scale_command import ScaleCommand
from lightrl.coordinator.scoring import ResponseScoring
from lightrl.core.commands import (
    Admit,
    CloseRound,
    CloseStep,
    Command,
    DrawPrompts,
    Finish,
    Record,
    ReplayShards,
    Report,
    Scale,
    ScoreResponse,
    Send,
)
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import (
    DrainRequested,
    Event,
    NodeLost,
    ShardLeft,
    ShellFailed,
    TimerFired,
)
from lightrl.core.recovery import recover
from lightrl.core.state import RunState
from lightrl.errors import JournalError, LightRLError, first_error
from lightrl.history.lengths import WorkloadLog
from lightrl.journal.write import MAX_TROUBLE_S
from lightrl.log import reporter
from lightrl.messages.message import Message
from lightrl.messages.nodes import Heartbeat, Welcome
from lightrl.messages.responses import Generate
from lightrl.messages.training import TrainShard
from lightrl.metrics.round_figures import eval_lines, live_figures, step_line, warnings
from lightrl.metrics.sinks import MetricsLog
from lightrl.system.output import plain
from lightrl.transport.router import Peer, Router
from lightrl.weights.machine.scratch import scratch_dir
from lightrl.wire import to_json

logger = logging.getLogger(__name__)
report_here = reporter(logger)


class CoordinatorDaemon:
    """Feeds events to the core and carries out its commands. Listens from its construction on, so
    that nodes can connect while data is being read."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        name: str,
        key: str,
        resume: bool = False,
        max_trouble_s: float = MAX_TROUBLE_S,
    ) -> None:
        """With `resume`, continue from the journal in `run_dir` at the same address. The run fails
        when the journal could not be written for `max_trouble_s`.

        Raises ConfigError, DataError or JournalError, one line, for wrong input.
        """
        self._config = config
        self._run_dir = run_dir
        self._is_resumed = resume
        bind = (run_files.old_address(run_dir) if resume else "") or config.run.bind
        self._router = Router(bind, key)
        self.address = self._router.address
        try:
            self._build(name, resume, max_trouble_s)
        except BaseException:
            self._router.close()
            raise

    def _build(self, name: str, resume: bool, max_trouble_s: float) -> None:
        """Build all but the router. Raises as `__init__`."""
        config, run_dir = self._config, self._run_dir
        self._metrics = MetricsLog(run_dir, config.logging.backends, config, self._report)
        self._prompts = Prompts(config)
        self._core = Coordinator(self._prompts.settings, time.monotonic())
        self._records = new_records(config, run_dir, name, self.address)
        fleet = self._core.fleet
        self._scale = ScaleCommand(config.scale, lambda: fleet.num_preemptible, self._warn)
        self._histories = open_histories(config, run_dir, resume, self._report)
        self._journaling = Journaling(run_dir, config.journal, self._report, max_trouble_s)
        self._replays = Replays(
            self._journaling, self._send_shard, lambda why: self.feed(ShellFailed(why))
        )
        parts = self._prompts, self._core, self._journaling
        self._episodes = EpisodeMessages(config.environment, *parts, self._send)
        self._to_do = self._recover() if resume else []  # before anything else
        self._prompts.start()
        self._workload = WorkloadLog(run_dir, self._core.step, self._report)
        if resume:
            run_files.reopen(run_dir)
        self._scoring: ResponseScoring | None = None
        self._reason = "ended before it was over"
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers = Watchers(self._send_snapshot)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()  # from timers and signals
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._descriptors = Descriptors(self._report, self._router.num_connections)
        self._peers = self._new_peers(name)
        peers = self._router, self._core, self._peers, self._watchers
        logs = self._histories, self._replays, self._journaling, self._records
        self._inbound = Inbound(config.run.name, *peers, *logs, self.feed)

    def _new_peers(self, name: str) -> Peers:
        return Peers(
            self._router,
            self._core.fleet,
            self._descriptors,
            name,
            self._config.run.name,
            self._warn,
            lambda node: self._inbox.put_nowait(NodeLost(node, "connection lost")),
        )

    @property
    def succeeded(self) -> bool:
        return self._core.state is RunState.FINISHED

    def stop(self, reason: str) -> None:
        """Stop the run: every node is drained."""
        self._inbox.put_nowait(DrainRequested("*", reason))

    async def run(self) -> None:
        """Return when the run is over. Raises RewardError if reward functions cannot be used."""
        with scratch_dir("head") as scratch:
            for name, data in self._prompts.model_files.items():
                (scratch / name).write_bytes(data)
            logs = self._run_dir / "logs"
            logs.mkdir(exist_ok=True)
            parts = self._prompts, self._core, self._records
            self._scoring = ResponseScoring(scratch, logs, *parts, self.feed, self._warn)
            rewards = self._scoring.pool
            try:
                # what is recorded now is part of the next segment
                self._journaling.close_step()
                self._carry_out(self._to_do)
                self._begin_if_due()
                async with asyncio.TaskGroup() as tasks:
                    self._background = tasks
                    background = [
                        tasks.create_task(self._inbound.receive(tasks), name="receive"),
                        tasks.create_task(self._feed_inbox(), name="inbox"),
                        tasks.create_task(self._beat(), name="heartbeat"),
                        tasks.create_task(self._serve_rewards(self._scoring), name="rewards"),
                        tasks.create_task(self._scale.run(), name="scale"),
                        tasks.create_task(self._prompts.serve(self.feed), name="prompts"),
                        tasks.create_task(self._prompts.check(logs, self._report), name="data"),
                    ]
                    await self._finished
                    self._watchers.cancel()
                    self._replays.cancel()
                    for task in background:
                        task.cancel()
            except* LightRLError as errors:
                await self._write_end()
                raise first_error(errors) from None
            else:
                await self._write_end()
            finally:
                # After an unexpected error the run can be resumed.
                await rewards.stop()
                self._scoring.samples.close()
                await self._journaling.close()
                await self._metrics.close()
                self._workload.close()
                self._router.close()
                self._prompts.close()
                await self._histories.close()

    def _recover(self) -> list[Command]:
        """Recover the core from the journal, and return the commands that are pending."""
        entries, lines = load_entries(self._run_dir)
        for line in lines:
            self._report(f"WARNING: {line}")
        commands = recover(self._core, entries, time.monotonic())
        self._prompts.go_on_from(self._core.backlog.num_drawn)
        if (known := noted(entries)) is not None:
            self._prompts.require_same(known.data)
            recall(self._records, self._core, self._run_dir, known)
        return commands

    def _begin_segment(self) -> None:
        elapsed_s = time.monotonic() - self._core.started_at
        note = self._records.note(elapsed_s, self._prompts.digests, self._core.settings)
        self._journaling.begin(self._core, note)
        self._set_timer()

    async def _serve_rewards(self, scoring: ResponseScoring) -> None:
        """Serve reward functions. The address file is written once all input is checked; nodes may
        join before."""
        await scoring.serve(
            lambda: run_files.announce(self._run_dir, self.address, self._report),
            tries_rows=not self._is_resumed,
        )

    # Events in, commands out

    def feed(self, event: Event) -> None:
        """Pass an event to the core and carry out its commands; failures become events."""
        core, now = self._core, time.monotonic()
        self._records.speeds.before(core, event, now)
        commands = core.handle(event, now)
        self._records.speeds.after(core, event, commands)
        self._carry_out(commands)
        self._begin_if_due()
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer for the next deadline of the core. One that is set for an earlier time
        stays: deadlines mostly move later."""
        deadline = self._core.next_deadline()
        if deadline is None or self._timer_at <= deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at, delay_s = deadline, max(0.0, deadline - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._time_out)

    def _time_out(self, has_waited: bool = False) -> None:
        """Feed TimerFired. If this process was late itself, read pending heartbeats first."""
        self._timer_at = math.inf
        deadline = self._core.next_deadline()
        late_s = time.monotonic() - deadline if deadline is not None else -math.inf
        grace_s = 2 * self._config.node.heartbeat_s
        if late_s < 0:
            self._set_timer()
        elif late_s > grace_s and not has_waited:
            self._timer_at = -math.inf
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(grace_s, self._time_out, True)
        else:
            self._inbox.put_nowait(TimerFired())

    def _begin_if_due(self) -> None:
        """Begin a segment once the responses of the step are hashed and no draw is pending."""
        if self._journaling.is_due and self._records.is_hashed and not self._core.steps.draws:
            self._begin_segment()

    async def _begin_when_hashed(self) -> None:
        await self._records.hashed()
        self._begin_if_due()

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Record(entry):
                self._journaling.record(entry)
            case Send(node, TrainShard() as shard):
                hello = self._core.trainer_feed.num_hellos
                self._journaling.when_durable(lambda: self._send_shard(node, shard, hello))
            case Send(node, message):
                if self._config.environment.enabled and isinstance(message, Ordered):
                    self._episodes.send(node, message, self._background)
                else:
                    self._send(node, message)
            case ReplayShards():
                self._replays.start(self._background, command)
            case Admit(node):
                config_json = self._config.model_dump_json()
                self._send(
                    node, Welcome(self._config.run.name, config_json, self._prompts.model_files)
                )
            case DrawPrompts():
                self._prompts.ask(command)
            case ScoreResponse():
                assert self._scoring is not None
                self._scoring.submit(command)
            case CloseRound(round) if round.is_eval:
                self._histories.learn(round)
                record = self._records.close_eval(round, self._prompts.source_of)
                self._metrics.write(round.step, record)
                for line in eval_lines(*self._records.evals[-1], record):
                    self._report(line)
            case CloseRound(round):
                self._records.close_round(round, self._core, self._histories.learn(round))
                self._workload.write(round)
            case CloseStep(step):
                self._journaling.close_step()
                record = self._records.close_step(command, self._core)
                self._workload.write_step(self._records.speeds.close_step(self._core, command))
                record["timing_s/data"] = self._prompts.take_waited_s()
                self._background.create_task(self._begin_when_hashed(), name="hashing")
                self._metrics.write(step + 1, record)
                for line in (*warnings(record), step_line(step + 1, record)):
                    self._report(line)
            case Report(text, is_warning):
                self._report(text, logging.WARNING if is_warning else logging.INFO)
            case Scale(wanted):
                self._scale.want(wanted)
            case Finish():
                failed = command.state is RunState.FAILED
                text = f"run {command.state}: {command.reason}"
                self._report(text, logging.ERROR if failed else logging.INFO)
                self._reason = command.reason
                if not self._finished.done():
                    self._finished.set_result(None)

    def _send(self, node: str, message: Message) -> None:
        """Send to a node, with the histories that it needs to draft from."""
        peer = self._peers.of_node(node)
        if peer is not None and isinstance(message, Generate):
            message = self._histories.attach(peer.identity, message, self._core.table.responses)
        self._peers.send(node, message)

    def _send_shard(self, node: str, shard: TrainShard, hello: int) -> bool:
        """Send a shard; False if the trainer has sent another Hello since: the core sends it
        again."""
        if self._core.trainer_feed.num_hellos != hello:
            return False
        self._send(node, shard)
        # if it could not be sent, the trainer is lost and sends Hello again
        sent = ShardLeft(shard.step, shard.index)
        # other tasks run first
        asyncio.get_running_loop().call_soon(self._inbox.put_nowait, sent)
        return True

    def _send_snapshot(self, peer: Peer) -> bool:
        return self._peers.send_to(peer, self._records.snapshot(self._core, time.monotonic()))

    async def _feed_inbox(self) -> None:
        """Feed events of timers and signals; an error in this task ends the run."""
        while True:
            self.feed(await self._inbox.get())

    async def _beat(self) -> None:
        """Send heartbeats to all nodes, and measure their speeds."""
        while True:
            try:
                self._journaling.check()
            except JournalError as e:
                self.feed(ShellFailed(str(e)))
            self._descriptors.check()
            self._records.nodes.measure(self._core.fleet, time.monotonic())
            self._records.waits.report(self._core, time.monotonic(), self._report)
            self._metrics.show(lambda: live_figures(self._core))
            for name in self._core.fleet.nodes:
                self._send(name, Heartbeat())
            await asyncio.sleep(self._config.node.heartbeat_s)

    # Files

    def _report(self, text: str, level: int = logging.INFO) -> None:
        elapsed = time.monotonic() - self._core.started_at
        text = plain(text)  # parts of it come from nodes
        self._records.event(elapsed, text, is_warning=level == logging.WARNING)
        if level > logging.INFO:
            logger.log(level, text)
        else:
            report_here(text)

    def _warn(self, text: str) -> None:
        self._report(text, logging.WARNING)

    async def _write_end(self) -> None:
        await self._records.hashed()
        now = time.monotonic()
        self._records.waits.report(self._core, now, self._report)
        summary = self._records.summary(self._core, self._reason, now - self._core.started_at)
        snapshot = self._records.snapshot(self._core, now, over=True)
        await run_files.end(self._run_dir, to_json(summary), to_json(snapshot), self._report)
        for peer in self._watchers.peers:
            self._peers.send_to(peer, snapshot)
