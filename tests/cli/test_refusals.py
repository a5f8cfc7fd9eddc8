"""What is refused, or said, before a run begins: by `lightrl up --dry-run` and `lightrl check`
alike."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from lightrl.cli import main
from lightrl.config.run_file import load_config, parse_config
from lightrl.config.schema import Config
from lightrl.devices.assign import NO_GPUS, Assignment
from lightrl.errors import ConfigError
from lightrl.launch.checks import model as model_check
from lightrl.launch.checks.checklist import Launch, judge
from lightrl.launch.checks.files import require_files, require_here
from lightrl.launch.checks.notes import device_notes, key_notes
from lightrl.launch.folder import create_run_dir
from tests.support.cli import QUICKSTART
from tests.support.families import PACKED, saved

torch = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("warm_runs")  # a child with transformers is asked


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(QUICKSTART.parent / "model", tmp_path / "model"))


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


def lightrl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


def refusal(*overrides: str) -> str:
    """Why no run begins, in the words of `lightrl check`."""
    [reason] = (
        found.text
        for found in judge(Launch(config(*overrides)), "check")
        if (found.subject, found.verdict) == ("config", "fail")
    )
    assert "\n" not in reason
    return reason


def test_a_refusal_is_the_one_line_of_a_dry_run_and_a_line_of_the_check(capsys):
    missing = "model.path=/no/such/model"
    assert lightrl("up", QUICKSTART, "--dry-run", missing) == 1
    said = capsys.readouterr()
    assert said.out == ""
    reason = refusal(missing)
    assert said.err == f"lightrl: {reason}\n"
    assert lightrl("check", QUICKSTART, missing) == 1
    assert f"fail  config         {reason}" in capsys.readouterr().out.splitlines()


def test_a_function_that_a_set_lacks_is_named_with_the_key_of_the_set(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "39%3="}\n')
    sets = 'data.sets=[{path = "a.jsonl", reward = "nofile.py:x"}]'
    reason = refusal("data.path=", sets)
    assert reason == f"data.sets.reward = {tmp_path}/nofile.py:x: no such file nofile.py"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("source={0}/nofile.py:Guess", "environment.source = {0}/nofile.py:Guess: no such file"),
        ("source=trl:{0}/a.py:Guess", "{0}/a.py:Guess: has no class Guess; it defines Other"),
        ("tools=['{0}/a.py:mul']", "{0}/a.py:mul: has no function mul; it defines add"),
        ("command=nopython", "environment.command = 'nopython': no such program on this machine"),
        ("mcp=[{{command=['nomcp']}}]", "environment.mcp[0].command = 'nomcp': no such program"),
    ],
)
def test_an_environment_node_that_cannot_start_here(tmp_path, settings, reason):
    (tmp_path / "a.py").write_text("class Other: pass\ndef add(): pass\n")
    overrides = (f"environment.{settings.format(tmp_path)}", "environment.slots=4")
    if "source" not in settings:
        overrides = (f"environment.source={tmp_path}/a.py:Other", *overrides)
    assert reason.format(tmp_path) in refusal(*overrides)
    require_files(config(*overrides, "environment.workers=0"))  # it starts elsewhere


def test_a_run_with_a_copy_of_its_functions_needs_no_file_of_them(tmp_path):
    functions = 'reward.functions="nofile.py:x"', "run.name=old"
    with pytest.raises(ConfigError, match=r"no such file nofile\.py"):
        require_files(config(*functions))
    (tmp_path / "runs" / "old" / "rewards").mkdir(parents=True)
    require_files(config(*functions))
    with pytest.raises(ConfigError, match=r"no such file nofile\.py"):
        require_files(config(*functions, "reward.source=files"))


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised (quantization_config"),
        ({"vision_config": {"depth": 2}}, "is multimodal (vision_config"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"architectures": ["BertForMaskedLM"]}, "is a BertForMaskedLM, not a causal"),
    ],
)
def test_a_model_that_cannot_be_trained(model, says, reason):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | says))
    assert refusal(f"model.path={model}").startswith(f"model.path = '{model}': {reason}")


def test_a_prompt_and_a_response_that_the_model_cannot_read(model):
    """By default a prompt has room for 1024 tokens, which is more than a small model reads."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 128}))
    line = refusal(f"model.path={model}", "data.max_prompt_length=24")
    assert line == (
        "data.max_prompt_length = 24 and rollout.max_response_length = 105 add up to 129 "
        "tokens, but the model's context (max_position_embeddings) is 128; lower one of them"
    )
    require_files(config(f"model.path={model}", "data.max_prompt_length=23"))
    defaults = parse_config({"model": {"path": str(model)}, "data": {"path": "d.jsonl"}})
    with pytest.raises(ConfigError, match=r"^data.max_prompt_length = 1024 \(the default\) and "):
        require_files(defaults)


