"""Sixty bugs that `scripts/mutate` plants in lightrl, one at a time; a test must catch each.

A bug is an address and a change. The address names a module, a function (`Class.method`; or a
constant of the module) and a node in it: the n-th of its kind in the order of the source, "if 2" or
"return", without a number if it is the only one, a keyword by its name; "if 2 compare 1" is the
first comparison within "if 2". An address stays valid when variables are renamed or comments
change, and fails when the function is moved or restructured: the error lists what is there. The
change replaces the source of one node, and the rest of the file stays as it is. `scripts/mutate
--list` prints all of them.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

KINDS: dict[str, tuple[type[ast.AST], ...]] = {
    "if": (ast.If, ast.IfExp),
    "while": (ast.While,),
    "for": (ast.For, ast.AsyncFor),
    "return": (ast.Return,),
    "assign": (ast.Assign, ast.AnnAssign, ast.AugAssign),
    "do": (ast.Expr,),  # a call whose result is not used
    "call": (ast.Call,),
    "keyword": (ast.keyword,),
    "compare": (ast.Compare,),
    "boolean": (ast.BoolOp,),  # and, or
    "arithmetic": (ast.BinOp,),
    "unary": (ast.UnaryOp,),  # not, -
    "list": (ast.List, ast.Tuple),
}
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SHOWN = 50  # characters of a node in an error message

# Of a node: which part of it is replaced, and by what source.
Change: TypeAlias = Callable[[ast.AST], tuple[ast.AST, str]]


class AddressError(Exception):
    """There is no such node; one line."""


class Mutation(NamedTuple):
    module: str
    function: str
    # "" = the function or the constant itself
    node: str
    change: Change
    bug: str
    # files in tests/ of which one must fail
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        return f"lightrl/{self.module.replace('.', '/')}.py"

    def planted(self, root: Path) -> bytes:
        """Returns the source of the file with the bug in it. Raises AddressError."""
        before, _, new, after = self._parts(root)
        return before + new + after

    def shown(self, root: Path) -> str:
        """Returns "old -> new", the replaced source and what replaces it, on one line."""
        _, old, new, _ = self._parts(root)
        return " ".join(f"{old.decode()} -> {new.decode()}".split())

    def _parts(self, root: Path) -> tuple[bytes, bytes, bytes, bytes]:
        """Returns the source before what is replaced, this part, the new part and the rest."""
        where = f"{self.module} {self.function}"
        try:
            source = (root / self.file).read_bytes()
        except FileNotFoundError:
            raise AddressError(f"{where}: there is no {self.file}") from None
        node = _function(ast.parse(source), self.function, where)
        words = self.node.split()
        while words:
            kind = words.pop(0)
            which = words.pop(0) if words and words[0] not in KINDS else ""
            node = _nth(node, kind, which, where)
            where += f" {kind} {which}".rstrip()
        replaced: Any
        replaced, new = self.change(node)
        begin = _offset(source, replaced.lineno, replaced.col_offset)
        end = _offset(source, replaced.end_lineno, replaced.end_col_offset)
        return source[:begin], source[begin:end], new.encode(), source[end:]


def _function(module: ast.Module, name: str, where: str) -> ast.AST:
    node: Any = module
    for part in name.split("."):
        inside = {n: each for each in node.body for n in _names(each)}
        if part not in inside:
            raise AddressError(f"{where}: no {part!r}; there are {', '.join(inside)}")
        node = inside[part]
    return node


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, NAMED):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _nth(node: ast.AST, kind: str, which: str, where: str) -> ast.AST:
    found: list[Any] = [each for each in _inside(node) if isinstance(each, KINDS.get(kind, ()))]
    if kind == "keyword" and which:
        chosen = [each for each in found if each.arg == which]
    else:
        chosen = [each for k, each in enumerate(found, start=1) if which in ("", str(k))]
    if len(chosen) == 1:
        return chosen[0]
    there = "; ".join(f"{kind} {k}: {_shown(each)}" for k, each in enumerate(found, start=1))
    raise AddressError(
        f"{where}: {f'{kind} {which}'.rstrip()!r} is not one node; there are [{there}]"
    )


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yields nodes in the order of the source, the larger first of two that begin together;
    leaves docstrings out."""
    nodes: list[Any] = [
        each
        for each in ast.walk(node)
        if hasattr(each, "lineno")
        and each is not node
        and not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]
    nodes.sort(key=lambda n: (n.lineno, n.col_offset, -n.end_lineno, -n.end_col_offset))
    return iter(nodes)


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _offset(source: bytes, line: int, column: int) -> int:
    return sum(map(len, source.splitlines(keepends=True)[: line - 1])) + column


