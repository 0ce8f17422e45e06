"""This package provides the metrics, logs, traces and diagnosis that every process has."""
