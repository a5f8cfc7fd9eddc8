"""What must hold in a core after every event."""

from itertools import pairwise
from typing import TYPE_CHECKING

from lightrl.core.nodes.fleet import MAX_WEIGHTS_FAILURES
from lightrl.core.rounds import race, rounds
from lightrl.core.state import (
    OVER,
    RESTING,
    UNFINISHED,
    GroupState,
    NodeState,
    Response,
    ResponseState,
    Round,
    RoundState,
)
from lightrl.core.weights.broadcasts import Phase
from lightrl.core.weights.weight_sources import PULLING
from lightrl.errors import InvariantViolation

if TYPE_CHECKING:
    from lightrl.core.coordinator import Coordinator

FINAL = {GroupState.ACCEPTED, GroupState.TRAINED, GroupState.DEFERRED, GroupState.DROPPED}


def check(core: "Coordinator") -> None:
    """Raise InvariantViolation naming the first broken invariant. O(responses + nodes)."""
    _nodes(core)
    _sources(core)
    _broadcast(core)
    _devices(core)
    _sizes(core)
    _require(len(core.table.rounds) <= core.settings.max_staleness + 1, "too many rounds are open")
    for round in core.table.rounds:
        _round(core, round)
        for group in round.groups.values():
            for response in group.responses:
                _response(core, round, response)
    _places(core)
    _prompts(core)
    _version(core)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise InvariantViolation(text)


def _nodes(core: "Coordinator") -> None:
    published = core.fleet.published
    for node in core.fleet.nodes.values():
        _require(node.state is not NodeState.GONE, f"{node.name} is gone but listed")
        _require(
            len(node.running) <= node.slots,
            f"{node.name} runs {len(node.running)} of {node.slots} slots",
        )
        serves = node.state is NodeState.READY and "rollout" in node.roles
        if serves:
            _require(
                published is not None and node.policy_version == published.policy_version,
                f"{node.name} is ready with version {node.policy_version}, not the published one",
            )
        _require(
            serves == (core.fleet.ready.get(node.name) is node),
            f"{node.name} is {node.state} and listed wrongly",
        )
        updating = core.fleet.updating.get(node.name) is node
        _require(
            updating == (node.state is NodeState.UPDATING),
            f"{node.name} is {node.state} and listed wrongly",
        )
    known = core.fleet.nodes.keys()
    _require(
        core.fleet.ready.keys() | core.fleet.updating.keys() <= known, "a node that left is listed"
    )
    for nodes, share in (
        (core.fleet.updating, core.fleet.share_updating),
        (core.fleet.ready, core.fleet.share_ready),
    ):
        shares = sum(n.share for n in nodes.values())
        _require(abs(share - shares) <= 1e-6 * max(1.0, shares), "shares do not add up")
    num_preemptible = sum(n.is_preemptible for n in core.fleet.nodes.values())
    _require(core.fleet.num_preemptible == num_preemptible, "preemptible nodes are miscounted")


