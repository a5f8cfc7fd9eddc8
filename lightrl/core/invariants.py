"""What must hold after every event. Reads the whole state: for tests, in production on demand."""

from typing import TYPE_CHECKING

from lightrl.core.state import GroupState, NodeState, Response, ResponseState, Round, RoundState
from lightrl.errors import InvariantViolation

if TYPE_CHECKING:
    from lightrl.core.coordinator import Coordinator


def check(core: "Coordinator") -> None:
    """Raises InvariantViolation naming the first broken invariant. O(responses + nodes)."""
    _nodes(core)
    if core.ledger.round is not None:
        for response in core.ledger.responses.values():
            _response(core, core.ledger.round, response)
        _round(core, core.ledger.round)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise InvariantViolation(text)


def _nodes(core: "Coordinator") -> None:
    seen: set[str] = set()
    for node in core.fleet.nodes.values():
        _require(node.state is not NodeState.GONE, f"{node.name} is gone but listed")
        _require(
            len(node.running) <= node.slots, f"{node.name} runs {len(node.running)} of {node.slots} slots"
        )
        for response in node.running:
            _require(response not in seen, f"{response} runs in two places")
            seen.add(response)
            held = core.ledger.responses.get(response)
            _require(held is not None and held.node == node.name, f"{response} is not where {node.name} says")
        if node.state is NodeState.READY and "rollout" in node.roles:
            published = core.fleet.published
            _require(
                published is not None and node.policy_version == published.policy_version,
                f"{node.name} is ready with version {node.policy_version}, not the published one",
            )
    running = {r.id for r in core.ledger.responses.values() if r.state is ResponseState.RUNNING}
    _require(running == seen, f"running responses and nodes differ: {sorted(running ^ seen)[:3]}")


def _response(core: "Coordinator", round: Round, r: Response) -> None:
    _require((r.node is not None) == (r.state is ResponseState.RUNNING), f"{r.id} is {r.state} at {r.node}")
    _require(len(r.tokens) == len(r.logprobs), f"{r.id}: tokens and logprobs differ in length")
    _require(sum(n for _, n in r.spans) == len(r.tokens), f"{r.id}: version spans do not cover its tokens")
    _require(len(r.tokens) <= core.settings.max_response_tokens, f"{r.id} is too long")
    for version, _ in r.spans:
        _require(version == round.policy_version, f"{r.id} has tokens of version {version}")
    _require(not r.scored or r.state is ResponseState.DONE, f"{r.id} is scored but {r.state}")


def _round(core: "Coordinator", round: Round) -> None:
    groups = round.groups.values()
    settled = {GroupState.SCORED, GroupState.TRAINED, GroupState.DROPPED}
    num_settled = sum(g.state in settled for g in groups)
    _require(num_settled == round.num_settled, f"step {round.step}: {num_settled} groups settled")
    if round.state is not RoundState.FILLING:
        prompts = {(g.prompt.id, g.prompt.epoch) for g in groups}
        _require(len(prompts) == len(round.groups), f"step {round.step}: a prompt twice in one epoch")
    held = sum(len(g.responses) for g in groups)
    _require(
        held == len(core.ledger.responses),
        f"step {round.step}: {len(core.ledger.responses)} of {held} responses held",
    )
    for group in groups:
        _require(len(group.responses) == round.group_size, f"{group.id} has {len(group.responses)} responses")
        if group.state in {GroupState.SCORED, GroupState.TRAINED} and not round.is_eval:
            unscored = [r.id for r in group.responses if r.reward is None]
            _require(not unscored, f"{group.id} is {group.state} without rewards for {unscored}")
    if round.state in {RoundState.CLOSED, RoundState.TRAINED}:
        _require(num_settled == len(groups), f"step {round.step} closed with open groups")
    if round.state is RoundState.RUNNING:
        queued = {r.id for r in core.ledger.responses.values() if r.state is ResponseState.QUEUED}
        _require(queued <= set(core.ledger.queue), f"lost: {sorted(queued - set(core.ledger.queue))[:3]}")
