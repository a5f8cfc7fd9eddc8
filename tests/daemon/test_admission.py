"""With which config a node goes on when its coordinator has come back."""

from lightrl.daemon.admission import is_same_config
from tests.support.daemons import make_config


def test_a_resumed_run_may_name_its_directory_otherwise(tmp_path):
    """`lightrl resume` names it whole, the run file may have been relative."""
    config = make_config(tmp_path)
    elsewhere = make_config(tmp_path / "elsewhere")
    assert is_same_config(config, elsewhere)
    assert not is_same_config(config, make_config(tmp_path, train={"steps": 7}))
    assert not is_same_config(config, make_config(tmp_path, run={"seed": 99}))