@pytest.mark.parametrize(
    ("overrides", "roles", "line"),
    [
        ("rollout.threads=5", (), "rollout.threads = 5: one engine would have more threads than"),
        ("rollout.threads=5 rollout.nodes=0", (), None),
        ("rollout.threads=5", ("coordinator", "trainer"), None),
        ("rollout.threads=4", ("rollout",), None),
        (
            "train.threads=5",
            (),
            "train.threads = 5: with train.ranks = 1 the ranks would have 5 threads on this "
            "machine's 4 cores; lower it",
        ),
        (
            "train.ranks=3 train.threads=2",
            ("trainer",),
            "train.ranks = 3: with train.threads = 2 the ranks would have 6 threads on",
        ),
        ("train.ranks=2 train.threads=2", (), None),
        ("train.ranks=5", ("coordinator",), None),
        ("train.ranks=5 train.engine=emulated rollout.engine=emulated rollout.threads=9", (), None),
    ],
)
def test_more_threads_or_ranks_than_cores(monkeypatch, overrides, roles, line):
    monkeypatch.setattr("lightrl.launch.checks.files.num_cores", lambda: 4)
    some = config(*overrides.split())
    if line is None:
        require_here(some, roles)
        return
    with pytest.raises(ConfigError) as caught:
        require_here(some, roles)
    assert str(caught.value).startswith(line)


def test_a_learning_rate_that_destroys_a_model():
    [note] = key_notes(config("train.optim.lr=0.01"))
    assert note.startswith("train.optim.lr = 0.01: AdamW moves every weight by about as much")
    assert not list(key_notes(config("train.optim.lr=1e-3")))


def test_weights_in_eight_bits(model):
    save_file({"a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, model / "model.safetensors")
    line = refusal(f"model.path={model}")
    assert line.startswith(f"model.path = '{model}': is quantised (a.weight is F8_E4M3 in its")


def test_a_rank_and_the_dry_run_take_the_same_dtypes():
    from lightrl.trainer.model.loading import DTYPES

    assert set(DTYPES) == model_check.DTYPES


def test_a_model_of_the_hub_that_is_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1" * 40)
    folder = repository / "snapshots" / ("1" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"is_encoder_decoder": True}))
    assert "has an encoder" in refusal("model.path=org/model")


def test_names_of_adapters_that_no_layer_has():
    lora = "model.lora.rank=2"
    line = refusal(lora, 'model.lora.targets=["q_prj"]')
    assert line.startswith(
        "model.lora.targets: 'q_prj' is the name of no linear layer of Qwen2ForCausalLM; "
        "there are q_proj, "
    )


def test_a_head_has_no_adapter():
    with pytest.raises(ConfigError, match="'lm_head' is the name of no linear layer"):
        require_files(config("model.lora.rank=2", "model.lora.targets=lm_head"))


def test_the_names_in_the_files_are_enough(monkeypatch):
    """No process is started for them."""
    monkeypatch.setattr(sys, "executable", "/none")
    overrides = ("model.lora.rank=2", 'model.lora.targets=["q_proj","mlp.down_proj"]')
    require_files(config(*overrides))
    folder = QUICKSTART.parent / "model"
    model_check.require_targets(folder, ["model.layers.0.self_attn.q_proj"])


def test_layers_that_are_called_otherwise_in_the_files(tmp_path):
    """Of a model that was saved without its head: transformers puts the prefix before the names."""
    folder = saved(tmp_path / "model", "llama", {})
    file = folder / "model.safetensors"
    from safetensors.torch import load_file

    tensors = load_file(file)
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, file)
    model_check.require_targets(folder, ["model.layers.1.mlp.up_proj"])
    with pytest.raises(ConfigError, match=r"'model.layers.9.mlp.up_proj' is the name of no"):
        model_check.require_targets(folder, ["model.layers.9.mlp.up_proj"])


