"""One iteration of a job on a virtual clock: engines, inference, trainer, and GPUs that change hands between them.

It holds no policy: `simulator.world` takes moves as calls and tells what happened. What a run costs is in
`simulator.costs`, how long responses are in `simulator.lengths`, and both are read from a file by `simulator.scenario`.
"""
