"""The configs in configs/: each can be read, fits the GPUs that it names, and has no key without
effect; and the keys and the memory in their README. Needs no model, data or network."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.config.run_file import OTHER_NAMES, load_config
from lightrl.config.schema import Config, keys
from lightrl.devices.assign import TooLittleMemory, assign
from lightrl.devices.driver import Gpu, Machine
from lightrl.devices.memory import (
    GIB,
    Shape,
    Training,
    adapter_parameters,
    kv_bytes_per_token,
    shape_of,
    trainer_bytes,
    trainer_items,
)
from lightrl.devices.plan import wanted
from lightrl.launch.checks.notes import key_notes
from lightrl.launch.checks.plan import describe
from tests.support.chat_models import make_model, make_weights, trl_templates

pytestmark = pytest.mark.usefixtures("warm_runs")  # reward workers are forked
FOLDER = Path(__file__).parents[1] / "configs"
README = FOLDER / "README.md"
ON_CPU = ("quickstart/run.toml", "guess/run.toml")
EXAMPLES = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*.toml"))
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SIZES = {  # of Qwen2.5
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}


def shape(size: str) -> Shape:
    found = shape_of(dict(zip(FIELDS, SIZES[size], strict=True)))
    assert found is not None
    return found


def machine(count: int, gib: float) -> Machine:
    total, free = int(gib * GIB), int((gib - 0.5) * GIB)
    return Machine(tuple(Gpu(i, f"GPU-{i}", "GPU", total, free) for i in range(count)), "580.95.05")


def load(name: str) -> Config:
    return load_config(FOLDER / name)


def table(title: str) -> list[list[str]]:
    """The cells of a table of the README, without its head."""
    _, _, text = README.read_text(encoding="utf-8").partition(title)
    section = text.split("\n#", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_can_be_read_and_has_nothing_without_effect(name):
    config = load(name)
    notes = [line for line in describe(config) if line.startswith("note")]
    assert name in ON_CPU or [*notes, *key_notes(config)] == []
    assert (FOLDER / name).read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "quickstart/run.toml"])
def test_a_dry_run_of_an_example_passes(name, tmp_path, monkeypatch, capsys):
    """With a tiny model and little data in place of its own, on a machine with cores enough."""
    monkeypatch.setattr("lightrl.launch.checks.files.num_cores", lambda: 64)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    quickstart = FOLDER / "quickstart"
    model = shutil.copytree(quickstart / "model", tmp_path / "model")
    said = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 32768}
    (model / "config.json").write_text(json.dumps(said))
    if load(name).environment.tools:
        model = make_model(tmp_path / "chat", trl_templates()["qwen2_5"])
        make_weights(model, ["1"], 32768)
    train, held_out = quickstart / "train.jsonl", quickstart / "eval.jsonl"
    config = load(name)
    if config.reward.functions == ("code",):
        programs = [{"prompt": f"{k}%9=", "answer": ["assert x"]} for k in range(256)]
        train = held_out = tmp_path / "programs.jsonl"
        train.write_text("".join(json.dumps(row) + "\n" for row in programs))
    others = [f"model.path={model}", f"data.path={train}"]
    others += ["reward.code.unisolated=true"] if train.parent == tmp_path else []
    sampling = "samples = 4, max_response_length = 8192"
    is_one = not config.eval.sets
    others += [
        f"eval.path={held_out}" if is_one else f'eval.sets=[{{path="{held_out}", {sampling}}}]'
    ]
    others += [f"checkpoint.dir={tmp_path}"] if load(name).checkpoint.dir else []
    if config.environment.eval_tasks:
        others = []  # its model and its rows are there
    with pytest.raises(SystemExit) as end:
        main(["up", str(FOLDER / name), "--dry-run", *others])
    assert not end.value.code
    assert "cannot act" not in (out := capsys.readouterr().out)
    assert f"in runs/{load(name).run.name}" in out


@pytest.mark.parametrize(
    ("name", "size", "gpus"),
    [
        ("gsm8k-0.5b.toml", "0.5B", machine(1, 24)),
        ("lora-3b-24gb.toml", "3B", machine(1, 24)),
        ("math-7b-8gpu.toml", "7B", machine(8, 79.6)),
        ("code-7b.toml", "7B", machine(8, 79.6)),
        ("math-32b-4x8.toml", "32B", machine(8, 79.6)),
    ],
)
def test_an_example_fits_the_gpus_of_its_machine(name, size, gpus):
    """As far as arithmetic can tell: `assign` refuses a rank or an engine without room."""
    config = load(name)
    engines, is_shared = config.rollout.nodes, config.rollout.placement == "shared"
    some = wanted(config, config.train.ranks, engines, shape(size))
    found = assign(gpus, {}, replace(some, is_shared=is_shared))
    assert (len(found.ranks), len(found.engines)) == (config.train.ranks, engines)
    used = {*found.ranks, *(t for part in found.engines for t in part.tokens)}
    assert len(used) == len(gpus.gpus)
    # of a rank whose GPU is too small this says so, too
    small = machine(len(gpus.gpus), some.rank_bytes / GIB)
    with pytest.raises(TooLittleMemory):
        assign(small, {}, replace(some, is_shared=is_shared))


def test_an_engine_of_a_preemptible_machine_fits_its_two_gpus():
    config = load("math-32b-4x8.toml")
    some = wanted(config, 0, 1, shape("32B"))
    assert len(assign(machine(2, 79.6), {}, some).engines[0].tokens) == 2
    assert some.least < 2 * 79.6 * GIB * 0.9


def test_the_readme_names_every_example_and_no_other():
    assert sorted(row[0].strip("`") for row in table("# configs")) == EXAMPLES


def test_keys_of_ours_in_the_table_are_keys():
    known = {key for key, _, _ in keys()}
    ours = {
        n for row in table("keys of verl and TRL") for n in re.findall(r"`(\w+\.[\w.]+)`", row[2])
    }
    assert len(ours) > 30
    assert {n for n in ours if not n.startswith("rollout.engine_args.")} - known == set()


def test_the_table_and_the_hints_for_unknown_keys_agree():
    rows = table("keys of verl and TRL")
    agreed = 0
    for name, key in OTHER_NAMES.items():
        mine = [row for row in rows if re.search(rf"[`.]{name}`", " ".join(row[:2]))]
        assert not mine or any(f"`{key}`" in row[2] for row in mine), name
        agreed += bool(mine)
    assert agreed >= 20


def memory_row(size: str) -> list[str]:
    """As the table has it."""
    some = shape(size)
    count = some.num_parameters

    def rank(world: int = 1, adapters: int = 0) -> float:
        how = Training(world=world, tokens=8192, checkpointing=True, adapters=adapters)
        return trainer_bytes(trainer_items(some, how)) / GIB

    lora = rank(adapters=adapter_parameters(some, 32))
    whole = [16 * count / GIB, 10 * count / GIB, 2 * count / GIB, rank(), rank(8), rank(16), lora]
    cells = [*whole, 2 * count / GIB]
    kv = 10_000 * kv_bytes_per_token(some) / GIB
    return [size, *(f"{cell:.0f}" for cell in cells), f"{kv:.1f}"]


@pytest.mark.parametrize("size", SIZES)
def test_the_table_of_memory_is_the_arithmetic(size):
    assert memory_row(size) in table("memory by size of the model")
