"""Resolve `environment.source`, `tools` and `mcp` of the config to what a worker serves.

Runs user code, so in a worker only. A source is FILE.py:CLASS, package.module:CLASS, or PREFIX:NAME
of an adapter: a module with `load(name: str, args: dict) -> Callable[[], Episode]`, which is
imported only when it is used.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lightrl.environments.worker.base import Episode, ToolSchema, UserError
from lightrl.environments.worker.native import Seeded, WithTools, load_class

ADAPTERS = {  # prefix -> module of lightrl.environments.adapters
    "gym": "gymnasium_envs",
    "textarena": "textarena_envs",
    "reasoning_gym": "reasoning_gym_tasks",
    "skyrl": "skyrl_envs",
    "trl": "trl_envs",
    "verifiers": "verifiers_envs",
}
TOOL_SHARE = 0.9  # of environment.timeout_s, for a call of a tool: it ends before its worker does


def load_source(source: str, args: dict[str, Any]) -> Callable[[], Episode]:
    """Return a factory of episodes. Raises UserError, one line, and whatever user code raises."""
    prefix, colon, name = source.partition(":")
    try:
        if colon and prefix in ADAPTERS:
            adapter = importlib.import_module(f"lightrl.environments.adapters.{ADAPTERS[prefix]}")
            make = adapter.load(name, args)
        else:
            make = load_class(import_object(source), args, source)
        return partial(Seeded, make)
    except ModuleNotFoundError as e:
        advice = "install it there, or name another interpreter with environment.command"
        raise UserError(f"{source}: no module {e.name!r} in {sys.executable}: {advice}") from e


async def add_tools(
    make: Callable[[], Episode] | None, setup: dict[str, Any]
) -> tuple[Callable[[], Episode], list[ToolSchema]]:
    """Return a factory of episodes that may call the tools of the run, and these tools; `make` is
    None without a class. Raises as `load_source`."""
    if make is not None and not setup["tools"] and not setup["mcp"]:
        return make, []
    from lightrl.environments.worker import tools  # few environments need it

    box = await tools.load_tools(setup["tools"], setup["mcp"], TOOL_SHARE * setup["timeout_s"])

    def with_tools() -> Any:
        answering = tools.ToolEpisode(box, setup["prompt_key"])
        return answering if make is None else WithTools(make(), answering)

    return with_tools, box.schemas


def import_object(reference: str) -> Any:
    """Return the object "FILE.py:NAME" or "package.module:NAME". Raises UserError, one line."""
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        known = ", ".join(f"{prefix}:" for prefix in ADAPTERS)
        forms = f"FILE.py:NAME, package.module:NAME, or a name after {known}"
        raise UserError(f"{reference!r}: expected {forms}")
    module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", 0) == module.__name__]
        raise UserError(f"{reference}: no such name; {place} defines {', '.join(own) or 'none'}")
    return getattr(module, name)


def _import_file(path: Path) -> ModuleType:
    """Import a file as a script is: it finds its neighbours. In a package it is a member of it."""
    path = path.resolve()
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    root, name = path.parent, path.stem
    while (root / "__init__.py").is_file():
        root, name = root.parent, f"{root.name}.{name}"
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if "." in name:
        return importlib.import_module(name)
    if name in sys.modules and getattr(sys.modules[name], "__file__", "") != str(path):
        name = f"{root.name}_{name}"  # another module has its name
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, path)
        # dataclasses and pickle look their module up
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
