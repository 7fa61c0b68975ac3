"""The names of a rank's tensors and the tensors themselves, as transports, copies and checks share them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tidegate.elastic.plan.optimizers import StateKind

TensorKey = tuple[str, StateKind]
Tensors = Mapping[TensorKey, torch.Tensor]
"""Flat and contiguous, each with exactly its Holding's elements."""
