"""The rules on several keys of a config: which of their values contradict each other, or have no
effect together.

A rule yields the key to change and the reason. Must stay importable without torch.
"""

import json
import shlex
from collections.abc import Iterator

from lightrl.config.algorithm import UNGROUPED
from lightrl.config.data import Data
from lightrl.config.environment import Environment, split_endpoint
from lightrl.config.evaluation import Eval
from lightrl.config.reward import LONGEST_TEST_S, OF_OWN_FUNCTIONS, Reward, is_own_function
from lightrl.config.scale import ScaleSection
from lightrl.config.schema import LORA_ARGS, PARALLEL_ARGS, Config
from lightrl.config.sections import MAX_SLOTS, Lora, Section
from lightrl.config.values import TASKS, not_plain

Conflicts = Iterator[tuple[str, str]]
SIZED_ENGINES = ("vllm", "emulated")  # can span more than one GPU


def conflict(config: Config) -> str | None:
    """Return the first conflict in one line, which begins with a key and its value."""
    for rules in RULES:
        for key, why in rules(config):
            return f"{config.key_value(key)}: {why}"
    return None


def _general(c: Config) -> Conflicts:
    if c.run.name == "latest":
        yield "run.name", "is the link to the newest run; choose another name"
    for key, value in (
        ("rollout.engine_args", c.rollout.engine_args),
        ("data.chat_template_kwargs", c.data.chat_template_kwargs),
        ("reward.kwargs", c.reward.kwargs),
        ("environment.args", c.environment.args),
    ):
        if problem := not_plain(value):
            yield key, problem
    if c.rollout.engine_args.get("trust_remote_code"):
        yield "rollout.engine_args", "trust_remote_code: no code of a model directory is run"
    if c.node.lease_s < 2 * c.node.heartbeat_s:
        needed = f"twice node.heartbeat_s = {c.node.heartbeat_s:g}"
        yield "node.lease_s", f"must be at least {needed}, or healthy nodes are lost"
    if not c.data.all_sets and not c.eval.checkpoint:
        yield "data.path", "is required, or at least one [[data.sets]]"
    if not all(c.rollout.stop):
        yield "rollout.stop", "an empty text is in every text; leave it out"
    if c.train.engine == "emulated" and c.rollout.engine != "emulated":
        only = "only 'emulated' can load"
        yield (
            "rollout.engine",
            f"{only} what train.engine = 'emulated' publishes, which is no model",
        )
    if c.weights.broadcast == "always" and c.rollout.engine == "emulated":
        why = "rollout.engine = 'emulated' has no memory to receive weights in"
        yield "weights.broadcast", f"{why}; leave it out"
    interval = c.checkpoint.interval
    if c.checkpoint.keep_every and (not interval or c.checkpoint.keep_every % interval):
        yield "checkpoint.keep_every", f"must be a multiple of checkpoint.interval = {interval}"


def _sets(c: Config) -> Conflicts:
    for name in ("data", "eval"):
        section: Data | Eval = getattr(c, name)
        for key in ("path", "subset", "split"):
            if section.sets and getattr(section, key, ""):
                several = f"is short for a single set, and there are [[{name}.sets]]"
                yield f"{name}.{key}", f"{several}: give it to one of them"
        names = [one.name for one in (c.data.all_sets if name == "data" else c.eval_sets)]
        for one in names:
            if (count := names.count(one)) > 1:
                each = "give each a name of its own"
                yield f"{name}.sets", f"{count} sets are called {json.dumps(one)}; {each}"
    unweighted = [one.name or one.path for one in c.data.sets if one.weight is None]
    if 0 < len(unweighted) < len(c.data.sets):
        others = "has no weight and others have: give one to all of them, or to none"
        yield "data.sets", f"{unweighted[0]} {others}"
    if c.eval.step and not c.eval.checkpoint:
        yield "eval.step", "is that of eval.checkpoint; leave it out"


def _shared_devices(c: Config) -> Conflicts:
    """Devices that sample and train in turn."""
    if c.rollout.placement == "own":
        if c.offload.rule != "foreseen":
            yield "offload.rule", "acts on rollout.placement = 'shared' only; leave it out"
        return
    if ahead := c.async_.max_staleness:
        both = f"with async.max_staleness = {ahead} nodes sample while the trainer trains"
        yield "rollout.placement", f"{both}, on the same devices; leave one of them out"
    if not c.rollout.nodes:
        yield "rollout.placement", "rollout.nodes = 0 starts no engine that could use the devices"


