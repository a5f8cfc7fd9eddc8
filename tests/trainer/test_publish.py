"""What a version consists of, and that ranks make the same one however many they are."""

import math
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from lightrl.engine.model_dir import build_model, check_fits, read_config, tensor_targets
from lightrl.errors import WeightsError
from lightrl.system.child import Pipe
from lightrl.trainer.checkpoint.export import export
from lightrl.trainer.model.policy import load_policy, shards
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    Done,
    RankFailed,
    Save,
    Saved,
    Update,
)
from lightrl.trainer.rank.rank import main
from lightrl.weights.delta.file import open_packed
from lightrl.weights.publish.publisher import Shard, require_finite
from lightrl.weights.version.layout import BUCKET_BYTES
from lightrl.weights.version.manifest import read_manifest
from lightrl.weights.version.tensors import read_tensors, served_dtype, write_tensors
from tests.support.delta_files import patch_version
from tests.support.tiers import e2e
from tests.support.versions import wrong_buckets
from tests.trainer.made_versions import made

DEADLINE_S = 110

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def routed_dir(save_model, tmp_path_factory):
    """A mixture of experts with a router bias that is learnt by no gradient: a persistent
    buffer. Its experts are joined by transformers when it is loaded."""
    folder = save_model(tmp_path_factory.mktemp("routed"))  # for the tokenizer
    torch.manual_seed(3)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "vocab_size": 24,
    }
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
    }
    dims = {
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "max_position_embeddings": 64,
    }
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = DeepseekV3Config(
        **shape, **heads, **dims, **experts, **tokens, num_hidden_layers=2, first_k_dense_replace=1
    )
    module = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    module.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([1.0, 2, 3, 4.5]))
    module.save_pretrained(folder)
    return folder


def test_a_version_has_all_that_the_engines_model_has_and_no_more(routed_dir, new_rank):
    file = new_rank(routed_dir, model={"path": "unused", "dtype": "float16"}).started.published.file
    manifest = read_manifest(file)
    targets = tensor_targets(build_model(read_config(routed_dir), torch.float16, "meta"))
    check_fits(targets, manifest.tensors, 0)
    given = dict(read_tensors(file))
    bias = given.pop("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.tolist() == [1, 2, 3, 4.5]
    stored = AutoModelForCausalLM.from_pretrained(routed_dir, dtype="auto").state_dict()
    assert bias.dtype == stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype
    assert {t.dtype for t in given.values()} == {torch.float16}
    for name, tensor in given.items():
        assert torch.equal(tensor, stored[name].to(torch.float16)), name


@pytest.mark.parametrize(
    ("stored", "name", "device", "served"),
    [
        (torch.bfloat16, "auto", "cpu", torch.bfloat16),
        (torch.float32, "auto", "cpu", torch.float32),
        (torch.float32, "auto", "cuda", torch.bfloat16),
        (torch.bfloat16, "float32", "cuda", torch.float32),
    ],
)
def test_what_is_served_has_the_dtype_of_the_engines(stored, name, device, served):
    class Stored:
        dtype = stored

    assert served_dtype(name, Stored(), device) == served


def test_weights_are_cast_where_they_are_written(model_dir):
    """Nothing is copied before, on a CPU."""
    policy = load_policy(model_dir, torch.device("cpu"), served="bfloat16")
    places = {p.data_ptr() for p in policy.module.parameters()}
    assert {s.values.data_ptr() for s in shards(policy)} == places
    assert {s.dtype for s in shards(policy)} == {torch.bfloat16}


def test_a_version_that_has_no_room_is_one_line(start, tmp_path):
    start = start()
    folder = Path(start.publish_dir)
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            daemon = Pipe(ours, RANK_EVENTS, RANK_COMMANDS)
            daemon.send(start)
            with pytest.raises(SystemExit):
                main(theirs)
            [event] = daemon.receive(DEADLINE_S)
        assert isinstance(event, RankFailed)
        assert not event.is_final
        assert event.reason.startswith("OSError: [Errno 28] No space left on device for "), (
            event.reason
        )
        assert "\n" not in event.reason
        assert not list(folder.iterdir())
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_an_export_by_parts_is_the_model_that_was_loaded(routed_dir, new_rank, tmp_path):
    """With the names of its own files, though transformers has others in memory; and the same of
    the checkpoint alone as of the rank that has the model."""
    path = tmp_path / "step_0"
    said = [Done(0), Saved(str(path)), Saved(str(path), is_export=True)]
    assert new_rank(routed_dir).save(Save(0, str(path), export=True)) == said
    export(path, tmp_path / "parts", shard_bytes=1)
    parts = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(parts) > 5  # a tensor each
    expected, found = {}, {}
    whole = {}
    of_rank = (path / "hf").glob("*.safetensors")
    sources = (routed_dir.glob("*.safetensors"), parts, of_rank)
    for files, tensors in zip(sources, (expected, found, whole), strict=True):
        for file in files:
            with safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert found.keys() == expected.keys() == whole.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", dtype="auto").state_dict()
    original = AutoModelForCausalLM.from_pretrained(routed_dir, dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], original[name]) for name in original)


