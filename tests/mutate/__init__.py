"""Mutation check of the config: each field is ignored in turn, and a test must notice."""
