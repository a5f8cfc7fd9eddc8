"""An engine that gives its devices back and takes them again: it is as if it had never slept, what
it had is really free, and nothing is generated before a version is there and right."""

import json
import re
import resource
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.engine.base import (
    EngineFailed,
    EngineLoaded,
    EngineSlept,
    EngineWoken,
    LoadWeights,
    Sleep,
    Wake,
)
from lightrl.messages.responses import Sampling
from lightrl.system.child import ChildDied
from lightrl.weights.version.tensors import write_tensors
from tests.engine.conftest import CONFIG
from tests.engine.test_contract import canary_of

# 113 MB of weights in tensors that no allocator keeps in its heap (more than 32 MiB each), and up
# to 17 MB of keys and values for 4 responses of 512 tokens
LARGE = CONFIG | {
    "hidden_size": 512,
    "intermediate_size": 18_000,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "initializer_range": 0.02,
}


def test_after_a_sleep_it_generates_what_it_would_have_without(engine, ask):
    request = ask("n", [4, 5, 6], 30)
    (before,) = engine.run(1, Sampling(1.0), request)
    engine.load(2)
    (other,) = engine.run(2, Sampling(1.0), request)
    assert engine.sleep().freed_bytes >= 0
    loaded = engine.wake(1, canary_of(engine, 1))
    assert (loaded.policy_version, loaded.digest) == (1, engine.tiny.files[1].digest)
    assert loaded.canary_diff < 1e-4
    (after,) = engine.run(1, Sampling(1.0), request)
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
    engine.sleep()
    engine.wake(2, canary_of(engine, 2))
    (after,) = engine.run(2, Sampling(1.0), request)
    assert (after.tokens, after.logprobs) == (other.tokens, other.logprobs)


def test_what_runs_is_sent_and_ends_before_it_sleeps_and_can_go_on_from_there(engine, ask):
    for _ in range(10):  # this process may be kept from running until it was over
        engine.generate(1, Sampling(1.0), ask("cut", [4, 5, 6], 400))
        engine.until(lambda: "cut" in engine.outcomes)
        engine.sleep()
        cut = engine.outcomes["cut"]
        engine.wake(1)
        if cut.finish == "abort":
            break
    assert (cut.finish, 0 < len(cut.tokens) < 400) == ("abort", True)
    rest = ask("cut", [4, 5, 6], 20, prefix=cut.tokens, attempt=2)
    (found,) = engine.run(1, Sampling(1.0), rest)
    (whole,) = engine.run(1, Sampling(1.0), ask("w", [4, 5, 6], len(cut.tokens) + 20))
    assert cut.tokens + found.tokens == whole.tokens


def test_a_command_that_cannot_be_now_is_refused_and_changes_nothing(engine, ask):
    def refused(*commands) -> str:
        for command in commands:
            engine.child.send(command)
        return engine.next(EngineFailed).reason

    load = LoadWeights(engine.tiny.files[1])
    assert refused(Wake()) == "the engine cannot wake: it does not sleep"
    engine.sleep()
    assert refused(Sleep()) == "the engine cannot sleep: it sleeps already"
    assert refused(load) == ("version 1 was not loaded: the engine sleeps: Wake must come first")
    engine.generate(1, Sampling(1.0), ask("early", [4], 3))
    assert "loaded is none" in engine.next(EngineFailed).reason
    engine.child.send(Wake())
    engine.next(EngineWoken)
    engine.generate(1, Sampling(1.0), ask("early", [4], 3))
    assert "loaded is none" in engine.next(EngineFailed).reason
    engine.child.send(load)
    engine.next(EngineLoaded)
    assert "early" not in engine.outcomes
    assert len(engine.run(1, Sampling(1.0), ask("ok", [4], 3))[0].tokens) == 3


def test_other_weights_than_the_trainers_are_not_served_after_a_sleep(engine, ask):
    engine.sleep()
    engine.child.send(Wake())
    failed = engine.load_file(engine.tiny.files[2], canary_of(engine, 1))
    assert isinstance(failed, EngineFailed)
    assert "differ by up to" in failed.reason
    engine.generate(2, Sampling(1.0), ask("refused", [4, 5, 6], 5))
    assert "loaded is none" in engine.next(EngineFailed).reason
    engine.load(1)
    assert len(engine.run(1, Sampling(1.0), ask("ok", [4], 3))[0].tokens) == 3


def test_an_engine_with_devices_of_its_own_does_not_sleep(start, ask):
    engine = start("emulated")
    engine.load(1)
    engine.child.send(Sleep())
    assert "was not built to" in engine.next(EngineFailed).reason
    assert len(engine.run(1, Sampling(1.0), ask("ok", [4], 3))[0].tokens) == 3


@pytest.mark.e2e
def test_on_a_cpu_vllm_frees_nothing_and_says_so(vllm_engine):
    if vllm_engine.device != "cpu":
        pytest.skip("this is a GPU")
    vllm_engine.load(1)
    assert vllm_engine.sleep().freed_bytes == 0
    vllm_engine.wake(1)
    assert [note for note in vllm_engine.notes if "no memory free on a CPU" in note]
    vllm_engine.until(lambda: vllm_engine.loads and vllm_engine.loads[-1].kv_tokens > 100)


@pytest.fixture
def large(start, tmp_path):
    """A torch engine whose memory can be seen, a version of its weights, and their bytes."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    file = write_tensors(tmp_path / "v1.bin", 1, model.named_parameters())
    engine = start("torch", slots=4, model_dir=tmp_path, can_sleep=True)
    if engine.device != "cpu":
        pytest.skip("on a GPU the driver says what is free: tests/gpu/test_torch_engine.py")
    assert isinstance(engine.load_file(file), EngineLoaded)
    yield engine, file, sum(p.nbytes for p in model.parameters())
    if not engine.is_stopped:
        engine.stop()


def resident(pid: int) -> int:
    """Bytes that the process has written and the system has not got back."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)[1])


def test_what_a_torch_engine_gives_back_is_free_for_others(large, ask):
    engine, file, weights = large
    prompt = [4 + i % 20 for i in range(400)]
    requests = [ask(f"r{i}", prompt, 4, seed=i) for i in range(4)]
    before = [o.tokens for o in engine.run(1, Sampling(1.0), *requests)]
    awake = resident(engine.child.pid)
    num_bytes = engine.sleep().freed_bytes
    keys_and_values = 4 * (2 * LARGE["num_hidden_layers"] * 4 * 513 * LARGE["hidden_size"])
    assert num_bytes == weights + keys_and_values
    assert awake - resident(engine.child.pid) > 0.95 * num_bytes
    engine.child.send(Wake())
    assert isinstance(engine.load_file(file), EngineLoaded)
    assert [o.tokens for o in engine.run(1, Sampling(1.0), *requests)] == before


def test_an_engine_that_finds_its_memory_taken_ends_in_one_line(large):
    engine, file, weights = large
    engine.child.send(Sleep())
    engine.next(EngineSlept)
    pid = engine.child.pid
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    size += weights // 2  # for all but the weights; others have the rest
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
    engine.child.send(Wake())
    engine.child.send(LoadWeights(file))
    with pytest.raises(ChildDied, match=r"exit status 1: .*the engine cannot wake: .*memory"):
        engine.next(EngineWoken)
    assert engine.together(engine.child.stop()) == 1
    engine.is_stopped = True