def _sizes(c: Config) -> Conflicts:
    """Engines of several sizes over the same devices."""
    if c.rollout.parallel:
        yield from (("rollout.parallel", why) for why in _why_no_sizes(c))


def _why_no_sizes(c: Config) -> Iterator[str]:
    rollout, sizes = c.rollout, c.rollout.parallel
    ahead = c.async_.max_staleness
    least, most = sizes[0], sizes[-1]
    width, nodes, given = most // least, rollout.nodes, len(rollout.devices)
    if len(sizes) == 1:
        alone = "set tensor_parallel_size in rollout.engine_args"
        yield f"one size takes no turns; leave it out, and {alone}"
    if any(n & (n - 1) for n in sizes) or list(sizes) != sorted(set(sizes)):
        yield "must be powers of two, each larger than the one before"
    for name in sorted(PARALLEL_ARGS.intersection(rollout.engine_args)):
        yield f"is in conflict with {name} of rollout.engine_args; leave one of them out"
    if rollout.engine not in SIZED_ENGINES:
        known = " or ".join(map(repr, SIZED_ENGINES))
        yield f"needs rollout.engine = {known}, which spans several GPUs, not {rollout.engine!r}"
    if rollout.placement == "shared":
        yield "these engines take no turns with the trainer; leave out rollout.placement = 'shared'"
    if ahead:
        yield f"sizes change while nothing is sampled; leave out async.max_staleness = {ahead}"
    if c.run.deterministic and rollout.engine != "emulated":
        yield "engines of another size round otherwise; leave out run.deterministic"
    if not nodes or nodes % width:
        least_nodes = f"rollout.nodes = {nodes}, the engines of {least}"
        yield f"{least_nodes}, must be a multiple of {width}: one of {most} spans so many"
    if rollout.slots * width > MAX_SLOTS:
        slots = f"{width} times rollout.slots = {rollout.slots}"
        yield f"an engine of {most} has {slots}, and at most {MAX_SLOTS} are possible"
    if given and given != nodes * least:
        takes = f"rollout.nodes = {nodes} engines of {least} take {nodes * least} GPUs"
        yield f"{takes}, and rollout.devices names {given}"


def _rounds(c: Config) -> Conflicts:
    prompts, responses, limit = c.train.prompts_per_step, c.rollout.group_size, c.max_trained_length
    longest = c.rollout.max_response_length
    if c.round.tail_batching != "off" and c.launched == (prompts, responses):
        needed = f"{prompts} prompts x {responses} responses"
        yield "round.eta", f"over-provisions nothing: {needed} are needed and launched; raise it"
    if c.train.engine != "emulated" and limit > c.train.max_tokens_per_gpu:
        keys = "data.max_prompt_length + rollout.max_response_length"
        one = f"sequence, {keys} = {c.data.max_prompt_length} + {longest}"
        one = f"episode, environment.max_length = {limit}" if c.environment.enabled else one
        yield "train.max_tokens_per_gpu", f"is less than one {one}"
    if c.algorithm.overlong_buffer > longest:
        yield "algorithm.overlong_buffer", f"is more than rollout.max_response_length = {longest}"
    if c.algorithm.dynamic_sampling and responses == 1:
        one = "with rollout.group_size = 1 the rewards of a group are always equal"
        yield "algorithm.dynamic_sampling", f"{one}, and every group would be replaced"
    if prompts % c.train.mini_batches:
        yield "train.mini_batches", f"must divide train.prompts_per_step = {prompts}"


