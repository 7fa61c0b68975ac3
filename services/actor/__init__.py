"""The actor: trains the policy with Megatron and owns the sample ledger."""
