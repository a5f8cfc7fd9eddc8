"""The arithmetic of GPU memory against what torch and transformers really keep."""

import json
from dataclasses import replace

import pytest

from lightrl.devices.memory import (
    GIB,
    LOGITS_PER_CALL,
    SAMPLE_BYTES,
    Shape,
    Training,
    activation_bytes,
    adapter_parameters,
    draftable_values,
    engine_bytes,
    kv_bytes_per_token,
    kv_cache_bytes,
    parked_bytes,
    parked_gradients,
    shape_of,
    shape_of_folder,
    trainer_bytes,
    trainer_items,
    working_bytes,
)
from tests.support.cli import QUICKSTART

torch = pytest.importorskip("torch")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
TOKENS = 128
LLAMA_8B = Shape(8_030_261_248, 4096, 14336, 32, 4096, 1024, 128256)
QWEN_3B = Shape(3_085_938_688, 2048, 11008, 36, 2048, 256, 151936, is_tied=True)
QWEN_7B = Shape(7_615_616_512, 3584, 18944, 28, 3584, 512, 152064)
QWEN_32B = Shape(32_763_876_352, 5120, 27648, 64, 5120, 1024, 152064)


def model_and_shape(kind: str, **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    return model, shape_of(config.to_dict())


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_from_the_config(kind, tied):
    model, shape = model_and_shape(kind, tie_word_embeddings=tied)
    real = sum(p.numel() for p in model.parameters())
    assert shape.num_parameters == pytest.approx(real, rel=0.01)


def test_parameters_of_experts_are_all_counted_and_a_token_uses_some():
    shape = shape_of(
        {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    )
    dense = shape_of(SIZES)
    assert shape.num_parameters - dense.num_parameters == 3 * 3 * 128 * (8 * 64 - 320)
    assert shape.intermediate == 2 * 64


def test_files_say_more_than_the_config():
    folder = QUICKSTART.parent / "model"
    shape = shape_of_folder(folder)
    counted = shape_of(json.loads((folder / "config.json").read_bytes()))
    assert shape.num_parameters == pytest.approx(counted.num_parameters, rel=0.01)


def test_a_config_of_another_kind_is_not_guessed_at(tmp_path):
    assert shape_of({"architectures": ["Mamba"]}) is None
    (tmp_path / "config.json").write_text("[]")
    assert shape_of_folder(tmp_path) is None
    assert shape_of_folder(tmp_path / "none") is None


def test_kv_cache_of_a_known_model():
    assert kv_bytes_per_token(LLAMA_8B) == 128 << 10  # as everybody knows


def test_what_is_left_for_the_kv_cache():
    weights = 2 * LLAMA_8B.num_parameters
    left = kv_cache_bytes(40 * GIB, weights, LLAMA_8B, slots=64, max_length=8192)
    assert left == 40 * GIB - weights - working_bytes(LLAMA_8B, 64)
    half = kv_cache_bytes(20 * GIB, weights, LLAMA_8B, slots=64, max_length=8192, gpus=2)
    assert half == 20 * GIB - weights // 2 - working_bytes(LLAMA_8B, 64)
    assert kv_cache_bytes(18 * GIB, weights, LLAMA_8B, slots=64, max_length=8192) == 0
    assert engine_bytes(LLAMA_8B, 64, 8191) + 1 >= 18 * GIB  # so it is not given so little


def test_drafts_fit_into_their_room():
    most = 1 << 28
    for room in (0, 1000, GIB // 2, GIB, 2 * GIB, 2.2 * GIB, 3 * GIB):
        values = draftable_values(room, most)
        assert 2 * values + SAMPLE_BYTES * min(values, LOGITS_PER_CALL) <= room
        more = values + 100
        assert values == most or 2 * more + SAMPLE_BYTES * min(more, LOGITS_PER_CALL) > room
    assert draftable_values(-GIB, most) == 0


def needs(shape, **how):
    return trainer_bytes(trainer_items(shape, Training(tokens=8192, **how)))


def bytes_of(shape, what, **how):
    """Of the lines that begin so."""
    items = trainer_items(shape, Training(tokens=8192, **how))
    return sum(item.num_bytes for item in items if item.what.startswith(what))


def test_what_a_rank_holds_for_each_parameter():
    count = LLAMA_8B.num_parameters
    assert bytes_of(LLAMA_8B, "weights") == 4 * count
    assert bytes_of(LLAMA_8B, "gradients") == 4 * count
    assert bytes_of(LLAMA_8B, "optimizer") == 8 * count
    assert bytes_of(LLAMA_8B, "weights", holds_start=True) == 8 * count
    assert bytes_of(LLAMA_8B, "reference") == 0
    on_eight = {"world": 8, "replicas": 2, "has_reference": True}
    assert bytes_of(LLAMA_8B, "weights", **on_eight) == count
    assert bytes_of(LLAMA_8B, "gradients", **on_eight) == count
    assert bytes_of(LLAMA_8B, "gradients", **on_eight, sums_late=True) == 4 * count
    assert bytes_of(LLAMA_8B, "optimizer", **on_eight) == 2 * count
    assert bytes_of(LLAMA_8B, "reference", **on_eight) == 2 * count // 4


def test_what_is_elsewhere_or_in_eight_bits():
    full = bytes_of(LLAMA_8B, "optimizer")
    assert bytes_of(LLAMA_8B, "optimizer", optimizer="adamw8bit") < 0.27 * full
    assert bytes_of(LLAMA_8B, "optimizer", offload="optimizer") == 1 << 29
    on_host = {"offload": "all", "has_reference": True}
    for what in ("weights", "gradients", "optimizer", "reference"):
        assert bytes_of(LLAMA_8B, what, **on_host) == 0
    assert needs(LLAMA_8B, **on_host) > 4 * GIB  # passes are on the device
    # FSDP takes gradients to the host when it sums them up, not before
    late = {**on_host, "sums_late": True}
    assert bytes_of(LLAMA_8B, "gradients", **late) == 4 * LLAMA_8B.num_parameters
    assert bytes_of(LLAMA_8B, "gradients", **late, world=8) == 4 * LLAMA_8B.num_parameters
    # nor does it when a replica has summed them up: they have not met those of the others
    halves = {"world": 4, "replicas": 2}
    assert bytes_of(LLAMA_8B, "gradients", **on_host, **halves) == 2 * LLAMA_8B.num_parameters


def test_what_is_on_the_host_is_said_in_gigabytes():
    """The begin of a step of several updates: its weights where the weights are, the state of its
    optimizer on the host."""
    count = LLAMA_8B.num_parameters
    half = Training(tokens=8192, world=2, holds_start=True)
    lines = {item.what: item.num_bytes for item in trainer_items(LLAMA_8B, half)}
    assert lines["weights of the step's begin"] == 4 * count // 2
    state = f"{8 * count / 2 / GIB:.1f} GiB on the host"
    assert lines[f"optimizer (adamw) of the step's begin: {state}"] == 0
    on_host = Training(tokens=8192, world=2, holds_start=True, offload="optimizer")
    lines = {item.what: item.num_bytes for item in trainer_items(LLAMA_8B, on_host)}
    assert lines[f"optimizer (adamw): {state}"] == 0
    assert lines["optimizer (adamw), the part that is stepped"] == 1 << 29


def test_what_is_parked_on_the_host():
    """14B on 8 devices: masters and AdamW, 12 bytes a parameter among all of them."""
    count = LLAMA_8B.num_parameters
    on_eight = Training(tokens=8192, world=8, is_shared=True)
    assert parked_bytes(LLAMA_8B, on_eight) == 12 * count // 8
    assert parked_gradients(LLAMA_8B, on_eight) == 4 * count // 8
    lines = [item.what for item in trainer_items(LLAMA_8B, on_eight) if not item.num_bytes]
    assert lines == [
        f"parked while engines sample: {12 * count / 8 / GIB:.1f} GiB on the host",
        f"gradients, parked in the middle of a step: {4 * count / 8 / GIB:.1f} GiB on the host",
    ]
    late = replace(on_eight, sums_late=True, holds_start=True)
    assert parked_bytes(LLAMA_8B, late) == 16 * count // 8
    assert parked_gradients(LLAMA_8B, late) == 4 * count
    moved = replace(on_eight, offload="optimizer", has_reference=True)  # its state is there anyway
    assert parked_bytes(LLAMA_8B, moved) == 6 * count // 8
    away = replace(on_eight, offload="all")
    assert parked_bytes(LLAMA_8B, away) == parked_gradients(LLAMA_8B, away) == 0
    adapters = replace(on_eight, adapters=8_000_000)
    assert parked_bytes(LLAMA_8B, adapters) == (2 * count + 12 * 8_000_000) // 8


def test_adapters_alone_have_gradients_and_an_optimizer():
    adapters = adapter_parameters(QWEN_3B, 32)
    assert adapters == 32 * 36 * (2 * 4096 + 2 * 2304 + 3 * 13056)  # counted by hand
    how = {"adapters": adapters, "has_reference": True}
    assert bytes_of(QWEN_3B, "optimizer", **how) == 8 * adapters
    assert bytes_of(QWEN_3B, "gradients", **how) == 4 * adapters
    assert bytes_of(QWEN_3B, "adapters", **how) == 4 * adapters
    assert bytes_of(QWEN_3B, "weights", **how) == 2 * QWEN_3B.num_parameters
    assert bytes_of(QWEN_3B, "reference", **how) == 0  # the model without its adapters
    assert adapter_parameters(QWEN_3B, 8, ["q_proj", "v_proj"]) == 8 * 36 * (4096 + 2304)
    assert adapter_parameters(QWEN_3B, 0) == 0


def test_the_targets_fit():
    """7B on 8 x 80 GB with micro-batches of 16k tokens and a reference, 32B on 4 x 8 of them, LoRA
    of 3B with its engine on 24 GB."""
    usual = {"tokens": 16384, "checkpointing": True, "has_reference": True}
    need = trainer_bytes(trainer_items(QWEN_7B, Training(world=8, **usual)))
    assert 20 * GIB < need < 0.9 * 80e9
    assert trainer_bytes(trainer_items(QWEN_7B, Training(**usual))) > 80e9  # not on one
    need = trainer_bytes(trainer_items(QWEN_32B, Training(world=32, **usual)))
    assert 20 * GIB < need < 0.9 * 80e9
    adapters = adapter_parameters(QWEN_3B, 32)
    need = needs(QWEN_3B, checkpointing=True, adapters=adapters)
    assert need + engine_bytes(QWEN_3B, 64, 8192) < 23 * GIB


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_autograd_keeps_of_a_token(kind, checkpointing):
    """Counted once for each storage."""
    from lightrl.trainer.model.sharding import layers, recompute

    model, shape = model_and_shape(kind)
    model.bfloat16().eval()
    if checkpointing:
        for layer in layers(model):
            recompute(layer)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(
            input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False, logits_to_keep=1
        )
    real = sum(t.untyped_storage().nbytes() for t in kept.values()) / TOKENS
    # Rather too much than too little. With checkpoints one layer is made again, which is not seen
    # here.
    estimated = activation_bytes(shape, checkpointing)
    if checkpointing:
        all_layers = activation_bytes(shape, checkpointing=False) - 8 * shape.hidden
        estimated -= all_layers // shape.layers
    assert 0.95 * real <= estimated <= 1.35 * real
