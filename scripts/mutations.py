"""Bugs that `scripts/mutate` plants in lightrl, one at a time; every one must be caught by a
test."""

from typing import NamedTuple


class Mutation(NamedTuple):
    bug: str
    # in lightrl/
    file: str
    # found there exactly once
    text: str
    instead: str
    # what must catch it, as pytest is told; () = any of tests/core
    tests: tuple[str, ...] = ()


MUTATIONS = [
    # What comes from nodes
    Mutation(
        "news of an attempt that was given up is taken",
        "core/arrivals.py",
        "response.node is node and response.attempt == item.attempt",
        "response.node is node",
    ),
    Mutation(
        "tokens of a node where the response does not run are taken",
        "core/arrivals.py",
        "response.node is node and response.attempt == item.attempt",
        "response.node is not None and response.attempt == item.attempt",
    ),
    Mutation(
        "overlap is not trimmed",
        "core/arrivals.py",
        "            if known:\n",
        "            if known > 99:\n",
    ),
    Mutation(
        "hole is accepted",
        "core/arrivals.py",
        "        if known < 0:  # a hole",
        "        if known < -99:  # a hole",
    ),
    Mutation(
        "attempt with a hole is not told to stop",
        "core/arrivals.py",
        "self._table.counters.holes += 1\n            self._table.abort(response)\n",
        "self._table.counters.holes += 1\n",
    ),
    Mutation(
        "digest of a chunk is not checked",
        "core/arrivals.py",
        "if chunk.digest != ",
        "if False and chunk.digest != ",
    ),
    Mutation(
        "version of tokens is not checked",
        "core/arrivals.py",
        "if not round.step - settings.max_staleness <= version <= round.step:",
        "if not 0 <= version <= round.step + 99:",
    ),
    Mutation(
        "tokens one version too old are taken",
        "core/arrivals.py",
        "if not round.step - settings.max_staleness <= version",
        "if not round.step - settings.max_staleness - 1 <= version",
    ),
    Mutation(
        "one token more than allowed is taken",
        "core/arrivals.py",
        "if held > settings.max_response_tokens:",
        "if held > settings.max_response_tokens + 1:",
    ),
    Mutation(
        "confirmed digest is not compared",
        "core/fleet.py",
        "if ready.digest != published.digest:",
        "if False:",
    ),
    Mutation(
        "version that is not the published one counts as confirmed",
        "core/fleet.py",
        "if ready.policy_version != published.policy_version:",
        "if ready.policy_version > published.policy_version:",
    ),
    Mutation(
        "late score of an earlier attempt counts",
        "core/judge.py",
        "if response is None or response.attempt != attempt or response.scored:",
        "if response is None or response.scored:",
    ),
    Mutation(
        "second score replaces the first",
        "core/judge.py",
        "if response is None or response.attempt != attempt or response.scored:",
        "if response is None or response.attempt != attempt:",
    ),
    Mutation(
        "placing a response does not begin a new attempt",
        "core/responses.py",
        "self.run(response, node, response.attempt + 1)",
        "self.run(response, node, response.attempt)",
    ),
    # Where work is
    Mutation(
        "what is resumed goes to the end of the queue",
        "core/responses.py",
        "self._enqueue(response, resumed=True)",
        "self._enqueue(response)",
    ),
    Mutation(
        "responses of a lost node are dropped",
        "core/responses.py",
        "        for response in leaving:\n            self.requeue(response)\n",
        "        node.running.clear()\n",
    ),
    Mutation(
        "slots are exceeded by one",
        "core/placement.py",
        "if best.running < best.node.slots:",
        "if best.running <= best.node.slots:",
    ),
    Mutation(
        "draining node still gets work",
        "core/fleet.py",
        "self._move(node, NodeState.DRAINING)",
        "pass",
    ),
    Mutation(
        "node that left keeps being listed",
        "core/fleet.py",
        "if self.ready.pop(node.name, None) is not None:",
        "if to is not NodeState.GONE and self.ready.pop(node.name, None) is not None:",
    ),
    Mutation(
        "first node to load takes the work of those that still load",
        "core/coordinator.py",
        "min(sum(n.free for n in nodes), self._num_unreserved(nodes))",
        "sum(n.free for n in nodes)",
    ),
    Mutation(
        "nodes are ordered once, for the longest response",
        "core/placement.py",
        "if not self.tokens / SAME_LENGTH <= tokens <= self.tokens:",
        "if not self.tokens:",
    ),
    Mutation(
        "idle node is looked at once and never again",
        "core/responses.py",
        "if busy and not n.running}",
        "if False}",
    ),
    Mutation(
        "moved response loses its tokens",
        "core/responses.py",
        "prefix=encode(response.tokens),",
        'prefix=b"",',
    ),
    Mutation(
        "moved response may run as long as a new one",
        "core/responses.py",
        "max_new_tokens=self._settings.max_response_tokens - len(response.tokens),",
        "max_new_tokens=self._settings.max_response_tokens,",
    ),
    Mutation(
        "rebalancing moves to nodes that do not serve",
        "core/coordinator.py",
        "nodes = [n for n in self.fleet.ready.values() if n.speed",
        "nodes = [n for n in self.fleet.nodes.values() if n.speed",
    ),
    Mutation(
        "rebalancing does not abort at the old node",
        "core/responses.py",
        "                self.stop(response)\n",
        "                self.release(response)\n",
    ),
    Mutation(
        "migration cannot be switched off",
        "core/coordinator.py",
        "self.settings.migration and self.table.has_idle_room",
        "self.table.has_idle_room",
    ),
    Mutation(
        "chunk of an idle time counts as slow decoding",
        "core/state.py",
        "self.chunk_at = now if self.running else None",
        "self.chunk_at = now",
    ),
    # Races
    Mutation(
        "winners are those whose score arrives first",
        "core/race.py",
        'by_clock = round.races and settings.tail.race == "clock"\n',
        "by_clock = round.races\n",
    ),
    Mutation(
        "ties in a group are broken by arrival",
        "core/judge.py",
        "bisect.insort(group.finishers, race.finish_of_response(self._settings, response))",
        "bisect.insort(group.finishers, race.finish_of_response(self._settings, response))\n"
        "            count = group.round.num_scores\n"
        "            group.finishers.sort(key=lambda f: f[0] * 1000 + (f[1] + count) % 7)",
    ),
    Mutation(
        "ties between groups are broken the other way",
        "core/judge.py",
        "bisect.insort(round.finishers, race.finish_of_group(group))",
        "bisect.insort(round.finishers, race.finish_of_group(group))\n"
        "        round.finishers.sort(key=lambda f: (f[0], -f[1]))",
    ),
    Mutation(
        "sibling is aborted one token too early",
        "core/race.py",
        "return n >= group.bound or n >= group.round.cut",
        "return n + 1 >= group.bound or n >= group.round.cut",
    ),
    Mutation(
        "sibling is aborted one token too early while it decodes",
        "core/arrivals.py",
        "if held >= group.bound or held >= round.cut:",
        "if held + 1 >= group.bound or held >= round.cut:",
    ),
    Mutation(
        "group is aborted one token too early",
        "core/race.py",
        "return n >= group.bound or n >= group.round.cut",
        "return n >= group.bound or n + 1 >= group.round.cut",
    ),
    Mutation(
        "loser goes on one token too long",
        "core/arrivals.py",
        "if held >= group.bound or held >= round.cut:",
        "if held > group.bound or held > round.cut:",
    ),
    Mutation(
        "cut is that of the group before the last",
        "core/race.py",
        "round.finishers[round.needed - 1][0]\n",
        "round.finishers[max(0, round.needed - 2)][0]\n",
    ),
    Mutation(
        "finished response that is at the cut has lost",
        "core/race.py",
        "return n > group.round.cut or",
        "return n >= group.round.cut or",
    ),
    Mutation(
        "too many groups are certain",
        "core/race.py",
        "rivals, key) < round.needed",
        "rivals, key) <= round.needed",
    ),
    Mutation(
        "an unfinished rival is believed to finish one token later than it may",
        "core/race.py",
        "(not r.finish_reason)",
        "2 * (not r.finish_reason)",
    ),
    Mutation(
        "groups of one event are certified one by one",
        "core/judge.py",
        "            elif race.is_out(group):\n                self._eliminate(group)\n",
        "            elif race.is_out(group):\n                self._eliminate(group)\n"
        "            if not group.round.is_eval:\n                self.accept_decided(group.round)\n",
    ),
    Mutation(
        "response without a reward counts as finished",
        "core/judge.py",
        "if reward is not None or group.round.is_eval:",
        "if True:",
    ),
    Mutation(
        "siblings that cannot matter any more go on",
        "core/judge.py",
        "if not group.num_open or race.is_out(group):",
        "if not group.num_open:",
    ),
    Mutation(
        "group with too few rewards is dropped by a race",
        "core/judge.py",
        "        if group.round.races:\n            self._give_up_all(group)\n",
        "        if group.round.races and race.has_lost(group.responses[0]):\n"
        "            self._give_up_all(group)\n",
    ),
    Mutation(
        "deterministic order is ignored",
        "core/race.py",
        "if settings.deterministic else won",
        "if False else won",
    ),
    Mutation(
        "surplus is not launched",
        "core/settings.py",
        "round(self.tail.eta_prompts * self.prompts_per_step)",
        "self.prompts_per_step",
    ),
    Mutation(
        "one response more than needed is kept",
        "core/state.py",
        "self.finishers[: self.round.group_size])",
        "self.finishers[: self.round.group_size + 1])",
    ),
    # Prompts
    Mutation(
        "put-off queue is last in, first out",
        "core/backlog.py",
        "self.put_off.popleft()",
        "self.put_off.pop()",
    ),
    Mutation(
        "prompt that waits is drawn again",
        "core/round_scheduler.py",
        "{g.prompt.id for g in round.groups.values()} | put_off",
        "{g.prompt.id for g in round.groups.values()}",
    ),
    Mutation(
        "prompt that was held back is lost",
        "core/backlog.py",
        "self.held_back.append(prompt)",
        "pass",
    ),
    Mutation(
        "epoch ends without a flush",
        "core/rounds.py",
        "backlog.epoch_left < settings.prompts_launched and (backlog.put_off or backlog.epoch_left)",
        "False",
    ),
    Mutation(
        "long round waits for one prompt too many",
        "core/rounds.py",
        "len(backlog.put_off) >= settings.prompts_per_step",
        "len(backlog.put_off) > settings.prompts_per_step",
    ),
    Mutation(
        "long round races too",
        "core/rounds.py",
        'races = kind == "short"',
        'races = kind in {"short", "long"}',
    ),
    Mutation(
        "attempts of a prompt put off begin anew",
        "core/judge.py",
        "attempts = max(r.attempt for r in group.responses)",
        "attempts = 0",
    ),
    Mutation(
        "all of the surplus is put off unseen",
        "core/rounds.py",
        "(settings.prompts_launched - round.needed) // 2",
        "(settings.prompts_launched - round.needed)",
    ),
    Mutation(
        "dropped flat group counts as one that may be trained",
        "core/rounds.py",
        "left = round.num_open + len(round.finishers)",
        "left = len(round.groups)",
    ),
    Mutation(
        "flat groups are kept",
        "core/race.py",
        "return len({r.reward for r in group.kept}) <= 1",
        "return False",
    ),
    # Steps
    Mutation(
        "two rounds are open in synchronous mode",
        "core/round_scheduler.py",
        "            if self._table.rounds and not self._settings.max_staleness:\n                return\n",
        "",
    ),
    Mutation(
        "admission is one step too early",
        "core/staleness.py",
        "return (max_staleness + version + 1)",
        "return (max_staleness + version + 2)",
    ),
    Mutation(
        "admission is one step too late",
        "core/staleness.py",
        "return (max_staleness + version + 1)",
        "return (max_staleness + version)",
    ),
    Mutation(
        "oldest version is taken for the newest",
        "core/staleness.py",
        "version - max(versions), version - min(versions)",
        "version - min(versions), version - max(versions)",
    ),
    Mutation(
        "training does not wait for an evaluation",
        "core/round_scheduler.py",
        "for the evaluation\n                    return\n",
        "for the evaluation\n                    pass\n",
    ),
    Mutation(
        "last shard is never sent",
        "core/trainer_feed.py",
        "last = round.state is RoundState.CLOSED",
        "last = False",
    ),
    Mutation(
        "last shard is sent again and again",
        "core/trainer_feed.py",
        "round.is_handed_over = is_last",
        "round.is_handed_over = False",
    ),
    Mutation(
        "groups are sent to the trainer again with the next shard",
        "core/trainer_feed.py",
        "round.num_sent += len(groups)",
        "round.num_sent = len(groups)",
    ),
    Mutation(
        "steps of later rounds are sent before their turn",
        "core/round_scheduler.py",
        "        if round is self.training():\n            self.trainer_feed.send(",
        "        if True:\n            self.trainer_feed.stands_at = round.step\n"
        "            self.trainer_feed.send(",
    ),
    Mutation(
        "stopped run sends the trainer the next step",
        "core/round_scheduler.py",
        "        if self._is_trained():\n            self._close_step(now)\n\n",
        "        if self._is_trained():\n            self._close_step(now)\n"
        "            if (upcoming := self.training()) is not None:\n"
        "                self._send_accepted(upcoming)\n\n",
    ),
    # Recovery
    Mutation(
        "score of an earlier process is forgotten",
        "core/recovery.py",
        "core.judge.score(response.id, response.attempt, entry.reward, entry.failure)",
        "pass",
    ),
    Mutation(
        "late score of a restated round comes first",
        "core/recovery.py",
        "[*(r for _, r in counted), *failed, *late]",
        "[*late, *failed, *(r for _, r in counted)]",
    ),
    Mutation(
        "attempt of a score is not known again",
        "core/recovery.py",
        "            response.attempt = max(response.attempt, entry.attempt)\n",
        "            response.attempt = 0\n",
    ),
    Mutation(
        "restated round that was closed is open again",
        "core/recovery.py",
        "            if round in self._closed:\n",
        "            if False:\n",
    ),
    Mutation(
        "what restated rounds put off is put off twice",
        "core/recovery.py",
        "close_round(round, self._now)\n        self._restore()\n",
        "close_round(round, self._now)\n",
    ),
    Mutation(
        "restated response does not say how it ended",
        "core/recovery.py",
        "finish = held.finish_reason if end == num_tokens else None",
        "finish = None",
    ),
    Mutation(
        "rounds opened before are opened again",
        "core/recovery.py",
        "        core.steps.opened += not round.is_eval\n",
        "",
    ),
    Mutation(
        "response whose tokens come back after its race is lost goes on",
        "core/arrivals.py",
        "        elif race.has_lost(response):\n            self._judge.give_up(response)\n",
        "",
    ),
    Mutation(
        "response that runs elsewhere is taken back as well",
        "core/responses.py",
        "waits = fits and response is not None and response.state is ResponseState.QUEUED",
        "waits = fits and response is not None and not response.resolved",
    ),
    Mutation(
        "order that was lost with the connection is waited for",
        "core/responses.py",
        "if claims.get(response.id) != response.attempt:",
        "if False:",
    ),
    Mutation(
        "what a silent node finished is taken whatever its version",
        "core/arrivals.py",
        "or not 0 <= staleness <= self._settings.max_staleness:",
        "or False:",
    ),
    Mutation(
        "response that was queued again waits twice",
        "core/queue.py",
        " and number == response.queued_as",
        "",
    ),
    Mutation(
        "process that was replaced may come back",
        "core/fleet.py",
        "return hello.incarnation in self._replaced.get(hello.node, ())",
        "return False",
    ),
    # Who pulls from whom
    Mutation(
        "trainer is asked before those who have the version",
        "core/sources.py",
        "return (*holders, *others, trainer)",
        "return (trainer, *holders, *others)",
    ),
    Mutation(
        "all pull from the same nodes",
        "core/sources.py",
        "few = (ring[(start + step) % size]",
        "few = (ring[step % size]",
    ),
    Mutation(
        "source that sent wrong bytes is assigned again",
        "core/offers.py",
        "return name in others or self.bad.bars(receiver, name)",
        "return name in others",
    ),
    Mutation(
        "liar bars all sources",
        "core/bad_sources.py",
        "        if len(named) >= MAX_BELIEVED or self.is_barred_for_all(reporter):\n",
        "        if False:\n",
    ),
    Mutation(
        "liars bar more than half of the sources",
        "core/bad_sources.py",
        "        if 2 * len(self._barred | {source}) > num_sources:\n",
        "        if False:\n",
    ),
    Mutation(
        "trainer that is behind is a source of the newest version",
        "core/coordinator.py",
        "            self.fleet.trainer_is_behind(version)\n",
        "",
    ),
    Mutation(
        "node whose sources are lost is told of no others",
        "core/fleet.py",
        "is_trainer))\n        self._tell_news(self.offers.short_of(name))\n",
        "is_trainer))\n",
    ),
    Mutation(
        "node that came before there was a source is forgotten",
        "core/offers.py",
        "            return list(dict.fromkeys([*self.waiting, *self.told]))\n",
        "            return list(self.told)\n",
    ),
    # Who gets it by broadcast
    Mutation(
        "members of a group that is over wait for ever",
        "core/broadcasts.py",
        "        self._release(owed)\n        version",
        "        version",
    ),
    Mutation(
        "node that was fed by broadcast is a source",
        "core/offers.py",
        "holds = has_newest and node.has_file",
        "holds = has_newest",
    ),
    Mutation(
        "version is sent before all members are there",
        "core/broadcast_groups.py",
        "if len(self._joined) < 1 + len(self.epoch.members):",
        "if len(self._joined) < len(self.epoch.members):",
    ),
    Mutation(
        "member that is lost is waited for",
        "core/fleet.py",
        "        self._offer_to(self.broadcasts.lost(name, is_trainer))\n",
        "",
    ),
    Mutation(
        "group outlives the process of a member",
        "core/broadcast_groups.py",
        "incarnations = tuple(m.incarnation for m in members)",
        "incarnations = tuple(0 for m in members)",
    ),
    Mutation(
        "one member ends all broadcasts for ever",
        "core/broadcast_groups.py",
        "before + count * FORGIVEN_AFTER",
        "before",
    ),
    Mutation(
        "delta is offered though it is as large as the version",
        "core/delta_chain.py",
        "            if most < 0:\n",
        "            if False:\n",
    ),
    # A trainer that was lost
    Mutation(
        "step that was published is trained again as it comes",
        "core/trainer_feed.py",
        "if self.stands_at < published.policy_version:",
        "if False:",
    ),
    Mutation(
        "trainer that is back does not get what the lost one had",
        "core/trainer_feed.py",
        "round.num_sent = round.num_shards = 0",
        "pass",
    ),
    Mutation(
        "run forgets that it waits for its trainer",
        "core/trainer_feed.py",
        "        self.missing_since = now\n",
        "        self.missing_since = None\n",
    ),
    Mutation(
        "another version under the same number is served",
        "core/coordinator.py",
        "        if known != digest:\n",
        "        if False:\n",
    ),
    Mutation(
        "run ends without the checkpoint of its last step",
        "core/ending.py",
        "if not self._fleet.nodes and not self.awaits_trainer:",
        "if not self._fleet.nodes:",
    ),
    Mutation(
        "lost node is named as source",
        "core/fleet.py",
        "        self.offers.forget(name)\n",
        "",
    ),
    # Limits on strangers, on holders of the join key, on what waits; what makes files last
    Mutation(
        "stranger may send a frame of 32 MiB",
        "transport/zeromq.py",
        "MAX_TO_ROUTER_BYTES = 64 << 10",
        "MAX_TO_ROUTER_BYTES = 32 << 20",
        tests=(
            "tests/security/test_strangers.py::test_a_frame_may_have_so_many_bytes_and_one_more_is_cut_off",
        ),
    ),
    Mutation(
        "stranger has ten minutes for the handshake",
        "transport/zeromq.py",
        "HANDSHAKE_MS = 3000",
        "HANDSHAKE_MS = 600_000",
        tests=(
            "tests/security/test_strangers.py::test_a_hundred_strangers_who_send_all_they_may_cost_less_than_128_mib",
        ),
    ),
    Mutation(
        "parts of a peer that has gone are kept",
        "transport/router.py",
        "for identity in [i for i, (connection, _) in self._partial.items() if connection in gone]:",
        "for identity in ():",
        tests=("tests/transport/test_link.py::test_parts_of_a_peer_are_bounded_and_go_with_it",),
    ),
    Mutation(
        "parts may be put together to any size",
        "transport/parts.py",
        "if size > self._max_bytes:",
        "if False:",
        tests=("tests/transport/test_parts.py::test_what_is_no_part_or_too_large_is_refused",),
    ),
    Mutation(
        "peer that comes back is declared lost",
        "transport/router.py",
        "self._unheard.pop(peer, None)",
        "pass",
        tests=(
            "tests/transport/test_link.py::test_a_peer_that_comes_back_with_a_hello_is_not_lost",
        ),
    ),
    Mutation(
        "peer that cannot be reached is lost before it is heard out",
        "coordinator/peers.py",
        "            self._router.hear_out(peer)",
        "            self._lost(node)",
        tests=(
            "tests/daemon/test_goodbyes.py::test_nodes_that_said_goodbye_have_left_although_they_cannot_be_reached",
        ),
    ),
    Mutation(
        "number of strangers is not bounded",
        "transport/strangers.py",
        "if surplus > 0:",
        "if False:",
        tests=(
            "tests/security/test_strangers.py::test_the_oldest_of_the_address_with_most_of_them_goes_first",
        ),
    ),
    Mutation(
        "daemon keeps its soft limit of descriptors",
        "daemon/main.py",
        "    open_files.raise_limit()\n",
        "",
        tests=(
            "tests/security/test_strangers.py::test_steps_go_on_and_nodes_join_while_strangers_take_all_descriptors",
        ),
    ),
    Mutation(
        "no descriptors are set aside",
        "system/open_files.py",
        "SET_ASIDE = 8",
        "SET_ASIDE = 0",
        tests=(
            "tests/system/test_open_files.py::test_limit_is_raised_and_what_is_set_aside_serves_files_alone",
        ),
    ),
    Mutation(
        "children inherit the raised limit",
        "system/child.py",
        "open_files.restore_for(process.pid)",
        "pass",
        tests=(
            "tests/system/test_open_files.py::test_children_have_the_limit_that_the_daemon_was_started_with",
        ),
    ),
    Mutation(
        "order to a node has no bound",
        "core/orders.py",
        "size + num_bytes > MAX_ORDER_BYTES",
        "False",
        tests=("tests/core/test_orders.py",),
    ),
    Mutation(
        "caller without a ticket may stay for minutes",
        "weights/serve/door.py",
        "GREETING_S = 2.0",
        "GREETING_S = 200.0",
        tests=("tests/weights/test_strangers.py::test_who_says_too_little_is_cut_off_soon",),
    ),
    Mutation(
        "no stranger makes room at the door",
        "weights/serve/door.py",
        "if len(self._callers) >= self._places:",
        "if False:",
        tests=(
            "tests/weights/test_strangers.py::test_the_address_that_has_most_makes_room_and_who_has_asked_is_let_in",
        ),
    ),
    Mutation(
        "ticket is not compared",
        "weights/serve/server.py",
        "hmac.compare_digest(request.ticket, expected)",
        "True",
        tests=("tests/weights/test_pull.py::test_a_wrong_ticket_gets_nothing",),
    ),
    Mutation(
        "one node may have all connections",
        "weights/serve/server.py",
        "theirs < MAX_OF_A_NODE",
        "theirs < 9999",
        tests=(
            "tests/weights/test_pull.py::test_a_node_has_no_more_than_its_share_of_connections",
        ),
    ),
    Mutation(
        "peer that does not read keeps its turn",
        "weights/serve/send.py",
        "loop.call_later(STALL_S, turn.pass_on)",
        "loop.call_later(999, turn.pass_on)",
        tests=(
            "tests/weights/test_pull.py::test_peers_that_never_read_do_not_keep_others_waiting",
        ),
    ),
    Mutation(
        "wrong bytes are taken for right",
        "weights/pull/fetch.py",
        "if begun.digest.digest() == self._manifest.digest_of(transfer.bucket):",
        "if True:",
        tests=(
            "tests/weights/test_peers.py::test_a_lying_peer_is_named_and_avoided_and_spoils_nobody_else",
        ),
    ),
    Mutation(
        "leftovers are not proved",
        "weights/machine/leftovers.py",
        "return digest.digest() == manifest.digest_of(bucket)",
        "return True",
        tests=(
            "tests/weights/test_resume.py::test_a_killed_puller_goes_on_where_it_was_and_only_with_what_is_right",
        ),
    ),
    Mutation(
        "a partial holder serves what it has not proved",
        "weights/serve/held.py",
        "return self._proved.issuperset(",
        "return True or self._proved.issuperset(",
        tests=(
            "tests/weights/test_peers.py::test_what_a_partial_holder_has_not_proved_is_not_to_be_had",
        ),
    ),
    Mutation(
        "what a silent peer owes stays with it",
        "weights/pull/swarm.py",
        "if now - transfer.last_at > STALL_S * patience and",
        "if now - transfer.last_at > 999 and",
        tests=(
            "tests/weights/test_swarm.py::test_what_stalls_is_asked_of_another_if_there_is_one",
        ),
    ),
    Mutation(
        "all joiners ask the trainer for the same",
        "weights/pull/swarm.py",
        "self._start = int(order * _GOLDEN % 1 * num_buckets)",
        "self._start = 0",
        tests=("tests/weights/test_swarm.py::test_pullers_begin_in_different_places",),
    ),
    Mutation(
        "what peers are getting is asked of the trainer",
        "weights/pull/swarm.py",
        "                    mask |= 1 << bucket",
        "                    mask |= 0 << bucket",
        tests=(
            "tests/weights/test_swarm.py::test_what_a_peer_is_getting_is_waited_for_but_not_for_ever",
        ),
    ),
    Mutation(
        "retired version is said to be free while it is read",
        "weights/serve/held.py",
        "if self.retired is None or self._num_users or self.file < 0:",
        "if self.retired is None or self.file < 0:",
        tests=(
            "tests/weights/test_peers.py::test_a_retired_version_is_free_when_the_future_says_so",
        ),
    ),
    Mutation(
        "overtaken pull leaves its part",
        "rollout/weights.py",
        """        if self.wanted is not None and self.wanted.digest != claim.digest:
            await _patiently(self._store.sweep)
""",
        "",
        tests=("tests/rollout/test_pulls.py::test_pulls_that_are_overtaken_leave_nothing",),
    ),
    Mutation(
        "join key may say everything",
        "transport/router.py",
        "if access is not Access.FULL:",
        "if False:",
        tests=(
            "tests/security/test_join.py::test_with_join_nothing_can_be_said_that_is_no_business_of_a_rollout_node",
        ),
    ),
    Mutation(
        "join key lets one be a trainer",
        "transport/validate.py",
        'if hello.roles != ("rollout",):',
        "if False:",
        tests=("tests/security/test_join.py::test_with_join_one_is_a_rollout_node_or_nothing",),
    ),
    Mutation(
        "join key takes the name of a living node",
        "coordinator/peers.py",
        "if self._is_taken(peer):",
        "if False:",
        tests=(
            "tests/security/test_join.py::test_with_join_nobody_speaks_under_the_name_of_a_node_that_lives",
        ),
    ),
    Mutation(
        "identity can be guessed",
        "transport/link.py",
        "RANDOM_BYTES = 16",
        "RANDOM_BYTES = 4",
        tests=(
            "tests/security/test_join.py::test_nobody_can_guess_under_which_identity_another_one_is_connected",
        ),
    ),
    Mutation(
        "attempt that was never given out is believed",
        "core/attempts.py",
        "return attempt <= response.attempt + unrecorded",
        "return True",
        tests=(
            "tests/security/test_join.py::test_attempt_that_was_never_given_out_makes_no_response_poison",
        ),
    ),
    Mutation(
        "version is taken while its round is open",
        "core/coordinator.py",
        "and not self.steps.has_closed(stood_at)",
        "and False",
    ),
    Mutation(
        "length of a list is not bounded",
        "message_fields.py",
        "RESPONSES = Meta(max_length=MAX_RESPONSES)",
        "RESPONSES = Meta()",
        tests=("tests/security/test_largest.py",),
    ),
    Mutation(
        "shards do not wait for the disk",
        "core/trainer_feed.py",
        ">= MAX_UNWRITTEN",
        ">= 10**9",
        tests=("tests/core/test_trainer_feed.py",),
    ),
    Mutation(
        "step that is replayed is sent at once",
        "coordinator/replays.py",
        "await self._room_for(shard)",
        "pass",
        tests=(
            "tests/daemon/test_handover.py::test_a_step_that_is_trained_again_is_read_and_sent_as_the_trainer_takes_it",
        ),
    ),
    Mutation(
        "long writes are synced at their end only",
        "journal/disk.py",
        "offset - synced >= SYNC_BYTES",
        "False",
        tests=(
            "tests/journal/test_slow.py::test_much_is_synced_in_parts_so_that_a_slow_disk_shows_that_it_lives",
        ),
    ),
    Mutation(
        "replay counts a step more than a resume does",
        "replay/log.py",
        "self.steps_done = core.step\n",
        "self.steps_done = core.step + 1\n",
        tests=("tests/replay/test_agreement.py",),
    ),
    Mutation(
        "status and replay guess how many prompts there are",
        "replay/log.py",
        "note = noted(entries)",
        "note = None",
        tests=("tests/replay/test_agreement.py",),
    ),
    Mutation(
        "file takes its name though its writer failed",
        "system/files.py",
        "    except BaseException:\n        os.close(file)\n",
        "    except BaseException:\n        os.rename(draft, path)\n        os.close(file)\n",
        tests=("tests/system/test_files.py",),
    ),
    Mutation(
        "length of a record is not in its checksum",
        "system/framing.py",
        "crc32(payload, crc32(head[: _LENGTH.size]))",
        "crc32(payload)",
        tests=("tests/system/test_framing.py",),
    ),
    Mutation(
        "journal is not synced",
        "journal/disk.py",
        '    getattr(os, "fdatasync", os.fsync)(file)\n',
        "    pass\n",
        tests=("tests/journal/test_power_loss.py",),
    ),
    Mutation(
        "segment is not synced before it has its name",
        "journal/disk.py",
        "files.replacing(segment.path, keep_open=True)",
        "files.replacing(segment.path, lasting=False, keep_open=True)",
        tests=("tests/journal/test_power_loss.py",),
    ),
    Mutation(
        "names in the journal's folder are not synced",
        "system/files.py",
        "os.fsync(descriptor)",
        "pass",
        tests=("tests/journal/test_power_loss.py",),
    ),
    Mutation(
        "config is not synced before it has its name",
        "system/files.py",
        "os.fsync(file)",
        "pass",
        tests=("tests/journal/test_power_loss.py",),
    ),
    Mutation(
        "key is not synced",
        "keys.py",
        "os.fsync(file.fileno())",
        "pass",
        tests=("tests/journal/test_power_loss.py",),
    ),
    Mutation(
        "name of the key is not synced",
        "keys.py",
        "    sync(path.parent)\n",
        "",
        tests=("tests/journal/test_power_loss.py",),
    ),
    Mutation(
        "files of a checkpoint are not synced",
        "trainer/saved.py",
        "files.sync(entry)",
        "pass",
        tests=("tests/trainer/test_power_loss.py",),
    ),
    Mutation(
        "name of a checkpoint is not synced",
        "trainer/saved.py",
        "files.sync(path.parent)",
        "pass",
        tests=("tests/trainer/test_power_loss.py",),
    ),
    Mutation(
        "run directory is removed whatever it holds",
        "launch/folder.py",
        "if has_begun(run_dir):",
        "if False:",
        tests=(
            "tests/daemon/test_faults.py::test_a_foreground_coordinator_that_fails_leaves_what_can_be_resumed",
        ),
    ),
    Mutation(
        "journal is pruned to the newest checkpoint",
        "coordinator/inbound.py",
        "drop_before(message.oldest)",
        "drop_before(message.step)",
        tests=(
            "tests/daemon/test_resume.py::test_a_trainer_may_fall_back_to_the_oldest_checkpoint_that_is_kept",
        ),
    ),
    Mutation(
        "damaged file of a checkpoint is not noticed",
        "trainer/seal.py",
        "now != digest]",
        "False]",
        tests=(
            "tests/trainer/test_checkpoint.py::test_whatever_is_changed_in_a_checkpoint_is_noticed",
        ),
    ),
    Mutation(
        "key stays in the environment",
        "rewards/environment.py",
        "and not fnmatchcase(name, NEVER)",
        "",
        tests=("tests/rewards/test_processes.py::test_usual_names_pass_in_capitals_or_not",),
    ),
    Mutation(
        "rewards see the whole environment",
        "rewards/runner.py",
        "inherited=inherited(os.environ, reward.env)",
        "inherited=os.environ",
        tests=(
            "tests/rewards/test_processes.py::test_secrets_of_the_environment_are_not_seen_and_named_ones_are",
        ),
    ),
    Mutation(
        "what a reward has started is not ended",
        "system/reaper.py",
        "last = _end_all(child)",
        "last = None",
        tests=(
            "tests/rewards/test_processes.py::test_nothing_is_left_of_a_worker_however_it_ends",
        ),
    ),
    Mutation(
        "worker outlives its reaper",
        "system/reaper.py",
        "_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)",
        "pass",
        tests=(
            "tests/rewards/test_processes.py::test_a_worker_dies_with_its_reaper_and_is_replaced",
        ),
    ),
    Mutation(
        "terminal that is not read stops its writer",
        "system/output.py",
        "if stat.S_ISREG(os.fstat(descriptor).st_mode):",
        "if True:",
        tests=(
            "tests/system/test_output.py::test_whoever_is_not_read_goes_on_and_says_later_how_many_lines_are_missing",
        ),
    ),
    Mutation(
        "level of the logs is not heeded",
        "log.py",
        "    package.setLevel(level)\n",
        "    package.setLevel(logging.DEBUG)\n",
        tests=("tests/test_log.py::test_a_level_silences_what_is_less_bad",),
    ),
    Mutation(
        "prints between lines of JSON are not JSON",
        "log.py",
        "capture_lines(_log_printed if settings.json else None)",
        "capture_lines(None)",
        tests=("tests/test_log.py::test_uncaught_exceptions_prints_and_warnings_are_json_too",),
    ),
    Mutation(
        "child processes forget what their parent says of logs",
        "log.py",
        'json.loads(os.environ.get(ENVIRONMENT, "{}"))',
        'json.loads("{}")',
        tests=("tests/test_log.py::test_children_write_what_their_parent_does",),
    ),
    Mutation(
        "escapes are sent to the terminal",
        "system/output.py",
        "    if text.isprintable():\n",
        "    if True:\n",
        tests=(
            "tests/system/test_output.py::test_print_lines_shows_escapes_instead_of_sending_them",
        ),
    ),
    Mutation(
        "SIGHUP ends a daemon at once",
        "system/signals.py",
        "signal.SIGUSR1, signal.SIGHUP)",
        "signal.SIGUSR1)",
        tests=(
            "tests/cli/test_terminal.py::test_a_node_and_a_run_leave_in_order_when_their_terminals_are_gone",
        ),
    ),
    Mutation(
        "SIGHUP ends a child",
        "system/child.py",
        "(signal.SIGTERM, signal.SIGHUP)",
        "(signal.SIGTERM,)",
        tests=(
            "tests/system/test_child.py::test_signals_that_are_for_the_daemon_do_not_end_a_child",
        ),
    ),
    # GPUs and the releases of what drives them
    Mutation(
        "one GPU is given to two ranks",
        "config.py",
        "            if twice:\n",
        "            if False:\n",
        tests=("tests/test_config.py::test_wrong_values_are_one_line_with_key_and_value",),
    ),
    Mutation(
        "ranks and their GPUs need not be equally many",
        "config.py",
        "if self.train.devices and len(self.train.devices) != self.train.ranks:",
        "if False:",
        tests=("tests/test_config.py::test_wrong_values_are_one_line_with_key_and_value",),
    ),
    Mutation(
        "no visible GPU is taken for all of them",
        "devices/assign.py",
        "    if setting is None:\n",
        "    if not setting:\n",
        tests=("tests/devices/test_assign.py::test_who_gets_what",),
    ),
    Mutation(
        "engines begin at the trainer's GPUs",
        "devices/assign.py",
        "range(len(devices)) if d not in ranks]",
        "range(len(devices))]",
        tests=("tests/devices/test_assign.py::test_who_gets_what",),
    ),
    Mutation(
        "tensor_parallel_size is ignored",
        "devices/assign.py",
        "size = wanted.per_engine",
        "size = 1",
        tests=("tests/devices/test_assign.py::test_who_gets_what",),
    ),
    Mutation(
        "engine takes what is free on the last of its GPUs",
        "devices/assign.py",
        "shares[k] = min(shares[k], share)",
        "shares[k] = share",
        tests=("tests/devices/test_assign.py::test_who_gets_what",),
    ),
    Mutation(
        "divided GPU counts as a whole one",
        "devices/driver.py",
        'mig == "Enabled"',
        "False",
        tests=("tests/devices/test_driver.py::test_a_gpu_that_is_divided_is_asked_for_its_slices",),
    ),
    Mutation(
        "memory of the trainer is not set aside",
        "devices/plan.py",
        "rank_bytes=memory.trainer_bytes(items)",
        "rank_bytes=0",
        tests=("tests/cli/test_devices.py::test_the_dry_run_shows_who_gets_what_and_why",),
    ),
    Mutation(
        "every rank sees the GPUs of all",
        "trainer/rank_processes.py",
        "self._gpus[rank : rank + 1]",
        "self._gpus",
        tests=("tests/cli/test_devices.py::test_each_child_sees_its_own_gpu",),
    ),
    Mutation(
        "engine sees all GPUs",
        "rollout/agent.py",
        "devices = environment(self._gpus.tokens, os.environ)",
        "devices = {}",
        tests=("tests/cli/test_devices.py::test_each_child_sees_its_own_gpu",),
    ),
    Mutation(
        "engine takes the whole of a GPU that it shares",
        "rollout/engine_spec.py",
        "gpu_memory=gpus.memory",
        "gpu_memory=0.0",
        tests=(
            "tests/coordinator/test_settings.py::test_an_engine_is_told_what_it_may_take_and_how_far_it_may_draft",
        ),
    ),
    Mutation(
        "newer vLLM than was tried passes in silence",
        "engine/vllm_versions.py",
        "OLDEST <= numbers <= NEWEST",
        "OLDEST <= numbers",
        tests=("tests/engine/test_vllm_versions.py::test_what_lies_outside_is_said",),
    ),
    Mutation(
        "what a vLLM lacks is not noticed",
        "engine/vllm_versions.py",
        '        if part.name not in found:\n            return f"no {_plain(part.name)}"\n',
        "        if part.name not in found:\n            continue\n",
        tests=("tests/engine/test_vllm_versions.py::test_what_is_missing_is_named",),
    ),
    Mutation(
        "vLLM that lacks something is used",
        "engine/vllm.py",
        "if (lack := lacking(ENGINE, self.found)) is not None:",
        'if (lack := "") is None:',
        tests=(
            "tests/engine/test_vllm_versions.py"
            "::test_the_installed_release_is_what_its_sources_say_and_no_use_without_a_part",
        ),
    ),
    Mutation(
        "loader may run code of a model",
        "engine/checkpoint.py",
        "local_files_only=True, trust_remote_code=False",
        "local_files_only=True, trust_remote_code=True",
        tests=("tests/cli/test_text.py::test_no_loader_asks_for_or_runs_code_of_a_model",),
    ),
    Mutation(
        "gloo listens where the machine's name points",
        "trainer/group.py",
        'os.environ["GLOO_SOCKET_IFNAME"] = _loopback()',
        "pass",
        tests=(
            "tests/trainer/test_loopback.py::test_no_socket_of_two_ranks_is_open_beyond_loopback",
        ),
    ),
    # The emulated rank: what its digest must show
    Mutation(
        "emulated weights are those of the last step alone",
        "trainer/emulated.py",
        "[self._trained.hex(), totals, all_R]",
        "[totals, all_R]",
        tests=(
            "tests/trainer/test_emulated.py::test_order_and_cut_and_number_make_another_version",
        ),
    ),
    Mutation(
        "emulated weights are those of rank 0 alone",
        "trainer/emulated.py",
        "all_R = self._meeting.exchange(mine)",
        "all_R = self._meeting.exchange(mine)[:1]",
        tests=("tests/trainer/test_emulated.py::test_two_ranks_publish_what_both_were_given",),
    ),
    Mutation(
        "emulated rank keeps what it had of a step that begins anew",
        "trainer/emulated.py",
        "                self._clear()\n                yield Cleared(step)",
        "                yield Cleared(step)",
        tests=(
            "tests/trainer/test_emulated.py::test_what_was_given_before_the_step_began_anew_does_not_count",
        ),
    ),
    Mutation(
        "emulated rank begins with other weights than were saved",
        "trainer/emulated.py",
        "            saved.require_digest(self.file.digest, DTYPE)",
        "            pass",
        tests=(
            "tests/trainer/test_emulated.py::test_a_restored_rank_goes_on_with_the_same_versions",
        ),
    ),
    Mutation(
        "emulated rank is not sent what has no signal",
        "trainer/supervisor.py",
        'if train.engine != "emulated":',
        "if True:",
        tests=("tests/trainer/test_emulated.py::test_a_group_without_signal_counts_as_well",),
    ),
    Mutation(
        "what crashes is started again for ever",
        "system/restart.py",
        "if num_crashes > self.max_restarts:",
        "if False:",
        tests=("tests/system/test_restart.py::test_limits_of_each_place",),
    ),
    Mutation(
        "a crash after a long life is one more of the row",
        "system/restart.py",
        "if lived_s > self.policy.settled_s:",
        "if False:",
        tests=(
            "tests/system/test_restart.py::test_a_crash_after_a_long_life_is_the_first_of_a_new_row",
        ),
    ),
    Mutation(
        "every slope is the prior's",
        "core/line_fit.py",
        "return (together + weight * prior) / (max(0.0, spread) + weight)",
        "return prior",
        tests=("tests/core/test_line_fit.py::test_it_is_the_least_squares_line",),
    ),
    Mutation(
        "trainer that was lost answers a welcome",
        "trainer/state.py",
        "            E.WELCOMED: S.DOWN,",
        "            E.WELCOMED: S.BEGINNING_ANEW,",
        tests=("tests/trainer/test_state.py",),
    ),
    Mutation(
        "engine that could not load another version counts as one that never served",
        "rollout/state.py",
        "E.LOAD_FAILED: S.REFUSING",
        "E.LOAD_FAILED: S.EMPTY",
        tests=("tests/rollout/test_state.py",),
    ),
    Mutation(
        "node that was dismissed says hello again",
        "daemon/state.py",
        """            E.NAME_REFUSED: S.NAME_TAKEN,
            E.DISMISSED: S.OUT_OF_TOUCH,
            E.WELCOMED: S.ADMITTED,
        },
        S.ADMITTED""",
        """            E.NAME_REFUSED: S.NAME_TAKEN,
            E.DISMISSED: S.GREETING,
            E.WELCOMED: S.ADMITTED,
        },
        S.ADMITTED""",
        tests=("tests/daemon/test_state.py",),
    ),
    # Weights in the simulator
    Mutation(
        "a full line does not hold its flows back",
        "sim/lines.py",
        "                    left[full] -= grown\n",
        "                    left[full] -= 0.9 * grown\n",
        ("tests/sim/test_lines.py",),
    ),
    Mutation(
        "the trainer is asked for what a peer is getting",
        "sim/swarm.py",
        "            elsewhere.append(self._coming(pull))\n",
        "",
        ("tests/sim/test_swarm.py",),
    ),
    Mutation(
        "what a dead source owed is asked of nobody",
        "sim/swarm.py",
        "                pull.missing[bucket] = None\n            for other",
        "                pass\n            for other",
        ("tests/sim/test_swarm.py",),
    ),
    Mutation(
        "a dead source goes on serving",
        "sim/swarm.py",
        "        self._whole = {(n, p) for n, p in self._whole if n != node}\n",
        "",
        ("tests/sim/test_swarm.py",),
    ),
    Mutation(
        "fluids run ahead of what the trainer has sent",
        "sim/fluid.py",
        "down[node] = min(down[node], can_be_new.get(pull.parcel, 0.0))",
        "down[node] = min(down[node], 1e18)",
        ("tests/sim/test_swarm.py",),
    ),
    Mutation(
        "a difference is used on any version",
        "sim/transfers.py",
        "        if base == machine.serves:\n",
        "        if base >= 0:\n",
        ("tests/sim/test_transfers.py",),
    ),
    Mutation(
        "a broadcast goes on without who has died",
        "sim/transfers.py",
        "            group.is_over = True\n            world.at(world.now + missed_after_s",
        "            world.at(world.now + missed_after_s",
        ("tests/sim/test_transfers.py",),
    ),
]
