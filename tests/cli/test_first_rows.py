"""`lightrl check` and `lightrl up --dry-run` read the data and score a row with its own answer and
with an empty one, in the process and by the code of a run."""

import json
import re
import shutil
import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lightrl.cli import main
from tests.support.cli import QUICKSTART

pytestmark = pytest.mark.usefixtures("warm_runs")  # reward workers are forked

REWARDS = """
import asyncio, re, threading

def good(sample):
    return {"reward": float(sample.response == sample.answer), "length": len(sample.response)}

def boxed(completions, answer, **columns):
    return [float(c.endswith(f"boxed{{{a}}}")) for c, a in zip(completions, answer)]

def nothing_pays(data_source, solution_str, ground_truth, extra_info):
    return 0.25

def raises(sample):
    return {}["solution"]

def silent(sample):
    return None

def hangs(sample):
    with open("hung", "a") as calls:
        calls.write("once more\\n")
    threading.Event().wait()

def ends(sample):
    import os
    os._exit(3)

def wants(completions, solution, **columns):
    return [0.0 for _ in completions]

def best_of_four(samples):
    right = [s.response == s.answer for s in samples]
    assert right == [True, False, True, False], right
    return [float(r) for r in right]

def relative(samples):
    # to the mean of a group; only for the marked form
    rewards = [float(s.response.endswith(f"boxed{{{s.answer}}}")) for s in samples]
    return [r - sum(rewards) / len(rewards) for r in rewards]

def first_word(sample):
    return float(len(sample.response.split()[0]))

async def slowly(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [0.5 for _ in completions]

def short(sample):
    return 1.0 if len(sample.response) < 20 else 0.0
"""


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)


@pytest.fixture
def model(tmp_path) -> Path:
    """One that writes every character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = Path(shutil.copytree(QUICKSTART.parent / "model", tmp_path / "model"))
    vocabulary = {"<pad>": 0, **{c: i for i, c in enumerate(string.printable, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text()) | {
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rows(tmp_path: Path, *given: dict[str, object]) -> tuple[str, ...]:
    """What to say for these data."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    return f"data.path={file}", "train.prompts_per_step=1"


def lightrl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    return int(end.value.code or 0)


def check(capsys, *overrides: str) -> tuple[int, list[tuple[str, str]]]:
    """The status, and verdict and text of what is said of data and rewards."""
    status = lightrl("check", QUICKSTART, "eval.path=", *overrides)
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    lines = [line.split(None, 2) for line in said.out.splitlines()]
    return status, [(v, text) for v, subject, text in lines if subject in {"rewards", "data"}]


def dry_run(capsys, *overrides: str) -> tuple[int, list[str], str]:
    """The status, what is said of rewards and as notes, and stderr."""
    status = lightrl("up", QUICKSTART, "--dry-run", "eval.path=", *overrides)
    said = capsys.readouterr()
    assert "each step   " in said.out
    lines = said.out.splitlines()
    return status, [line for line in lines if line.startswith(("rewards ", "note "))], said.err


def test_the_quickstart_pays_a_right_answer_and_no_wrong_one(capsys):
    assert lightrl("check", QUICKSTART) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " rewards " in line]
    train, evaluation = (line.partition(" rewards ")[2].strip() for line in lines)
    assert train.startswith("train: to '39%3=' (")
    assert train.endswith(
        "train.jsonl, line 1) the right response '36,33,30,27,24,21,18,15,12,09,06,03,00' gets 1, "
        "an empty one gets 0"
    )
    assert evaluation.startswith("eval: to '20%9=' (")
    assert lightrl("up", QUICKSTART, "--dry-run") == 0
    assert f"rewards     {train}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("functions", "parts"),
    [
        pytest.param("rewards.py:good", "gets 1 (length 2), an empty one", marks=pytest.mark.e2e),
        pytest.param("rewards.py:best_of_four", "gets 1, an empty one", marks=pytest.mark.e2e),
        (
            '["rewards.py:slowly", "exact_match"]',
            "gets 2.5 (exact_match 1, slowly 0.5), an empty one",
        ),
    ],
)
def test_functions_of_every_kind_are_tried(capsys, tmp_path, functions, parts):
    data = rows(tmp_path, {"prompt": "1%2=", "answer": "36"}, {"prompt": "1%3=", "answer": "37"})
    given = list(data)
    given += ["reward.weights=[1, 2]"] if functions.startswith("[") else []
    given += ["rollout.group_size=4", f"reward.functions={functions}"]
    status, [(verdict, text)] = check(capsys, *given)
    assert (status, verdict) == (0, "ok"), text
    assert f"the right response '36' {parts} gets 0" in text  # or 0.5


