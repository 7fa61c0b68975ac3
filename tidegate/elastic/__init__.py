"""The elastic Megatron library moves a running job from one layout on some ranks to another layout on others."""
