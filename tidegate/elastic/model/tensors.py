"""The keys of a rank's tensors and the tensors themselves, for transports, copies and checks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tidegate.elastic.plan.optimizers import StateKind

TensorKey = tuple[str, StateKind]
Tensors = Mapping[TensorKey, torch.Tensor]
"""Flat and contiguous tensors, each with exactly the elements of its Holding."""
