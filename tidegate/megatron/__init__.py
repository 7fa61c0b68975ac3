"""The code that the actor and the inference share: the model family, its shards, log-probabilities, the CPU
stand-in.
"""
