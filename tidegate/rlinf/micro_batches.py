"""The bound of RLinf's micro-batches: a number of tokens or of sequences. A switch chooses one of them. Pure.

Invariant: a note names the number that the switch turns off. [test_rlinf: micro_batches_of_dynamic_sizes]
"""

from __future__ import annotations

from tidegate.rlinf.translation import MISSING, Translation


def micro_batches(config: Translation) -> None:
    """Translate the bound: tokens where sizes are dynamic, else sequences."""
    switch, tokens = "runner.enable_dynamic_batch_size", "runner.max_tokens_per_mbs"
    sequences = "algorithm.training_batch_size_per_gpu"
    is_dynamic, max_tokens, num_sequences = (config.take(key) for key in (switch, tokens, sequences))
    if is_dynamic is not MISSING and not isinstance(is_dynamic, bool):
        config.refuse(switch, f"{switch}={is_dynamic!r} must be true or false")
    elif is_dynamic is True and max_tokens is MISSING:
        config.refuse(switch, f"{switch}=True: the number of tokens of a micro-batch is unknown; set {tokens}")
    elif is_dynamic is True:
        config.put("actor.max_tokens_per_microbatch", max_tokens, tokens)
        config.add_note("padding counts: samples are padded to the longest one of a micro-batch", tokens)
        if num_sequences is not MISSING:
            config.add_note(f"without effect here: {switch} is true", sequences)
    else:
        if num_sequences is not MISSING:
            config.put("actor.micro_batch_size", num_sequences, sequences)
        if max_tokens is not MISSING:
            config.add_note(f"without effect here: {switch} is not true", tokens)