def _algorithm(c: Config) -> Conflicts:
    algorithm, bounds, ahead = c.algorithm, c.algorithm.tis_bounds, c.async_.max_staleness
    if bounds == "off" and algorithm.old_logprobs == "trainer" and (c.continues or ahead):
        what = f"async.max_staleness = {ahead} trains" if ahead else "deferred responses have"
        leave = "leave it out" if ahead else "leave it out, or set round.deferred = 'restart'"
        biased = "tokens of older versions, which is biased without importance weights"
        yield "algorithm.tis_bounds", f"{what} {biased}; {leave}"
    if c.rollout.group_size == 1 and algorithm.name not in UNGROUPED:
        compares = f"algorithm.name = {algorithm.name!r} compares the responses to a prompt"
        others = " or ".join(sorted(UNGROUPED))
        yield "rollout.group_size", f"{compares} with each other; raise it, or choose {others}"
    if algorithm.name == "rloo" and algorithm.loss_norm not in (None, "sequence"):
        one = "to rloo a response is one action with one loss, whatever its length"
        yield "algorithm.loss_norm", f"{one}; leave it out"
    if algorithm.overlong_penalty != 1 and not algorithm.overlong_buffer:
        yield "algorithm.overlong_penalty", "penalises nothing with algorithm.overlong_buffer = 0"
    if algorithm.old_logprobs == "rollout" and isinstance(bounds, tuple):
        why = "with algorithm.old_logprobs = 'rollout' there is nothing to weigh"
        yield "algorithm.tis_bounds", f"{why}; leave it out"
    if c.tis_bounds(is_float32=False) is None:
        off = "algorithm.tis_bounds = 'off' or algorithm.old_logprobs = 'rollout'"
        for key, default in (("tis_level", "token"), ("tis_mode", "truncate")):
            if getattr(algorithm, key) != default:
                yield f"algorithm.{key}", f"there are no weights with {off}"


def _lora(c: Config) -> Conflicts:
    lora, rank = c.model.lora, c.key_value("model.lora.rank")
    for key in ("alpha", "targets"):
        if not lora.rank and getattr(lora, key) != getattr(Lora(), key):
            yield f"model.lora.{key}", "there are no adapters with model.lora.rank = 0"
    for target in lora.targets:
        if "," in target:
            names = json.dumps([name.strip() for name in target.split(",")])
            yield "model.lora.targets", f"{target!r} is one name; several are a list: {names}"
    if not lora.rank:
        return
    for which in ("train", "rollout"):
        if getattr(c, which).engine == "emulated":
            why = f"{which}.engine = 'emulated' has no model that could have adapters"
            yield "model.lora.rank", f"{why}; leave it out"
    for key in sorted(LORA_ARGS.intersection(c.rollout.engine_args)):
        yield "rollout.engine_args", f"{key}: follows from {rank}; leave it out"
    if c.weights.broadcast == "always":
        small = f"with {rank} a version is small and pulled by every node"
        yield "weights.broadcast", f"{small}; leave it out"


def _devices(c: Config) -> Conflicts:
    train, groups = c.train, c.train.prompts_per_step // c.train.mini_batches
    if train.world % train.replicas:
        ranks = f"train.nodes x train.ranks = {train.world}"
        yield "train.replicas", f"must divide {ranks}: each replica has as many ranks"
    if train.replicas > groups:
        update = f"train.prompts_per_step / train.mini_batches = {groups}"
        yield "train.replicas", f"each accumulates whole groups, and an update has {update} of them"
    for key in ("train", "rollout"):
        devices: tuple[int, ...] = getattr(c, key).devices
        if twice := [d for d in devices if devices.count(d) > 1]:
            yield f"{key}.devices", f"names GPU {twice[0]} twice"
    if train.devices and len(train.devices) != train.ranks:
        yield "train.devices", f"one GPU for each of train.ranks = {train.ranks} is needed"
    if len(c.rollout.devices) % (size := c.gpus_per_engine):
        engine = f"an engine takes {size} GPUs (tensor_parallel_size of rollout.engine_args)"
        yield "rollout.devices", f"{engine}, so a multiple of that is needed"


def _rewards(c: Config) -> Conflicts:
    reward, functions, defaults = c.reward, c.reward_functions, Reward()
    if reward.weights and len(reward.weights) != len(reward.functions):
        num = f"{len(reward.weights)} weights for {len(reward.functions)}"
        yield "reward.weights", f"{num} reward.functions"
    if not reward.functions and not c.environment.enabled:
        yield "reward.functions", "at least one is needed"
    for key in OF_OWN_FUNCTIONS:
        is_given = getattr(reward, key) != getattr(defaults, key)
        if is_given and not any(map(is_own_function, functions)):
            own = 'and no "path.py:function" is among reward.functions'
            yield f"reward.{key}", f"is for functions of your own, {own}"
    if "regex" in functions and not reward.regex:
        compared = "its first group is compared with the answer"
        yield "reward.regex", f"is needed for the reward 'regex', e.g. '#### (.+)': {compared}"
    if "code" in functions and reward.timeout_s < LONGEST_TEST_S:
        test = f'a test of the reward "code" may take {LONGEST_TEST_S:g} s'
        yield "reward.timeout_s", f"{test}, and a response has several: set it to 60 or more"
    if "judge" in functions and not (reward.judge.url and reward.judge.model):
        yield "reward.functions", '"judge" needs reward.judge.url and reward.judge.model'
    if "judge" in functions and reward.judge.concurrency < reward.workers:
        workers = c.key_value("reward.workers")
        yield "reward.judge.concurrency", f"is less than {workers}, which make a call each"
    for name in ("code", "judge"):
        section: Section = getattr(reward, name)
        for key, value in section:
            if name not in functions and value != getattr(getattr(defaults, name), key):
                yield f"reward.{name}.{key}", f'cannot act without "{name}" in reward.functions'


