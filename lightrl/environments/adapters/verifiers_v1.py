"""An episode of verifiers >= 0.4, as a program: PYTHON -P verifiers_v1.py ENVIRONMENT

ENVIRONMENT is the name of an installed taskset or environment, or a FILE.py. Asks the endpoint of
OPENAI_BASE_URL for tokens, with the key of OPENAI_API_KEY. LIGHTRL_MODEL is the model's directory;
LIGHTRL_ARGS, JSON, is what verifiers calls `env`: `taskset`, `agent`, ...; and `renderer`. Runs
without LightRL. Reports the reward, or ends with status 1 and one line on stderr.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

PACKAGE = "verifiers>=0.4"
BUILT_IN = "verifiers.v1.tasksets"
# verifiers gives no variable with this word in its name to the programs that it starts
KEY = "LIGHTRL_API_KEY"
MAX_LINE = 300  # characters of an error
NO_NAMES = ("auto", "custom", "default")  # of renderers that are no family
# Of the deadlines of verifiers, the one that ends an episode which has a reward.
SCORED_TIMEOUT = "agent_timeout"

THINK, THOUGHT = "<think>", "</think>"
ASKED = {"role": "user", "content": "qzquestion"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "qztool", "arguments": {}}}
TOOL = {
    "name": "qztool",
    "description": "qztext",
    "parameters": {"type": "object", "properties": {}},
}
CHATS = [
    [{"role": "system", "content": "qztext"}, ASKED],
    [ASKED, {"role": "assistant", "content": "qzanswer"}, ASKED],
    [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "qzresult", "name": "qztool", "tool_call_id": "call00000"},
    ],
]


class Refused(Exception):
    """The episode has no score; the text is one line."""


class Endpoint:
    """The session of this program at LightRL."""

    def __init__(self) -> None:
        # Judges that look for these variables would ask the model that is trained.
        self.url = os.environ.pop("OPENAI_BASE_URL").rstrip("/")
        os.environ[KEY] = os.environ.pop("OPENAI_API_KEY")

    def ask(self, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {os.environ[KEY]}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, headers)
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read() or b"null")


def imported(name: str) -> str:
    """Return the name by which verifiers imports an environment: of a file, that of its module."""
    if not name.endswith(".py"):
        return name
    file = Path(name).resolve()
    if not file.is_file():
        raise Refused(f"no file {name}")
    if not file.stem.isidentifier() or file.stem != file.stem.lower():
        raise Refused(f"{name}: the name of the file must be one of a module, in small letters")
    # Servers of tools are processes, which import the module, too.
    paths = [str(file.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(file.parent))
    if importlib.util.find_spec(f"{BUILT_IN}.{file.stem}"):
        raise Refused(f"{name}: verifiers has a taskset of this name; rename the file")
    return file.stem


def load(name: str, args: dict[str, Any]) -> tuple[Any, str]:
    """Return the environment, and the role whose turns are trained. Roles without a runtime get
    this machine, if they cannot execute code."""
    env = {**args, "taskset": {**args.get("taskset", {}), "id": imported(name)}}
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    agents = importlib.import_module("verifiers.v1.configs.agent")
    config = loaders.resolve_env_config(env)
    harnesses = config.agent_harnesses()
    roles = agents.agent_config_fields(config)
    for role, spec in roles.items():
        if "runtime" not in spec.model_fields_set:
            if loaders.harness_class(harnesses[role].id).EXECUTES_CODE:
                raise Refused(
                    f"{role}: harness {harnesses[role].id!r} executes commands of the model: set "
                    f"environment.args.{role}.runtime.type, as docker, or subprocess for this "
                    f"machine, or environment.args.{role}.harness.id = 'null'"
                )
            env[role] = {**env.get(role, {}), "runtime": {"type": "subprocess"}}
    trained = [role for role, spec in roles.items() if spec.client is None]
    if len(trained) != 1:
        raise Refused(
            f"trains one role, and the environment has {', '.join(roles)}: set "
            "environment.args.ROLE.client and .model of the others"
        )
    return loaders.load_environment(loaders.resolve_env_config(env)), trained[0]


def task_of(taskset: Any, row: dict[str, Any], seed: int) -> Any:
    """Return the task that the row's `index` names, else one by the seed."""
    index = row.get("index")
    if not isinstance(index, int):
        if not taskset.bounded:
            raise Refused("the taskset has no end: the data needs a column `index`")
        index = seed
    if not taskset.bounded:
        return next(itertools.islice(taskset, index, None))
    tasks = list(taskset)
    if not tasks:
        raise Refused("the taskset has no tasks")
    return tasks[index % len(tasks)]


def written(act: Callable[[], Any]) -> Any:
    """Return what a template or a renderer writes; None if it refuses."""
    try:
        return act()
    except Exception:  # each has its own
        return None


def families() -> Iterator[Any]:
    for config in get_args(get_args(importlib.import_module("renderers").RendererConfig)[0]):
        if config.model_fields["name"].default not in NO_NAMES:
            yield config


