"""What bounds RLinf's micro-batches, tokens or sequences, said by a switch and a number for either. Pure.

Invariant: the number that the switch turns off is told as such.
"""

from __future__ import annotations

from tidegate.rlinf.translation import MISSING, Translation


def micro_batches(config: Translation) -> None:
    """Tokens where sizes are dynamic, else sequences."""
    switch, tokens = "runner.enable_dynamic_batch_size", "runner.max_tokens_per_mbs"
    sequences = "algorithm.training_batch_size_per_gpu"
    is_dynamic, max_tokens, num_sequences = (config.take(key) for key in (switch, tokens, sequences))
    if is_dynamic is not MISSING and not isinstance(is_dynamic, bool):
        config.refuse(switch, f"{switch}={is_dynamic!r} must be true or false")
    elif is_dynamic is True and max_tokens is MISSING:
        config.refuse(switch, f"{switch}=True: of how many tokens a micro-batch is, is not said; set {tokens}")
    elif is_dynamic is True:
        config.put("actor.max_tokens_per_microbatch", max_tokens, tokens)
        config.tell("padding counts: samples are padded to the longest of a micro-batch", tokens)
        if num_sequences is not MISSING:
            config.tell(f"without effect here: {switch} is true", sequences)
    else:
        if num_sequences is not MISSING:
            config.put("actor.micro_batch_size", num_sequences, sequences)
        if max_tokens is not MISSING:
            config.tell(f"without effect here: {switch} is not true", tokens)
