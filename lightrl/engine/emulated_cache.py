"""The KV cache of an emulated engine: how many tokens it holds, and who has to wait for room.

As vLLM does it: a response begins when its tokens fit, and when those that run need more than there
is, the one that began last is preempted. It goes on first, once it fits again, after all its tokens
were computed anew.
"""

from collections import deque
from dataclasses import dataclass

from lightrl.engine.requests import Running


@dataclass(slots=True)
class EmulatedCache:
    # tokens; 0 = as many as come
    capacity: int
    # seconds for a token that is computed, but not sampled
    prefill_s: float
    # since the engine started
    num_preemptions: int = 0

    def schedule(self, running: list[Running], waiting: deque[Running], slots: int) -> float:
        """For the next step, in which each that runs gets a token: preempts, or lets begin who
        waits; the seconds that their tokens take."""
        if not self.capacity:
            begin = [waiting.popleft() for _ in range(min(len(waiting), slots - len(running)))]
            running += begin
            return self.prefill_s * sum(len(r.tokens) for r in begin)
        held = sum(len(r.tokens) + 1 for r in running)
        preempts = False
        while held > self.capacity:
            last = running.pop()
            held -= len(last.tokens) + 1
            waiting.appendleft(last)
            self.num_preemptions += 1
            preempts = True
        computed = 0
        while waiting and not preempts and len(running) < slots:
            num = len(waiting[0].tokens)
            if held + num + 1 > self.capacity:
                break
            running.append(waiting.popleft())
            held += num + 1
            computed += num
        return self.prefill_s * computed