def _sources(core: "Coordinator") -> None:
    """Nodes that are listed as sources can serve; nodes that need the version were sent a source,
    if there is any."""
    nodes, sources, published = core.fleet.nodes, core.fleet.sources, core.fleet.published
    for ring, holds in ((sources.complete, True), (sources.partial, False)):
        for name in ring:
            _require(name in nodes and name in sources.endpoints, f"{name} cannot be a source")
            node = nodes[name]
            is_newest = published is not None and node.policy_version == published.policy_version
            has_all = is_newest and node.has_file
            _require(has_all == holds, f"{name} is listed as another source than it is")
            _require(not node.receives, f"{name} gets no file, but is listed as a source")
    for name in sources.assigned.keys() | sources.endpoints.keys():
        _require(name in nodes, f"{name} is not there, but known as a source or receiver")
    for name, assigned in sources.assigned.items():
        is_joining = nodes[name].state is NodeState.JOINING
        pulls = sources.is_pulling(nodes[name]) or (is_joining and not assigned)
        _require(pulls, f"{name} is {nodes[name].state} and pulls")
        _require(name not in assigned, f"{name} is to pull from itself")
        there = {*sources.complete, *sources.partial, sources.trainer}
        _require(assigned <= there, f"{name} has sources that are no more")
    if published is None or not published.manifest_bytes:
        return
    has_trainer = sources.trainer is not None and sources.trainer in sources.endpoints
    for node in nodes.values():
        must_know = sources.is_pulling(node) or node.state is NodeState.JOINING
        if "rollout" not in node.roles or node.receives or not must_know:
            continue
        if node.takes_turns and node.policy_version == published.policy_version:
            continue  # it wakes with the version that it has
        is_there = has_trainer or bool(sources.complete.keys() - {node.name})
        was_asked_to_go = node.weights_failures >= MAX_WEIGHTS_FAILURES
        if is_there and node.name != sources.trainer and not was_asked_to_go:
            _require(bool(sources.assigned[node.name]), f"{node.name} was sent no source")


def _broadcast(core: "Coordinator") -> None:
    """A node that receives is a member of the one group; all members are present."""
    fleet, broadcasts = core.fleet, core.fleet.broadcasts
    group, phase = broadcasts.group, broadcasts.phase
    receiving = {n.name for n in fleet.nodes.values() if n.receives}
    _require(receiving == broadcasts.receiving, "some wait for a group, and it is not for them")
    _require((group is None) == (phase is Phase.NONE), f"a group that is {phase}")
    is_open = phase in {Phase.SENDING, Phase.IDLE}
    _require(bool(broadcasts.name) == is_open, f"a group with a name is {phase}")
    is_under_way = phase in {Phase.OPENING, Phase.SENDING}
    _require(bool(receiving) == is_under_way, f"some receive from a group that is {phase}")
    if group is None:
        return
    _require(fleet.sources.trainer in fleet.nodes, "a group without a trainer")
    for name, (incarnation, _) in group.members.items():
        node = fleet.nodes.get(name)
        if node is None or node.incarnation != incarnation:
            raise InvariantViolation(f"{name} is a member, but not there")
        waits = node.state in {*PULLING, NodeState.JOINING}
        _require(waits == node.receives, f"{name} is {node.state} and a member")
        _require(waits or node.state is NodeState.READY, f"{name} is {node.state} and a member")
        _require(name not in fleet.sources.assigned, f"{name} is a member, and pulls")


def _devices(core: "Coordinator") -> None:
    """No device is on two sides: where engines sample, no shard has left for the ranks since they
    were parked."""
    devices, nodes = core.fleet.devices, core.fleet.nodes
    shared = {n.name for n in nodes.values() if n.shares}
    _require(devices.nodes.keys() == shared, "nodes that share are listed wrongly")
    for node in devices.nodes.values():
        if node.state is NodeState.RELEASED:
            _require(not node.running, f"{node.name} is released and runs something")
        asleep = node.state is NodeState.RELEASED
        leaves = node.state is NodeState.DRAINING
        _require(leaves or node.is_asleep == asleep, f"{node.name} is {node.state}, asleep or not")
        trains = node.name in devices.wanted and not core.shutdown.has_begun
        _require(
            not trains or node.state in {*RESTING, NodeState.DRAINING},
            f"{node.name} is {node.state}, and its devices train",
        )


def _sizes(core: "Coordinator") -> None:
    """Of engines of several sizes over the same devices only those of one size have them."""
    nodes, size = core.fleet.devices.parallel, core.sizes.size
    listed = {n.name for n in core.fleet.nodes.values() if n.parallel}
    _require(nodes.keys() == listed, "nodes that take turns are listed wrongly")
    for node in nodes.values():
        if node.state is NodeState.RELEASED:
            _require(not node.running, f"{node.name} sleeps and runs something")
            _require(node.is_asleep, f"{node.name} sleeps and is awake")
    if core.shutdown.has_begun:
        return
    for node in nodes.values():
        rests = node.state in {*RESTING, NodeState.DRAINING}
        _require(
            rests or node.parallel == size,
            f"{node.name} has {node.parallel} devices of which engines of {size} sample",
        )


