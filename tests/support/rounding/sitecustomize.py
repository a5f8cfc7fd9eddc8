"""Read by each Python that has this folder in its path: ranks are those of rounding_rank.py."""

from lightrl.trainer import protocol

protocol.RANK_TARGET = "tests.support.rounding_rank:main"