def _environment(c: Config) -> Conflicts:
    environment, longest = c.environment, c.rollout.max_response_length
    given = {key for key, value in environment if value != getattr(Environment(), key)}
    if not environment.enabled:
        for key in sorted(given):
            yield f"environment.{key}", "cannot act without environment.source, program or tools"
        return
    if environment.has_agents:
        for key in ("source", "tools", "mcp", "args"):
            if key in given:
                agents = "environment.program or endpoint"
                yield f"environment.{key}", f"agents bring their own; leave out this or {agents}"
        if environment.resume == "snapshot":
            yield "environment.resume", "an agent cannot be saved; it can be replayed"
        try:
            if environment.program and not shlex.split(environment.program):
                yield "environment.program", "names no program"
        except ValueError as e:
            yield "environment.program", f"cannot be split into words: {e}"
    if split_endpoint(environment.endpoint) is None:
        yield "environment.endpoint", "must look like 127.0.0.1:8000 or 127.0.0.1:*"
    for key, names in (("source", (environment.source,)), ("tools", environment.tools)):
        for name in filter(None, names):
            if not all(part.strip() for part in name.rpartition(":")):
                known = "FILE.py:NAME or package.module:NAME"
                yield f"environment.{key}", f"{name!r} must look like {known}"
    if environment.args and not environment.source:
        yield "environment.args", "are those of a class, and there is no environment.source"
    for server in environment.mcp:
        if bool(server.command) == bool(server.url):
            yield "environment.mcp", "each table needs either a command or a url"
    if environment.max_turn_length > longest:
        limit = f"rollout.max_response_length = {longest}, which all turns share"
        yield "environment.max_turn_length", f"is more than {limit}"
    if 0 < environment.max_length <= longest:
        limit = f"rollout.max_response_length = {longest}"
        yield "environment.max_length", f"leaves no room for observations beside {limit}; raise it"
    for key, sets in (("tasks", c.data.all_sets), ("eval_tasks", c.eval_sets)):
        is_made = any(one.path.startswith(TASKS) for one in sets)
        if key in given and not is_made and not (c.eval.checkpoint and key == "tasks"):
            made = "rows are made for a class or a program only, and beside no other data"
            yield f"environment.{key}", f"{made}; leave it out"
    for key in (
        "continue_final",
        "too_long",
        *(("system_prompt",) * environment.has_first_messages),
    ):
        if getattr(c.data, key) != getattr(Data(), key):
            yield f"data.{key}", "cannot act: the environment makes the first messages"


def _cost(c: Config) -> Conflicts:
    prices, scale, defaults = c.prices, c.scale, ScaleSection()
    both = ("reserved_per_hour", "preemptible_per_hour")
    for key, other in (both, both[::-1]):
        if getattr(prices, key) is not None and getattr(prices, other) is None:
            yield f"prices.{key}", f"no cost is known without prices.{other}; give it (0 = free)"
    for key in ("command", "drain"):
        if getattr(scale, key) and not scale.max:
            yield f"scale.{key}", "no number of nodes is ever wanted with scale.max = 0; raise it"
    for key in ("every_s", "timeout_s"):
        if getattr(scale, key) != getattr(defaults, key) and not scale.command:
            yield f"scale.{key}", "there is no scale.command to run"
    if scale.max and not (scale.command or scale.drain):
        yield "scale.max", "has no effect without scale.command or scale.drain"


RULES = (
    _sets,
    _general,
    _shared_devices,
    _sizes,
    _rounds,
    _algorithm,
    _lora,
    _devices,
    _rewards,
    _environment,
    _cost,
)