def _version(core: "Coordinator") -> None:
    """The newest version is of a step that is done, or of the one whose round has closed."""
    published = core.fleet.published
    ahead = published is not None and published.policy_version > core.step
    _require(
        not ahead or core.steps.has_closed(core.step),
        f"a version is published before step {core.step} closed",
    )


def _places(core: "Coordinator") -> None:
    """A response is in exactly one place: at one node, in the queue, or held here."""
    seen: set[str] = set()
    for node in core.fleet.nodes.values():
        for name, response in node.running.items():
            _require(name not in seen, f"{name} runs in two places")
            seen.add(name)
            _require(
                core.table.responses.get(name) is response,
                f"{name} runs but is not of an open round",
            )
            _require(response.node is node, f"{name} is not where {node.name} says")
        context = sum(r.context for r in node.running.values())
        _require(node.context == context, f"{node.name} holds {context}, not {node.context} tokens")
    held = core.table.responses.values()
    running = {r.id for r in held if r.state is ResponseState.RUNNING}
    _require(running == seen, f"running responses and nodes differ: {sorted(running ^ seen)[:3]}")
    waiting = {id(r) for r in (*core.table.queue.waiting(), *core.table.unbegun.waiting())}
    lost = [r.id for r in held if r.state is ResponseState.QUEUED and id(r) not in waiting]
    _require(not lost, f"lost: {lost[:3]}")
    _episodes(core)


def _episodes(core: "Coordinator") -> None:
    """An episode that waits is at one environment, or about to be sent to one."""
    table = core.table
    at = {(r.id, n.name) for n in core.fleet.nodes.values() for r in n.episodes.values()}
    bound = {(r.id, r.environment.name) for r in table.responses.values() if r.environment}
    _require(at == bound, f"episodes are not where nodes say: {sorted(at ^ bound)[:3]}")
    for response in table.responses.values():
        is_waiting = response.state is ResponseState.WAITING
        is_known = response.id in table.to_step or response.environment is not None
        _require(not is_waiting or is_known, f"{response.id} waits for nothing")
        inserted = sum(turn.num_inserted for turn in response.turns)
        _require(response.num_inserted == inserted, f"{response.id}: insertions are miscounted")
        is_open = is_waiting or (bool(response.turns) and response.state in UNFINISHED)
        _require(is_open == (response.id in table.open_episodes), f"{response.id}: open or not")


def _response(core: "Coordinator", round: Round, r: Response) -> None:
    _require(
        (r.node is not None) == (r.state is ResponseState.RUNNING),
        f"{r.id} is {r.state} at {r.node}",
    )
    _require(len(r.tokens) == len(r.logprobs), f"{r.id}: tokens and logprobs differ in length")
    covered = all(n > 0 for _, n in r.spans) and sum(n for _, n in r.spans) == r.num_sampled
    _require(covered, f"{r.id}: version spans do not cover its tokens")
    _require(r.num_sampled <= r.group.max_response_tokens, f"{r.id} is too long")
    for version, _ in r.spans:
        oldest = r.group.since if r.carried else round.step
        fresh = oldest - core.settings.max_staleness <= version <= round.step
        _require(fresh, f"{r.id} has tokens of version {version} in step {round.step}")
    _require(not r.scored or r.state is ResponseState.DONE, f"{r.id} is scored but {r.state}")
    _require(not (r.resolved and r.state in UNFINISHED), f"{r.id} is settled but {r.state}")
    _require(
        r.resolved or r.state is not ResponseState.ABORTED, f"{r.id} is aborted but not settled"
    )


