"""Tensor operations, each with a reference and, where it pays, a faster implementation."""