# Changes


def _value(node: Any) -> Any:
    """Returns the condition of an if or while, the value of a statement, else the node itself."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return node.test
    if isinstance(node, ast.Return | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.keyword):
        return node.value
    return node


def _parts(node: Any) -> list[Any]:
    """Returns operands, elements or positional arguments."""
    match node:
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            return parts
        case ast.Call(args=parts):
            return parts
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case _:
            raise AddressError(f"{_shown(node)}: has no parts")


def drop(node: ast.AST) -> tuple[ast.AST, str]:
    """Leaves a statement out."""
    return node, "pass"


def give(value: object) -> Change:
    """Puts a constant in the place of the value."""
    return lambda node: (_value(node), repr(value))


never, always = give(False), give(True)


def plus(number: int) -> Change:
    """Adds to the value; of a comparison, to its left side."""

    def change(node: ast.AST) -> tuple[ast.AST, str]:
        value = _value(node)
        value = value.left if isinstance(value, ast.Compare) else value
        return value, f"({ast.unparse(value)} + {number})"

    return change


def operator(sign: str) -> Change:
    """Puts another comparison or operation in the place of the (first) one."""
    other: Any = ast.parse(f"a {sign} b", mode="eval").body

    def change(node: ast.AST) -> tuple[ast.AST, str]:
        value = _value(node)
        if isinstance(value, ast.Compare):
            value.ops[0] = other.ops[0]
        else:
            value.op = other.op
        return value, f"({ast.unparse(value)})"

    return change


def only(number: int) -> Change:
    """Puts the n-th operand, element or argument in the place of all of it."""
    return lambda node: (_value(node), f"({ast.unparse(_parts(_value(node))[number - 1])})")


def without(number: int) -> Change:
    """Leaves the n-th operand, element or argument out."""

    def change(node: ast.AST) -> tuple[ast.AST, str]:
        value = _value(node)
        del _parts(value)[number - 1]
        return value, f"({ast.unparse(value)})"

    return change


def swap(first: int, second: int) -> Change:
    """Exchanges two operands, elements or arguments."""

    def change(node: ast.AST) -> tuple[ast.AST, str]:
        value = _value(node)
        parts = _parts(value)
        one, other = parts[first - 1], parts[second - 1]
        parts[first - 1], parts[second - 1] = other, one
        if isinstance(value, ast.BinOp):
            value.left, value.right = parts
        return value, f"({ast.unparse(value)})"

    return change


# (module, tests that must catch its bugs) -> (function, node, change, what is wrong then)
Row: TypeAlias = tuple[str, str, Change, str]
ROWS: dict[tuple[str, str], list[Row]] = {
    # Which node gets which response, and what is accepted from it
    (
        "core.responses.responses",
        "core/test_responses.py core/test_membership.py core/test_recovery.py",
    ): [
        ("ResponseTable.requeue_all", "for", drop, "the responses of a lost node are dropped"),
        ("ResponseTable._place", "keyword prefix", give(b""), "a moved response loses its tokens"),
        ("ResponseTable.reconcile", "if 1", never, "an order lost with the connection is awaited"),
        ("ResponseTable.reconcile", "assign 6", without(3), "a response runs at two nodes"),
    ],
    ("core.responses.queue", "core/test_responses.py"): [
        ("_is_valid", "return", without(2), "a response that was queued again is placed twice"),
    ],
    ("core.responses.placement", "core/test_placement.py"): [
        ("assign", "compare 4", operator("<="), "a node gets one response more than it has slots"),
    ],
    (
        "core.responses.arrivals",
        "core/test_responses.py core/test_recovery.py core/test_tail.py core/test_async.py",
    ): [
        ("Arrivals.accept", "if 1", never, "tokens of unconfirmed weights are accepted"),
        ("Arrivals.accept", "boolean 3", only(1), "late tokens of an earlier attempt are accepted"),
        ("Arrivals._extend", "compare 1", plus(-1), "tokens one version too old are accepted"),
        ("Arrivals._extend", "if 3", never, "a hole in the tokens is accepted"),
        ("Arrivals._extend", "if 5", never, "tokens that come twice count twice"),
        ("Arrivals._comes_back", "if 4", without(2), "tokens of any version come back with a node"),
    ],
    ("core.responses.responses", "core/test_responses.py"): [
        ("can_exist", "return", always, "a node may claim an attempt that was never placed"),
    ],
    # Who wins a round, and what follows
    ("core.rounds.race", "core/test_race.py core/test_tail.py"): [
        ("finish_of_response", "boolean 2", only(1), "winners are those whose score arrives first"),
        ("has_lost", "return 2 compare 1", plus(1), "a sibling is stopped one token too early"),
        ("decided_groups", "compare 2", operator("<="), "one group too many is certain"),
        ("decided_groups", "if 2", never, "a deterministic run has another order each time"),
        ("_earliest", "arithmetic 1", plus(1), "a rival counts as one token behind where it is"),
    ],
    ("core.rounds.group_lifecycle", "core/test_race.py core/test_tail.py core/test_deferred.py"): [
        ("GroupLifecycle.score", "if 1", without(2), "the late score of an earlier attempt counts"),
        ("GroupLifecycle._count", "if 1", always, "a response without a reward counts as finished"),
    ],
    ("core.rounds.rounds", "core/test_tail.py core/test_rounds.py"): [
        ("next_kind", "if 4", never, "what the last short rounds put off is never trained"),
    ],
    ("core.rounds.rounds", "core/test_staleness.py"): [
        ("admissible", "arithmetic 3", plus(1), "a prompt starts one step too early"),
        ("staleness", "call 2", swap(2, 3), "the oldest version counts as the newest"),
    ],
    ("core.rounds.mini_batches", "core/test_mini_batches.py"): [
        ("is_shuffled", "return", never, "mini-batches are sorted by length"),
    ],
    # Steps, versions, restarts
    ("core.training.trainer_feed", "core/test_trainer_feed.py core/test_retrained.py"): [
        ("TrainerFeed.send", "assign 4", never, "shards are sent before they are on the disk"),
        (
            "TrainerFeed.feed",
            "assign 4",
            never,
            "a step that was published is trained by new groups",
        ),
    ],
    (
        "core.training.versions",
        "core/test_retrained.py core/test_trainer_feed.py core/test_async.py",
    ): [
        ("Versions.accept", "if 4", never, "a version is published while its round is open"),
        ("Versions._retrain", "if 1", always, "other weights are served under the same number"),
        ("Versions._retrain", "if 5", never, "a retrained version may differ as much as it likes"),
    ],
    ("core.recovery", "core/test_recovery.py core/test_tail.py core/test_worlds.py"): [
        ("_Recovery._score", "do", drop, "a restart forgets the scores"),
        ("_Recovery._begin", "do 3", drop, "a restart defers prompts twice"),
        ("_spans", "assign 4", give(None), "a snapshot forgets how responses ended"),
    ],
    # What a crash or a loss of power may not take
    ("journal.write", "journal/test_power_loss.py journal/test_write.py"): [
        ("JournalWriter._write", "do 2", drop, "appended records are not synced"),
        ("JournalWriter._sweep", "if 2", only(1), "the newest segment is removed"),
    ],
    ("journal.read", "journal/test_damage.py journal/test_shards.py"): [
        ("recut", "keyword replica", give(0), "a step is trained again by other replicas"),
    ],
    ("journal.merge", "journal/test_merge.py"): [
        ("_Items._spans", "assign 7", drop, "tokens sent twice are restored twice"),
    ],
    ("system.framing", "journal/test_damage.py system/test_framing.py"): [
        ("read_payload", "if 5", never, "a damaged record is believed"),
    ],
    ("system.files", "journal/test_power_loss.py"): [
        ("replacing", "do 2", drop, "a file gets its name before its contents last"),
        ("sync", "do 1", drop, "names in a folder are not synced"),
    ],
    # What is sampled and learned
    ("engine.sampling", "engine/test_sampling.py"): [
        ("keys", "arithmetic 1", only(1), "the noise of a token does not depend on its position"),
        ("_sample", "if 2", never, "the temperature is ignored"),
    ],
    ("engine.torch.engine", "engine/test_speculation.py"): [
        ("TorchEngine._accept", "assign 8", only(2), "drafted tokens are accepted unverified"),
    ],
    ("weights.broadcast.transfer", "weights/test_broadcast.py"): [
        ("_buckets", "if 1", never, "a bucket with a wrong digest is loaded"),
    ],
    ("trainer.algorithm.loss", "trainer/test_loss.py"): [
        ("Clip.apply", "arithmetic 2", operator("-"), "ratios above 1 are clipped below it"),
        ("importance_weights", "call 6", swap(1, 2), "importance weights are upside down"),
        ("losses", "arithmetic 6", operator("-"), "the KL term drives away from the reference"),
    ],
    ("trainer.algorithm.advantage", "trainer/test_advantage.py trainer/test_stream.py"): [
        ("standardized", "arithmetic 3", only(1), "the standard deviation is biased"),
        ("train_samples", "unary", always, "truncated responses are trained all the same"),
    ],
    ("trainer.model.logprobs", "trainer/test_logprobs.py"): [
        ("_forward", "arithmetic 9", only(1), "the softmax over tiles is wrong"),
    ],
    ("rewards.score", "rewards/test_base.py"): [
        ("_add", "arithmetic 2", only(2), "weights of reward functions are ignored"),
    ],
    ("rewards.protocol", "rewards/test_processes.py"): [
        ("inherited", "boolean", only(1), "reward functions see the key of the run"),
    ],
    # Who may say what
    ("transport.router", "security/test_join.py"): [
        ("Router._decoded", "if 2", never, "the join key is good for every message"),
    ],
    ("transport.validate", "security/test_join.py security/test_bounds.py"): [
        ("why_unwelcome", "if 1", never, "the join key is good for a trainer"),
    ],
    ("transport.parts", "transport/test_parts.py"): [
        ("Assembly.add", "if 2", never, "a message in parts may have any size"),
    ],
    ("transport.unauthenticated", "security/test_strangers.py"): [
        ("UnauthenticatedPeers._check", "if 3", never, "connections without a key are unlimited"),
    ],
    ("weights.serve.server", "weights/test_pull.py"): [
        ("WeightServer._admits", "return", only(2), "weights are sent without a valid ticket"),
    ],
    ("weights.canary", "weights/test_canary.py"): [
        ("compare", "if 2", never, "an engine may serve other weights than it was given"),
    ],
    ("wire", "wire/test_messages.py"): [
        ("Codec.decode", "if", never, "a frame may have any size"),
    ],
    ("rollout.resend_buffer", "rollout/test_resend_buffer.py"): [
        ("ResendBuffer.add", "if 1", only(1), "tokens of two attempts are mixed"),
    ],
    ("config.rules", "test_config.py"): [
        ("_devices", "if 3", never, "one GPU is given to two ranks"),
    ],
}
MUTATIONS = [
    Mutation(module, *row, tuple(f"tests/{test}" for test in tests.split()))
    for (module, tests), rows in ROWS.items()
    for row in rows
]