def fits(tokenizer: Any, config: Any) -> int:
    """Return how many of the chats a family writes as the model's template does; 0 if it differs in
    one without tools, or cannot append."""
    made = written(lambda: importlib.import_module("renderers").create_renderer(tokenizer, config))
    if made is None:
        return 0
    num = 0
    for chat in CHATS:
        args: dict[str, Any] = {"add_generation_prompt": True}
        if chat is CHATS[-1]:
            args["tools"] = [{"type": "function", "function": TOOL}]
        apply = partial(tokenizer.apply_chat_template, chat, tokenize=False, **args)
        if (want := written(apply)) is None:
            continue
        got = written(partial(made.render_ids, chat, **args))
        if got is None or tokenizer.decode(got) != want:
            return num if chat is CHATS[-1] else 0
        num += 1
    prompt = made.render_ids([ASKED], add_generation_prompt=True)
    begun = tokenizer.decode(prompt).rstrip().endswith(THINK)
    said = f"qzthought\n{THOUGHT}\n\nqzanswer" if begun else "qzanswer"
    end = made.get_stop_token_ids()[0]
    sampled = [*tokenizer.encode(said, add_special_tokens=False), end]
    bridged = written(partial(made.bridge_to_next_turn, prompt, sampled, [ASKED]))
    held = [*prompt, *sampled]
    return num if bridged and bridged.token_ids[: len(held)] == held else 0


def is_met(script: str) -> bool:
    """Return whether this interpreter has the packages that a script declares (PEP 723)."""
    requirement = importlib.import_module("packaging.requirements").Requirement
    found = re.search(r"(?m)^# dependencies = (\[.*\])$", script)
    for text in tomllib.loads(f"all = {found[1]}")["all"] if found else ["none declared"]:
        try:
            wanted = requirement(text)
            if metadata.version(wanted.name) not in wanted.specifier:
                return False
        except (metadata.PackageNotFoundError, ValueError):
            return False
    return True


def run_programs_here() -> None:
    """Run the programs of harnesses on this machine with this interpreter, where it has their
    packages: uv would ask the package index in each episode, and take other releases in time."""
    runtime = importlib.import_module("verifiers.v1.runtimes").SubprocessRuntime
    prepare = runtime.prepare_uv_script

    async def prepared(
        self: Any, script: str | bytes, env: Any = None, *, activate: bool = True
    ) -> list[str]:
        text = script if isinstance(script, str) else script.decode()
        if not is_met(text):
            return await prepare(self, script, env, activate=activate)
        file = f".program-{hashlib.sha256(text.encode()).hexdigest()}.py"
        await self.write(file, text.encode())
        return [sys.executable, "-P", file]

    runtime.prepare_uv_script = prepared


def client_of(endpoint: Endpoint, model: str, renderer: dict[str, Any] | None) -> Any:
    """Return the configuration of the client. It sends tokens, if a renderer is given or a family
    writes what the model's chat template does; else chats, which LightRL makes tokens of. Earlier
    thinking stays, as tokens are never taken back."""
    clients = importlib.import_module("verifiers.v1.configs.client")
    if renderer is None:
        tokenizer = importlib.import_module("renderers.base").load_tokenizer(model)
        configs = (config(thinking_retention="all") for config in families())
        num, best = max(((fits(tokenizer, c), c) for c in configs), key=lambda pair: pair[0])
        if not num:
            return clients.EvalClientConfig(base_url=endpoint.url, api_key_var=KEY)
    else:
        is_family = renderer.get("name") not in NO_NAMES
        best = {"thinking_retention": "all", **renderer} if is_family else renderer
    return clients.TrainClientConfig(
        base_url=endpoint.url, api_key_var=KEY, renderer=best, renderer_model_name=model
    )


def report_of(episode: Any, role: str) -> dict[str, Any]:
    """Return reward and metrics. Raises Refused if the episode did not come to its end."""
    traces = [trace for trace in episode.traces if trace.agent.name == role]
    if not episode.ok:
        errors = [trace.last_error for trace in episode.traces] + [episode.last_error]
        error = next((e for e in errors if e is not None), None)
        raise Refused(f"{error.type}: {error.message}" if error else "the episode failed")
    if len(traces) != 1:
        raise Refused(f"{role} ran {len(traces)} times: an episode is one conversation")
    trace = traces[0]
    if trace.is_timeout and trace.stop_condition != SCORED_TIMEOUT:
        raise Refused(str(trace.stop_condition))
    if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
        raise Refused(f"no reward of {unscored[0]}")
    if not math.isfinite(trace.reward):
        raise Refused(f"the reward is {trace.reward}")
    metrics = {name: reward.score for name, reward in trace.rewards.items()}
    metrics = {**(metrics if len(metrics) > 1 else {}), **trace.metrics}
    metrics = {k: v for k, v in metrics.items() if v is not None and math.isfinite(v)}
    return {"reward": trace.reward if trace.rewards else None, "metrics": metrics}


async def play(name: str) -> None:
    endpoint = Endpoint()
    args = json.loads(os.environ.get("LIGHTRL_ARGS") or "{}")
    given = endpoint.ask("episode")
    renderer = args.pop("renderer", None)
    env, role = load(name, args)
    run_programs_here()
    client = client_of(endpoint, os.environ["LIGHTRL_MODEL"], renderer)
    served = endpoint.ask("models")["data"][0]["id"]
    context = importlib.import_module("verifiers.v1.clients").ModelContext(served, client)
    task = task_of(env.taskset, given["row"], given["seed"])
    async with env.serving():
        episode = await env.run_episode(task, context)
    endpoint.ask("episode", report_of(episode, role))


def main() -> int:
    # An exception lets verifiers end what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Harnesses install their programs with uv.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        asyncio.run(play(sys.argv[1]))
    except ModuleNotFoundError as e:
        hint = f": {sys.executable} -m pip install '{PACKAGE}'" if e.name == "verifiers" else ""
        line = f"{e}{hint}"
    except Refused as e:
        line = str(e)
    except (Exception, SystemExit) as e:
        line = f"{type(e).__name__}: {e}"
    except KeyboardInterrupt:
        line = "ended by a signal"
    else:
        return 0
    print(" ".join(f"verifiers:{sys.argv[1]}: {line}".split())[:MAX_LINE], file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
