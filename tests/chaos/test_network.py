"""Two rollout nodes behind bad lines: packets lost or late, lines cut for longer than a lease."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightrl.client.address import listening
from lightrl.keys import KEY_FILE
from lightrl.metrics.sinks import read
from tests.chaos.conftest import LIMIT_S, STEPS, CommandIn
from tests.chaos.network import Network, why_not

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(2 * LIMIT_S + 30),
]
PORT = 5600
LOOK_S = 0.1
PATIENCE_S = 20.0  # who missed the end for a bad line sits it out
END_S = PATIENCE_S + 40


class Run:
    """The coordinator and the trainer in one namespace, a rollout node in each of two others."""

    def __init__(self, network: Network, folder: Path, command: tuple[str, ...]) -> None:
        self.run_dir = folder / "run"
        self._network = network
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        roles = ("--role", "coordinator,trainer", f"run.bind=tcp://0.0.0.0:{PORT}")
        settings = (f"node.patience_s={PATIENCE_S}",)
        self._start("head", network.head, *command, *settings, *roles)
        self._await(lambda: listening(self.run_dir) is not None, "a coordinator that listens")
        for k in range(2):
            address = f"tcp://{network.head_address(k)}:{PORT}"
            key = ("--key", str(self.run_dir / KEY_FILE), "--name", f"far-{k}")
            self._start(f"far-{k}", network.node(k), "up", "--join", address, *key)

    def until_step(self, step: int) -> None:
        self._await(lambda: self._steps_done() >= step, f"step {step}")

    def until_lost(self, node: str) -> None:
        """The coordinator has given the node up."""
        self._await(lambda: f"{node} lost" in self.said("head"), f"{node} to be lost")

    def finish(self) -> dict[str, Any]:
        """The summary. All leave by themselves; who was out of touch at the end runs out of
        patience."""
        self._await(lambda: self._processes["head"].poll() is not None, "the end")
        for name, process in self._processes.items():
            status = process.wait(END_S)
            assert status == 0 or "nothing received from the coordinator" in self.said(name), (
                self._account()
            )
        return json.loads((self.run_dir / "summary.json").read_bytes())

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text(errors="replace")

    def _start(self, name: str, namespace: str, *command: str) -> None:
        with (self._folder / f"{name}.out").open("wb") as out:
            self._processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, "-m", "lightrl.cli", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def _steps_done(self) -> int:
        return max((int(r["step"]) for r in read(self.run_dir)), default=0)

    def _await(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            head = self._processes["head"].poll()
            assert head is None or what == "the end", f"waiting for {what}\n{self._account()}"
            assert time.monotonic() < deadline, f"waited for {what}\n{self._account()}"
            time.sleep(LOOK_S)

    def _account(self) -> str:
        return "\n".join(f"-- {name}\n{self.said(name)[-1500:]}" for name in self._processes)


def bad(network: Network, run: Run, undisturbed: dict[str, str]) -> None:
    run.until_step(1)
    network.set(0, loss=0.3)
    network.set(1, delay_s=0.1)  # 200 ms there and back
    run.until_step(STEPS - 2)
    network.set(0, loss=0.3, delay_s=0.1)
    assert_equal(run.finish(), undisturbed)
    assert network.lost_packets(0) > 0  # how many it sends depends on how often it waits


def cut(network: Network, run: Run, undisturbed: dict[str, str]) -> None:
    """One line, then both: nobody but the trainer is left, and nothing that runs behind them is
    lost."""
    run.until_step(2)
    network.set(0, cut=True)
    run.until_lost("far-0")
    network.set(0)
    run.until_step(4)
    network.set(0, cut=True)
    network.set(1, cut=True)
    run.until_lost("far-1")
    network.set(0)
    network.set(1)
    assert_equal(run.finish(), undisturbed)


def assert_equal(summary: dict[str, Any], undisturbed: dict[str, str]) -> None:
    for name in ("weights_digest", "responses_digest"):
        assert summary[name] == undisturbed[name]
    assert summary["steps"] == STEPS


Story = Callable[[Network, Run, dict[str, str]], None]
STORIES = (bad, cut)


@pytest.fixture(scope="module")
def stories(
    tmp_path_factory: pytest.TempPathFactory, command_in: CommandIn, undisturbed: dict[str, str]
) -> Iterator[dict[Story, "Future[None]"]]:
    """On a network each, side by side: mostly they wait for packets that come again."""

    def tell(story: Story, folder: Path) -> None:
        with Network(f"{os.getpid()}-{story.__name__}", 2).up() as network:
            run = Run(network, folder, command_in(folder))
            try:
                story(network, run, undisturbed)
            finally:
                run.kill()

    with ThreadPoolExecutor(len(STORIES)) as pool:
        yield {story: pool.submit(tell, story, tmp_path_factory.mktemp("t")) for story in STORIES}


def test_lost_and_late_packets_cost_time_alone(stories: dict[Story, "Future[None]"]):
    stories[bad].result()


def test_lines_that_are_cut_and_come_back(stories: dict[Story, "Future[None]"]):
    stories[cut].result()
