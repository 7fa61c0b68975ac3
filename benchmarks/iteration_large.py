"""One iteration on 1,024 GPUs, 8,192 sequences of up to 32k tokens: its seconds and the peak memory of this process.

`python -m benchmarks.iteration_large` prints one JSON object. `iteration_sim` runs it in a process of its own to
measure its memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from benchmarks.contenders import SCENARIO, cluster_of
from simulator.policies import policies_of
from simulator.run import simulate
from simulator.scenario import load_scenario

NUM_GPUS = 1024


def main() -> int:
    began = time.perf_counter()
    scenario = load_scenario(SCENARIO, [*cluster_of(NUM_GPUS), "lengths.max_tokens=32768"])
    (policy,) = policies_of(["tide"], scenario).values()
    simulate(scenario, policy)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"sim_1024_s": time.perf_counter() - began, "sim_1024_gib": peak_gib}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
