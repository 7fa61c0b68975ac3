"""One iteration of a job on a virtual clock: engines, inference, trainer, and GPUs that move between them.

It holds no policy: `simulator.world` takes moves as calls and reports happenings. `simulator.cost_model` has the times
and rates, and `simulator.lengths` the lengths of responses. `simulator.scenario` reads both from a file.
"""
