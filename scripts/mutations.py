"""Bugs that `scripts/mutate` plants in lightrl/core, one at a time; every one must be caught by a test."""

from typing import NamedTuple


class Mutation(NamedTuple):
    bug: str
    file: str  # in lightrl/core
    text: str  # found there exactly once
    instead: str


MUTATIONS = [
    # What comes from nodes
    Mutation(
        "news of an attempt that was given up is taken",
        "ledger.py",
        "response.node is node and response.attempt == item.attempt",
        "response.node is node",
    ),
    Mutation(
        "tokens of a node where the response does not run are taken",
        "ledger.py",
        "response.node is node and response.attempt == item.attempt",
        "response.node is not None and response.attempt == item.attempt",
    ),
    Mutation(
        "overlap is not trimmed", "ledger.py", "            if known:\n", "            if known > 99:\n"
    ),
    Mutation(
        "hole is accepted",
        "ledger.py",
        "        if known < 0:  # a hole",
        "        if known < -99:  # a hole",
    ),
    Mutation(
        "attempt with a hole is not told to stop",
        "ledger.py",
        "self.counters.holes += 1\n            self._abort(response, out)\n",
        "self.counters.holes += 1\n",
    ),
    Mutation(
        "digest of a chunk is not checked",
        "ledger.py",
        "if chunk.digest != ",
        "if False and chunk.digest != ",
    ),
    Mutation(
        "version of tokens is not checked",
        "ledger.py",
        "if not round.step - settings.max_staleness <= version <= round.step:",
        "if not 0 <= version <= round.step + 99:",
    ),
    Mutation(
        "tokens one version too old are taken",
        "ledger.py",
        "if not round.step - settings.max_staleness <= version",
        "if not round.step - settings.max_staleness - 1 <= version",
    ),
    Mutation(
        "one token more than allowed is taken",
        "ledger.py",
        "if held + num_new > settings.max_response_tokens:",
        "if held + num_new > settings.max_response_tokens + 1:",
    ),
    Mutation(
        "confirmed digest is not compared", "fleet.py", "if ready.digest != published.digest:", "if False:"
    ),
    Mutation(
        "version that is not the published one counts as confirmed",
        "fleet.py",
        "if ready.policy_version != published.policy_version:",
        "if ready.policy_version > published.policy_version:",
    ),
    Mutation(
        "late score of an earlier attempt counts",
        "ledger.py",
        "if response is None or response.attempt != attempt or response.scored:",
        "if response is None or response.scored:",
    ),
    Mutation(
        "second score replaces the first",
        "ledger.py",
        "if response is None or response.attempt != attempt or response.scored:",
        "if response is None or response.attempt != attempt:",
    ),
    Mutation(
        "placing a response does not begin a new attempt",
        "ledger.py",
        "response.attempt += 1",
        "response.attempt += 0",
    ),
    # Where work is
    Mutation(
        "what is resumed goes to the end of the queue",
        "ledger.py",
        "self._enqueue(response, resumed=True)",
        "self._enqueue(response)",
    ),
    Mutation(
        "responses of a lost node are dropped",
        "ledger.py",
        "        for response in leaving:\n            self._requeue(response)\n",
        "        node.running.clear()\n",
    ),
    Mutation(
        "slots are exceeded by one",
        "placement.py",
        "if best.running < best.node.slots:",
        "if best.running <= best.node.slots:",
    ),
    Mutation(
        "draining node still gets work",
        "fleet.py",
        "self._move(node, NodeState.DRAINING)",
        "pass",
    ),
    Mutation(
        "node that left keeps being listed",
        "fleet.py",
        "if self.ready.pop(node.name, None) is not None:",
        "if to is not NodeState.GONE and self.ready.pop(node.name, None) is not None:",
    ),
    Mutation(
        "first node to load takes the work of those that still load",
        "ledger.py",
        "min(sum(n.free for n in nodes), self._unreserved(nodes))",
        "sum(n.free for n in nodes)",
    ),
    Mutation(
        "nodes are ordered once, for the longest response",
        "placement.py",
        "if not self.tokens / SAME_LENGTH <= tokens <= self.tokens:",
        "if not self.tokens:",
    ),
    Mutation(
        "idle node is looked at once and never again",
        "ledger.py",
        "if busy and not n.running}",
        "if False}",
    ),
    Mutation(
        "moved response loses its tokens", "ledger.py", "prefix=encode(response.tokens),", 'prefix=b"",'
    ),
    Mutation(
        "moved response may run as long as a new one",
        "ledger.py",
        "max_new_tokens=self._settings.max_response_tokens - len(response.tokens),",
        "max_new_tokens=self._settings.max_response_tokens,",
    ),
    Mutation(
        "rebalancing moves to nodes that do not serve",
        "ledger.py",
        "nodes = [n for n in self._fleet.ready.values() if n.speed",
        "nodes = [n for n in self._fleet.nodes.values() if n.speed",
    ),
    Mutation(
        "rebalancing does not abort at the old node",
        "ledger.py",
        "            self._abort(response, out)\n            self._release(response)\n"
        "            response.move(R",
        "            self._release(response)\n            response.move(R",
    ),
    Mutation(
        "migration cannot be switched off",
        "coordinator.py",
        "self.settings.migration and self.ledger.has_idle_room",
        "self.ledger.has_idle_room",
    ),
    Mutation(
        "chunk of an idle time counts as slow decoding",
        "state.py",
        "self.chunk_at = now if self.running else None",
        "self.chunk_at = now",
    ),
    # Races
    Mutation(
        "winners are those whose score arrives first",
        "race.py",
        'by_clock = round.races and settings.tail.race == "clock"\n    bisect',
        "by_clock = round.races\n    bisect",
    ),
    Mutation(
        "ties in a group are broken by arrival",
        "race.py",
        "else len(response.tokens), response.index))",
        "else len(response.tokens), response.index))\n"
        "    group.finishers.sort(key=lambda f: f[0] * 1000 + (f[1] + round.num_scores) % 7)",
    ),
    Mutation(
        "ties between groups are broken the other way",
        "race.py",
        "bisect.insort(round.finishers, (_last_kept(group)[0], group.position))",
        "bisect.insort(round.finishers, (_last_kept(group)[0], group.position))\n"
        "    round.finishers.sort(key=lambda f: (f[0], -f[1]))",
    ),
    Mutation(
        "sibling is aborted one token too early",
        "race.py",
        "return n >= group.bound or n >= group.round.cut",
        "return n + 1 >= group.bound or n >= group.round.cut",
    ),
    Mutation(
        "sibling is aborted one token too early while it decodes",
        "ledger.py",
        "if held >= group.bound or held >= round.cut:",
        "if held + 1 >= group.bound or held >= round.cut:",
    ),
    Mutation(
        "group is aborted one token too early",
        "race.py",
        "return n >= group.bound or n >= group.round.cut",
        "return n >= group.bound or n + 1 >= group.round.cut",
    ),
    Mutation(
        "loser goes on one token too long",
        "ledger.py",
        "if held >= group.bound or held >= round.cut:",
        "if held > group.bound or held > round.cut:",
    ),
    Mutation(
        "cut is that of the group before the last",
        "race.py",
        "round.finishers[round.needed - 1][0]\n",
        "round.finishers[max(0, round.needed - 2)][0]\n",
    ),
    Mutation(
        "finished response that is at the cut has lost",
        "race.py",
        "return n > group.round.cut or",
        "return n >= group.round.cut or",
    ),
    Mutation(
        "too many groups are certain",
        "race.py",
        "rivals, key) < round.needed",
        "rivals, key) <= round.needed",
    ),
    Mutation(
        "an unfinished rival is believed to finish one token later than it may",
        "race.py",
        "(not r.finish_reason)",
        "2 * (not r.finish_reason)",
    ),
    Mutation(
        "groups of one event are certified one by one",
        "steps.py",
        "            elif race.is_out(group):\n                self._take_out(group)\n",
        "            elif race.is_out(group):\n                self._take_out(group)\n"
        "            self._certify(group.round)\n",
    ),
    Mutation(
        "response without a reward counts as finished",
        "ledger.py",
        "if reward is not None or group.round.is_eval:",
        "if True:",
    ),
    Mutation(
        "siblings that cannot matter any more go on",
        "ledger.py",
        "if not group.num_open or race.is_out(group):",
        "if not group.num_open:",
    ),
    Mutation(
        "group with too few rewards is dropped by a race",
        "steps.py",
        "        if not group.round.races:\n            self._drop(group)\n            return\n",
        "        if not group.round.races or not race.has_lost(group.responses[0]):\n"
        "            self._drop(group)\n            return\n",
    ),
    Mutation(
        "deterministic order is ignored", "race.py", "if settings.deterministic else won", "if False else won"
    ),
    Mutation(
        "surplus is not launched",
        "state.py",
        "round(self.tail.eta_prompts * self.prompts_per_step)",
        "self.prompts_per_step",
    ),
    Mutation(
        "one response more than needed is kept",
        "state.py",
        "self.finishers[: self.round.group_size])",
        "self.finishers[: self.round.group_size + 1])",
    ),
    # Prompts
    Mutation(
        "put-off queue is last in, first out", "backlog.py", "self.put_off.popleft()", "self.put_off.pop()"
    ),
    Mutation(
        "prompt that waits is drawn again",
        "steps.py",
        "{g.prompt.id for g in round.groups.values()} | {p.prompt.id for p in self.backlog.put_off}",
        "{g.prompt.id for g in round.groups.values()}",
    ),
    Mutation("prompt that was held back is lost", "backlog.py", "self.spare.append(prompt)", "pass"),
    Mutation(
        "epoch ends without a flush",
        "rounds.py",
        "backlog.epoch_left < settings.prompts_launched and (backlog.put_off or backlog.epoch_left)",
        "False",
    ),
    Mutation(
        "long round waits for one prompt too many",
        "rounds.py",
        "len(backlog.put_off) >= settings.prompts_per_step",
        "len(backlog.put_off) > settings.prompts_per_step",
    ),
    Mutation(
        "long round races too", "rounds.py", 'races = kind == "short"', 'races = kind in {"short", "long"}'
    ),
    Mutation(
        "attempts of a prompt put off begin anew",
        "steps.py",
        "attempts = max(r.attempt for r in group.responses)",
        "attempts = 0",
    ),
    Mutation(
        "all of the surplus is put off unseen",
        "rounds.py",
        "(settings.prompts_launched - round.needed) // 2",
        "(settings.prompts_launched - round.needed)",
    ),
    Mutation(
        "dropped flat group counts as one that may be trained",
        "rounds.py",
        "left = round.num_open + len(round.finishers)",
        "left = len(round.groups)",
    ),
    Mutation(
        "flat groups are kept", "race.py", "return len({r.reward for r in group.kept}) <= 1", "return False"
    ),
    # Steps
    Mutation(
        "two rounds are open in synchronous mode",
        "steps.py",
        "            if self._ledger.rounds and not self._settings.max_staleness:\n                return\n",
        "",
    ),
    Mutation(
        "admission is one step too early",
        "staleness.py",
        "return (max_staleness + version + 1)",
        "return (max_staleness + version + 2)",
    ),
    Mutation(
        "admission is one step too late",
        "staleness.py",
        "return (max_staleness + version + 1)",
        "return (max_staleness + version)",
    ),
    Mutation(
        "oldest version is taken for the newest",
        "staleness.py",
        "version - max(versions), version - min(versions)",
        "version - min(versions), version - max(versions)",
    ),
    Mutation(
        "training does not wait for an evaluation",
        "steps.py",
        "                    return  # the evaluation waits",
        "                    pass  # the evaluation waits",
    ),
    Mutation(
        "last shard is never sent",
        "trainee.py",
        "last = round.state is RoundState.CLOSED",
        "last = False",
    ),
    Mutation(
        "last shard is sent twice",
        "steps.py",
        "        self._send_accepted(round)\n        self.out.append(CloseRound(round))",
        "        self._send_accepted(round)\n" * 2 + "        self.out.append(CloseRound(round))",
    ),
    Mutation(
        "groups are sent to the trainer again with the next shard",
        "trainee.py",
        "round.num_sent += len(groups)",
        "round.num_sent = len(groups)",
    ),
    Mutation(
        "steps of later rounds are sent before their turn",
        "steps.py",
        "        if round is self.training():\n            self.trainee.send(",
        "        if True:\n            self.trainee.stands_at = round.step\n            self.trainee.send(",
    ),
    Mutation(
        "stopped run sends the trainer the next step",
        "steps.py",
        "        if self._is_trained():\n            self._close_step(now)\n\n",
        "        if self._is_trained():\n            self._close_step(now)\n"
        "            if (upcoming := self.training()) is not None:\n"
        "                self._send_accepted(upcoming)\n\n",
    ),
    # Recovery
    Mutation(
        "score of an earlier process is forgotten",
        "recovery.py",
        "core.ledger.score(response.id, response.attempt, fact.reward, fact.failure, self._out)",
        "pass",
    ),
    Mutation(
        "late score of a restated round comes first",
        "recovery.py",
        "[*(r for _, r in counted), *failed, *late]",
        "[*late, *failed, *(r for _, r in counted)]",
    ),
    Mutation(
        "attempt of a score is not known again",
        "recovery.py",
        "            response.attempt = max(response.attempt, fact.attempt)\n",
        "            response.attempt = 0\n",
    ),
    Mutation(
        "restated round that was closed is open again",
        "recovery.py",
        "            if round in self._closed:\n",
        "            if False:\n",
    ),
    Mutation(
        "what restated rounds put off is put off twice",
        "recovery.py",
        "close_round(round, self._now)\n        self._stand()\n",
        "close_round(round, self._now)\n",
    ),
    Mutation(
        "restated response does not say how it ended",
        "recovery.py",
        "finish = response.finish_reason if is_last else None",
        "finish = None",
    ),
    Mutation(
        "rounds opened before are opened again",
        "recovery.py",
        "        core.steps.opened += not round.is_eval\n",
        "",
    ),
    Mutation(
        "response whose tokens come back after its race is lost goes on",
        "ledger.py",
        "        elif race.has_lost(response):\n            self.give_up(response, out)\n",
        "",
    ),
    Mutation(
        "response that runs elsewhere is taken back as well",
        "ledger.py",
        "waits = response is not None and response.state is ResponseState.QUEUED",
        "waits = response is not None and not response.settled",
    ),
    Mutation(
        "order that was lost with the connection is waited for",
        "ledger.py",
        "if claims.get(response.id) != response.attempt:",
        "if False:",
    ),
    Mutation(
        "what a silent node finished is taken whatever its version",
        "ledger.py",
        "or not 0 <= staleness <= self._settings.max_staleness:",
        "or False:",
    ),
    Mutation(
        "response that was queued again waits twice",
        "queue.py",
        " and number == response.queued_as",
        "",
    ),
    Mutation(
        "process that was replaced may come back",
        "fleet.py",
        "return hello.incarnation in self._replaced.get(hello.node, ())",
        "return False",
    ),
    # A trainer that was lost
    Mutation(
        "step that was published is trained again as it comes",
        "trainee.py",
        "if self.stands_at < published.policy_version:",
        "if False:",
    ),
    Mutation(
        "trainer that is back does not get what the lost one had",
        "trainee.py",
        "round.num_sent = round.num_shards = 0",
        "pass",
    ),
    Mutation(
        "run forgets that it waits for its trainer",
        "trainee.py",
        "        self.missing_since = now\n",
        "        self.missing_since = None\n",
    ),
    Mutation(
        "another version under the same number is served",
        "coordinator.py",
        "        if known != digest:\n",
        "        if False:\n",
    ),
    Mutation(
        "run ends without the checkpoint of its last step",
        "coordinator.py",
        "if not self.fleet.nodes and not self._awaits_trainer:",
        "if not self.fleet.nodes:",
    ),
    Mutation(
        "lost trainer is named as holder",
        "fleet.py",
        "                self._forget_holders()\n",
        "",
    ),
]
