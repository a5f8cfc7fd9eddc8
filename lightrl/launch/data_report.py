"""Report the sets of a config for `lightrl data`: lengths of prompts, and some prompts as tokens.

Reads every row, as a run does. Runs no user code except environments of `verifiers`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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

SHOWN_TOKENS = 48  # most tokens shown of a prompt: half at its beginning, half at its end
SHOWN_TEXT = 4000  # most characters shown of a text

Report = Mapping[str, Any]  # the report of a set, as in the JSON output


def data_json(config: Config, num: int) -> list[str]:
    return [to_json(list(_reports(config, num))).decode()]


def data_lines(config: Config, num: int) -> Iterator[str]:
    for report in _reports(config, num):
        yield from _lines(report)


def _reports(config: Config, num: int) -> Iterator[Report]:
    """Yield a report for each set. Lengths are tokens of the kept prompts; `share` is the share of
    the prompts drawn, null for evaluation, which has `sampling`."""
    with temporary_folder("rows") as folder:
        config = with_rows(config, folder)
        tokenizer = load_tokenizer(config.model.path)

        def opened(one: DataSet) -> PromptSet:
            return PromptSet(one, config.data, tokenizer, environment=config.environment)

        train = list(map(opened, config.data.all_sets))
        total = sum(one.weight or len(one) for one in train)
        for one in train:
            yield _report(one, (one.weight or len(one)) / total, None, num, tokenizer)
        for held_out in config.eval_sets:
            sampling = config.eval_sampling(held_out)
            yield _report(opened(held_out), None, sampling, num, tokenizer)


def _report(
    one: PromptSet, share: float | None, sampling: EvalSampling | None, num: int, tokenizer: Any
) -> Report:
    lengths: list[int] = []
    examples: list[Report] = []
    num_unanswered = 0
    for prompt in one.scan():
        lengths.append(len(prompt.token_ids))
        answer = answer_of(prompt.row, one.settings.answer_key)
        num_unanswered += answer is None
        if len(examples) < num:
            examples.append(_example(one, prompt, answer, tokenizer))
    one.require_any()
    place = one.settings
    return {
        "name": one.name,
        "path": ":".join(filter(None, (place.path, place.subset, place.split))),
        "num_rows": len(one),
        "num_kept": len(lengths),
        "num_dropped": one.num_dropped,
        "share": share,
        "sampling": sampling,
        "min_length": min(lengths),
        "mean_length": fmean(lengths),
        "max_length": max(lengths),
        "longest_dropped": one.longest_dropped,
        "num_unanswered": num_unanswered,
        "columns": list(one.columns),
        "unportable": [name for name in one.columns if name not in one.portable],
        "notes": one.notes(),
        "prompts": examples,
    }


def _example(one: PromptSet, prompt: Prompt, answer: Any, tokenizer: Any) -> Report:
    ids = prompt.token_ids.tolist()
    return {
        "id": prompt.id,
        "where": one.rows.where(prompt.index),
        "text": prompt.text or to_json(prompt.row).decode(),
        "token_ids": ids,
        "tokens": [tokenizer.decode([token]) for token in ids],
        "answer": answer,
    }


def _lines(r: Report) -> Iterator[str]:
    yield _line(r["name"], r["path"])
    use = f"for evaluation, each {r['sampling'].words}" if r["sampling"] else ""
    use = use or f"{r['share']:.1%} of the prompts drawn"
    longest = f"the longest with {r['longest_dropped']:,} tokens"
    dropped = f"; {r['num_dropped']:,} are too long and omitted, {longest}"
    yield _line("prompts", f"{r['num_kept']:,}, {use}{dropped if r['num_dropped'] else ''}")
    span = f"{r['min_length']} to {r['max_length']}, mean {r['mean_length']:.1f}"
    if r["max_length"]:  # else an environment makes the prompts
        yield _line("tokens", span)
    yield _line("columns", ", ".join(r["columns"]))
    if r["unportable"]:
        yield _line("", f"omitted, not representable in JSON: {', '.join(r['unportable'])}")
    if r["num_unanswered"]:
        yield _line("answers", f"{r['num_unanswered']:,} prompts have none")
    yield from (_line("note", note) for note in r["notes"])
    for prompt in r["prompts"]:
        yield _line("prompt", f"{prompt['id']} ({prompt['where']})")
        if prompt["tokens"]:
            yield _line("  text", _quoted(prompt["text"]))
            yield _line("  tokens", _tokens(prompt["tokens"]))
        else:
            yield _line("  row", prompt["text"][:SHOWN_TEXT])
        if prompt["answer"] is not None:
            yield _line("  answer", _quoted(str(prompt["answer"])))


def _line(label: str, text: str) -> str:
    return f"{label:12}{text}" if len(label) < 12 else f"{label} {text}"


def _quoted(text: str) -> str:
    text = text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}..."
    return json.dumps(text, ensure_ascii=False)


def _tokens(tokens: Sequence[str]) -> str:
    """Return each token as JSON, and the number of omitted tokens."""
    quoted = [json.dumps(token, ensure_ascii=False) for token in tokens]
    if (missing := len(quoted) - SHOWN_TOKENS) > 0:
        half = SHOWN_TOKENS // 2
        quoted[half:-half] = [f"({missing} more)"]
    return f"{len(tokens)}: " + " ".join(quoted)