def test_a_right_response_is_spelled_as_the_answer(capsys, tmp_path):
    data = rows(tmp_path, {"prompt": "1%2=", "answer": 36.0}, {"prompt": "1%3=", "answer": 40.0})
    _, [(_, text)] = check(capsys, *data, "reward.functions=exact_match")
    assert text.endswith("the right response '36' gets 1, an empty one gets 0")


def test_a_form_that_is_paid_is_found(capsys, tmp_path, model):
    data = rows(tmp_path, {"prompt": "2*3", "answer": "6"}, {"prompt": "2*4", "answer": "8"})
    given = (f"model.path={model}", *data, "reward.functions=rewards.py:boxed")
    status, [(verdict, text)] = check(capsys, *given)
    assert (status, verdict) == (0, "ok"), text
    assert "#### 6\\n<answer>6</answer>\\n\\\\boxed{6}' gets 1, an empty one" in text


def test_a_right_answer_that_gets_no_more_than_a_wrong_one_is_a_warning(capsys, tmp_path, model):
    data = rows(tmp_path, {"prompt": "2*3", "answer": "6"}, {"prompt": "2*4", "answer": "8"})
    given = [f"model.path={model}", *data, "reward.functions=rewards.py:nothing_pays"]
    status, [(first, shown), (verdict, text)] = check(capsys, *given)
    assert (status, first) == (0, "warn")
    assert "'6' gets 0.25, an empty one gets 0.25" in shown
    assert verdict == "warn"
    assert text == (
        "rows: a right response gets 0.25, no more than an empty one: do the functions want "
        "another form?"
    )
    status, lines, error = dry_run(capsys, *given)
    assert (status, error) == (0, "")
    assert lines[-2:] == [f"rewards     {shown}", f"note        {text}"]


@pytest.mark.parametrize(
    ("function", "more", "reason"),
    [
        ("raises", "", "KeyError: 'solution'"),
        pytest.param("silent", "", "None is returned", marks=pytest.mark.e2e),
        pytest.param("ends", "", "the process of the reward function ended", marks=pytest.mark.e2e),
    ],
)
def test_a_function_that_never_gives_a_score(capsys, tmp_path, function, more, reason):
    given = (f"reward.functions=rewards.py:{function}", *filter(None, [more]))
    status, [_, (verdict, text)] = check(capsys, *given)
    assert (status, verdict) == (1, "fail")
    assert text.startswith(f"{tmp_path}/rewards.py:{function}: a response to train (")
    assert text.endswith(f"train.jsonl, line 1) gets no score ({reason})")
    status, [shown], error = dry_run(capsys, *given)
    assert status == 1
    assert f"gets no score ({reason})" in shown
    assert error == f"lightrl: {text}\n"


