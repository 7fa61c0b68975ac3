"""The physics of an iteration: what each part takes, from the shape of the model and the GPU that runs it.

A section of the scenario goes in, and costs come out. Nothing here knows a policy, a world or a clock.
"""
