"""However a model lies on its ranks, it learns the same: one rank or two, divided or copied, sums
once a step, memory of the host, activations computed again."""

import asyncio
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from lightrl.errors import TrainerError
from lightrl.trainer.batch import num_tokens
from lightrl.trainer.learner import offload
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.policy import load_policy, response_logprobs
from lightrl.trainer.model.sharding import layers
from lightrl.trainer.protocol import (
    Accumulate,
    RankStarted,
    ResetStep,
    Save,
    Saved,
    StepFinished,
    Update,
)
from lightrl.weights.version.tensors import read_tensors
from lightrl.wire import unpack_f32
from tests.support.families import EXPERTS, GLM, OPT, SLIDING, saved
from tests.support.tiers import e2e
from tests.trainer.conftest import DEADLINE_S

CPU = torch.device("cpu")
VOCABULARY = 24  # of the model in conftest
TOLERANCE = 2e-6
SECTIONS = {"algorithm": {"name": "dapo", "kl_coef": 0.1}}
LR = {"optim": {"lr": 1e-3}}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def finish(samples, step):
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    return Update(step, len(samples), tokens, step + 1)


def shares(samples):
    """Of two ranks: one has longer ones."""
    ordered = sorted(samples, key=num_tokens)
    return [(tuple(ordered[8:16]), tuple(ordered[16:])), (tuple(ordered[:4]), tuple(ordered[4:8]))]


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    difference = math.sqrt(sum((found[n] - expected[n]).square().sum().item() for n in found))
    norm = math.sqrt(sum(expected[n].square().sum().item() for n in found))
    assert difference <= TOLERANCE * norm


def steps_of_one(rank, samples):
    for step in range(2):
        for share in shares(samples):
            list(rank.perform(Accumulate(step, share)))
        [finished] = rank.perform(finish(samples, step))
    return dict(read_tensors(finished.published.file))


async def answer(rank, kind):
    while not isinstance(event := await rank.receive(), kind):
        pass
    return event


async def steps_of_two(ranks, samples, tmp_path):
    """Two steps, of which the second begins anew once and is saved."""
    for step in range(2):
        for rank, share in zip(ranks, shares(samples), strict=True):
            rank.send(Accumulate(step, share))
            if step == 1:
                rank.send(ResetStep(step))
                rank.send(Accumulate(step, share))
            rank.send(finish(samples, step))
    while (finished := await answer(ranks[0], StepFinished)).step != 1:
        pass
    published, metrics = finished.published, finished.metrics
    found = {n: t.clone() for n, t in read_tensors(published.file)}
    path = tmp_path / "run" / "checkpoints" / "step_2"
    for rank in ranks:
        rank.send(Save(2, str(path), export=True))
    while not (await answer(ranks[0], Saved)).is_export:
        pass
    return found, metrics


