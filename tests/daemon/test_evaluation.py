"""A whole run that evaluates on three sets: what each response had to be, what its figures come to,
and that neither a killed coordinator nor training sees a difference."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.core.rounds.rounds import sample_seed
from lightrl.errors import DataError
from lightrl.metrics.evaluation import eval_figures
from lightrl.metrics.sinks import read
from lightrl.wire import from_json, pack_i32
from tests.support.daemons import QUICKSTART, Running, a_run, expected_tokens
from tests.support.metric_names import described

pytestmark = pytest.mark.usefixtures("warm_daemons")

END = 1  # the model's stop token
REWARD = """
def length(sample):
    return len(sample.response) % 3 / 2

def never(sample):
    return None if "7" in sample.response else 1.0
"""


def three_sets(folder: Path) -> dict[str, Any]:
    """Of different sizes, samples, limits and rewards; the second has two sources."""
    rows = [json.loads(line) for line in (QUICKSTART / "eval.jsonl").read_text().splitlines()]
    (folder / "r.py").write_text(REWARD)
    never = {"temperature": 0, "max_response_length": 7, "reward": f"{folder}/r.py:never"}
    longer = {"samples": 2, "max_response_length": 90}  # than training allows
    sets: list[dict[str, Any]] = []
    for name, count, how in (
        ("once", 6, never),
        ("sources", 4, {"samples": 5, "top_p": 0.9}),
        ("long", 3, longer),
    ):
        some = [rows.pop() for _ in range(count)]
        for k, row in enumerate(some if name == "sources" else ()):
            row["data_source"] = ("sums", "org/other")[k % 2]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
        sets.append({"path": str(folder / f"{name}.jsonl"), **how})
    evaluation = {"interval": 1, "temperature": 0.6, "sets": sets}
    return {"eval": evaluation, "reward": {"functions": f"{folder}/r.py:length"}}


async def run_to_its_end(folder: Path, **changes: Any) -> dict[str, Any]:
    """Its summary. Every response that was evaluated is as long as it had to be."""
    async with a_run(folder, **changes) as run:
        await run.add_rollout("a")
        await run.add_rollout("b")
        await run.until_finished()
        assert run.head.succeeded
        for line in samples(folder):
            require_exact(run, line)
    return from_json((folder / "test" / "summary.json").read_bytes(), dict[str, Any])


def require_exact(run: Running, line: dict[str, Any]) -> None:
    config, name = run.config, line["response"]
    [how] = [config.eval_sampling(one) for one in config.eval_sets if one.name == line["set"]]
    limit = {"max_response_length": how.max_response_length}
    cut = config.model_copy(update={"rollout": config.rollout.model_copy(update=limit)})
    prompt = run.head._prompts.known(name.partition("@")[0], is_eval=True)
    assert prompt is not None
    seed = sample_seed(config.run.seed, name)
    weights = run.trainer.files[line["step"]]
    expected = expected_tokens(cut, weights, seed, pack_i32(prompt.token_ids))
    assert line["tokens"] == len(expected)
    assert (line["finish_reason"] == "length") == (expected[-1] != END)


def samples(folder: Path) -> list[dict[str, Any]]:
    """Of evaluations, each response once: a score that came again after a restart is the same."""
    lines = (folder / "test" / "samples.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    return list({t["response"]: t for t in told if t["is_eval"]}.values())


def evaluations(folder: Path) -> list[dict[str, float]]:
    """The figures of each, but for how long it took."""
    return [
        {k: v for k, v in record.items() if k.startswith("eval/") and k != "eval/seconds"}
        for record in read(folder / "test")
    ]


def test_three_sets_are_evaluated_as_each_says_and_training_is_what_it_is_without(tmp_path: Path):
    with_sets, without = tmp_path / "with", tmp_path / "without"
    for folder in (with_sets, without):
        folder.mkdir()
    sections = three_sets(with_sets)

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        evaluated = await run_to_its_end(with_sets, **sections)
        return evaluated, await run_to_its_end(without, reward=sections["reward"])

    summary, alone = asyncio.run(scenario())
    for digest in ("responses_digest", "weights_digest"):
        assert summary[digest] == alone[digest]
    assert summary["trained_responses"] == alone["trained_responses"] == 2 * 4 * 4
    assert evaluations(without) == [{}, {}]

    lines = samples(with_sets)
    counts = {name: sum(t["set"] == name for t in lines) for name in ("once", "sources", "long")}
    assert counts == {"once": 3 * 6, "sources": 3 * 4 * 5, "long": 3 * 3 * 2}  # of steps 0, 1, 2
    limits = {"once": 7, "sources": 60, "long": 90}
    assert all(t["tokens"] <= limits[t["set"]] for t in lines)
    assert max(t["tokens"] for t in lines if t["set"] == "long") > 60

    source = {}
    for row, prompt in rows_of(with_sets / "sources.jsonl"):
        source[prompt] = row["data_source"]
    for step, record in enumerate(evaluations(with_sets)):
        groups: dict[str, Any] = {}
        for t in lines:
            if t["step"] == step:
                prompt, _, _ = t["response"].partition("@")
                group = SimpleNamespace(
                    id=prompt, set=t["set"], prompt=SimpleNamespace(id=t["prompt"]), responses=[]
                )
                response = SimpleNamespace(
                    reward=t["reward"],
                    num_sampled=t["tokens"],
                    finish_reason=t["finish_reason"],
                )
                groups.setdefault(prompt, group).responses.append(response)
        figures = eval_figures(groups.values(), lambda text: source.get(text, ""))
        assert record == pytest.approx(figures)
        assert all(described(name) for name in record)
        for name in ("once/avg@1", "sources/pass@4", "sources/org-other/avg@5", "long/pass@2"):
            assert f"eval/{name}" in record
        assert "eval/long/sums/avg@2" not in record
    assert sum(r["eval/once/failures"] for r in evaluations(with_sets)) > 0
    assert [step for step, _ in summary["evals"]] == [0, 1, 2]
    assert list(summary["eval_sets"]) == ["once", "sources", "long"]
    last = evaluations(with_sets)[-1]
    assert summary["eval_sets"]["sources"][-1] == [2, last["eval/sources/avg@5"]]


def rows_of(file: Path) -> list[tuple[dict[str, Any], str]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row, row["prompt"]) for row in rows]


@pytest.mark.e2e
def test_an_evaluation_whose_coordinator_is_killed_comes_to_the_same(tmp_path: Path):
    """In the middle of the first and, gone on from the journal, of a later one."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    sections = three_sets(calm)
    slow = {"rollout": {"engine_args": {"t0_ms": 5.0, "mean_length": 20.0}, "slots": 6}}

    async def interrupt(step: int, resume: bool) -> None:
        async with a_run(killed, resume=resume, **sections, **slow) as run:
            await run.add_rollout("a")
            await run.until(
                lambda s: (s.step, s.round_kind) == (step, "eval") and s.round_accepted > 2
            )
            assert len(run.head._core.table.responses) > 0
            await run.silence()

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        undisturbed = await run_to_its_end(calm, **sections)
        await interrupt(0, resume=False)
        await interrupt(1, resume=True)
        async with a_run(killed, resume=True, **sections, **slow) as run:
            await run.add_rollout("b")
            await run.until_finished()
            assert run.head.succeeded
        text = (killed / "test" / "summary.json").read_bytes()
        return undisturbed, from_json(text, dict[str, Any])

    undisturbed, summary = asyncio.run(scenario())
    assert evaluations(killed) == evaluations(calm)
    for name in ("responses_digest", "evals", "eval_sets"):
        assert summary[name] == undisturbed[name]
    # each counted once, though some came before and some after
    assert summary["eval_tokens"] == undisturbed["eval_tokens"]


@pytest.mark.e2e
def test_an_evaluation_goes_on_with_the_prompts_that_it_began_with(tmp_path: Path):
    sections = three_sets(tmp_path)

    async def scenario() -> None:
        async with a_run(tmp_path, **sections) as run:
            await run.add_rollout("a")
            await run.until(lambda s: s.round_kind == "eval")
            await run.silence()
        rows = (tmp_path / "once.jsonl").read_text().splitlines(True)
        (tmp_path / "once.jsonl").write_text("".join(rows[:-1]))
        with pytest.raises(DataError, match="the data differ from those the run started with"):
            async with a_run(tmp_path, resume=True, **sections):
                pass

    asyncio.run(scenario())
