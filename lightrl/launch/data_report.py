"""`lightrl data`: the sets of a config, how long their prompts are, and some of them as the model
sees them.

Reads every row, as a run does. Runs no user code but that of an environment of `verifiers`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightrl.config.data import DataSet
from lightrl.config.evaluation import EvalSampling
from lightrl.config.schema import Config
from lightrl.coordinator.prompts import with_rows
from lightrl.data.layouts import answer_of
from lightrl.data.prompts import Prompt, PromptSet
from lightrl.model_files import load_tokenizer
from lightrl.system.temporary import temporary_folder
from lightrl.wire import to_json

SHOWN_TOKENS = 48  # at the beginning and the end of a prompt, together
SHOWN_TEXT = 4000  # characters


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """`tokens`: the text of each of `token_ids`."""

    id: str
    where: str
    text: str
    token_ids: list[int]
    tokens: list[str]
    answer: Any


@dataclass(frozen=True, slots=True)
class SetReport:
    """Of one set; lengths in tokens, of the prompts that are kept. `share`: of the prompts drawn;
    None: for evaluation, `sampling`: how its prompts are answered there."""

    name: str
    path: str
    num_rows: int
    num_kept: int
    num_dropped: int
    share: float | None
    sampling: EvalSampling | None
    min_length: int
    mean_length: float
    max_length: int
    # of the prompts that are left out; 0 without any
    longest_dropped: int
    # prompts without a reference answer
    num_unanswered: int
    columns: list[str]
    # that no reward function sees
    unportable: list[str]
    # notes on its prompts: what is probably a mistake
    notes: list[str]
    prompts: list[ShownPrompt]


def data_json(config: Config, num: int) -> list[str]:
    return [to_json(_reports(config, num)).decode()]


def data_lines(config: Config, num: int) -> Iterator[str]:
    for report in _reports(config, num):
        yield from _lines(report)


def _reports(config: Config, num: int) -> list[SetReport]:
    with temporary_folder("rows") as folder:
        return _reports_of(with_rows(config, folder), num)


def _reports_of(config: Config, num: int) -> list[SetReport]:
    tokenizer = load_tokenizer(config.model.path)

    def opened(one: DataSet) -> PromptSet:
        return PromptSet(one, config.data, tokenizer)

    train = list(map(opened, config.data.all_sets))
    total = sum(one.weight or len(one) for one in train)
    shares = ((one, (one.weight or len(one)) / total) for one in train)
    samplings = ((opened(one), config.eval_sampling(one)) for one in config.eval_sets)
    return [
        *(_report(one, share, None, num, tokenizer) for one, share in shares),
        *(_report(one, None, sampling, num, tokenizer) for one, sampling in samplings),
    ]


def _report(
    one: PromptSet, share: float | None, sampling: EvalSampling | None, num: int, tokenizer: Any
) -> SetReport:
    lengths: list[int] = []
    examples: list[ShownPrompt] = []
    num_unanswered = 0
    for prompt in one.scan():
        lengths.append(len(prompt.token_ids))
        answer = answer_of(prompt.row, one.settings.answer_key)
        num_unanswered += answer is None
        if len(examples) < num:
            examples.append(_example(one, prompt, answer, tokenizer))
    one.require_any()
    return SetReport(
        one.name,
        ":".join(p for p in (one.settings.path, one.settings.subset, one.settings.split) if p),
        len(one),
        len(lengths),
        one.num_dropped,
        share,
        sampling,
        min(lengths),
        fmean(lengths),
        max(lengths),
        one.longest_dropped,
        num_unanswered,
        list(one.columns),
        [name for name in one.columns if name not in one.portable],
        one.notes(),
        examples,
    )


def _example(one: PromptSet, prompt: Prompt, answer: Any, tokenizer: Any) -> ShownPrompt:
    ids = prompt.token_ids.tolist()
    tokens = [tokenizer.decode([token]) for token in ids]
    return ShownPrompt(prompt.id, one.rows.where(prompt.index), prompt.text, ids, tokens, answer)


def _lines(report: SetReport) -> Iterator[str]:
    yield _line(report.name, report.path)
    dropped = ""
    if report.num_dropped:
        dropped = (
            f"; {report.num_dropped:,} are too long and left out, the longest with "
            f"{report.longest_dropped:,} tokens"
        )
    share = f"{report.share:.1%} of what is drawn" if report.share is not None else ""
    use = share if report.sampling is None else f"for evaluation, each {report.sampling.words}"
    yield _line("prompts", f"{report.num_kept:,}, {use}{dropped}")
    yield _line(
        "tokens", f"{report.min_length} to {report.max_length}, mean {report.mean_length:.1f}"
    )
    yield _line("columns", ", ".join(report.columns))
    if report.unportable:
        names = ", ".join(report.unportable)
        yield _line("", f"left out, since JSON cannot carry them: {names}")
    if report.num_unanswered:
        yield _line("answers", f"{report.num_unanswered:,} prompts have none")
    yield from (_line("note", note) for note in report.notes)
    for prompt in report.prompts:
        yield _line("prompt", f"{prompt.id} ({prompt.where})")
        yield _line("  text", json.dumps(_cut(prompt.text), ensure_ascii=False))
        yield _line("  tokens", _tokens(prompt.tokens))
        if prompt.answer is not None:
            yield _line("  answer", json.dumps(_cut(str(prompt.answer)), ensure_ascii=False))


def _line(label: str, text: str) -> str:
    return f"{label:12}{text}" if len(label) < 12 else f"{label} {text}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}..."


def _tokens(tokens: Sequence[str]) -> str:
    """Each as JSON, with how many are not shown."""
    quoted = [json.dumps(token, ensure_ascii=False) for token in tokens]
    if (missing := len(quoted) - SHOWN_TOKENS) > 0:
        half = SHOWN_TOKENS // 2
        quoted[half:-half] = [f"({missing} more)"]
    return f"{len(tokens)}: " + " ".join(quoted)
