"""`lightrl serve CHECKPOINT|RUN`: engines and an HTTP server, until ctrl-C."""

import asyncio
import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from lightrl.config.schema import Config
from lightrl.data.template import template_kwargs
from lightrl.devices.driver import look
from lightrl.devices.plan import for_run
from lightrl.devices.visible import visible
from lightrl.endpoints.api import SamplingLimits
from lightrl.endpoints.app import EndpointApp
from lightrl.endpoints.server import serving as http_server
from lightrl.environments.rendering import Renderer
from lightrl.errors import ConfigError, LightRLError, TrainerError, first_error
from lightrl.launch.checks.initial import settled
from lightrl.launch.evaluation.config import serving
from lightrl.launch.evaluation.target import EvalTarget, find_target, read_table
from lightrl.launch.serving.backend import ServingBackend
from lightrl.launch.serving.engines import ServedEngine, published_weights, start_engines
from lightrl.model_files import weights_folder
from lightrl.rope import context
from lightrl.system.child import ChildDied
from lightrl.system.output import print_error, print_lines
from lightrl.system.process import stop_signals
from lightrl.system.threads import cancel, in_thread
from lightrl.weights.machine.scratch import scratch_dir_in_thread

FOLLOW_S = 2.0  # between looks for a newer checkpoint


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`engines`, `max_length`: 0 = by the machine and the run. `key`: "" = any, for clients of this
    machine. `follows`: load newer checkpoints of the run."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str = ""
    overrides: tuple[str, ...] = ()
    engines: int = 0
    max_length: int = 0
    follows: bool = False


async def serve(checkpoint: str, options: ServeOptions) -> None:
    """Return after a signal. Raises LightRLError, one line."""
    target = find_target(checkpoint)
    if options.follows and target.config is None:
        raise ConfigError(f"--follow: {target.path} is not of a run")
    await in_thread(_require_address, options)
    stopped = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    work = asyncio.create_task(_Serving(target, options).run(), name="serve")
    signalled = asyncio.create_task(stopped.wait(), name="signal")
    await asyncio.wait({work, signalled}, return_when=asyncio.FIRST_COMPLETED)
    is_over = work.done()
    await cancel(work, signalled)
    if is_over:
        work.result()


def _require_address(options: ServeOptions) -> None:
    """Raises ConfigError before anything is loaded for nothing."""
    host, port = options.host, options.port
    try:
        is_loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not options.key:
        raise ConfigError(f"--host {host}: others reach it; give a --key that they must send")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as e:
        why = f"cannot listen on {host}: {e.strerror or e}"
        raise ConfigError(f"--port {port}: {why}; choose another") from None


class _Serving:
    """The engines of one model and its weights, which `--follow` replaces."""

    def __init__(self, target: EvalTarget, options: ServeOptions) -> None:
        self._target, self._options = target, options
        self._folder = Path()
        self._engines: list[ServedEngine] = []

    async def run(self) -> NoReturn:
        """Serve until cancelled. Raises LightRLError."""
        size = await in_thread(_num_bytes, self._target)
        async with scratch_dir_in_thread("serve", size) as self._folder:
            await in_thread((self._folder / "logs").mkdir)
            config = await in_thread(_config, self._target, self._options, self._folder)
            gpus = await in_thread(for_run, config)
            model_dir = await in_thread(_model_dir, config)
            most = await in_thread(_max_length, config, model_dir, self._options.max_length)
            self._engines = await start_engines(config, model_dir, gpus, most, self._folder)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for engine in self._engines:
                        tasks.create_task(engine.run())
                    tasks.create_task(self._answer(config, model_dir, most))
            except* LightRLError as failed:
                raise LightRLError(str(first_error(failed))) from None
            finally:
                await asyncio.gather(*(engine.stop() for engine in self._engines))
        raise AssertionError("its tasks end by an error")

    async def _answer(self, config: Config, model_dir: Path, most: int) -> NoReturn:
        run_dir, options = _run_dir(self._target), self._options
        limits = SamplingLimits(_name(self._target), most, is_free=True)
        renderer = await in_thread(_renderer, config, model_dir)
        backend = ServingBackend(limits, renderer, model_dir, self._engines, options.key)
        await self._load(config)
        async with http_server(EndpointApp(backend), options.host, options.port) as url:
            which = f"{limits.model}, step {self._target.step}"
            print_lines(f"serving {which}: {url}/v1 (ctrl-C stops it)")
            while True:
                await asyncio.sleep(FOLLOW_S)
                if options.follows and run_dir is not None:
                    await self._follow(run_dir)

    async def _follow(self, run_dir: Path) -> None:
        """Load the run's newest checkpoint if it is newer. Raises WeightsError, after which an
        engine has none."""
        try:
            newest = await in_thread(find_target, str(run_dir))
            if newest.step > self._target.step:
                await self._load(await in_thread(_config, newest, self._options, self._folder))
                self._target = newest
                print_lines(f"serving step {newest.step}")
        except (ConfigError, TrainerError, ChildDied) as e:
            # it may have been removed meanwhile: there is a newer one
            print_error(f"step {self._target.step} is still served: {e}")

    async def _load(self, config: Config) -> None:
        async with published_weights(config, self._folder) as published:
            await asyncio.gather(*(engine.load(published) for engine in self._engines))


def _name(target: EvalTarget) -> str:
    run_dir = _run_dir(target)
    return (run_dir or Path(target.path)).name


def _run_dir(target: EvalTarget) -> Path | None:
    """Return the directory itself, not `runs/latest`, which may name another one later."""
    return target.config.parent.resolve() if target.config is not None else None


def _config(target: EvalTarget, options: ServeOptions, folder: Path) -> Config:
    """Raises ConfigError."""
    config = serving(target, options.overrides, folder)
    num = options.engines
    if not num:
        found = [] if config.rollout.engine == "emulated" else visible(look(), os.environ)
        num = max(1, len(found) // config.gpus_per_engine)
    rollout = config.rollout.model_copy(update={"nodes": num})
    return settled(config.model_copy(update={"rollout": rollout}))


def _model_dir(config: Config) -> Path:
    folder = Path(config.model.path)
    return folder if folder.is_dir() else weights_folder(config.model.path)


def _max_length(config: Config, model_dir: Path, asked: int) -> int:
    """Return the tokens of the longest prompt with its answer. Raises ConfigError."""
    table = read_table(model_dir / "config.json")
    longest = context(table.get("text_config") or table) or asked or config.max_model_length
    if asked > longest:
        raise ConfigError(f"--max-length {asked}: the model's context is {longest:,} tokens")
    return asked or min(longest, config.max_model_length)


def _renderer(config: Config, model_dir: Path) -> Renderer:
    kwargs = template_kwargs(config.data)
    renderer = Renderer(model_dir, config.environment.tool_format, kwargs)
    renderer.prove((), user_turns=False)
    return renderer


def _num_bytes(target: EvalTarget) -> int:
    """Return what the weights may take, 0 if they are not here yet."""
    files = Path(target.path).rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