WAYS = {
    "divided": {},
    "each": {"sync": "each"},
    "replicas": {"replicas": 2},
    "host": {"offload": "all"},
    "host-optimizer": {"offload": "optimizer", "activation_checkpointing": True},
}


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("way", ["divided", *e2e(w for w in WAYS if w != "divided")])
def test_two_ranks_learn_what_one_does(start, new_rank, processes, samples, tmp_path, way):
    sections = SECTIONS | {"train": {"ranks": 2, **LR, **WAYS[way]}}

    async def on_two_ranks():
        async with asyncio.timeout(DEADLINE_S), processes(start(**sections), world=2) as ranks:
            return await steps_of_two(ranks, samples, tmp_path)

    alone = new_rank(**SECTIONS, train=LR)
    expected = steps_of_one(alone, samples)
    found, metrics = asyncio.run(on_two_ranks())
    assert_close(found, expected)
    assert metrics["num_trained_tokens"] == sum(len(s.token_ids) // 4 for s in samples)
    # the export and the checkpoint are those weights, too, for one rank as well
    folder = tmp_path / "run" / "checkpoints" / "step_2" / "hf"
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in found.items())
    for place in {"none", WAYS[way].get("offload", "optimizer")}:
        again = new_rank(start_step=2, **SECTIONS, train=LR | {"offload": place})
        restored = dict(read_tensors(again.started.published.file))
        assert all(torch.equal(restored[name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("train", [{"offload": "all"}, {"offload": "optimizer"}, {"sync": "last"}])
def test_one_rank_on_a_processor_has_the_same_bits_whatever_is_set(
    new_rank, samples, train, monkeypatch
):
    monkeypatch.setattr(offload, "PART_VALUES", 5000)  # several parts
    expected = steps_of_one(new_rank(**SECTIONS, train=LR), samples)
    found = steps_of_one(new_rank(**SECTIONS, train=LR | train), samples)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("then", "now"),
    [
        *e2e([({"offload": "optimizer"}, {"offload": "optimizer"})]),
        ({"offload": "none"}, {"offload": "optimizer", "activation_checkpointing": True}),
        ({"offload": "optimizer"}, {"offload": "all", "sync": "last", "max_tokens_per_gpu": 4096}),
        *e2e([({"offload": "all"}, {"offload": "none"})]),
    ],
)
def test_state_is_restored_wherever_it_lies_now(
    new_rank, samples, tmp_path, monkeypatch, then, now
):
    monkeypatch.setattr(offload, "PART_VALUES", 5000)
    ranks = [new_rank(train=LR | then)]
    list(ranks[0].perform(Accumulate(0, shares(samples)[0])))
    list(ranks[0].perform(finish(samples, 0)))
    ranks[0].save(Save(1, str(tmp_path / "run" / "checkpoints" / "step_1")))
    ranks.append(new_rank(start_step=1, train=LR | now))
    digests = set()
    for rank in ranks:
        list(rank.perform(Accumulate(1, shares(samples)[1])))
        [finished] = rank.perform(finish(samples, 1))
        digests.add(finished.published.file.digest)
    assert len(digests) == 1


def opt(folder):
    """Calls dropout as a function, wherever it is told that it is trained."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 3}
    config = OPTConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.5,
        attention_dropout=0.5,
        layerdrop=0.5,
        init_std=0.2,
        **shape,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    return folder


def test_activations_computed_again_are_those_of_before(tmp_path, samples, monkeypatch):
    """Dropout and dropped layers never act, and layers really are computed twice."""
    calls = []
    own = OPTDecoderLayer.forward

    def counted(self, *args, **kwargs):
        calls.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(OPTDecoderLayer, "forward", counted)

    def computed(checkpointing):
        policy = load_policy(opt(tmp_path), CPU, activation_checkpointing=checkpointing)
        batch = collate(samples, CPU, VOCABULARY, policy.way.packed)
        calls.clear()
        logprobs, _ = response_logprobs(policy, batch)
        (logprobs * batch.mask).sum().backward()
        return logprobs.detach(), [p.grad for p in policy.module.parameters()], len(calls)

    plain, again = computed(False), computed(True)
    assert (plain[2], again[2]) == (3, 6)
    assert torch.equal(plain[0], again[0])
    torch.testing.assert_close(again[1], plain[1], rtol=1e-6, atol=1e-6)


def test_a_family_that_names_no_layers_is_divided_by_its_longest_list(tmp_path, monkeypatch):
    module = load_policy(opt(tmp_path), CPU).module
    named = layers(module)
    assert {type(layer).__name__ for layer in named} == {"OPTDecoderLayer"}
    monkeypatch.setattr(module, "_no_split_modules", None)
    assert layers(module) == named
    with pytest.raises(TrainerError, match="Linear: has no layers by which it can be divided"):
        layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_takes_two_bytes_and_is_the_policy_to_the_bit(
    save_model, tmp_path, samples, dtype
):
    folder = save_model(tmp_path, dtype)
    policy, reference = load_policy(folder, CPU), load_policy(folder, CPU, use="reference")
    assert {p.dtype for p in reference.module.parameters()} == {dtype}
    assert not any(p.requires_grad for p in reference.module.parameters())
    batch = collate(samples, CPU, VOCABULARY)
    with torch.no_grad():
        found, expected = (response_logprobs(p, batch)[0] for p in (reference, policy))
    assert torch.equal(found, expected)
    assert {p.dtype for p in reference.module.parameters()} == {dtype}


def rewritten(folder, change):
    """The tensors of the model directory, changed."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_files_that_do_not_fit_are_one_line(save_model, tmp_path):
    def refusal(change, tied=False):
        folder = save_model(tmp_path / str(len(list(tmp_path.iterdir()))), tied=tied)
        rewritten(folder, change)
        with pytest.raises(TrainerError) as raised:
            load_policy(folder, CPU)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    norm = "model.layers.1.input_layernorm.weight"
    assert f"1 tensors of a Qwen2ForCausalLM are not in its files: {norm}" in refusal(
        lambda tensors: tensors.pop(norm)
    )
    assert f"{norm} has shape (63,), its config.json says (64,)" in refusal(
        lambda tensors: tensors.update({norm: torch.ones(63)})
    )
    assert (
        "config.json ties lm_head.weight to model.embed_tokens.weight, but they differ"
        in refusal(
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCABULARY, 64)}),
            tied=True,
        )
    )
    assert f"{norm} is quantised (F8_E4M3)" in refusal(
        lambda tensors: tensors.update({norm: torch.ones(64).to(torch.float8_e4m3fn)})
    )


def test_a_head_that_is_there_twice_is_one(save_model, tmp_path):
    folder = save_model(tmp_path)
    plain = load_policy(folder, CPU).module.state_dict()
    rewritten(
        folder,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"] + 0}
        ),
    )
    module = load_policy(folder, CPU).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert all(torch.equal(tensor, plain[name]) for name, tensor in module.state_dict().items())


# Rows that two ranks do not have alike, and experts of which one has more.
UNEVEN = {
    "qwen2": {"vocab_size": 401, "hidden_size": 33},
    "qwen3_moe": EXPERTS | {"num_experts": 3},
    "glm4_moe": EXPERTS | GLM | {"n_routed_experts": 5, "n_group": 1},
    "gemma3_text": SLIDING,
    "opt": OPT,
}


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("family", ["qwen3_moe", *e2e(f for f in UNEVEN if f != "qwen3_moe")])
def test_two_ranks_load_what_one_does(start, new_rank, processes, tmp_path, family):
    folder = saved(tmp_path / "model", family, UNEVEN[family])

    async def on_two_ranks():
        async with asyncio.timeout(DEADLINE_S), processes(start(folder), world=2) as ranks:
            return (await answer(ranks[0], RankStarted)).published

    alone, two = new_rank(folder).started.published, asyncio.run(on_two_ranks())
    assert two.file.digest == alone.file.digest
    assert unpack_f32(two.canary.logprobs) == pytest.approx(
        unpack_f32(alone.canary.logprobs), abs=1e-5
    )
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, tensor in read_tensors(alone.file):
        assert torch.equal(tensor, exported[name]), name


def test_what_was_never_updated_is_restored_without_a_state(new_rank, samples, tmp_path):
    """Made on the way, it would have the first update corrected as the second one is."""
    rank = new_rank(train=LR | {"offload": "optimizer"})
    list(rank.perform(finish(samples, 0)))  # none of which had a signal
    rank.save(Save(1, str(tmp_path / "run" / "checkpoints" / "step_1")))
    again = new_rank(start_step=1, train=LR | {"offload": "optimizer"})
    assert not again.learner.optimizer.state
