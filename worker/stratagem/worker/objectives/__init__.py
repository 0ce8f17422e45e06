"""Objectives of a model: training losses, evaluation metrics, and evaluation of a split."""
