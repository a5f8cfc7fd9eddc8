"""What `lightrl config --metrics` says is what runs write."""

import re
from pathlib import Path

import pytest

from lightrl.metrics.names import METRICS, table
from tests.support.metric_names import described

pytestmark = pytest.mark.usefixtures("warm_daemons")
SOURCES = Path(__file__).parents[2] / "lightrl"


def test_names_are_said_once():
    names = [m.name for m in METRICS]
    assert len(set(names)) == len(names)
    assert described("eval/gsm8k/avg@4").name == "eval/<set>/avg@<k>"
    assert described("eval/gsm8k/aime24/length").name == "eval/<set>/<source>/length"
    assert described("device_s/rollout-0/train").unit == "s"
    assert described("planner/next_parallel") is not None
    assert described("loss") is None


def test_every_name_in_the_sources_is_described():
    literal = re.compile(r'"((?:[a-z_]+)/[a-zA-Z_@]+)": ')
    folders = ("metrics", "trainer", "history", "coordinator")
    files = [f for folder in folders for f in (SOURCES / folder).rglob("*.py")]
    found = {name for f in files for name in literal.findall(f.read_text())}
    assert len(found) > 40
    unknown = {n for n in found if described(n) is None}
    # for Prometheus alone
    assert unknown == {
        "responses/running",
        "responses/queued",
        "responses/waiting",
        "responses/done",
        "nodes/ready",
        "nodes/all",
    }


def test_every_metric_is_computed_where_the_table_says():
    for metric in METRICS:
        text = (SOURCES / metric.module).read_text()
        last = re.sub("<[a-z]+>", "", metric.name.rpartition("/")[2])
        # "<name>_max" and "restart_<name>" are put together there
        last = last.removesuffix("_max").removeprefix("restart_")
        assert last in text, f"{metric.name}: not in {metric.module}"


def test_the_table_has_a_line_for_each():
    assert len(table()) == len(METRICS) + 1
    assert all("\n" not in line for line in table())