def _round(core: "Coordinator", round: Round) -> None:
    name = f"{round.kind} round of step {round.step}"
    num_open = 0
    for group in round.groups.values():
        unsettled = sum(not r.resolved for r in group.responses)
        _require(group.num_open == unsettled, f"{group.id}: {unsettled} responses are open")
        num_open += unsettled > 0
        _require(
            len(group.responses) == rounds.num_launched(core.settings, group),
            f"{group.id} has too few responses",
        )
        if group.state in {GroupState.COMPLETE, GroupState.ACCEPTED, GroupState.TRAINED}:
            skipped = sum(r.scored and r.reward is None for r in group.responses)
            skips = core.settings.skips_unscored or round.is_eval
            least = group.size - skips * skipped
            least = max(least, 0 if round.is_eval else min(race.MIN_COMPARED, group.size))
            _require(
                least <= len(group.kept) <= group.size,
                f"{group.id} keeps {len(group.kept)} responses",
            )
            unscored = [r.id for r in group.kept if not r.scored]
            _require(not unscored, f"{group.id} is {group.state} without rewards for {unscored}")
            _require(
                _has_right_winners(core, round, [r.id for r in group.kept], group.responses),
                f"{group.id} kept others than the first to finish",
            )
        undecided = group.state is GroupState.OPEN and race.is_won(group)
        _require(not undecided, f"{group.id} is complete, but nobody noticed")
    _require(round.num_open == num_open, f"{name}: {num_open} groups are open")
    final = [
        g for g in round.groups.values() if g.state in {GroupState.ACCEPTED, GroupState.TRAINED}
    ]
    if not round.is_eval:
        _require(
            len(final) == len(round.accepted) <= round.needed,
            f"{name}: {len(final)} groups accepted",
        )
        labels = [g.mini_batch for g in round.in_turn]
        whole = round.state not in {RoundState.CLOSED, RoundState.TRAINED} or len(labels) == len(
            final
        )
        in_order = all(a is not None and b in {a, a + 1} for a, b in pairwise(labels))
        _require(whole and in_order, f"{name}: the order of its mini-batches is {labels}")
    if round.state is not RoundState.FILLING and not round.is_eval:
        prompts = {g.prompt.id for g in round.groups.values()}
        _require(len(prompts) == len(round.groups), f"{name}: a prompt twice")
    if round.state in {RoundState.CLOSED, RoundState.TRAINED}:
        done = all(g.state in FINAL or round.is_eval for g in round.groups.values())
        _require(done and not num_open, f"{name} closed with open groups")


def _has_right_winners(
    core: "Coordinator", round: Round, kept: list[str], group: list[Response]
) -> bool:
    """In token space nobody who lost is shorter than one who was kept."""
    if round.races and core.settings.tail.race == "clock":
        return True
    longest = max((r.num_sampled for r in group if r.id in kept), default=0)
    others = [r for r in group if r.id not in kept and (r.reward is not None or not r.scored)]
    return all(r.num_sampled + r.will_grow >= longest for r in others)


def _prompts(core: "Coordinator") -> None:
    """Prompts in = trained + dropped + held, and nobody is held twice."""
    backlog, counters = core.backlog, core.table.counters
    waiting = [(p.prompt.id, p.prompt.epoch) for p in backlog.deferred]
    _require(len(set(waiting)) == len(waiting), "a prompt waits twice")
    held_back = [(p.id, p.epoch) for p in backlog.held_back]
    _require(len(set(held_back)) == len(held_back), "a prompt is held back twice")
    if core.state in OVER:
        return
    in_rounds = sum(
        g.state not in {GroupState.TRAINED, GroupState.DROPPED, GroupState.DEFERRED}
        for r in core.table.rounds
        if not r.is_eval
        for g in r.groups.values()
    )
    done = counters.groups_trained + counters.groups_dropped
    accounted = done + len(backlog.deferred) + len(backlog.held_back) + in_rounds
    _require(
        backlog.num_drawn == accounted,
        f"{backlog.num_drawn} prompts drawn, {accounted} accounted for",
    )
