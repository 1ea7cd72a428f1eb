"""Runs the batch scheduler's commands."""