def test_a_function_that_hangs_takes_its_time_once(capsys, tmp_path):
    given = ("reward.functions=rewards.py:hangs", "reward.timeout_s=0.3")
    status, [_, (verdict, text)] = check(capsys, *given)
    assert (status, verdict) == (1, "fail")
    reason = "takes longer than reward.timeout_s = 0.3 s"
    assert text.startswith(f"{tmp_path}/rewards.py:hangs: a response to train (")
    assert text.endswith(f"train.jsonl, line 1) gets no score ({reason})")
    assert (tmp_path / "hung").read_text() == "once more\n"
    status, [shown], error = dry_run(capsys, *given)
    assert (status, error) == (1, f"lightrl: {text}\n")
    assert shown.endswith(f"an empty one gets no score ({reason})")
    assert (tmp_path / "hung").read_text() == 2 * "once more\n"


def test_an_answer_that_the_model_cannot_write_is_said(capsys):
    """The quickstart's has neither letters nor braces."""
    status, [_, (verdict, text)] = check(capsys, "reward.functions=math")
    assert (status, verdict) == (0, "warn")
    assert "gets 0, no more than an empty one; the model's tokenizer makes '36,33,30," in text
    assert "03,00' of it: " in text


def test_where_failures_have_a_reward_one_that_always_fails_is_a_warning(capsys):
    given = ("reward.functions=rewards.py:raises", "reward.on_failure=0")
    status, [_, (verdict, text)] = check(capsys, *given)
    assert (status, verdict) == (0, "warn")
    assert text.endswith("(KeyError: 'solution'); it gets reward.on_failure = 0")


@pytest.mark.parametrize(
    ("overrides", "subject", "reason"),
    [
        (
            "reward.functions=rewards.py:wants",
            "rewards",
            "requires solution, which no row has; the columns are answer, prompt",
        ),
        (
            "data.answer_key=solutoin",
            "data",
            "train.jsonl has it; the columns are answer, prompt",
        ),
        ("data.path=empty.jsonl", "data", "empty.jsonl, line 2: the prompt is empty"),
        ("data.path=cut.parquet", "data", "cut.parquet: not a readable parquet file (cut off?): "),
    ],
)
def test_what_a_run_would_not_begin_with(capsys, tmp_path, overrides, subject, reason):
    (tmp_path / "empty.jsonl").write_text('{"prompt": "1%2="}\n{"prompt": ""}\n')
    (tmp_path / "cut.parquet").write_bytes(b"PAR1" + bytes(100))
    status, [(verdict, text)] = check(capsys, overrides)
    assert (status, verdict) == (1, "fail")
    assert reason in text
    if "parquet" in overrides:  # already counted by the plan
        return
    status, lines, error = dry_run(capsys, overrides)
    assert (status, error) == (1, f"lightrl: {text}\n")
    assert not [line for line in lines if line.startswith("rewards ")]


def test_a_group_of_an_evaluation_is_as_large_as_its_set_says(capsys):
    several = f'eval.sets=[{{path="{QUICKSTART.parent / "eval.jsonl"}", samples=4, temperature=1}}]'
    given = ("rollout.group_size=4", "reward.functions=rewards.py:best_of_four", several)
    status, lines = check(capsys, *given)
    assert (status, [verdict for verdict, _ in lines]) == (0, ["ok", "ok"])


@pytest.mark.parametrize("column", ["code", pytest.param("explanation", marks=pytest.mark.e2e)])
def test_a_program_of_the_row_passes_its_tests(capsys, tmp_path, model, column):
    """MBPP's layout."""
    program = "def add(a, b):\n    return a + b"
    row = {"prompt": "Add.", "test_list": ["assert add(1, 2) == 3"], column: program}
    given = ("reward.functions=code", "reward.timeout_s=60", "reward.code.unisolated=true")
    status, [(verdict, text)] = check(capsys, f"model.path={model}", *rows(tmp_path, row), *given)
    assert (status, verdict) == (0, "ok"), text
    if column == "code":
        right = repr(f"```python\n{program}\n```")
        text = re.sub(r"slowest_s [\d.]+, ", "", text)  # of its tests; it is as fast as the machine
        assert text.endswith(
            f"the right response {right} gets 1 (timeouts 0), an empty one gets 0 (timeouts 0)"
        )
    else:
        assert text.endswith("gets 0 (timeouts 0); the row has no right one to try")


