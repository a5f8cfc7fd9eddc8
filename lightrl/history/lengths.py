"""lengths.jsonl of a run: how long every response of every round was, one line for each round.

A workload as it was, for whoever wants to replay or simulate it. Owns the file.
"""

from pathlib import Path

from lightrl.core.state import Round
from lightrl.wire import to_json

FILE_NAME = "lengths.jsonl"


class LengthsLog:
    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / FILE_NAME).open("ab", buffering=0)  # one write per line

    def write(self, round: Round) -> None:
        """A training round that has closed. Of each response [prompt, epoch, index, tokens, finished], in
        the order in which they were launched; not finished = given up with so many tokens.
        """
        responses = [
            [g.prompt.id, g.prompt.epoch, r.index, len(r.tokens), r.finish_reason is not None]
            for g in round.groups.values()
            for r in g.responses
        ]
        line = {"step": round.step, "kind": round.kind, "responses": responses}
        self._file.write(to_json(line) + b"\n")

    def close(self) -> None:
        self._file.close()
