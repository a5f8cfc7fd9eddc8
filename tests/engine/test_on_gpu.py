"""What the engines ask of a GPU and how much of it they take, with a driver that was told what
there is."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from lightrl.devices import memory
from lightrl.devices.memory import GIB
from lightrl.engine.base import EngineSpec
from lightrl.engine.model_dir import build_model, kv_bytes_per_token, read_config, tensor_targets
from lightrl.engine.torch.gpu_room import DRAFT_LOGITS, fitting
from lightrl.engine.vllm import engine as vllm
from lightrl.engine.vllm import memory as vllm_memory
from lightrl.engine.vllm.speculation import MAX_LOGITS, max_drafted_rows
from lightrl.errors import EngineError, EngineUnusable

QWEN = {  # Qwen2.5-7B: 28 heads share 4 heads of keys and values
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
WEIGHTS = 2 * 7_615_616_512
LENGTH, SLOTS = 4096, 64


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return read_config(tmp_path)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(total, free): the answers of the driver in GiB; the weights are on it, nothing else of
    ours."""

    def set_to(total, free):
        properties = SimpleNamespace(total_memory=total * GIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, total * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: WEIGHTS)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: WEIGHTS)

    return set_to


def spec_of(kind="torch", **fields):
    return EngineSpec(kind, "", "bfloat16", LENGTH, SLOTS, **fields)


def used_by_torch(config, spec):
    """Bytes besides the weights at its fullest step, slots and drafts."""
    shape, sequence = (
        memory.shape_of(config.to_dict()),
        LENGTH * kv_bytes_per_token(config, torch.bfloat16),
    )
    slots, drafts = fitting(spec, config, sequence)
    repeated = 7 * sequence // 28  # the keys and values of one layer, once for each head
    step = memory.working_bytes(shape, spec.slots) - memory.sampling_bytes(shape, spec.slots)
    drawn = memory.SAMPLE_BYTES * min(drafts, memory.LOGITS_PER_CALL) + memory.BF16 * drafts
    return (
        slots * (sequence + repeated) + step + max(drawn, memory.sampling_bytes(shape, slots)),
        slots,
        drafts,
    )


@pytest.mark.parametrize("free", [8, 12, 20, 60])
def test_the_torch_engine_fits_into_what_is_free(config, gpu, free):
    gpu(80, free)
    used, slots, drafts = used_by_torch(config, spec_of())
    assert 0 < used <= 0.9 * free * GIB
    assert 0 < slots <= SLOTS
    assert slots == SLOTS or used > 0.8 * free * GIB  # nothing is given away
    assert drafts <= DRAFT_LOGITS


def test_with_room_there_is_no_other_bound_than_that_of_the_config(config, gpu):
    gpu(80, 60)
    _, slots, drafts = used_by_torch(config, spec_of())
    assert (slots, drafts) == (SLOTS, DRAFT_LOGITS)


def test_beside_others_the_torch_engine_takes_its_share(config, gpu):
    gpu(80, 60)
    used, slots, _ = used_by_torch(config, spec_of(gpu_memory=0.3))
    assert slots < SLOTS
    assert 0.2 * 80 * GIB < used + WEIGHTS <= 0.3 * 80 * GIB


def test_a_gpu_that_is_full_is_one_line(config, gpu):
    gpu(80, 2)
    with pytest.raises(
        EngineError, match=r"^the GPU has room for 0\.0 GiB of KV cache, and one sequence"
    ):
        used_by_torch(config, spec_of())


def shared(config, spec):
    targets = tensor_targets(build_model(config, torch.bfloat16, "meta"))
    args = vllm._engine_args(spec, config, torch.bfloat16, "cuda") | spec.engine_args
    return vllm_memory.shared_memory_args(spec, config, targets, args)