@pytest.mark.parametrize(
    ("family", "settings", "target", "reason"),
    [
        ("gpt2", {}, "c_attn", "model.lora.rank: GPT2LMHeadModel has no linear layers"),
        ("gpt2", {}, "", "model.lora.rank: GPT2LMHeadModel has no linear layers"),
        (
            "qwen3_moe",
            PACKED["qwen3_moe"],
            "gate_proj",
            "'gate_proj' is the name of no linear layer of Qwen3MoeForCausalLM; there are ",
        ),
    ],
)
def test_layers_that_files_name_but_that_are_not_linear(tmp_path, family, settings, target, reason):
    folder = saved(tmp_path / "model", family, settings)
    with pytest.raises(ConfigError) as caught:
        model_check.require_targets(folder, [target] if target else [])
    assert reason in str(caught.value)


def test_names_of_adapters_in_one_string():
    with pytest.raises(ConfigError) as caught:
        config("model.lora.rank=2", "model.lora.targets=q_proj, v_proj")
    line = "'q_proj, v_proj' is one name; several are a list: "
    assert str(caught.value).endswith(line + '["q_proj", "v_proj"]')


@pytest.mark.parametrize("key", ["enable_lora", "max_loras", "max_lora_rank"])
def test_what_vllm_is_told_of_adapters(key):
    argument = f"rollout.engine_args={{{key}=1}}"
    line = f"rollout.engine_args: {key} cannot act: there are no adapters with model.lora.rank = 0"
    assert line in key_notes(config(argument))
    with pytest.raises(ConfigError, match=f"{key}: follows from model.lora.rank = 2; leave it out"):
        config(argument, "model.lora.rank=2")


def test_one_port_for_the_weights_of_several_nodes():
    line = refusal("node.weights_port=5601", "train.nodes=2")
    assert line.startswith("node.weights_port = 5601: train.nodes = 2 start on this machine, and")
    line = refusal("node.weights_port=5601", "run.bind=127.0.0.1:5601")
    assert line.startswith("node.weights_port = 5601: is the port of run.bind; choose another")
    alone = ("--role", "coordinator,trainer", "node.weights_port=5601", "train.nodes=2")
    assert lightrl("up", QUICKSTART, "--dry-run", *alone) == 0


def test_an_optimizer_whose_package_is_missing(monkeypatch):
    def find_spec(name: str, package: str | None = None) -> object | None:
        return None if name == "torchao" else object()

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    line = refusal("train.optim.name=adamw8bit")
    assert line.startswith("train.optim.name = 'adamw8bit': torchao is not installed; install it")
    elsewhere = ("--role", "coordinator", "train.optim.name=adamw8bit")
    assert lightrl("up", QUICKSTART, "--dry-run", *elsewhere) == 0


def test_a_tracker_that_is_not_installed(monkeypatch):
    def find_spec(name: str, package: str | None = None) -> object | None:
        return None if name == "mlflow" else object()

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    line = refusal('logging.backends=["mlflow"]')
    assert line == "logging.backends = 'mlflow': not installed: pip install mlflow"
    elsewhere = ("--role", "trainer", 'logging.backends=["mlflow"]')
    assert lightrl("up", QUICKSTART, "--dry-run", *elsewhere) == 0


def test_a_place_for_checkpoints_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    line = refusal(f"checkpoint.dir={tmp_path / 'file' / 'below'}")
    place = tmp_path / "file"
    assert line == (
        f"checkpoint.dir = '{place / 'below'}': cannot be created: {place} is not a directory"
    )


def test_a_place_for_checkpoints_is_not_blamed_on_the_run_directory(tmp_path):
    """What may be made is not always known before."""
    with pytest.raises(ConfigError, match=r"^checkpoint.dir = '/proc/x': cannot make this dir"):
        create_run_dir(config(f"run.dir={tmp_path}", "checkpoint.dir=/proc/x"))
    assert not (tmp_path / "quickstart").exists()


@pytest.mark.parametrize(
    ("overrides", "acts", "line"),
    [
        ("train.sync=last", "train.ranks=2", "train.sync = 'last' cannot act: there is one rank"),
        ("train.sync=last", "train.nodes=2", "train.sync = 'last' cannot act: there is one rank"),
        *(
            (
                f"train.ranks=4 train.replicas=4 train.sync={sync}",
                "train.ranks=8",
                f"train.sync = '{sync}' cannot act: each of train.replicas = 4 is one rank",
            )
            for sync in ("each", "last")
        ),
        (
            "algorithm.kl_type=k1",
            "algorithm.kl_coef=0.1",
            "algorithm.kl_type = 'k1' cannot act: there is no penalty with algorithm.kl_coef = 0",
        ),
        (
            "train.mini_batch_order=arrival",
            "train.mini_batches=2",
            "train.mini_batch_order = 'arrival' cannot act: a step is one update",
        ),
        (
            "round.tail_batching=prompts train.steps=1",
            "train.steps=2",
            "round.tail_batching cannot act: after a short round train.steps = 1 are too few",
        ),
    ],
)
def test_keys_that_cannot_act(overrides, acts, line):
    given = overrides.split()
    assert any(note.startswith(line) for note in key_notes(config(*given)))
    assert not list(key_notes(config(*given, acts)))
    assert not list(key_notes(config(acts)))


