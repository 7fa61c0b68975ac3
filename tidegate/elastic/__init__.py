"""The elastic Megatron library: a running job goes from one layout on some ranks to another on others."""