def test_vllm_beside_others_is_told_its_cache(config, gpu):
    gpu(80, 60)
    got = shared(config, spec_of("vllm", gpu_memory=0.4))
    shape = memory.shape_of(config.to_dict())
    assert got["gpu_memory_utilization"] == 0.4
    assert WEIGHTS + got["kv_cache_memory_bytes"] + memory.working_bytes(shape, SLOTS) == int(
        0.4 * 80 * GIB
    )
    assert shared(config, spec_of("vllm", gpu_memory=0.4, kv_cache_gib=2)) == {
        "gpu_memory_utilization": 0.4
    }
    own = spec_of("vllm", gpu_memory=0.4, engine_args={"gpu_memory_utilization": 0.3})
    assert shared(config, own)["gpu_memory_utilization"] == 0.3
    with pytest.raises(
        EngineError, match=r"^14\.4 GiB of the GPU are too few for the weights and one"
    ):
        shared(config, spec_of("vllm", gpu_memory=0.18))


def test_a_step_of_vllm_is_as_large_as_the_arithmetic_has_it(config):
    args = vllm._engine_args(spec_of("vllm"), config, torch.bfloat16, "cuda")
    assert args["max_num_batched_tokens"] == memory.ENGINE_STEP_TOKENS
    assert "kv_cache_memory_bytes" not in args
    on_cpu = vllm._engine_args(spec_of("vllm"), config, torch.bfloat16, "cpu")
    assert "max_num_batched_tokens" not in on_cpu


def test_what_is_left_for_drafts_is_of_the_share_where_there_is_one(gpu):
    gpu(80, 6)
    assert vllm_memory.left_on_gpu(spec_of("vllm")) == 6 * GIB
    gpu(80, 40)
    assert vllm_memory.left_on_gpu(spec_of("vllm", gpu_memory=0.25)) == 20 * GIB - WEIGHTS
    assert vllm_memory.left_on_gpu(spec_of("vllm", gpu_memory=0.1)) == 0


def test_drafts_take_no_more_than_is_left():
    vocabulary = QWEN["vocab_size"]
    assert max_drafted_rows(vocabulary, SLOTS, None) == MAX_LOGITS // vocabulary
    assert max_drafted_rows(vocabulary, SLOTS, 40 * GIB) == MAX_LOGITS // vocabulary
    rows = max_drafted_rows(vocabulary, SLOTS, 0.5 * GIB)
    assert SLOTS < rows < MAX_LOGITS // vocabulary
    assert rows * vocabulary * (memory.SAMPLE_BYTES + memory.BF16) <= 0.5 * GIB
    assert max_drafted_rows(vocabulary, SLOTS, 0) == SLOTS  # which a step without drafts has, too


@pytest.mark.parametrize(("is_deterministic", "wanted"), [(True, "1"), (False, None)])
def test_a_deterministic_run_asks_vllm_for_kernels_that_do_not_depend_on_the_batch(
    config, tmp_path, monkeypatch, is_deterministic, wanted
):
    def api():
        assert os.environ.get("VLLM_BATCH_INVARIANT") == wanted  # vLLM looks when it is imported
        raise EngineUnusable("far enough")

    for name in (*vllm.ENVIRONMENT, *vllm.CUDA_ENVIRONMENT, "VLLM_BATCH_INVARIANT"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        del os.environ[name]
    monkeypatch.setattr("lightrl.devices.cuda.has_cuda", lambda: True)
    monkeypatch.setattr(vllm, "Api", api)
    spec = EngineSpec("vllm", str(tmp_path), "auto", 256, 4, is_deterministic=is_deterministic)
    with pytest.raises(EngineUnusable, match="far enough"):
        vllm.VllmEngine(spec)


def test_a_vllm_that_ignores_the_setting_is_no_engine_of_a_deterministic_run(
    config, tmp_path, monkeypatch
):
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # by whoever started the daemon
    monkeypatch.setattr("lightrl.devices.cuda.has_cuda", lambda: True)
    monkeypatch.setattr(vllm, "Api", lambda: None)
    for name in (*vllm.ENVIRONMENT, *vllm.CUDA_ENVIRONMENT):
        monkeypatch.setenv(name, "")
        del os.environ[name]
    spec = EngineSpec("vllm", str(tmp_path), "auto", 256, 4, is_deterministic=True)
    refusal = "^run.deterministic: VLLM_BATCH_INVARIANT is off in the environment"
    with pytest.raises(EngineUnusable, match=refusal):
        vllm.VllmEngine(spec)