@pytest.mark.parametrize("what", ["all", "optimizer"])
def test_memory_that_is_the_hosts_anyway(what):
    some = config(f"train.offload={what}")
    [line] = device_notes(some, NO_GPUS)
    assert line.startswith(f"train.offload = '{what}' cannot act: ranks here have no GPU")
    assert not list(device_notes(some, Assignment(ranks=("0",))))
    assert not list(device_notes(some, NO_GPUS, ("coordinator",)))
    assert not list(device_notes(config(), NO_GPUS))


def test_deterministic_attention_is_for_gpus():
    some = config("train.deterministic=true")
    [line] = device_notes(some, NO_GPUS)
    assert line.startswith("train.deterministic = true cannot act: ranks here have no GPU")
    assert not list(device_notes(some, Assignment(ranks=("0",))))
    for acts in ("train.deterministic=false", "train.deterministic=auto"):
        assert not list(device_notes(config(acts), NO_GPUS))


CODE = ("reward.functions=code", "reward.timeout_s=60")
JUDGE = ("reward.functions=judge", "reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=m")
TIMEOUTS = "time-outs of rewards (reward.timeout_s = "


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ((), [TIMEOUTS + "10): a slow call has no score"]),
        (CODE, [TIMEOUTS + "60): a slow call has no score, nor tests of 'code' that take 30 s"]),
        (JUDGE, ["the reward 'judge'", TIMEOUTS]),
        (("round.race=clock",), [TIMEOUTS]),
        (("round.race=clock", "round.tail_batching=prompts"), ["round.race = 'clock'", TIMEOUTS]),
        (("async.max_staleness=2",), ["async.max_staleness = 2", TIMEOUTS]),
    ],
)
def test_what_a_deterministic_run_does_not_cover_is_named(given, names):
    notes = key_notes(config("run.deterministic=true", *given))
    found = [note for note in notes if "cannot act" not in note]
    assert len(found) == len(names)
    for line, name in zip(found, names, strict=True):
        assert line.startswith(f"run.deterministic does not cover {name}")
    assert not [n for n in key_notes(config(*given)) if "deterministic" in n]


def test_notes_are_in_the_dry_run_and_in_the_check(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    some = ("train.offload=all", "train.sync=last")
    for command, label in (
        (("up", QUICKSTART, "--dry-run"), "note        "),
        (("check", QUICKSTART), "warn  config         "),
    ):
        assert lightrl(*command, *some) == 0
        out = capsys.readouterr().out
        assert f"{label}train.offload = 'all' cannot act" in out
        assert f"{label}train.sync = 'last' cannot act" in out


def test_a_merged_export_has_the_files_of_its_model(capsys):
    assert lightrl("export", "step_1", "out", "--merge", "--shard-mb", "5") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("lightrl: --shard-mb 5: with --merge the files are those of the model")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "bloom"}, "bloom: transformers has no sdpa attention for this family"),
        ({"model_type": "gptj"}, "gptj: transformers has no sdpa attention for this family"),
        ({"model_type": "vit"}, "vit: not a decoder-only model: transformers has no causal"),
    ],
)
def test_a_family_that_the_torch_engine_cannot_compute(tmp_path, settings, reason):
    sizes = {"hidden_size": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **settings}))
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    line = refusal(f"model.path={tmp_path}", "rollout.engine=torch")
    assert line.startswith(f"model.path = '{tmp_path}': {reason}")


def test_vllm_gives_names_of_tensors_of_any_family():
    from transformers import BloomConfig

    from lightrl.engine.model_dir import build_model, tensor_targets

    config = BloomConfig(n_layer=1, n_head=2, hidden_size=8, vocab_size=32)
    targets = tensor_targets(build_model(config, torch.float32, "meta", attention=None))
    assert "transformer.h.0.self_attention.dense.weight" in targets