RANKS = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from lightrl.weights.publish import publisher as publish
from lightrl.weights.publish.buffers import Buffers
from tests.trainer.made_versions import made, shards_of
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
store = dist.FileStore(str(folder / f"rendezvous-{world}"), world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
local = int(sys.argv[4])
place = folder / ("versions" if rank < local else "elsewhere")  # which is never made
publisher = publish.Publisher(Buffers(place), rank, world, local)
for version in range(3):
    file = publisher.write(version, shards_of(made(version), rank, world))
    publisher.allocate_second()
    if rank == 0:
        print(file.digest, flush=True)
    delta = publisher.write_delta()
    assert (delta is not None) == (rank == 0 and version > 0), delta
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
if rank == world - 1:
    publish._copy = publish.Exchange.carry_out = die
try:
    publisher.write(3, shards_of(made(3), rank, world))
except RuntimeError as e:
    print("RuntimeError", flush=True)
    os._exit(1)
"""


@pytest.mark.parametrize(
    ("world", "local"),
    [(2, 1), *e2e([(2, 2), (3, 3)]), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_any_number_of_ranks_makes_the_same_version_and_half_of_one_is_none(tmp_path, world, local):
    """Also those of which only the first are where the version is."""
    command = [sys.executable, "-c", RANKS]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path), str(local)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [child.communicate(timeout=DEADLINE_S)[0] for child in children]
    digests = []
    for version in range(3):
        tensors = {name: t.bfloat16() for name, t in made(version).items()}
        whole = [*tensors.items(), ("s", torch.tensor(3.5))]
        digests.append(write_tensors(tmp_path / f"v{version}.bin", version, whole))
    assert said[0].split() == [*(file.digest for file in digests), "RuntimeError"]
    assert [child.returncode for child in children] == [1] * (world - 1) + [-signal.SIGKILL]
    assert not (tmp_path / "elsewhere").exists()
    names = sorted(p.name.split(".")[0] for p in (tmp_path / "versions").iterdir())
    deltas = ["to_1", "to_1", "to_2", "to_2"]  # each with its manifest
    assert names == ["draft", *deltas, "version_2", "version_2"]
    paths = sorted((tmp_path / "versions").glob("to_*.delta"))
    deltas = [open_packed(path, path.stat().st_size) for path in paths]
    one, other = (delta.manifest for delta in deltas)
    assert [one.base, one.target, other.target] == [file.digest for file in digests]
    assert one.num_bytes + other.num_bytes < digests[0].num_bytes // 100
    patch_version(digests[0], deltas, read_manifest(digests[2]))  # which proves it
    [published] = (tmp_path / "versions").glob("version_2.*.bin")
    data = published.read_bytes()
    assert len(data) > 2 * BUCKET_BYTES
    assert list(wrong_buckets(memoryview(data), read_manifest(digests[2]))) == []


def shard(values: object, dtype: torch.dtype = torch.float32, stored=torch.float32) -> Shard:
    tensor = torch.tensor(values, dtype=stored)
    return Shard("layer.weight", dtype, tuple(tensor.shape), tensor.reshape(-1))


@pytest.mark.parametrize(
    ("values", "dtype", "what"),
    [
        ([1.0, math.nan, math.inf], torch.float32, "NaN"),
        ([[0.0], [-math.inf]], torch.bfloat16, "a value beyond bfloat16"),
        ([1e5], torch.float16, "a value beyond float16"),  # finite before it is rounded
    ],
)
def test_weights_that_are_not_finite_are_no_version(values, dtype, what):
    fine = shard([0.5])
    with pytest.raises(WeightsError) as e:
        require_finite(7, [fine, shard(values, dtype), fine])
    assert str(e.value) == f"version 7: the weights are not finite: layer.weight holds {what}"


def test_what_is_finite_or_no_float_or_not_here_is_a_version():
    require_finite(0, [])
    require_finite(0, [shard([6e4], torch.float16), shard([]), shard([[3e38]], torch.bfloat16)])
    require_finite(0, [shard([1 << 40, -5], torch.int64, torch.int64), shard([0.5])])


def test_a_rank_publishes_no_version_with_nan_and_says_where(new_rank):
    """After the model is loaded, and after an update that has made it so."""
    rank = new_rank()
    name, first = next(iter(rank.learner.policy.module.named_parameters()))
    with torch.no_grad():
        first.view(-1)[3] = math.nan
    with pytest.raises(WeightsError, match=rf"version 1: the weights are .* {name} holds NaN"):
        list(rank.perform(Update(0, 0, 0, 1)))