def test_a_row_without_an_answer_is_scored_all_the_same(capsys, tmp_path):
    data = rows(tmp_path, {"prompt": "1%2="}, {"prompt": "1%3="})
    status, [(verdict, text)] = check(capsys, *data, "reward.functions=rewards.py:short")
    assert (status, verdict) == (0, "ok")
    assert text.endswith("gets 1; the row has no right one to try")


def test_where_no_answer_is_known_a_function_need_not_take_an_empty_one(capsys, tmp_path, model):
    data = rows(tmp_path, {"prompt": "1%2=", "answer": {"x": 1}})
    given = (f"model.path={model}", *data, "reward.functions=rewards.py:first_word")
    status, [(verdict, text)] = check(capsys, *given)
    assert (status, verdict) == (0, "ok"), text
    assert text.endswith("the response 'I do not know.' gets 1; the row has no right one to try")


@pytest.mark.e2e
def test_rewards_relative_to_the_group_are_no_warning(capsys, tmp_path, model):
    data = rows(tmp_path, {"prompt": "2*3", "answer": "6"}, {"prompt": "2*4", "answer": "8"})
    given = (f"model.path={model}", *data, "reward.functions=rewards.py:relative")
    status, [(verdict, text)] = check(capsys, *given, "rollout.group_size=4")
    assert (status, verdict) == (0, "ok"), text
    assert "boxed{6}' gets 0.5, an empty one gets -0.5" in text


def test_a_data_set_of_the_hub_that_is_out_of_reach_is_said(capsys):
    pytest.importorskip("datasets")
    status, [(verdict, text)] = check(capsys, "data.path=org/none")
    assert (status, verdict) == (0, "warn")
    assert text.startswith("org/none: the hub cannot be reached: ")
    assert text.endswith(": no reward was tried")
    status, lines, error = dry_run(capsys, "data.path=org/none")
    assert (status, lines, error) == (0, [f"note        {text}"], "")


def test_a_daemon_that_reads_no_data_tries_nothing(capsys):
    role = ("--role", "trainer", "reward.functions=rewards.py:raises")
    assert lightrl("up", QUICKSTART, "--dry-run", *role) == 0
    assert "\nrewards " not in capsys.readouterr().out


class Judge(BaseHTTPRequestHandler):
    """Sends 1 where "36" is the answer of the student."""

    status = 200
    num_calls = 0

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).num_calls += 1
        is_right = "Answer:\n36\n" in asked["messages"][0]["content"]
        reply = {"choices": [{"message": {"content": f"Score: {int(is_right)}"}}]}
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def judging(status: int = 200) -> Iterator[tuple[type[Judge], tuple[str, ...]]]:
    class Mine(Judge):
        pass

    Mine.status = status
    with ThreadingHTTPServer(("127.0.0.1", 0), Mine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        yield Mine, ("reward.functions=judge", f"reward.judge.url={url}", "reward.judge.model=m")
        server.shutdown()
        thread.join()


def test_a_judge_is_asked(capsys, tmp_path):
    data = rows(tmp_path, {"prompt": "1%2=", "answer": "36"}, {"prompt": "1%3=", "answer": "40"})
    with judging() as (judge, given):
        status, [(verdict, text)] = check(capsys, *data, *given)
    assert (status, verdict) == (0, "ok")
    assert "'36' gets 1, an empty one gets 0" in text
    assert judge.num_calls == 3


def test_a_judge_whose_first_call_fails_is_one_line(capsys):
    with judging(status=401) as (judge, given):
        status, [(verdict, text)] = check(capsys, *given)
    assert (status, verdict) == (1, "fail")
    assert text.startswith("judge: http://127.0.0.1:")
    assert "status 401" in text
    assert judge.num_calls == 1
